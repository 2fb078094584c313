"""How much of a mask is empty."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

CONVENTIONS = ("keep=True", "keep=False", "additive")


def summarize_mask(x: Tensor, convention: str | None) -> Tensor:
    """Emptiness of a mask by row (all dimensions but the last flattened).

    Args:
        x: mask of at least one dimension, bool, integer (non-zero is True) or floating.
        convention: one of `CONVENTIONS`: True is kept, True is dropped, or values to add to scores, of which large
            negative ones drop. None: additive when an element is negative, else non-zero is kept. A floating mask has
            truth values only where it holds ones, and nothing but ones and zeros; else it is additive.

    Returns:
        int64 of shape (6,) on x's device: kept, empty_rows, min_kept, max_kept, first_empty (-1 when no row is empty),
        index of the convention. min_kept and max_kept are -1 when there are no rows.
    """
    with torch.no_grad():
        rows, code = _kept(x.detach(), convention)
        per_row = rows.sum(-1).reshape(-1)
        if per_row.numel() == 0:
            return torch.stack([*(per_row.new_tensor(value) for value in (0, 0, -1, -1, -1)), code])
        empty = (per_row == 0).to(torch.int64)
        first = torch.where(empty.any(), empty.argmax(), -1)
        return torch.stack([per_row.sum(), empty.sum(), per_row.amin(), per_row.amax(), first, code])


def _kept(x: Tensor, convention: str | None) -> tuple[Tensor, Tensor]:
    truth = "keep=True" if convention in (None, "additive") else convention
    kept = (x == 0) if truth == "keep=False" else (x != 0)
    if convention in ("keep=True", "keep=False") and not x.is_floating_point():
        return kept, torch.full((), CONVENTIONS.index(truth), dtype=torch.int64, device=x.device)
    additive = _additive(x, convention)
    kept = torch.where(additive, x.to(torch.float64) > _dropped_below(x.dtype), kept)
    return kept, torch.where(additive, CONVENTIONS.index("additive"), CONVENTIONS.index(truth))


def _additive(x: Tensor, convention: str | None) -> Tensor:
    """Whether the values of a mask are added to scores: bool of shape ()."""
    if convention == "additive":
        return torch.ones((), dtype=torch.bool, device=x.device)
    if convention is None:
        return (x < 0).any()
    return ~(((x == 0) | (x == 1)).all() & (x == 1).any())


def _dropped_below(dtype: torch.dtype) -> float:
    """Masks are filled with -inf, the dtype's minimum, -1e9 or, in older code, -1e4: what is at or below drops."""
    return max(torch.finfo(dtype).min / 2, _OLDEST_FILL) if dtype.is_floating_point else _OLDEST_FILL


_OLDEST_FILL = -9984.0
"""-1e4 as bfloat16 rounds it."""


def unpack_masks(packed: Sequence[Sequence[int]], shapes: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    """Columns of the masks table from the numbers of `summarize_mask` and the masks' shapes."""
    counts = [math.prod(shape) for shape in shapes]
    return {
        "count": counts,
        "kept": [row[0] for row in packed],
        "rows": [math.prod(shape[:-1]) for shape in shapes],
        "empty_rows": [row[1] for row in packed],
        "min_kept": [row[2] if row[2] >= 0 else None for row in packed],
        "max_kept": [row[3] if row[3] >= 0 else None for row in packed],
        "first_empty": [row[4] if row[4] >= 0 else None for row in packed],
        "convention": [CONVENTIONS[row[5]] for row in packed],
    }
