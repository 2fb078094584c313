"""How far repeats of one version are apart: differences no larger than that say nothing about another version."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tracehooks.analysis.align import Alignment
from tracehooks.analysis.compare import EQUAL, Comparison
from tracehooks.analysis.divergence import Divergence
from tracehooks.analysis.window import Floats, Ints

SAFETY = 3.0
"""The largest difference of a few repeats is not the largest there is."""


@dataclass(frozen=True)
class Noise:
    """What repeats of a version do not share."""

    repeats: int
    sites: int
    """Sites that differ between repeats by more than rounding."""
    largest: float
    """The largest relative difference among them."""
    first: Divergence | None
    """Where repeats first differ by more than rounding."""

    def __str__(self) -> str:
        runs = "1 repeat" if self.repeats == 1 else f"{self.repeats} repeats"
        if self.first is None:
            return f"{runs}: equal within rounding"
        sites = "1 site differs" if self.sites == 1 else f"{self.sites} sites differ"
        return f"{runs}: {sites} by up to {self.largest:.2g}, where less is not seen; first: {self.first}"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def floor(size: int, pairs: Alignment, repeats: Comparison) -> Floats:
    """For each of ``size`` rows of a, how far a repeat is from it; 0 where it is equal or has no such row."""
    apart = np.zeros(size)
    both = (pairs.a >= 0) & (pairs.b >= 0) & (repeats.status != EQUAL)
    # bits that differ where all statistics agree are noise too, of unknown size
    apart[pairs.a[both]] = np.fmax(repeats.distance[both], np.finfo(float).tiny)
    return apart


def pooled(own: Floats, group: Ints) -> Floats:
    """The noise of each row, and where it has some at least the median of the noisy rows of its group: few repeats can agree
    by chance in one number, hardly in most."""
    noisy = np.flatnonzero(own)
    if not len(noisy):
        return own
    order = noisy[np.lexsort((own[noisy], group[noisy]))]
    starts = np.flatnonzero(np.diff(group[order], prepend=group[order[:1]] - 1))
    sizes = np.diff(starts, append=len(order))
    raised = own.copy()
    raised[order] = np.maximum(own[order], np.repeat(own[order[starts + sizes // 2]], sizes))
    return raised


def of_scalars(own: Floats, steps: Ints, tensors: Floats, tensor_steps: Ints) -> Floats:
    """The noise of each scalar, and where it has some at least the median of the noisy tensors of its step."""
    raised = own.copy()
    for row in np.flatnonzero(own).tolist():
        there = tensors[
            np.searchsorted(tensor_steps, steps[row]) : np.searchsorted(tensor_steps, steps[row], side="right")
        ]
        noisy = there[there > 0]
        if len(noisy):
            raised[row] = max(own[row], float(np.median(noisy)))
    return raised
