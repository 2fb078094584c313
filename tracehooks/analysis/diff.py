"""Two traces compared: docs/diff.md says how rows align and what a tolerance means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracehooks.analysis import essay
from tracehooks.analysis.align import Alignment, align
from tracehooks.analysis.changes import Change, changes
from tracehooks.analysis.compare import STATUSES, Comparison, coarsest, compare
from tracehooks.analysis.divergence import Compared, Divergence, first_and_culprits, first_other_bits, merged
from tracehooks.analysis.missing import Missing, missing
from tracehooks.analysis.scalars import Scalars, compare_scalars, part, read_scalars
from tracehooks.analysis.steps import Rename, Steps, chosen_steps, condition, renaming
from tracehooks.analysis.tolerance import Tolerance, tolerance_for
from tracehooks.analysis.window import KEY, Ints, Trace, Vocabulary, Window, windows
from tracehooks.core.records import Problem, RunSource


@dataclass(frozen=True)
class Diff:
    """What differs between run ``a`` and run ``b``; ``str()`` of it tells the story."""

    a: str
    b: str
    rows: pa.Table = field(repr=False)
    """One row for each aligned pair: the key, seq_a, seq_b, status (equal, within, differs, only_a, only_b, shape,
    dtype), difference (relative; null where there is none to take) and tolerance. module is null for scalars."""
    counts: Mapping[str, int]
    """Rows by status."""
    first: Divergence | None
    """The first site, in execution order, that differs beyond tolerance; None when there is none."""
    first_bits: Divergence | None
    """The first site that is not bit for bit equal; None when all are."""
    culprits: tuple[Divergence, ...]
    """The sites that made the difference, not those that passed it on."""
    only_a: tuple[Missing, ...]
    only_b: tuple[Missing, ...]
    changes: tuple[Change, ...]
    """What the two run.json say differently; it does not count as a difference."""
    problems: tuple[Problem, ...] = ()
    """What of either run could not be read, and was therefore not compared."""

    @property
    def identical(self) -> bool:
        """Every row has its counterpart and equals it bit for bit."""
        return self.counts["equal"] == len(self.rows)

    @property
    def within_tolerance(self) -> bool:
        """Every row has its counterpart and equals it within tolerance."""
        return self.counts["equal"] + self.counts["within"] == len(self.rows)

    @property
    def differing(self) -> pa.Table:
        """Those of `rows` that differ beyond tolerance, in execution order."""
        alike = pc.is_in(self.rows["status"].cast(pa.string()), value_set=pa.array(["equal", "within"]))
        return self.rows.filter(pc.invert(alike))

    def __str__(self) -> str:
        return essay.essay(self)

    def to_json(self) -> dict[str, Any]:
        """Everything but the rows, as plain values."""
        return {
            "a": self.a,
            "b": self.b,
            "identical": self.identical,
            "within_tolerance": self.within_tolerance,
            "counts": dict(self.counts),
            "first": self.first and self.first.to_json(),
            "first_bits": self.first_bits and self.first_bits.to_json(),
            "culprits": [item.to_json() for item in self.culprits],
            "only_a": [item.to_json() for item in self.only_a],
            "only_b": [item.to_json() for item in self.only_b],
            "changes": [item.to_json() for item in self.changes],
            "problems": [str(item) for item in self.problems],
        }


def diff(
    a: RunSource, b: RunSource, *, steps: Steps = None, rename: Rename = None, tolerance: float | str = "auto"
) -> Diff:
    """Compare two runs row by row.

    Args:
        steps: only these: a step, a range, a slice or several numbers.
        rename: regular expressions applied to the module paths of a before rows align: a mapping from old to new or a
            list of ``old=new``.
        tolerance: "auto" (rounding noise by dtype and depth), or a relative difference; 0 asks for equal bits.

    Raises:
        InvalidOptionError: an option of the wrong form, or steps that were not recorded.
        UnknownNameError: a rename that matches no module of a.
    """
    try:
        return _diff(a, b, steps, rename, tolerance)
    except (OSError, pa.ArrowInvalid):
        # A damaged page. Rows already read may be of the part that is now left out, so all is read again.
        if not _healed(a, b):
            raise
        return _diff(a, b, steps, rename, tolerance)


def _healed(*runs: RunSource) -> bool:
    """Whether verifying the runs set something aside."""
    before = [len(run.problems) for run in runs]
    for run in runs:
        run.verify("tensors")
        run.verify("scalars")
    return before != [len(run.problems) for run in runs]


def _diff(a: RunSource, b: RunSource, steps: Steps, rename: Rename, tolerance: float | str) -> Diff:
    vocabulary = Vocabulary()
    side_a, side_b = _Side(a, vocabulary, rename), _Side(b, vocabulary)
    settings = tolerance_for(tolerance, a.info, b.info)
    by_rank = side_a.several_ranks or side_b.several_ranks
    recorded = np.union1d(side_a.steps, side_b.steps)
    parts: list[dict[str, Any]] = []
    first: Divergence | None = None
    first_bits: Divergence | None = None
    culprits: tuple[Divergence, ...] = ()
    for steps_of_window in _windows(side_a, side_b, recorded, chosen_steps(recorded, steps)):
        window_a, window_b = side_a.window(steps_of_window, recorded), side_b.window(steps_of_window, recorded)
        compared = _compare(window_a, window_b, settings, vocabulary, by_rank)
        first_bits = first_bits or first_other_bits(compared)
        if first is None:
            first, culprits = first_and_culprits(compared)
        parts.append(_columns(compared, by_rank))
    rows, counts = _table(parts, vocabulary)
    return Diff(
        a=str(a.path or "a"),
        b=str(b.path or "b"),
        rows=rows,
        counts=counts,
        first=first,
        first_bits=first_bits,
        culprits=culprits,
        only_a=missing(rows, "only_a", set(side_b.steps.tolist()), set(side_b.modules())),
        only_b=missing(rows, "only_b", set(side_a.steps.tolist()), set(side_a.modules())),
        changes=changes(a.info, b.info),
        problems=(*a.problems, *b.problems),
    )


class _Side:
    """One of the two runs."""

    def __init__(self, run: RunSource, vocabulary: Vocabulary, rename: Rename = None) -> None:
        plain = Trace(run, vocabulary)
        self._renamed = renaming(rename, plain.modules() if rename else ())
        self._trace = Trace(run, vocabulary, self._renamed)
        self._scalars = read_scalars(run, vocabulary)
        self.tensor_steps, self.rows = self._trace.steps()
        self.steps = np.union1d(self.tensor_steps, self._scalars.window.columns["step"])
        self.several_ranks = len(self._trace.ranks()) > 1

    def window(self, steps: Ints, recorded: Ints) -> tuple[Window, Scalars]:
        return self._trace.window(condition(steps, recorded)), part(self._scalars, steps)

    def modules(self) -> list[str]:
        return [self._renamed(name) if self._renamed else name for name in self._trace.modules()]


def _windows(a: _Side, b: _Side, recorded: Ints, chosen: Ints) -> Iterator[Ints]:
    counts = np.zeros(len(recorded), np.int64)
    for side in (a, b):
        place = np.searchsorted(recorded, side.tensor_steps)
        counts[place] = np.maximum(counts[place], side.rows)
    return windows(chosen, counts[np.searchsorted(recorded, chosen)])


def _compare(
    a: tuple[Window, Scalars], b: tuple[Window, Scalars], settings: Tolerance, vocabulary: Vocabulary, by_rank: bool
) -> Compared:
    (tensors_a, scalars_a), (tensors_b, scalars_b) = a, b
    pairs = align(tensors_a, tensors_b, by_rank=by_rank)
    tensors = compare(tensors_a, tensors_b, pairs, settings, vocabulary)
    scalar_pairs, scalars = compare_scalars(
        scalars_a,
        scalars_b,
        settings,
        epsilon=max(coarsest(tensors_a, settings, vocabulary), coarsest(tensors_b, settings, vocabulary)),
        depth=max(int(tensors_a.columns["seq"].max(initial=0)), int(tensors_b.columns["seq"].max(initial=0))),
        by_rank=by_rank,
    )
    return Compared(tensors_a, tensors_b, pairs, tensors, scalars_a, scalars_b, scalar_pairs, scalars, vocabulary)


def _columns(compared: Compared, by_rank: bool) -> dict[str, Any]:
    """The rows of a window as columns, the scalars of a step after its tensors."""
    tensors = _judged(compared.a, compared.b, compared.pairs, compared.tensors)
    scalars = _judged(compared.scalars_a.window, compared.scalars_b.window, compared.scalar_pairs, compared.scalars)
    scalars["seq_a"][:] = scalars["seq_b"][:] = -1
    columns = {name: np.concatenate((tensors[name], scalars[name])) for name in tensors}
    if not by_rank:
        columns["rank"][:] = -1
    if len(compared.scalar_pairs.a):
        order = np.argsort(columns["step"], kind="stable")
        columns = {name: column[order] for name, column in columns.items()}
    return columns


def _judged(a: Window, b: Window, pairs: Alignment, judged: Comparison) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for name in KEY:
        columns[name] = merged(a, b, pairs, name).astype(np.int64 if name == "step" else np.int32)
    columns["seq_a"] = np.where(pairs.a >= 0, a.columns["seq"][pairs.a], -1) if len(a) else np.full(len(pairs.a), -1)
    columns["seq_b"] = np.where(pairs.b >= 0, b.columns["seq"][pairs.b], -1) if len(b) else np.full(len(pairs.b), -1)
    columns |= {"status": judged.status, "difference": judged.distance, "tolerance": judged.allowed}
    return columns


def _table(parts: list[dict[str, Any]], vocabulary: Vocabulary) -> tuple[pa.Table, dict[str, int]]:
    names = (*KEY, "seq_a", "seq_b", "status", "difference", "tolerance")
    whole = {name: np.concatenate([part[name] for part in parts]) if parts else np.empty(0, np.int32) for name in names}
    counts = np.bincount(whole["status"].astype(np.int64), minlength=len(STATUSES)).tolist()
    scalar = whole["phase"] == vocabulary.code("scalar")
    columns = {
        "step": pa.array(whole["step"], pa.int64()),
        "micro": pa.array(whole["micro"], pa.int32()),
        "phase": _named(whole["phase"], vocabulary.names),
        "module": _named(whole["module"], vocabulary.names, null=scalar),
        "slot": _named(whole["slot"], vocabulary.names),
        "call": pa.array(whole["call"], pa.int32()),
        "recompute": pa.array(whole["recompute"].astype(bool)),
        "rank": pa.array(whole["rank"], pa.int32(), mask=whole["rank"] < 0),
        "seq_a": pa.array(whole["seq_a"], pa.int64(), mask=whole["seq_a"] < 0),
        "seq_b": pa.array(whole["seq_b"], pa.int64(), mask=whole["seq_b"] < 0),
        "status": _named(whole["status"].astype(np.int32), STATUSES),
        "difference": pa.array(whole["difference"].astype(float), mask=np.isnan(whole["difference"].astype(float))),
        "tolerance": pa.array(whole["tolerance"].astype(float), mask=np.isnan(whole["tolerance"].astype(float))),
    }
    return pa.table(columns), dict(zip(STATUSES, counts, strict=True))


def _named(codes: Any, names: Sequence[str], null: Any = None) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32(), mask=null), pa.array(names, pa.string()))
