"""What sequences of token ids hold: how much is padding, how many are distinct, how long they repeat themselves."""

from __future__ import annotations

import math

import torch
from torch import Tensor

LARGEST = 1 << 14
"""Ids among which repeats are looked for at most: the first sequences of a batch, of a longer one its beginning."""

GRAM = 4
"""Length of the n-grams that are counted: what is usual in work on repetition in generated text (Welleck et al., 2020)."""

_BASE, _ODD, _MIX = 6364136223846793005, 0x9E3779B97F4A7C1, 0x2545F4914F6CDD1D


def summarize_tokens(ids: Tensor, vocab_size: int | None = None, pad: int | None = None) -> dict[str, Tensor]:
    """Counts and shares over the ids of a batch.

    Args:
        ids: integers; the last dimension is the sequence, all others the batch.
        vocab_size: ids from 0 to below it exist.
        pad: the id that fills up sequences; it is no token, whatever ``vocab_size`` says of it.

    Returns:
        0-dim tensors on the ids' device, none where there are no ids: ``padding`` (share of ids that are ``pad``),
        ``distinct`` (number of distinct ids), ``out_of_vocabulary`` (number of ids that do not exist), ``longest_repeat``
        (length of the longest stretch that occurs twice in one sequence, overlaps counted) and ``distinct_4grams`` (share
        of the 4-grams of a sequence that are distinct, over all sequences). What needs an argument that is None, or
        sequences longer than they are, is left out.
    """
    if not ids.numel():
        return {}
    with torch.no_grad():
        rows = ids.detach().to(torch.int64)
        rows = rows.reshape(-1, rows.shape[-1] if rows.ndim else 1)
        padded = torch.zeros_like(rows, dtype=torch.bool) if pad is None else rows == pad
        found = {"distinct": _changes(rows.flatten()) + 1 - padded.any().to(torch.int64)}
        if pad is not None:
            found["padding"] = padded.to(torch.float64).mean()
        if vocab_size is not None:
            found["out_of_vocabulary"] = (~padded & ((rows < 0) | (rows >= vocab_size))).sum()
        some = slice(0, max(1, LARGEST // rows.shape[1])), slice(0, LARGEST)
        stretches = _Stretches(rows[some], padded[some])
        found["longest_repeat"] = stretches.longest_repeat()
        if rows.shape[1] >= GRAM:
            found["distinct_4grams"] = stretches.distinct(GRAM)
        return found


class _Stretches:
    """Every stretch of every sequence by a rolling hash, so that equal ones are found by sorting numbers."""

    def __init__(self, rows: Tensor, padded: Tensor) -> None:
        self._length = rows.shape[1]
        place = torch.arange(rows.numel(), device=rows.device).reshape(rows.shape)
        self._unique = _mixed(-place - 2)
        """A number for each place that no other has: what must not be found equal to anything."""
        values = torch.where(padded, self._unique, _mixed(rows))
        powers = torch.cumprod(torch.full((self._length + 1,), _BASE, dtype=torch.int64, device=rows.device), 0)
        self._sums = torch.nn.functional.pad((values * powers[:-1]).cumsum(1), (1, 0))
        self._shift = powers.flip(0)[:-1]
        self._padding = torch.nn.functional.pad(padded.to(torch.int64).cumsum(1), (1, 0))

    def longest_repeat(self) -> Tensor:
        """Length of the longest stretch that occurs twice in one sequence: int64 of shape ()."""
        low = torch.zeros_like(self._sums[:, :1])
        high = low + self._length - 1
        for _ in range(math.ceil(math.log2(self._length)) if self._length > 1 else 0):
            middle = (low + high + 1) // 2
            hashes, _ = self._hashes(middle)
            ordered = hashes.sort(1).values
            repeats = (ordered[:, 1:] == ordered[:, :-1]).any(1, keepdim=True)
            low, high = torch.where(repeats, middle, low), torch.where(repeats, high, middle - 1)
        return low.amax()

    def distinct(self, length: int) -> Tensor:
        """Share of the stretches of a length that are distinct within their sequence: float64 of shape (), 1 when there
        are none without padding."""
        hashes, whole = self._hashes(torch.full_like(self._sums[:, :1], length))
        ordered = hashes.sort(1).values
        repeated = (ordered[:, 1:] == ordered[:, :-1]).sum()
        count = whole.sum()
        return torch.where(count > 0, 1 - repeated / count.clamp_min(1).to(torch.float64), 1.0)

    def _hashes(self, length: Tensor) -> tuple[Tensor, Tensor]:
        """A hash of the stretch of ``length`` (int64 of shape (rows, 1)) that begins at each place, and whether it ends
        within the sequence and holds no padding."""
        begin = torch.arange(self._length, device=length.device).expand(len(length), -1)
        end = (begin + length).clamp_max(self._length)
        hashes = (self._sums.gather(1, end) - self._sums[:, :-1]) * self._shift
        padding = self._padding.gather(1, end) - self._padding[:, :-1]
        whole = (begin + length <= self._length) & (padding == 0)
        return torch.where(whole, hashes, self._unique), whole


def _changes(flat: Tensor) -> Tensor:
    ordered = flat.sort().values
    return (ordered[1:] != ordered[:-1]).sum()


def _mixed(x: Tensor) -> Tensor:
    """A well spread int64 for each int64 (multiply and shift, wrapping)."""
    x = (x + _ODD) * _MIX
    return (x ^ (x >> 31)) * _BASE
