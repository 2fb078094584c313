"""A sample in 64 signs, so that nearly equal samples have nearly equal signs: for finding near-duplicates.

Of samples x and y with an angle a between them (after each one's mean is taken away) about 64 · a / π signs differ: all for
opposite ones, half for unrelated ones, none to three of 64 where they differ by some percent (Charikar, 2002). The level of
a recording and the contrast of a picture do not matter. Integers are tokens: what counts is which runs of three occur, and
how often.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from tracehooks.stats.plain import plain
from tracehooks.stats.reference import finish64, signs

LEAST, LEAST_TOKENS = 256, 16
"""Elements of the smallest samples that have a likeness: one of fewer says little beyond its kind."""
MOST, MOST_TOKENS = 4_096, 64
"""Elements of a sample that are looked at: of larger ones so many, evenly spread; of tokens the first."""
BITS = 64
SHINGLE = 3


def likeness(x: Tensor) -> Tensor | None:
    """64 signs of each sample: int64 of shape (batch,), the bits of a uint64. None where samples are too small, or bools.

    Args:
        x: a dense tensor of at least one dimension; the first one is the batch.
    """
    with torch.no_grad():
        values = plain(x)
        size = values[0].numel() if len(values) else 0
        if values.dtype is torch.bool or size < (LEAST if values.is_floating_point() else LEAST_TOKENS):
            return None
        rows = values.flatten(1)
        return _bits(_projections(rows) if rows.is_floating_point() else _shingles(rows[:, :MOST_TOKENS]))


def _projections(rows: Tensor) -> Tensor:
    """Signed sums of the elements, element i in bucket i mod 64: (batch, 64)."""
    rows = rows[:, :: -(-rows.shape[1] // MOST)].to(torch.float32)
    rows = rows - rows.mean(1, keepdim=True)
    rows = rows * _signs(rows.shape[1], rows.device)
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[1] % BITS))
    return padded.view(len(rows), -1, BITS).sum(1)


@lru_cache(maxsize=32)
def _signs(count: int, device: torch.device) -> Tensor:
    return signs(0, count, device).to(torch.float32)


def _shingles(tokens: Tensor) -> Tensor:
    """How many more of the hashes of runs of three tokens have each bit set than not: (batch, 64)."""
    runs = tokens.long().unfold(1, SHINGLE, 1)
    hashes = finish64(finish64(finish64(runs[..., 0] + 1) + runs[..., 1]) + runs[..., 2])
    place = torch.arange(BITS, device=tokens.device)
    return ((hashes.unsqueeze(-1) >> place & 1) * 2 - 1).sum(1)


def _bits(sums: Tensor) -> Tensor:
    place = torch.arange(BITS, device=sums.device)
    return ((sums > 0).long() << place).sum(1)
