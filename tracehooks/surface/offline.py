"""Reading, comparing and mending recorded runs: the front door of everything that needs no live model and no torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tracehooks.analysis import engine
from tracehooks.analysis.diff import Diff
from tracehooks.analysis.diff import diff as diff_runs
from tracehooks.analysis.first import first as first_of_run
from tracehooks.analysis.rules import diagnose as diagnose_run
from tracehooks.analysis.steps import Rename, Steps
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
        NotARunError: no such directory, or one that holds no run.
        UnreadableRunError: run.json is damaged and there are no tables beside it.
        FormatVersionError: the run was written in a newer format.
    """
    return open_run(path, select=engine.select)


def diff(
    a: Source,
    b: Source,
    *,
    steps: Steps = None,
    rename: Rename = None,
    tolerance: float | str = "auto",
    noise: Sequence[Source] = (),
) -> Diff:
    """Compare two runs, given as paths or as opened runs; see `tracehooks.analysis.diff.diff`."""
    repeats = [_opened(run) for run in noise]
    return diff_runs(_opened(a), _opened(b), steps=steps, rename=rename, tolerance=tolerance, noise=repeats)


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


def query(run: Source, sql: str) -> pa.Table:
    """The result of one SELECT over the run's tables: tensors, scalars, masks, samples, events.

    Raises:
        UnknownNameError: a column or table that does not exist; the nearest names are listed.
        QueryError: SQL that does not parse, is not a query, touches a file, or fails.
    """
    return engine.query(_opened(run), sql)


def _opened(run: Source) -> RunSource:
    return open(run) if isinstance(run, str | os.PathLike) else run
