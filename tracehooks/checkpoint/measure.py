"""The numbers of one stored tensor, and of the difference between two, read a stretch at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracehooks.checkpoint.stored import Kept


@dataclass(frozen=True)
class Measured:
    """Counts, and statistics over the finite elements (None where there is none); complex tensors by component."""

    count: int
    nan: int
    posinf: int
    neginf: int
    zeros: int
    rms: float | None
    mean: float | None
    absmax: float | None
    min: float | None
    max: float | None

    @property
    def constant(self) -> bool:
        """Whether all elements are one finite number."""
        return self.min is not None and self.min == self.max and not (self.nan or self.posinf or self.neginf)


def measure(tensor: Kept) -> Measured:
    """Read a tensor once and measure it, in float64.

    Raises:
        CheckpointError: its bytes are not there, or its dtype cannot be read.
    """
    count = nan = posinf = neginf = zeros = finite = 0
    total = squares = 0.0
    low, high = np.inf, -np.inf
    for raw in tensor.chunks():
        values = raw.astype(np.float64)
        count += values.size
        zeros += int(np.count_nonzero(values == 0))
        holds = np.isfinite(values)
        if not holds.all():
            nan += int(np.count_nonzero(np.isnan(values)))
            posinf += int(np.count_nonzero(np.isposinf(values)))
            neginf += int(np.count_nonzero(np.isneginf(values)))
            values = values[holds]
        if values.size:
            finite += values.size
            total += float(values.sum())
            with np.errstate(over="ignore"):
                squares += float(np.dot(values, values))
            low, high = min(low, float(values.min())), max(high, float(values.max()))
    if not finite:
        return Measured(count, nan, posinf, neginf, zeros, None, None, None, None, None)
    rms = float(np.sqrt(squares / finite))
    return Measured(count, nan, posinf, neginf, zeros, rms, total / finite, max(abs(low), abs(high)), low, high)


@dataclass(frozen=True)
class Apart:
    """How far tensor b is from tensor a, over the elements that are finite in both."""

    across: float
    """‖a − b‖²."""
    square: float
    """‖a‖²."""
    cosine: float | None
    """None where either is zero."""
    largest: float
    """The largest |a − b|."""
    nonfinite: int
    """Elements finite on one side only, or other infinities."""

    @property
    def relative(self) -> float:
        """‖a − b‖ / ‖a‖; infinite where a is zero and b is not."""
        return float(np.sqrt(self.across / self.square)) if self.square else (np.inf if self.across else 0.0)

    @property
    def equal(self) -> bool:
        """Whether no element differs in value."""
        return not self.largest and not self.nonfinite

    @property
    def angle(self) -> float | None:
        """Between the two, in degrees."""
        return None if self.cosine is None else float(np.degrees(np.arccos(np.clip(self.cosine, -1, 1))))


def apart(a: Kept, b: Kept) -> Apart:
    """Compare two tensors of equal shape, in float64, whatever their dtypes."""
    across = square_a = square_b = product = largest = 0.0
    nonfinite = 0
    for x, y in _together(a, b):
        both = np.isfinite(x) & np.isfinite(y)
        if not both.all():
            same = (x == y) | (np.isnan(x) & np.isnan(y))
            nonfinite += int(np.count_nonzero(~both & ~same))
            x, y = x[both], y[both]
        if x.size:
            difference = x - y
            across += float(np.dot(difference, difference))
            square_a, square_b = square_a + float(np.dot(x, x)), square_b + float(np.dot(y, y))
            product += float(np.dot(x, y))
            largest = max(largest, float(np.abs(difference).max()))
    cosine = product / float(np.sqrt(square_a) * np.sqrt(square_b)) if square_a and square_b else None
    return Apart(across, square_a, cosine, largest, nonfinite)


def _together(a: Kept, b: Kept) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Stretches of both of equal length: whole and assembled tensors come in stretches of different lengths."""
    streams = [(chunk.astype(np.float64) for chunk in tensor.chunks()) for tensor in (a, b)]
    x, y = np.empty(0), np.empty(0)
    while True:
        x = x if x.size else next(streams[0], x)
        y = y if y.size else next(streams[1], y)
        size = min(x.size, y.size)
        if not size:
            return
        yield x[:size], y[:size]
        x, y = x[size:], y[size:]
