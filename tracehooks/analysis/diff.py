"""Two traces compared: docs/diff.md says how rows align and what a tolerance means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracehooks.analysis import essay
from tracehooks.analysis.ahead import ahead
from tracehooks.analysis.align import align
from tracehooks.analysis.beside import Aside, compare_beside
from tracehooks.analysis.changes import Change, changes
from tracehooks.analysis.compare import DIFFERS, UNREAD, coarsest, compare
from tracehooks.analysis.culprits import Circumstances, Culprit, first_and_culprits
from tracehooks.analysis.divergence import Compared, Divergence, first_other_bits, tensor_divergence
from tracehooks.analysis.engine import EMBEDDED, Engine
from tracehooks.analysis.missing import Missing, missing
from tracehooks.analysis.moved import guess
from tracehooks.analysis.noise import SAFETY, Noise, floor, of_scalars, pooled
from tracehooks.analysis.queried import queried_tables
from tracehooks.analysis.rows import columns_of, table_of
from tracehooks.analysis.scalars import Scalars, compare_scalars, unlike_steps
from tracehooks.analysis.side import Side
from tracehooks.analysis.steps import Chosen, Rename, Steps, chosen_steps, renaming
from tracehooks.analysis.tables import LocalTables, Tables, stretches
from tracehooks.analysis.tolerance import tolerance_for
from tracehooks.analysis.window import Floats, Vocabulary, Window
from tracehooks.analysis.worlds import Worlds
from tracehooks.core.records import Problem, RunSource


@dataclass(frozen=True)
class Diff:
    """What differs between run ``a`` and run ``b``; ``str()`` of it tells the story."""

    a: str
    b: str
    rows: pa.Table = field(repr=False)
    """One row for each aligned pair: the key, seq_a, seq_b, status (one of `STATUSES`), difference (relative; null where
    there is none to take), tolerance, and `ESTIMATES` from sketches. module is null for scalars."""
    counts: Mapping[str, int]
    """Rows by status."""
    first: Divergence | None
    """The first site, in execution order, that differs beyond tolerance; None when there is none."""
    first_bits: Divergence | None
    """The first site that is not bit for bit equal; None when all are."""
    culprits: tuple[Culprit, ...]
    """The sites that made the difference, not those that passed it on."""
    only_a: tuple[Missing, ...]
    only_b: tuple[Missing, ...]
    changes: tuple[Change, ...]
    """What the two run.json say differently; it does not count as a difference."""
    beside: tuple[Aside, ...] = ()
    """Masks, batches of samples and events that differ; of these only masks count as a difference by themselves."""
    guessed: Mapping[str, str] = field(default_factory=dict)
    """Modules of a under other names in b, matched by type, shapes and order."""
    noise: Noise | None = None
    """What repeats of a's version do not share; None without ``noise=``."""
    worlds: str = ""
    """How runs with other numbers of ranks were compared; empty where they have as many."""
    refused: str = ""
    """What was not compared, and why."""
    problems: tuple[Problem, ...] = ()
    """What of either run could not be read, and was therefore not compared."""

    @property
    def identical(self) -> bool:
        """Every row has its counterpart and equals it bit for bit, in every table."""
        return self.counts["equal"] == sum(self.counts.values()) and not self.beside and not self.refused

    @property
    def within_tolerance(self) -> bool:
        """Every tensor, scalar and mask has its counterpart and equals it within tolerance; what a damaged file may have
        held is left out."""
        alike = self.counts["equal"] + self.counts["within"] + self.counts["unread"]
        return (
            alike == sum(self.counts.values())
            and not self.refused
            and not any(item.table == "masks" for item in self.beside)
        )

    @property
    def differing(self) -> pa.Table:
        """Those of `rows` that differ beyond tolerance, in execution order."""
        alike = pc.is_in(self.rows["status"].cast(pa.string()), value_set=pa.array(["equal", "within", "unread"]))
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
            "beside": [item.to_json() for item in self.beside],
            "guessed": dict(self.guessed),
            "noise": self.noise and self.noise.to_json(),
            "worlds": self.worlds,
            "refused": self.refused,
            "problems": [str(item) for item in self.problems],
        }


def diff(
    a: RunSource,
    b: RunSource,
    *,
    steps: Steps = None,
    rename: Rename = None,
    tolerance: float | str = "auto",
    noise: Sequence[RunSource] = (),
    engine: Engine = EMBEDDED,
) -> Diff:
    """Compare two runs row by row.

    Args:
        steps: only these: a step, a range, a slice or several numbers.
        rename: regular expressions applied to the module paths of a before rows align: a mapping from old to new or a
            list of ``old=new``.
        tolerance: "auto" (rounding noise by dtype and depth), or a relative difference; 0 asks for equal bits.
        noise: repeats of a's version; no row is to be closer to a than three times the farthest of them.
        engine: what reads the runs. With Spark, steps in which both agree bit for bit are counted where they lie and are not
            in `Diff.rows`.

    Raises:
        InvalidOptionError: an option of the wrong form, or steps that were not recorded.
        UnknownNameError: a rename that matches no module of a.
    """
    runs = (a, b, *noise)
    try:
        return _Comparing(runs, rename, tolerance, engine).diff(steps)
    except (OSError, pa.ArrowInvalid):
        # A damaged page. Rows already read may be of the part that is now left out, so all is read again.
        if not _healed(runs):
            raise
        return _Comparing(runs, rename, tolerance, engine).diff(steps)


