"""Reading, comparing and mending recorded runs: the front door of everything that needs no live model and no torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tracehooks.analysis.diff import Diff
from tracehooks.analysis.diff import diff as diff_runs
from tracehooks.analysis.duck import select
from tracehooks.analysis.engine import EMBEDDED, Engine
from tracehooks.analysis.engine import query as query_run
from tracehooks.analysis.first import first as first_of_run
from tracehooks.analysis.fixes import Fix, judge_fix, paired_runs
from tracehooks.analysis.rules import diagnose as diagnose_run
from tracehooks.analysis.steps import Rename, Steps
from tracehooks.analysis.symptoms import Checklist
from tracehooks.analysis.symptoms import checklist as checklist_of_run
from tracehooks.core.errors import InvalidOptionError, shown
from tracehooks.core.records import Finding, FirstNonFinite, RunSource
from tracehooks.storage import Run, open_run
from tracehooks.storage import repair as repair

if TYPE_CHECKING:
    import pyarrow as pa

Source = str | os.PathLike[str] | RunSource
"""A run, or where it is."""


def open(path: str | os.PathLike[str]) -> Run:
    """Open a run directory for reading; ``where`` conditions of its tables are SQL.

    Raises:
        InvalidOptionError: something that is no path.
        NotARunError: no such directory, or one that holds no run.
        UnreadableRunError: run.json is damaged and there are no tables beside it.
        FormatVersionError: the run was written in a newer format.
    """
    if not isinstance(path, str | os.PathLike):
        raise InvalidOptionError("path", shown(path), "the path of a run directory")
    return open_run(path, select=select)


def diff(
    a: Source,
    b: Source,
    *,
    steps: Steps = None,
    rename: Rename = None,
    tolerance: float | str = "auto",
    noise: Sequence[Source] = (),
    engine: Engine = EMBEDDED,
) -> Diff:
    """Compare two runs, given as paths or as opened runs; see `tracehooks.analysis.diff.diff`."""
    if not isinstance(noise, list | tuple):
        raise InvalidOptionError("noise", shown(noise), "a list of runs that repeat A")
    repeats = [_opened(run) for run in noise]
    return diff_runs(
        _opened(a), _opened(b), steps=steps, rename=rename, tolerance=tolerance, noise=repeats, engine=engine
    )


def first(run: Source) -> FirstNonFinite | None:
    """The first non-finite value of a run, from its events or else from its rows; None when all is finite."""
    return first_of_run(_opened(run))


def diagnose(path: Source, control: Source | None = None) -> list[Finding]:
    """What is wrong with a run, the likeliest explanation first; nothing when it is healthy.

    Args:
        path: the run, or where it is.
        control: a run that is known to be fine; what is found there as well is left out.

    Raises:
        NotARunError, UnreadableRunError, FormatVersionError: as `open`.
    """
    return diagnose_run(_opened(path), None if control is None else _opened(control))


def checklist(path: Source, symptom: str, control: Source | None = None) -> Checklist:
    """The causes of a symptom, in order: found in this run, not known from it, ruled out by a number.

    Args:
        path: the run, or where it is.
        symptom: flat-loss, nan, repetition, silence, ignores-condition, slow or too-good.
        control: a run that is known to be fine; what is found there as well is left out.

    Raises:
        UnknownNameError: no such symptom; the nearest are listed.
        NotARunError, UnreadableRunError, FormatVersionError: as `open`.
    """
    return checklist_of_run(_opened(path), symptom, None if control is None else _opened(control))


def verify_fix(
    before: Source | Sequence[Source],
    after: Source | Sequence[Source],
    control: Sequence[Source] | Sequence[Sequence[Source]] | None = None,
    *,
    tolerance: float | str = "auto",
) -> Fix:
    """Whether a fix solved the right problem: the failure is gone, and what was healthy is unchanged.

    Args:
        before, after: runs without and with the fix; several of each, in one order, for several batches, seeds or
            checkpoints.
        control: a healthy case without and with the fix, as a pair of runs, or several pairs.

    Returns:
        A verdict that is its own written record: ``str()`` and ``to_json()`` have the identities of all runs.

    Raises:
        InvalidOptionError: not as many runs after as before, or a control that is no pair.
    """
    pairs = paired_runs(_several(before), _several(after), "after")
    if control is not None and not isinstance(control, list | tuple):
        raise InvalidOptionError(
            "control", shown(control), "a pair of runs, without and with the fix, or several pairs"
        )
    given: list[Any] = list(control or ())
    if given and not isinstance(given[0], list | tuple):
        given = [given]
    controls = [pair for runs in map(_several, given) for pair in paired_runs(runs[:1], runs[1:], "control")]
    return judge_fix(pairs, controls, diagnose_run, tolerance=tolerance)


def _several(runs: Any) -> list[RunSource]:
    several = runs if isinstance(runs, list | tuple) else [runs]
    return [_opened(run) for run in several]


def query(run: Source, sql: str, *, engine: Engine = EMBEDDED) -> pa.Table:
    """The result of one SELECT over the run's tables: tensors, scalars, masks, samples, events.

    Args:
        engine: "duckdb", a master of Spark's (``spark://host:7077``, ``local[2]``, ``yarn``), or a SparkSession.

    Raises:
        UnknownNameError: a column or table that does not exist; the nearest names are listed.
        QueryError: SQL that does not parse, is not a query, touches a file, or fails.
        InvalidOptionError, EngineError: no such engine; Spark, its Java or its master is not there.
    """
    return query_run(_opened(run), sql, engine)


def _opened(run: Source) -> RunSource:
    if isinstance(run, str | os.PathLike):
        return open(run)
    if not hasattr(run, "dataset"):
        raise InvalidOptionError("run", shown(run), "a run directory's path, or a run that tracehooks.open() opened")
    return run
