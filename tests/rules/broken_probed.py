"""Training that shows by its probes what is wrong: tokens and audio. Each builder's docstring says what is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

import tracehooks
from tests.rules.broken_data import padded
from tests.rules.cases import Broken, Case, batches, trained
from tests.rules.parts import Composed

RATE = 8000


class Reader(nn.Module):
    """Tokens, seen by a probe under some name, averaged."""

    def __init__(self, name: str, pad: int | None = 0) -> None:
        super().__init__()
        self.name, self.pad = name, pad
        self.embedding, self.head = nn.Embedding(64, 8), nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        tracehooks.tokens(ids, self.name, vocab_size=20, pad=self.pad)
        return self.head(self.embedding(ids).mean(1))


def _read(name: str, ids_of: Callable[[int], Tensor]) -> Case:
    def loss(model: nn.Module, number: int) -> Tensor:
        return (model(ids_of(number)) - 1.0).square().mean()

    return trained(Reader(name), loss)


def drawn(number: int, length: int = 32) -> Tensor:
    """Ids without padding."""
    return torch.randint(1, 20, (8, length), generator=torch.Generator().manual_seed(number))


def another_tokenizer() -> Case:
    """Ids of a larger vocabulary than the one that the model was told of."""
    return _read("ids", lambda number: torch.where(torch.arange(32) == 5, 40, padded(number)[0]))


def one_long_sequence_in_each_batch() -> Case:
    """All sequences are padded to the length of one that is ten times as long."""

    def ids(number: int) -> Tensor:
        made = drawn(number, 200)
        made[1:, 10:] = 0
        return made

    return _read("ids", ids)


def a_loop_is_generated() -> Case:
    """Four tokens again and again."""
    return _read("generated", lambda number: drawn(number, 4).repeat(1, 8) * (torch.arange(32) < 30))


def one_token_is_generated() -> Case:
    """The same token everywhere."""
    return _read("generated", lambda number: torch.full((8, 32), 7) * (torch.arange(32) < 30))


def nothing_ever_ends() -> Case:
    """Every generated sequence has the full length."""
    return _read("generated", drawn)


def captions_cut_off() -> Case:
    """Captions fill their thirty-two positions, every one of them."""
    return _read("caption", drawn)


class Heard(nn.Module):
    """A sound through two stages, each seen by a probe."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.between, self.gain = between, nn.Parameter(torch.tensor(0.5))

    def forward(self, sound: Tensor) -> Tensor:
        x = tracehooks.audio(sound, "source", sample_rate=RATE)
        x = tracehooks.audio(self.between(x), "mono", sample_rate=RATE)
        return (x * self.gain).square().mean()


def _heard(between: Callable[[Tensor], Tensor]) -> Case:
    t = torch.arange(RATE) / RATE

    def loss(model: nn.Module, number: int) -> Tensor:
        left = 0.5 * torch.sin(2 * math.pi * (200 + number) * t)
        return (model(torch.stack([left, -left]).unsqueeze(0)) - 0.1).square()

    return trained(Heard(between), loss)


def channels_that_cancel() -> Case:
    """The sum of two channels of opposite sign is silence."""
    return _heard(lambda x: x.sum(1, keepdim=True) + 0.0 * x[:, :1])


def scaled_twice() -> Case:
    """A gain of four in front of a clamp to full scale."""
    return _heard(lambda x: (4.0 * x[:, :1]).clamp(-1.0, 1.0))


def loss_of_what_a_probe_saw() -> Case:
    """The loss is computed from what a layer before the head returns, which a probe of the root sees as well."""
    kept: list[Tensor] = []

    def watched(h: Tensor) -> Tensor:
        kept.append(tracehooks.probe(h, "hidden"))
        return torch.tanh(h)

    def loss(model: nn.Module, number: int) -> Tensor:
        kept.clear()
        x = batches(16, 6)[number % 8]
        model(x)
        return (kept[0] - x.sum(-1, keepdim=True)).square().mean()

    return trained(Composed(watched, width=1), loss)


PROBED = [
    Broken(another_tokenizer, "out_of_vocabulary", "out_of_vocabulary", {"site": "ids"}),
    Broken(one_long_sequence_in_each_batch, "padding_share", "padded_to_the_longest", {"site": "ids"}),
    Broken(a_loop_is_generated, "repetition", "repeats", {"site": "generated", "length": 32}),
    Broken(one_token_is_generated, "repetition", "repeats", {"distinct": 1.0}),
    Broken(nothing_ever_ends, "stop_never_reached", "never_stops", {"site": "generated"}),
    Broken(captions_cut_off, "condition_truncated", "cut_at_the_limit", {"site": "caption", "length": 32}),
    Broken(channels_that_cancel, "silent_audio", "silent", {"site": "mono", "share": 1.0}),
    Broken(scaled_twice, "clipped_audio", "clipped", {"site": "mono", "peak": 1.0}),
    Broken(loss_of_what_a_probe_saw, "output_not_in_loss", "output_not_used", {"modules": [""]}),
]
