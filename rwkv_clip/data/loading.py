"""Which pairs make which step, and loading them. Legend: B pairs of a micro-batch, S image side, T caption tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from rwkv_clip.data.pairs import Pairs, Sample
from rwkv_clip.errors import InputError

__all__ = ["Batch", "Plan", "in_order", "load_steps"]


class Batch(NamedTuple):
    """The samples of a micro-batch."""

    image: Tensor  # (B, 3, S, S) float32
    tokens: Tensor  # (B, T) int64
    label: Tensor  # (B,) int64
    pair: Tensor  # (B,) int64: which of the data set
    whole: Tensor  # (B,) bool: not standing in for a broken sample, nor filling up a share
    broken: list[str]  # places of the broken samples, with what is wrong


@dataclass(frozen=True, slots=True)
class Plan:
    """The order of the pairs: a permutation for each (seed, epoch), cut into steps, ranks and micro-batches.

    A step's pairs are the same whatever the number of ranks and micro-batches they are dealt to, as long as their
    product with the batch size is. Pairs that do not fill a last step are left out, others in every epoch.

    Raises:
        InputError: when there are fewer pairs than ranks and micro-batches.
    """

    pairs: int
    batch_size: int
    seed: int = 0
    micro_batches: int = 1
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if self.pairs < self.world * self.micro_batches:
            raise InputError(
                f"{self.pairs} pairs are too few for {self.world} processes with {self.micro_batches} micro-batches"
            )

    @property
    def batch(self) -> int:
        """B: the batch size, or less where there are not enough pairs for one step."""
        return min(self.batch_size, self.pairs // (self.world * self.micro_batches))

    @property
    def pairs_a_step(self) -> int:
        """Pairs of a step on all ranks together."""
        return self.batch * self.micro_batches * self.world

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return self.pairs // self.pairs_a_step

    def indices(self, epoch: int, start: int = 0) -> Tensor:
        """Return this rank's pairs of the epoch's steps from ``start`` on, (steps * micro_batches, B) int64."""
        order = torch.randperm(self.pairs, generator=torch.Generator().manual_seed((self.seed << 20) + epoch))
        dealt = order[: self.steps * self.pairs_a_step].view(self.steps, self.world, self.micro_batches, self.batch)
        return dealt[start:, self.rank].reshape(-1, self.batch)


class _Rows(Sampler[list[int]]):
    """Yields the rows of a table of indices."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[list[int]]:
        return (row.tolist() for row in self.rows)


def load_steps(pairs: Pairs, plan: Plan, epoch: int, *, start: int = 0, workers: int = 0) -> Iterator[list[Batch]]:
    """Yield the micro-batches of each step of an epoch from step ``start`` on; no global generator is drawn from.

    What a sample is made of follows from its seed, epoch and index alone, so the number of workers changes nothing.
    """
    pairs.set_epoch(epoch)
    # Of the workers' own seeds; what our data sets draw does not depend on them.
    generator = torch.Generator().manual_seed(((plan.seed << 20) + epoch) * plan.world + plan.rank)
    rows = _Rows(plan.indices(epoch, start))
    loader: DataLoader[Sample] = DataLoader(
        pairs,  # type: ignore[arg-type]  # a Dataset by its methods
        batch_sampler=rows, collate_fn=_collate, num_workers=workers, generator=generator,
    )  # fmt: skip
    batches = iter(loader)
    for _ in range(plan.steps - start):
        yield [next(batches) for _ in range(plan.micro_batches)]


def in_order(pairs: Pairs, batch_size: int, *, workers: int = 0, rank: int = 0, world: int = 1) -> Iterator[Batch]:
    """Yield all samples in their order, the last batch perhaps smaller; no global generator is drawn from.

    Of several ranks each gets a share, one after another, in batches of the same sizes: ranks that exchange something
    in every pass, as a sharded model does, stay together. What fills up the last shares is not whole.
    """
    count = len(pairs)
    size = -(-count // world)
    first, end = rank * size, rank * size + size
    share = [range(start, min(start + batch_size, end)) for start in range(first, end, batch_size)]
    loader: DataLoader[Sample] = DataLoader(
        pairs,  # type: ignore[arg-type]
        batch_sampler=[[place % count for place in places] for places in share],
        collate_fn=_collate, num_workers=workers, generator=torch.Generator(),
    )  # fmt: skip
    for places, batch in zip(share, loader, strict=True):
        yield batch._replace(whole=batch.whole & torch.tensor([place < count for place in places]))


def _collate(samples: list[Sample]) -> Batch:
    return Batch(
        torch.stack([sample.image for sample in samples]),
        torch.stack([sample.tokens for sample in samples]),
        torch.tensor([sample.label for sample in samples]),
        torch.tensor([sample.pair for sample in samples]),
        torch.tensor([not sample.broken for sample in samples]),
        [place for sample in samples for place in sample.broken],
    )