def _healed(runs: Sequence[RunSource]) -> bool:
    """Whether verifying the runs set something aside."""
    before = [len(run.problems) for run in runs]
    for run in runs:
        run.verify("tensors")
        run.verify("scalars")
    return before != [len(run.problems) for run in runs]


def _nested(a: set[str], b: set[str]) -> bool:
    return a <= b or a >= b


class _Comparing:
    """Two runs, and repeats of the first, on their way to a `Diff`."""

    def __init__(self, runs: Sequence[RunSource], rename: Rename, tolerance: float | str, engine: Engine) -> None:
        self._vocabulary = Vocabulary()
        self._queried = [] if engine == EMBEDDED else queried_tables(runs, engine)
        tables: Sequence[Tables] = self._queried or [LocalTables(run) for run in runs]
        sides = (Side(run, of_run, self._vocabulary) for run, of_run in zip(runs, tables, strict=True))
        self._a, self._b, *self._repeats = sides
        self._guessed = self._name_alike(rename)
        sizes = tuple(int(run.info.get("world_size") or 0) for run in runs[:2])
        other = 0 not in sizes and sizes[0] != sizes[1]
        self._worlds = Worlds((sizes[0], sizes[1]), (self._a.ranks, self._b.ranks), self._vocabulary) if other else None
        self._settings = replace(tolerance_for(tolerance, runs[0].info, runs[1].info), merged=other)
        self._by_rank = not other and (len(self._a.ranks) > 1 or len(self._b.ranks) > 1)
        self._noisy: dict[tuple[int, ...], float] = {}
        self._first_noise: Divergence | None = None

    def _name_alike(self, rename: Rename) -> dict[str, str]:
        """Make a's module paths those of b, by the expressions asked for and then by guesses, which are returned."""
        asked = renaming(rename, self._a.modules() if rename else ()) or str
        for side in (self._a, *self._repeats):
            side.named = asked
        looks_a, looks_b = self._a.looks(), self._b.looks()
        if _nested({look.path for look in looks_a}, {look.path for look in looks_b}):
            return {}
        if _nested(set(self._a.modules()), set(self._b.modules())):
            return {}
        guessed = guess(looks_a, looks_b)
        for side in (self._a, *self._repeats):
            side.named = lambda path: guessed.get(asked(path), asked(path))
        return guessed

    def diff(self, wanted: Steps) -> Diff:
        """Compare the steps that are wanted, a window of them at a time."""
        a, b = self._a, self._b
        chosen = self._chosen(wanted)
        circumstances = Circumstances(
            a.modes(), b.modes(), {**a.tied(), **b.tied()}, a.inputs_recorded and b.inputs_recorded
        )
        parts: list[dict[str, Any]] = []
        first: Divergence | None = None
        first_bits: Divergence | None = None
        culprits: tuple[Culprit, ...] = ()
        left, settled = self._settled(chosen)
        steps_a, steps_b = set(settled), set(settled)
        for compared, repeats in ahead(self._window, self._stretches(left)):
            for repeat in repeats:
                self._note_noise(repeat)
            first_bits = first_bits or first_other_bits(compared)
            if first is None:
                first, culprits = first_and_culprits(compared, circumstances)
            parts.append(columns_of(compared, by_rank=self._by_rank))
            steps_a |= compared.steps_of_a()
            steps_b |= compared.steps_of_b()
        rows, counts = table_of(parts, self._vocabulary)
        counts["equal"] += sum(settled.values())
        within = None if wanted is None else chosen
        return Diff(
            a=str(a.run.path or "a"),
            b=str(b.run.path or "b"),
            rows=rows,
            counts=counts,
            first=first,
            first_bits=first_bits,
            culprits=culprits,
            only_a=missing(rows, "only_a", steps_b, b.modules),
            only_b=missing(rows, "only_b", steps_a, a.modules),
            changes=changes(a.run.info, b.run.info),
            beside=() if self._worlds else compare_beside(a, b, self._vocabulary, within, by_rank=self._by_rank),
            guessed=self._guessed,
            noise=self._noise(),
            worlds=str(self._worlds or ""),
            refused=self._worlds.refused if self._worlds else "",
            problems=(*a.run.problems, *b.run.problems),
        )

    def _chosen(self, wanted: Steps) -> Chosen | None:
        """The steps to compare; None where neither run has any."""
        spans = [span for span in (self._a.span, self._b.span) if span is not None]
        if not spans:
            return None
        span = min(first for first, _ in spans), max(last for _, last in spans)
        a, b = self._a, self._b
        return chosen_steps(wanted, span, lambda *ends: np.union1d(a.recorded(*ends), b.recorded(*ends)))

    def _settled(self, chosen: Chosen | None) -> tuple[Chosen | None, dict[int, int]]:
        """The steps that are left to compare, and those in which an engine finds both runs alike, each with its rows."""
        if chosen is None or not self._queried or self._repeats or self._worlds:
            return chosen, {}
        a, b = self._a, self._b
        found = self._queried[0].alike(self._queried[1], chosen, a.named, by_rank=self._by_rank)
        scalars_a, scalars_b = a.scalars(chosen), b.scalars(chosen)
        unlike = unlike_steps(scalars_a, scalars_b, by_rank=self._by_rank)
        beside = Counter(scalars_a.window.columns["step"].tolist())
        settled = {step: rows + beside[step] for step, rows in found.items() if step not in unlike}
        recorded = np.union1d(*(side.recorded(chosen.first, chosen.last) for side in (a, b)))
        left = np.setdiff1d(recorded[chosen.mask(recorded)], list(settled))
        return (Chosen(int(left[0]), int(left[-1]), left) if len(left) else None), settled

    def _stretches(self, chosen: Chosen | None) -> Iterable[Chosen]:
        return () if chosen is None else stretches((self._a.extent, self._b.extent), chosen)

    def _window(self, chosen: Chosen) -> tuple[Compared, list[Compared]]:
        """A stretch of steps of both runs compared; and of a and its repeats."""
        a, b = self._a.window(chosen), self._b.window(chosen)
        if self._worlds:
            a, b = self._worlds.met(a, b)
        tensors, scalars = np.zeros(len(a[0])), np.zeros(len(a[1].window))
        repeats = []
        for repeat in self._repeats:
            other = repeat.window(chosen)
            if self._worlds:
                _, other = self._worlds.met(a, other)
            again = self._compared(a, other, np.zeros(len(a[0])), np.zeros(len(scalars)))
            np.maximum(tensors, floor(len(tensors), again.pairs, again.tensors), out=tensors)
            np.maximum(scalars, floor(len(scalars), again.scalar_pairs, again.scalars), out=scalars)
            repeats.append(again)
        step = a[0].columns["step"]
        tensors = pooled(tensors, step * len(self._vocabulary.names) + a[0].columns["phase"])
        scalars = of_scalars(scalars, a[1].window.columns["step"], tensors, step)
        compared = self._compared(a, b, SAFETY * tensors, SAFETY * scalars)
        for pairs, judged, column in (
            (compared.pairs, compared.tensors, compared.column("module")),
            (compared.scalar_pairs, compared.scalars, compared.scalar_column("module")),
        ):
            table = "tensors" if judged is compared.tensors else "scalars"
            judged.status[(pairs.a < 0) & self._a.may_have_lost(table, column)] = UNREAD
            judged.status[(pairs.b < 0) & self._b.may_have_lost(table, column)] = UNREAD
        return compared, repeats

    def _compared(
        self, a: tuple[Window, Scalars], b: tuple[Window, Scalars], noise: Floats, scalar_noise: Floats
    ) -> Compared:
        (tensors_a, scalars_a), (tensors_b, scalars_b) = a, b
        settings, vocabulary = self._settings, self._vocabulary
        pairs = align(tensors_a, tensors_b, by_rank=self._by_rank)
        scalar_pairs = align(scalars_a.window, scalars_b.window, by_rank=self._by_rank)
        tensors = compare(tensors_a, tensors_b, pairs, settings, noise, vocabulary)
        scalars = compare_scalars(
            scalars_a,
            scalars_b,
            scalar_pairs,
            settings,
            scalar_noise,
            epsilon=max(coarsest(tensors_a, settings, vocabulary), coarsest(tensors_b, settings, vocabulary)),
            depth=max(int(tensors_a.columns["seq"].max(initial=0)), int(tensors_b.columns["seq"].max(initial=0))),
        )
        return Compared(tensors_a, tensors_b, pairs, tensors, scalars_a, scalars_b, scalar_pairs, scalars, vocabulary)

    def _note_noise(self, again: Compared) -> None:
        rows = np.flatnonzero(again.tensors.status >= DIFFERS)
        if len(rows) and self._first_noise is None:
            self._first_noise = tensor_divergence(again, int(rows[0]))
        sites = zip(*(again.column(name)[rows].tolist() for name in ("phase", "module", "slot", "call")), strict=True)
        for site, apart in zip(sites, again.tensors.distance[rows].tolist(), strict=True):
            self._noisy[site] = max(self._noisy.get(site, 0.0), apart)

    def _noise(self) -> Noise | None:
        if not self._repeats:
            return None
        return Noise(len(self._repeats), len(self._noisy), max(self._noisy.values(), default=0.0), self._first_noise)
