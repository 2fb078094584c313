"""How the numbers of one tensor are packed into one row of int64, so that many of them travel in one copy.

Floats are stored as their bit patterns. `unpack` turns a matrix of such rows into the columns of the tensors table,
without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracehooks.core.schema import HISTOGRAM_EXPONENTS, SKETCH_SIZE

INTEGERS = ("count", "nan", "posinf", "neginf", "zeros", "hash")
FLOATS = ("min", "max", "mean", "std", "rms", "absmax")
NAN, POSINF, NEGINF = 1, 2, 4
"""Bits that say which non-finite values were found."""
BASE_WIDTH = len(INTEGERS) + len(FLOATS)


@dataclass(frozen=True)
class Spec:
    """Which of the optional statistics are computed."""

    hash: bool = True
    sketch: bool = False
    histogram: bool = False

    @cached_property
    def width(self) -> int:
        """Length of a packed row in int64 words."""
        return BASE_WIDTH + SKETCH_SIZE * self.sketch + len(HISTOGRAM_EXPONENTS) * self.histogram

    @cached_property
    def flags(self) -> int:
        """The choice in bits, as kernels take it: 1 for the hash, 2 for the sketch, 4 for the histogram."""
        return self.hash + 2 * self.sketch + 4 * self.histogram


Columns = dict[str, NDArray[Any] | None]


def nonfinite_rows(packed: NDArray[np.int64]) -> bool:
    """Whether any of these packed rows tells of a NaN or an infinity."""
    return bool(packed[:, 1:4].any())


def unpack(packed: NDArray[np.int64], spec: Spec) -> Columns:
    """Columns of the tensors table from packed rows.

    Args:
        packed: int64 of shape (rows, spec.width).

    Returns:
        One array of ``rows`` elements a column (``sketch`` float32 of shape (rows, 16), ``histogram`` int64 of shape
        (rows, buckets)), None for what was not asked for. NaN in a float column means null.
    """
    base = packed[:, :BASE_WIDTH].T.copy()  # each column in one piece, since each is read several times
    columns: Columns = dict(zip(INTEGERS, base, strict=False))
    columns["hash"] = base[INTEGERS.index("hash")].view(np.uint64) if spec.hash else None
    columns |= zip(FLOATS, base[len(INTEGERS) :].view(np.float64), strict=True)
    end = BASE_WIDTH + SKETCH_SIZE * spec.sketch
    sketch = np.ascontiguousarray(packed[:, BASE_WIDTH:end]).view(np.float64)
    with np.errstate(over="ignore"):
        columns["sketch"] = sketch.astype(np.float32) if spec.sketch else None
    columns["histogram"] = packed[:, end : end + len(HISTOGRAM_EXPONENTS)] if spec.histogram else None
    return columns
