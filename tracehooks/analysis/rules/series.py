"""Numbers in a row: the small statistics that several rules share."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def longest(flags: NDArray[np.bool_]) -> tuple[int, int]:
    """(start, length) of the longest stretch of True; (0, 0) where there is none."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags.astype(np.int8), [0]])))
    starts, ends = edges[::2], edges[1::2]
    if not len(starts):
        return 0, 0
    best = int(np.argmax(ends - starts))
    return int(starts[best]), int(ends[best] - starts[best])


def running(flags: NDArray[np.bool_]) -> int:
    """How many of the last are True without a break."""
    return len(flags) if flags.all() else int(np.argmin(flags[::-1]))


def trend(values: NDArray[np.float64]) -> float:
    """Spearman's rank correlation of values with their position; 0 where they are constant. Equal values share their
    mean rank."""
    if len(values) < 2 or np.ptp(values) == 0:
        return 0.0
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return float(np.corrcoef(ranks, np.arange(len(values)))[0, 1])


def ends(values: NDArray[np.float64], parts: int = 10) -> tuple[float, float]:
    """Medians of the first and of the last of so many parts."""
    part = max(1, len(values) // parts)
    return float(np.median(values[:part])), float(np.median(values[-part:]))


def period(values: NDArray[Any]) -> int | None:
    """The smallest period of two or more different values that the whole row keeps, seen at least one and a half times."""
    for length in range(2, len(values) * 2 // 3 + 1):
        if (values[length:] == values[:-length]).all():
            return length if len(np.unique(values[:length])) == length else None
    return None


def notch(values: NDArray[np.float64]) -> float:
    """Half-width of the interval around a median that two medians must leave to differ: 1.57 IQR/√n (McGill, Tukey and
    Larsen, 1978)."""
    low, high = np.percentile(values, [25, 75])
    return 1.57 * float(high - low) / float(np.sqrt(len(values)))
