"""How far apart two rows may be and still say the same: rounding noise by dtype and depth (docs/diff.md)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tracehooks.analysis.window import Floats, Ints
from tracehooks.core.errors import InvalidOptionError

EPSILON = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "tf32": 2.0**-7,
    "bfloat16": 2.0**-7,
    "float16": 2.0**-10,
    "float8_e4m3fn": 2.0**-3,
    "float8_e4m3fnuz": 2.0**-3,
    "float8_e5m2": 2.0**-2,
    "float8_e5m2fnuz": 2.0**-2,
    "float8_e8m0fnu": 1.0,
    "float4_e2m1fn_x2": 0.5,
    "complex128": 2.0**-52,
    "complex64": 2.0**-23,
    "complex32": 2.0**-10,
}
"""Distance from 1 to the next number of each dtype. Dtypes not listed (whole numbers, booleans) compare exactly."""

SAFETY = 4.0
"""Rounding of one operation, in units of epsilon: other kernels and summation orders stay below it."""

DEPTH = 16.0
"""Rows after which the noise has grown by √2: errors of independent roundings add like a random walk."""


@dataclass(frozen=True)
class Tolerance:
    """``relative`` None is "auto"; a number is the same relative tolerance everywhere, 0 asks for equal bits."""

    relative: float | None = None
    tf32: bool = False
    """Whether either run lets CUDA multiply float32 in TF32."""
    same_environment: bool = False
    """Whether parameters of the first step and the root's inputs must be bit-equal: nothing was computed with them yet."""
    merged: bool = False
    """Whether inputs were put together from what several ranks recorded, and need not be."""

    def epsilon(self, dtype: str, device: str) -> float:
        """The rounding unit of a row's numbers; 0 for dtypes that compare exactly."""
        if self.tf32 and dtype == "float32" and device.startswith("cuda"):
            return EPSILON["tf32"]
        return EPSILON.get(dtype, 0.0)

    def allowed(self, epsilon: Floats, depth: Ints) -> Floats:
        """The largest relative difference that still counts as the same, of rows this deep in the execution."""
        if self.relative is not None:
            return np.where(epsilon > 0, self.relative, 0.0)
        return epsilon * SAFETY * np.sqrt(1.0 + depth / DEPTH)


def tolerance_for(option: float | str, info_a: Mapping[str, Any], info_b: Mapping[str, Any]) -> Tolerance:
    """What ``tolerance=`` and the two run.json ask for.

    Raises:
        InvalidOptionError: neither "auto" nor a number from 0 up.
    """
    if option == "auto":
        tf32 = _uses_tf32(info_a.get("flags")) or _uses_tf32(info_b.get("flags"))
        same = all(info_a.get(name) == info_b.get(name) for name in ("host", "devices", "packages"))
        return Tolerance(tf32=tf32, same_environment=same)
    try:
        relative = float(option)
    except (TypeError, ValueError):
        relative = -1.0
    if isinstance(option, bool) or not 0 <= relative < float("inf"):
        raise InvalidOptionError("tolerance", option, "'auto' or a relative difference from 0 up")
    return Tolerance(relative=relative)


def _uses_tf32(flags: object) -> bool:
    """Whether any flag that speaks of TF32 is on, whatever its exact name."""
    if not isinstance(flags, Mapping):
        return False
    return any(
        (re.search("tf32", name, re.IGNORECASE) is not None and bool(value)) or value in ("tf32", "high", "medium")
        for name, value in flags.items()
    )
