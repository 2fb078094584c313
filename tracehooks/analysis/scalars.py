"""The numbers of a step that two equal runs share: loss, learning rates, loss scale, gradient norm."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tracehooks.analysis.align import Alignment, align
from tracehooks.analysis.compare import DIFFERS, EQUAL, WITHIN, Comparison, blank
from tracehooks.analysis.steps import Chosen
from tracehooks.analysis.tables import Tables
from tracehooks.analysis.tolerance import EPSILON, SAFETY, Tolerance
from tracehooks.analysis.window import Floats, Ints, Vocabulary, Window, execution_order

SETTINGS = r"^(lr(/.*)?|scale)$"
"""Scalars that are set, not computed: they agree to float64, and where they differ they are causes."""

COMPARED = r"^(loss(/.*)?|grad_norm|lr(/.*)?|scale)$"
"""Times, throughput and the user's own numbers are not compared."""


@dataclass(frozen=True)
class Scalars:
    """The compared scalars of some steps of one run, keyed like tensors: the name is the slot, the phase "scalar"."""

    window: Window
    values: Floats
    setting: NDArray[np.bool_]

    def only(self, rows: Ints) -> Scalars:
        """Some of them."""
        return Scalars(self.window.only(rows), self.values[rows], self.setting[rows])


def read_scalars(tables: Tables, vocabulary: Vocabulary) -> Scalars:
    """All compared scalars of a run, in the order of steps."""
    table = tables.beside("scalars", ["step", "micro", "name", "value", "rank"])
    names = table["name"].cast(pa.string())
    table = table.filter(pc.match_substring_regex(names, COMPARED).fill_null(False))
    return _scalars(table, vocabulary)


def _scalars(table: pa.Table, vocabulary: Vocabulary) -> Scalars:
    size = len(table)
    columns = {name: table[name].to_numpy().astype(np.int64) for name in ("step", "micro", "rank")}
    order = execution_order(columns["step"], np.zeros(size, np.int64), np.zeros(size, np.int64))
    order = np.arange(size) if order is None else order
    names = table["name"].cast(pa.string())
    columns["slot"] = vocabulary.encode(names)
    columns |= {name: np.zeros(size, np.int64) for name in ("call", "recompute", "seq")}
    columns["phase"] = np.full(size, vocabulary.code("scalar"))
    columns["module"] = np.full(size, vocabulary.code(""))
    columns = {name: column[order] for name, column in columns.items()}
    setting = pc.match_substring_regex(names, SETTINGS).to_numpy()[order]
    nothing = Window(columns, np.zeros(size, np.uint64), np.zeros(size, bool), order, table.select)
    return Scalars(nothing, table["value"].to_numpy()[order], setting)


def part(scalars: Scalars, chosen: Chosen) -> Scalars:
    """The scalars of some steps."""
    return scalars.only(np.flatnonzero(chosen.mask(scalars.window.columns["step"])))


def unlike_steps(a: Scalars, b: Scalars, *, by_rank: bool) -> set[int]:
    """Steps in which the two sides do not have the same scalars with the same values."""
    pairs = align(a.window, b.window, by_rank=by_rank)
    both = np.flatnonzero((pairs.a >= 0) & (pairs.b >= 0))
    same = both[_relative(a.values[pairs.a[both]], b.values[pairs.b[both]]) == 0]
    alone_a = np.delete(a.window.columns["step"], pairs.a[same])
    alone_b = np.delete(b.window.columns["step"], pairs.b[same])
    return {*alone_a.tolist(), *alone_b.tolist()}


def compare_scalars(
    a: Scalars, b: Scalars, pairs: Alignment, tolerance: Tolerance, noise: Floats, *, epsilon: float, depth: int
) -> Comparison:
    """Compare aligned scalars. Computed numbers have the tolerance of the deepest tensor of their step (``epsilon`` of
    the coarsest dtype, ``depth`` rows), settings that of float64; neither is less than the noise of a's row."""
    judged = blank(pairs)
    both = np.flatnonzero(judged.status == EQUAL)
    x, y = a.values[pairs.a[both]], b.values[pairs.b[both]]
    step = a.window.columns["step"][pairs.a[both]]
    distance = _relative(x, y)
    computed = tolerance.allowed(np.full(len(both), epsilon), depth * (1 + step) + step)
    exact = SAFETY * EPSILON["float64"] if tolerance.relative is None else tolerance.relative
    allowed = np.maximum(np.where(a.setting[pairs.a[both]], exact, computed), noise[pairs.a[both]])
    judged.distance[both], judged.allowed[both] = distance, allowed
    judged.status[both] = np.where(distance == 0, EQUAL, np.where(distance <= allowed, WITHIN, DIFFERS))
    for column in judged.estimates.values():
        column[:] = np.nan
    return judged


def _relative(x: Floats, y: Floats) -> Floats:
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        apart = np.abs(x - y) / np.maximum(np.abs(x), np.abs(y))
    apart[np.isnan(apart)] = np.inf
    apart[(x == y) | (np.isnan(x) & np.isnan(y))] = 0.0
    return apart
