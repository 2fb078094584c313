"""Training that is as it should be, with data, runs and processes in which something looks like a failure and is none."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import tracehooks
from tests.rules.broken_data import Guided, Pooled, caption, padded
from tests.rules.broken_training import pictures
from tests.rules.cases import Case, Ranks, Resumed, batches, trained
from tests.rules.parts import Composed, mlp, regression

LONG = 80


def learns_and_is_evaluated() -> Case:
    """A long run whose validation loss wavers while it falls."""
    model = mlp(6, 16, 1)
    case = trained(model, regression, steps=LONG)

    def validate(number: int, trace: Any) -> None:
        if number % 5 == 4:
            x = batches(16, 6, count=LONG, seed=7)[number]
            with torch.no_grad():
                trace.scalar("validation/loss", (model(x) - x.sum(-1, keepdim=True)).square().mean())

    case.after = validate
    return case


def long_and_noisy() -> Case:
    """A loss that is mostly noise, and falls all the same."""
    generator = torch.Generator().manual_seed(0)

    def loss(model: nn.Module, number: int) -> Tensor:
        x = torch.randn(8, 6, generator=generator)
        noise = torch.randn(8, 1, generator=generator)
        return (model(x) - x.sum(-1, keepdim=True) - noise).square().mean()

    return trained(mlp(6, 1), loss, lr=3e-2, steps=LONG)


def players_whose_losses_hover() -> Case:
    """A long game of two players: neither loss falls."""
    model = nn.ModuleDict({"maker": mlp(4, 8, 2), "judge": mlp(2, 8, 1)})
    makers = torch.optim.Adam(model["maker"].parameters(), 1e-3)
    judges = torch.optim.Adam(model["judge"].parameters(), 1e-3)
    real = batches(32, 2, count=LONG, seed=4)

    def step(number: int) -> None:
        made = model["maker"](batches(32, 4, count=LONG)[number])
        judges.zero_grad()
        told = torch.cat([model["judge"](real[number]), model["judge"](made.detach())])
        truth = torch.cat([torch.ones(32, 1), torch.zeros(32, 1)])
        functional.binary_cross_entropy_with_logits(told, truth).backward()
        judges.step()
        makers.zero_grad()
        functional.binary_cross_entropy_with_logits(model["judge"](made), torch.ones(32, 1)).backward()
        makers.step()

    return Case(model, step, steps=LONG)


def fine_tuned_at_a_small_rate() -> Case:
    """A trained model goes on at a rate of 1e-5."""
    model = mlp(6, 16, 1)
    learner = torch.optim.Adam(model.parameters(), 1e-2)
    for number in range(100):
        learner.zero_grad()
        regression(model, number).backward()
        learner.step()
    return trained(model, regression, lr=1e-5, steps=16)


def rare_class_that_is_learned() -> Case:
    """One sample in sixteen has another class, and the predictions follow it."""

    def loss(model: nn.Module, number: int) -> Tensor:
        x = batches(64, 6)[number % 8]
        return functional.cross_entropy(model(x), (x[:, 0] > 1.5).long())

    return trained(mlp(6, 2), loss, lr=0.3, steps=40)


def digits_learned() -> Case:
    """The digits of scikit-learn, in [0, 1], with others of the same kind for validation."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def loss(m: nn.Module, number: int) -> Tensor:
        x, y = pictures(number, 64)
        return functional.cross_entropy(m(x / 16), y)

    case = trained(model, loss, steps=12)

    def validate(number: int, trace: Any) -> None:
        with torch.no_grad():
            model(pictures(number + 12, 64)[0] / 16)

    case.after = validate
    return case


def alike_but_not_the_same() -> Case:
    """Samples that all share most of what is in them, as pictures of one kind do, in both splits."""
    model = mlp(400, 8, 1)
    shared = 3.0 * batches(400, count=1, seed=2)[0]

    def samples(number: int, seed: int) -> Tensor:
        return shared + batches(16, 400, count=12, seed=seed)[number]

    case = trained(model, lambda m, number: (m(samples(number, 1)) - 1.0).square().mean(), lr=1e-4, steps=12)

    def validate(number: int, trace: Any) -> None:
        with torch.no_grad():
            model(samples(number, 5))

    case.after = validate
    return case


