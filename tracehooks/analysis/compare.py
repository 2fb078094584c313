"""Row by row: equal, within tolerance, or how far apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracehooks.analysis.align import Alignment
from tracehooks.analysis.distance import CHUNK, Distances, Wide, distances
from tracehooks.analysis.tolerance import EPSILON, Tolerance
from tracehooks.analysis.window import NONFINITE, STATISTICS, Bools, Floats, Ints, Vocabulary, Window, same_shapes

STATUSES = ("equal", "within", "unread", "differs", "only_a", "only_b", "shape", "dtype")
EQUAL, WITHIN, UNREAD, DIFFERS, ONLY_A, ONLY_B, SHAPE, DTYPE = range(len(STATUSES))

ESTIMATES = ("relative_l2", "relative_l2_error", "cosine", "cosine_error")
"""Columns of a diff that come from sketches: distance and direction, each with its standard error."""


_COMPARED = ("count", *NONFINITE, *STATISTICS)


@dataclass(frozen=True)
class Comparison:
    """Status, relative difference and tolerance of each aligned row. The difference is NaN where there is none to take
    (one side only, another shape) and infinite where counts of elements or non-finite values disagree."""

    status: NDArray[np.int8]
    distance: Floats
    allowed: Floats
    estimates: dict[str, NDArray[np.float32]]
    """`ESTIMATES`; NaN where a side has no sketch and the rows are not equal."""


def compare(
    a: Window, b: Window, pairs: Alignment, tolerance: Tolerance, noise: Floats, vocabulary: Vocabulary
) -> Comparison:
    """Compare aligned rows; statistics are read only where the hashes do not settle it. What is allowed is never less
    than the noise of a's row."""
    judged = blank(pairs)
    both = np.flatnonzero(judged.status == EQUAL)
    rows_a, rows_b = pairs.a[both], pairs.b[both]
    open_pairs, hashes_differ = _unsettled(a, b, rows_a, rows_b)
    allowed = _allowed(a, b, rows_a, rows_b, tolerance, vocabulary)
    judged.allowed[both] = np.maximum(allowed, noise[rows_a])
    if len(open_pairs):
        at = both[open_pairs]
        _judge(a, b, rows_a[open_pairs], rows_b[open_pairs], hashes_differ, tolerance, judged, at)
    _mark_consequences_of_parameters(a, pairs, judged.status, vocabulary)
    return judged


def blank(pairs: Alignment) -> Comparison:
    """Every pair equal, every row without counterpart in one run only, and no tolerance yet."""
    status = np.full(len(pairs.a), EQUAL, np.int8)
    status[pairs.b < 0], status[pairs.a < 0] = ONLY_A, ONLY_B
    distance = np.where(status == EQUAL, 0.0, np.nan)
    estimates = {name: distance.astype(np.float32) for name in ESTIMATES}
    estimates["cosine"] += 1
    return Comparison(status, distance, np.full(len(status), np.nan), estimates)


def _unsettled(a: Window, b: Window, rows_a: Ints, rows_b: Ints) -> tuple[Ints, Bools]:
    """The pairs that are not alike in shape, dtype and hash, and which of them have hashes that differ."""
    hashed = a.has_hash[rows_a] & b.has_hash[rows_b]
    same_hash = a.hash[rows_a] == b.hash[rows_b]
    alike = hashed & same_hash & same_shapes(a, b, rows_a, rows_b)
    alike &= a.columns["dtype"][rows_a] == b.columns["dtype"][rows_b]
    rest = np.flatnonzero(~alike)
    return rest, (hashed & ~same_hash)[rest]


def _allowed(a: Window, b: Window, rows_a: Ints, rows_b: Ints, tolerance: Tolerance, vocabulary: Vocabulary) -> Floats:
    """By the coarser dtype of the two and the depth of the row: its place in its step, times the steps before."""
    exact = np.maximum(
        _epsilons(a, tolerance, vocabulary)[rows_a],
        _epsilons(b, tolerance, vocabulary)[rows_b],
    )
    step = a.columns["step"][rows_a]
    initial = a.columns["phase"][rows_a] == vocabulary.code("parameter")
    place = np.where(initial, 0, np.maximum(a.columns["seq"][rows_a], b.columns["seq"][rows_b]))
    allowed = tolerance.allowed(exact, place * (1 + step) + step)
    if tolerance.same_environment:
        allowed[initial & (step == 0) & (a.columns["dtype"][rows_a] == b.columns["dtype"][rows_b])] = 0.0
        root_input = a.columns["phase"][rows_a] == vocabulary.code("input")
        root_input &= a.columns["module"][rows_a] == vocabulary.code("")
        if not tolerance.merged:
            allowed[root_input] = 0.0  # data, not yet computed with: a permuted batch has equal statistics
    return allowed


def _epsilons(window: Window, tolerance: Tolerance, vocabulary: Vocabulary) -> Floats:
    """The rounding unit of each row; 0 for whole numbers."""
    names, dtypes, devices = vocabulary.names, window.columns["dtype"], window.columns["device"]
    units = np.zeros(len(window))
    for device in np.flatnonzero(np.bincount(devices)).tolist():
        of_dtype = np.zeros(len(names))
        for dtype in np.flatnonzero(np.bincount(dtypes)).tolist():
            of_dtype[dtype] = tolerance.epsilon(names[dtype], names[device])
        np.copyto(units, of_dtype[dtypes], where=devices == device)
    return units


