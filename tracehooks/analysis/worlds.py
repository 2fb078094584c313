"""Runs of different numbers of ranks.

What all ranks of a data-parallel run have alike is compared as it is. Of what each has for its own share of the batch the
statistics are merged into those of the whole batch, which do not depend on how it was dealt to ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tracehooks.analysis.align import align, dense
from tracehooks.analysis.scalars import Scalars
from tracehooks.analysis.window import KEY, NONFINITE, Bools, Floats, Ints, Vocabulary, Window, same_shapes

SHARED = ("parameter", "buffer", "gradient", "update", "optimizer")
"""Phases that every rank has alike; where ranks differ (shards, running statistics) there is nothing to compare."""
LOCAL = ("input", "forward", "probe")
"""Phases that belong to a rank's share of the batch. Gradients of these are of each rank's own loss, and are left out."""

MERGED = "inputs, outputs and probes were merged over ranks and compared by their statistics; "
TOLD = (
    "{} against {}: {}parameters, buffers, gradients, updates, settings and the gradient norm are those of the lowest "
    "rank{}; gradients of outputs and the loss, which are of each rank's own share of the batch, were left out"
)
OTHER_BATCH = (
    "inputs, outputs and probes: over all ranks the batches hold other numbers of elements ({} against {} at {})"
)
UNRECORDED = "inputs, outputs and probes: {} of {} ranks recorded them, and the whole batch cannot be put together"

Rows = tuple[Window, Scalars]


class Worlds:
    """Two runs with other numbers of ranks, brought to one."""

    def __init__(
        self, sizes: tuple[int, int], recorded: tuple[Sequence[int], Sequence[int]], names: Vocabulary
    ) -> None:
        self._sizes, self._names = sizes, names
        counts = ((len(ranks), size) for size, ranks in zip(sizes, recorded, strict=True))
        self._unrecorded = next((UNRECORDED.format(*pair) for pair in counts if pair[0] != pair[1]), "")
        self._other_batches: dict[int, str] = {}
        """Stretches in which the batches differ, by their first step."""
        self._unshared: set[tuple[int, ...]] = set()

    @property
    def refused(self) -> str:
        """What cannot be compared, and why; empty where all can."""
        return self._unrecorded or next((why for _, why in sorted(self._other_batches.items())), "")

    def __str__(self) -> str:
        sizes = (f"{size} rank" if size == 1 else f"{size} ranks" for size in self._sizes)
        many = len(self._unshared)
        sites = f", but for {many} {'site' if many == 1 else 'sites'} that ranks do not share" if many else ""
        return TOLD.format(*sizes, "" if self.refused else MERGED, sites)

    def met(self, rows_a: Rows, rows_b: Rows) -> tuple[Rows, Rows]:
        """Tensors and scalars of both runs as if each had one rank, without those that cannot be compared."""
        (a, keep_a), (b, keep_b) = self._merged(rows_a[0]), self._merged(rows_b[0])
        pairs = align(a, b, by_rank=False)
        here, there = pairs.a >= 0, pairs.b >= 0
        kept = np.ones(len(pairs.a), bool)
        kept[here] &= keep_a[pairs.a[here]]
        kept[there] &= keep_b[pairs.b[there]]
        both = np.flatnonzero(here & there)
        paired_a, paired_b = pairs.a[both], pairs.b[both]
        whole = same_shapes(a, b, paired_a, paired_b) & ~self._is(a, ("buffer",))[paired_a]
        kept[both[whole]] = True  # no shard, so the lowest rank's counts, also where replicas fell apart
        for row in pairs.a[~kept & here].tolist():
            self._unshared.add(tuple(int(a.columns[name][row]) for name in ("phase", "module", "slot", "call")))
        why = self._other_batch(a, b, paired_a, paired_b)
        if why:
            self._other_batches[int(a.columns["step"][0])] = why
        merge = not (why or self._unrecorded)
        left_a, left_b = self._left(a, pairs.a[here & kept], merge), self._left(b, pairs.b[there & kept], merge)
        return (left_a, self._common(rows_a[1])), (left_b, self._common(rows_b[1]))

    def _left(self, side: Window, rows: Ints, merge: bool) -> Window:
        rows = np.sort(rows)
        return side.only(rows if merge else rows[~self._is(side, LOCAL)[rows]])

    def _common(self, scalars: Scalars) -> Scalars:
        """Settings and the gradient norm of the lowest rank."""
        rank = scalars.window.columns["rank"]
        common = scalars.setting | (scalars.window.columns["slot"] == self._names.code("grad_norm"))
        return scalars.only(np.flatnonzero(common & (rank == rank.min(initial=0))))

    def _is(self, window: Window, phases: Sequence[str]) -> Bools:
        return np.isin(window.columns["phase"], [self._names.code(phase) for phase in phases])

    def _other_batch(self, a: Window, b: Window, rows_a: Ints, rows_b: Ints) -> str:
        """Why the shares do not make the same batch: an input of the root with other elements in all."""
        root = self._is(a, ("input",))[rows_a] & (a.columns["module"][rows_a] == self._names.code(""))
        rows_a, rows_b = rows_a[root], rows_b[root]
        counts = a.wide(rows_a)["count"], b.wide(rows_b)["count"]
        unequal = np.flatnonzero(counts[0] != counts[1])
        if not len(unequal):
            return ""
        at = int(unequal[0])
        return OTHER_BATCH.format(counts[0][at], counts[1][at], self._names.names[a.columns["slot"][rows_a[at]]])

    def _merged(self, window: Window) -> tuple[Window, Bools]:
        """One row for each site, in execution order, and which of them can be compared."""
        window = window.only(np.flatnonzero(self._is(window, SHARED) | self._is(window, LOCAL)))
        site = dense([window.columns[name] for name in KEY if name != "rank"])
        order = np.lexsort((window.columns["rank"], site))
        starts = np.flatnonzero(np.diff(site[order], prepend=-1))
        first = order[starts]
        local = self._is(window, LOCAL)[first]
        alike = _alike(window, order, starts)
        numbers = {name: pa.array(column) for name, column in _sums(window, order, starts, local).items()}
        table = pa.table(numbers).append_column("sketch", pa.nulls(len(first), pa.list_(pa.float32())))
        columns = {name: column[first] for name, column in window.columns.items()}
        columns["rank"] = np.zeros_like(columns["rank"])
        merged = Window(
            columns,
            window.hash[first],
            window.has_hash[first] & ~local,
            np.arange(len(first)),
            table.select,
            _shapes(window, first, local, numbers["count"]),
        )
        in_order = np.lexsort((columns["seq"], columns["step"]))
        return merged.only(in_order), (local | alike)[in_order]


def _alike(window: Window, order: Ints, starts: Ints) -> Bools:
    """Of each site, whether all ranks hold the same bits, as far as hashes were recorded."""
    if not len(starts):
        return np.empty(0, bool)
    hashes = window.hash[order]
    return np.asarray(np.minimum.reduceat(hashes, starts) == np.maximum.reduceat(hashes, starts))


def _sums(window: Window, order: Ints, starts: Ints, local: Bools) -> dict[str, NDArray[Any]]:
    """Statistics of each site: merged over ranks where it is local, else those of the lowest rank."""
    wide = {name: column[order] for name, column in window.wide(np.arange(len(window))).items() if name != "sketch"}
    if not len(starts):
        return wide
    sizes = np.diff(starts, append=len(order))
    finite = wide["count"] - sum(wide[name] for name in NONFINITE)
    held = np.add.reduceat(finite, starts)

    def mean(values: Floats) -> Floats:
        with np.errstate(invalid="ignore", divide="ignore"):
            merged: Floats = np.add.reduceat(np.where(finite > 0, finite * values, 0.0), starts) / held
        return merged

    means = mean(wide["mean"])
    apart = np.repeat(means, sizes)
    merged = {name: np.add.reduceat(wide[name], starts) for name in ("count", *NONFINITE, "zeros")}
    merged |= {"min": np.fmin.reduceat(wide["min"], starts), "mean": means}
    merged |= {name: np.fmax.reduceat(wide[name], starts) for name in ("max", "absmax")}
    merged["rms"] = np.sqrt(mean(wide["rms"] ** 2))
    merged["std"] = np.sqrt(mean(wide["std"] ** 2 + (wide["mean"] - apart) ** 2))
    return {name: np.where(local, merged[name], column[starts]) for name, column in wide.items()}


def _shapes(window: Window, first: Ints, local: Bools, counts: pa.Array) -> pa.ListArray:
    """Shapes of the lowest rank; of merged rows the number of their elements."""
    whole = window.shapes.take(pa.array(window.order[first]))
    flat = pa.ListArray.from_arrays(np.arange(len(first) + 1, dtype=np.int32), counts.cast(pa.int64()))
    place = np.arange(len(first)) + np.where(local, len(first), 0)
    return pa.concat_arrays([whole.cast(flat.type), flat]).take(pa.array(place))