def sources_apart() -> Case:
    """Every source is in one split; windows of one overlap there."""
    case = trained(mlp(6, 1), regression)

    def tell(number: int, trace: Any) -> None:
        trace.samples(batches(4, 6)[number % 8], "train", [f"song{number}@{start}+8" for start in (0, 4, 8, 12)])
        trace.samples(batches(2, 6, seed=3)[number % 8], "validation", [f"held{number}@0+8", f"held{number}@4+8"])

    case.after = tell
    return case


def padded_sentences() -> Case:
    """A mask that keeps the tokens, some of them in every row."""

    def loss(model: nn.Module, number: int) -> Tensor:
        ids, _ = padded(number)
        return (model(ids, ids != 0) - ids.float().mean(-1, keepdim=True)).square().mean()

    return trained(Pooled(), loss)


class Padded(nn.Module):
    """Tokens through torch's attention, averaged; the mask says which are padding, as torch wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 8, padding_idx=0), nn.Linear(8, 1)
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, ids: Tensor, padding_mask: Tensor) -> Tensor:
        attended = self.attention(self.embedding(ids), src_key_padding_mask=padding_mask)
        kept = (~padding_mask).float().unsqueeze(-1)
        return self.head((attended * kept).sum(1) / kept.sum(1))


class Sounding(nn.Module):
    """Samples of sound, averaged where the mask has ones, as transformers' EnCodec takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 8, padding_idx=0), nn.Linear(8, 1)

    def forward(self, ids: Tensor, padding_mask: Tensor) -> Tensor:
        return self.head((self.embedding(ids) * padding_mask.unsqueeze(-1)).sum(1) / padding_mask.sum(1, keepdim=True))


def cut(number: int) -> Tensor:
    """Token ids, cut to a length that one row in two fills; the others have zeros behind them."""
    return padded(number, length=48)[0][:, :24]


def padding_marked_by_true() -> Case:
    """The mask is True where there is padding, which many rows have none of."""

    def loss(model: nn.Module, number: int) -> Tensor:
        ids = cut(number)
        return (model(ids, ids == 0) - ids.float().mean(-1, keepdim=True)).square().mean()

    return trained(Padded(), loss, lr=1e-3)


def sound_marked_by_ones() -> Case:
    """The mask of the same name is 1 where there is sound."""

    def loss(model: nn.Module, number: int) -> Tensor:
        ids = cut(number)
        return (model(ids, (ids != 0).long()) - ids.float().mean(-1, keepdim=True)).square().mean()

    return trained(Sounding(), loss, lr=1e-3)


def few_masks_for_many_samples() -> Case:
    """Which elements are hidden comes in a few patterns, each for some batches running, and a scale is mostly the same."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 1)

        def forward(self, x: Tensor, hidden: Tensor, scale: Tensor) -> Tensor:
            return self.layer(x.masked_fill(hidden, 0.0) * scale)

    def loss(model: nn.Module, number: int) -> Tensor:
        x = batches(16, 6)[number]
        hidden = batches(16, 6, seed=2)[number // 2] > 1
        scale = torch.full((16, 2), 1.0 + (number == 2 or number > 6)).repeat(1, 3)
        return (model(x, hidden, scale) - x.sum(-1, keepdim=True)).square().mean()

    return trained(Model(), loss)


def stream_that_begins_anew() -> Case:
    """The first batch is tried once before the loop over a stream that comes round."""

    def loss(model: nn.Module, number: int) -> Tensor:
        x = batches(16, 6, count=5)[max(0, number - 1) % 5]
        return (model(x) - x.sum(-1, keepdim=True)).square().mean()

    return trained(mlp(6, 8, 1), loss, steps=12)


def guided_with_dropout() -> Case:
    """The caption of one sample in five is dropped, as classifier-free guidance wants it."""

    def loss(m: nn.Module, number: int) -> Tensor:
        x = batches(16, 6)[number % 8]
        kept = torch.rand(16, generator=torch.Generator().manual_seed(number)) > 0.2
        given = torch.where(kept.unsqueeze(1), caption(number), 0)
        return (m(x, given) - x.sum(-1, keepdim=True)).square().mean()

    return trained(Guided(), loss)


def tokens_and_audio_probed() -> Case:
    """Probes see sentences with some padding, and music with pauses."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(20, 8, padding_idx=0), nn.Linear(8, 1)

        def forward(self, caption: Tensor, sound: Tensor) -> Tensor:
            ids = tracehooks.tokens(caption, "caption", vocab_size=20, pad=0)
            heard = tracehooks.audio(sound, "sound", sample_rate=8000)
            return self.head(self.embedding(ids).mean(1)) * heard.std()

    def loss(model: nn.Module, number: int) -> Tensor:
        ids, _ = padded(number)
        t = torch.arange(8000) / 8000
        sound = 0.3 * torch.sin(2 * math.pi * (220 + 20 * number) * t) * (t < 0.7)
        return (model(ids, sound.expand(1, 1, -1)) - 1.0).square().mean()

    return trained(Model(), loss)


