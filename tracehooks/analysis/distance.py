"""How far two tensors are apart, and in which direction, from their sketches and their norms.

The cosine c is the maximum-likelihood estimate from the sketches when both norms are known exactly, a root of a cubic
(Li, Hastie and Church, "Improving random projections using marginal information", 2006); its standard error is
(1 − c²) / √(16 · (1 + c²)) for 16 sums. It is exact for a scaled and for a flipped tensor. The distance follows by the
law of cosines.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracehooks.analysis.window import NONFINITE, Floats
from tracehooks.core.schema import SKETCH_SIZE

FLOOR = 4 * 2.0**-23
"""Sums are kept in float32: relative distances below this may be the sketch's own rounding, and count as none."""

ALIGNED = 1e-6
"""One minus the magnitude of the cosine of tensors that are multiples of one another, computed in low precision."""

REORDERED = 1e-3
"""A relative distance that rounding does not make: with equal statistics the elements changed places."""

CHUNK = 1 << 13
"""Rows at a time, so that what is computed on the way stays in the processor's cache."""

_NEWTON_STEPS = 12
_NEEDED = ("count", *NONFINITE, "rms", "sketch")

Wide = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Distances:
    """Of each pair of rows; NaN where a side has no sketch. Elements that are not finite count as 0."""

    relative_l2: Floats
    """‖a − b‖ / ‖a‖; infinite where a alone is zero."""
    relative_l2_error: Floats
    """Its standard error, at least `FLOOR`."""
    cosine: Floats
    """Of the angle between a and b; NaN where either is zero."""
    cosine_error: Floats
    symmetric: Floats
    """‖a − b‖ over the larger norm, from 0 to 2: the same whichever side is a."""


def distances(a: Wide, b: Wide) -> Distances:
    """Estimate distance and cosine of pairs of tensors of equal shape, given as columns of their rows."""
    size = len(a["count"])
    whole = np.empty((len(fields(Distances)), size))
    for start in range(0, size, CHUNK):
        part = slice(start, start + CHUNK)
        whole[:, part] = _estimates(*({name: rows[name][part] for name in _NEEDED} for rows in (a, b)))
    return Distances(*whole)


def _estimates(a: Wide, b: Wide) -> tuple[Floats, ...]:
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        norm_a, size = _norm(a)
        norm_b, _ = _norm(b)
        larger, smaller = np.maximum(norm_a, norm_b), np.minimum(norm_a, norm_b)
        gap = _gap(a["sketch"] / norm_a[:, None], b["sketch"] / norm_b[:, None])
        gap[np.sqrt(2 * gap) <= FLOOR] = 0.0
        cosine = 1 - gap
        cosine_error = gap * (2 - gap) / np.sqrt(SKETCH_SIZE * (1 + cosine**2))
        cosine_error *= np.sqrt(
            1 - SKETCH_SIZE / np.maximum(size, SKETCH_SIZE)
        )  # a bucket with one element has no error
        ratio = np.where(larger > 0, smaller / larger, 1.0)
        symmetric = np.sqrt((1 - ratio) ** 2 + 2 * np.nan_to_num(gap) * ratio)
        relative = symmetric * np.where(larger > 0, larger / norm_a, 1.0)
        error = np.fmax(norm_b / norm_a * cosine_error / relative, FLOOR)
        unknown = ~np.isfinite(a["sketch"].sum(axis=1) + b["sketch"].sum(axis=1))
    for column in (relative, error, cosine, cosine_error, symmetric):
        column[unknown] = np.nan
    return relative, error, cosine, cosine_error, symmetric


def _norm(rows: Wide) -> tuple[Floats, Floats]:
    """The L2 norm over the finite elements, and how many those are."""
    finite = rows["count"] - sum(rows[name] for name in NONFINITE)
    with np.errstate(over="ignore"):  # a norm may be beyond what float64 holds: then no distance is told
        norm: Floats = np.nan_to_num(rows["rms"]) * np.sqrt(np.maximum(finite, 0))
    return norm, finite


def _gap(u: NDArray[Any], v: NDArray[Any]) -> Floats:
    """One minus the cosine e, from sketches of unit vectors: the root of e³ − (3 − p)e² + (2 + d)e − d in [0, 2], where
    p = Σuv and d = Σ(u − v)². It has one, being −d at 0 and Σ(u + v)² at 2."""
    product = np.einsum("ij,ij->i", u, v).astype(float)
    squares = np.einsum("ij,ij->i", u, u).astype(float) + np.einsum("ij,ij->i", v, v)
    u = u - v
    apart = np.einsum("ij,ij->i", u, u).astype(float)
    gap: Floats = np.clip(apart / squares, 0, 2)  # of the sketches themselves: where the search begins
    for _ in range(_NEWTON_STEPS):
        value = ((gap - (3 - product)) * gap + 2 + apart) * gap - apart
        slope = (3 * gap - 2 * (3 - product)) * gap + 2 + apart
        gap = np.clip(gap - value / np.where(slope == 0, 1.0, slope), 0, 2)
    return gap


def in_words(a: Wide, b: Wide) -> str:
    """How far one pair of unequal rows is apart and, where it shows, why: scale, sign or order. Empty without
    sketches."""
    apart = distances(a, b) if "sketch" in a and "sketch" in b and a["count"][0] == b["count"][0] else None
    if apart is None or np.isnan(apart.symmetric[0]):
        return ""
    norms = float(_norm(a)[0][0]), float(_norm(b)[0][0])
    told = f"relative L2 {apart.relative_l2[0]:.2g} ± {apart.relative_l2_error[0]:.1g}"
    if not min(norms) or np.isinf(max(norms)):
        return told
    cosine = float(apart.cosine[0])
    told += f", cosine {cosine:.4g} ± {apart.cosine_error[0]:.1g}"
    if abs(cosine) > 1 - ALIGNED and abs(norms[1] / norms[0] - np.sign(cosine)) > 1e-3:
        factor = np.sign(cosine) * norms[1] / norms[0]
        return f"{told}: {'sign flipped' if abs(factor + 1) < 1e-3 else f'scaled by {factor:.4g}'}"
    if apart.symmetric[0] > REORDERED and _same_values(a, b):
        return f"{told}: the same values in another order (transposed, permuted)"
    return told


def _same_values(a: Wide, b: Wide) -> bool:
    """Whether the statistics are those of the same elements: equal extremes, equal zeros, sums to rounding."""
    exact = all(a[name][0] == b[name][0] for name in ("count", *NONFINITE, "zeros", "min", "max"))
    return exact and all(abs(a[name][0] - b[name][0]) <= 1e-9 * a["rms"][0] for name in ("mean", "std", "rms"))