def coarsest(window: Window, tolerance: Tolerance, vocabulary: Vocabulary) -> float:
    """The largest rounding unit of the rows; that of float32 where there is none."""
    return float(_epsilons(window, tolerance, vocabulary).max(initial=0.0)) or EPSILON["float32"]


def _judge(
    a: Window,
    b: Window,
    rows_a: Ints,
    rows_b: Ints,
    hashes_differ: Bools,
    tolerance: Tolerance,
    judged: Comparison,
    at: Ints,
) -> None:
    """Fill in ``judged`` at these positions."""
    wide_a, wide_b = a.wide(rows_a), b.wide(rows_b)
    allowed = judged.allowed[at]
    same_dtype = a.columns["dtype"][rows_a] == b.columns["dtype"][rows_b]
    same_shape = same_shapes(a, b, rows_a, rows_b)
    apart = distances(wide_a, wide_b) if "sketch" in wide_a and "sketch" in wide_b else None
    distance = difference(wide_a, wide_b, apart)
    bits = same_dtype & ~hashes_differ
    unhashed = np.flatnonzero(~(a.has_hash[rows_a] & b.has_hash[rows_b]))
    bits[unhashed] &= _all_equal(_some(wide_a, unhashed), _some(wide_b, unhashed))
    within = distance <= allowed
    exact = (allowed == 0) | (tolerance.relative == 0)
    within &= ~(exact & hashes_differ & same_dtype)
    status = np.where(bits, EQUAL, np.where(within, WITHIN, DIFFERS))
    status = np.where(within & ~same_dtype, DTYPE, status)
    judged.status[at] = np.where(same_shape, status, SHAPE)
    judged.distance[at] = np.where(same_shape, np.where(bits, 0.0, distance), np.nan)
    unequal = ~(bits & same_shape)
    for name in ESTIMATES:
        judged.estimates[name][at[unequal]] = np.nan
        if apart is not None:
            known = unequal & same_shape
            with np.errstate(over="ignore"):  # beyond what the table's float32 holds is infinitely far
                judged.estimates[name][at[known]] = getattr(apart, name)[known]


def _some(wide: Wide, rows: Ints) -> Wide:
    return {name: column[rows] for name, column in wide.items()}


def difference(a: Wide, b: Wide, apart: Distances | None) -> Floats:
    """The largest relative difference of the statistics: mean, std and rms relative to the larger rms, min, max and
    absmax to the larger absmax; with sketches also the estimated ‖a − b‖ over the larger norm. Infinite where the
    numbers of elements or of non-finite elements disagree."""
    worst = np.zeros(len(a["count"]))
    for start in range(0, len(worst), CHUNK):
        part = slice(start, start + CHUNK)
        _widen(worst[part], *({name: rows[name][part] for name in _COMPARED} for rows in (a, b)))
    if apart is not None:
        np.fmax(worst, apart.symmetric, out=worst)
    return worst


def _widen(worst: Floats, a: Wide, b: Wide) -> None:
    scales = np.fmax(a["absmax"], b["absmax"]), np.fmax(a["rms"], b["rms"])
    for name in STATISTICS:
        np.maximum(worst, _relative(a[name], b[name], scales[name in ("mean", "std", "rms")]), out=worst)
    for name in ("count", *NONFINITE):
        worst[a[name] != b[name]] = np.inf


def _relative(x: NDArray[Any], y: NDArray[Any], scale: Floats) -> Floats:
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        ratio: Floats = np.abs(np.subtract(x, y)) / scale
    ratio[_same(x, y)] = 0.0
    ratio[np.isnan(ratio)] = np.inf
    return ratio


def _all_equal(a: Wide, b: Wide) -> Bools:
    equal = np.ones(len(a["count"]), bool)
    for name in ("count", *NONFINITE, "zeros", *STATISTICS):
        equal &= _same(a[name], b[name])
    if "sketch" in a and "sketch" in b:
        apart = ~_same(a["sketch"], b["sketch"]) & ~np.isnan(a["sketch"]) & ~np.isnan(b["sketch"])
        equal &= ~apart.any(axis=1)
    return equal


def _same(x: NDArray[Any], y: NDArray[Any]) -> Bools:
    """Equal, NaN being equal to NaN."""
    return np.asarray((x == y) | ((x != x) & (y != y)))


def _mark_consequences_of_parameters(
    a: Window, pairs: Alignment, status: NDArray[np.int8], vocabulary: Vocabulary
) -> None:
    """A module's output that changed along with the module's own parameter differs, however small the change: its cause
    is known, so it is no rounding noise."""
    paired = (pairs.a >= 0) & (pairs.b >= 0)
    if not paired.any():
        return
    place = a.columns["step"][pairs.a] * len(vocabulary.names) + a.columns["module"][pairs.a]
    phase = a.columns["phase"][pairs.a]
    changed = paired & (status >= DIFFERS) & (phase == vocabulary.code("parameter"))
    if changed.any():
        outputs = paired & (status == WITHIN) & (phase == vocabulary.code("forward"))
        status[outputs & np.isin(place, place[changed])] = DIFFERS