def recomputed_as_it_was() -> Case:
    """Activation checkpointing with dropout, the random state put back."""

    class Model(Composed):
        def __init__(self) -> None:
            super().__init__(torch.tanh)
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(lambda y: self.front(self.drop(y)), x, use_reentrant=False))

    return trained(Model(), regression)


def scale_on_its_way() -> Case:
    """A learned scale of logits that moves, clamped far away."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.logit_scale = nn.Linear(6, 4), nn.Parameter(torch.tensor(math.log(1 / 0.07)))

        def forward(self, x: Tensor) -> Tensor:
            return functional.normalize(self.body(x), dim=-1) * self.logit_scale.exp()

    model = Scaled()
    case = trained(model, lambda m, n: functional.cross_entropy(m(batches(16, 6)[n % 8]), torch.arange(16) % 4))

    def clamp(number: int, trace: Any) -> None:
        with torch.no_grad():
            model.logit_scale.clamp_(max=math.log(100))

    case.after = clamp
    return case


def autocast_to_bfloat16() -> Case:
    """Linear layers in bfloat16, the norm and the loss in float32."""
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 1))

    def loss(m: nn.Module, number: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return regression(m, number)

    return trained(model, loss)


def small_batches_through_rectifiers() -> Case:
    """Two samples a step: half of the units get no gradient in any one of them, others in the next."""

    def loss(m: nn.Module, number: int) -> Tensor:
        x = batches(2, 6, count=40)[number]
        return (m(x) - x.sum(-1, keepdim=True)).square().mean()

    model = mlp(6, 32, 1, activation=nn.ReLU)
    return trained(model, loss, optimizer=torch.optim.SGD(model.parameters(), 1e-2), steps=40)


def kept_at_every_step() -> Case:
    """A copy of the state is kept after every other step."""
    model = mlp(6, 8, 1)
    case = trained(model, regression, steps=10)

    def keep(number: int, trace: Any) -> None:
        if number % 2:
            trace.checkpoint(f"step-{number}", {name: x.clone() for name, x in model.state_dict().items()})

    case.after = keep
    return case


def resumed_as_it_was() -> Resumed:
    """Weights, moments and schedule go on where they were."""
    model = mlp(6, 8, 1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    return Resumed(trained(model, regression, optimizer=optimizer), trained(model, regression, optimizer=optimizer))


def ranks_in_step() -> Ranks:
    """Two ranks under DistributedDataParallel."""
    return Ranks("healthy")


def attention_whose_key_bias_stays_small() -> Case:
    """Biases that begin at zero; that of the keys has no gradient but rounding, since a shift of all scores is none."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value, self.out = (nn.Linear(6, 6) for _ in range(4))
            for module in self.children():
                nn.init.zeros_(module.bias)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.out(functional.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x)))

    def loss(model: nn.Module, number: int) -> Tensor:
        x = batches(16, 4, 6)[number % 8]
        return (model(x) - x.cumsum(1)).square().mean()

    return trained(nn.Sequential(Block(), Block(), nn.Linear(6, 6)), loss, steps=12)


HEALTHY_DATA = [
    attention_whose_key_bias_stays_small,
    learns_and_is_evaluated,
    long_and_noisy,
    players_whose_losses_hover,
    fine_tuned_at_a_small_rate,
    rare_class_that_is_learned,
    digits_learned,
    alike_but_not_the_same,
    sources_apart,
    padded_sentences,
    padding_marked_by_true,
    sound_marked_by_ones,
    few_masks_for_many_samples,
    stream_that_begins_anew,
    guided_with_dropout,
    tokens_and_audio_probed,
    recomputed_as_it_was,
    scale_on_its_way,
    autocast_to_bfloat16,
    small_batches_through_rectifiers,
    kept_at_every_step,
    resumed_as_it_was,
    ranks_in_step,
]
"""Nothing may be found."""
