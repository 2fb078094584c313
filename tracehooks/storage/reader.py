"""A recorded run as tables: sealed parts and journal alike, every row once, damage named and left out."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from tracehooks.core.errors import (
    InvalidOptionError,
    NotARunError,
    QueryError,
    UnknownNameError,
    UnreadableRunError,
    shown,
)
from tracehooks.core.records import FirstNonFinite, Problem
from tracehooks.core.schema import TABLES
from tracehooks.storage.info import load_info
from tracehooks.storage.layout import Layout
from tracehooks.storage.lock import is_held
from tracehooks.storage.schemas import read_schema
from tracehooks.storage.tables import TableReader

Select = Callable[[ds.Dataset, Sequence[str] | None, str], pa.Table]
"""Evaluates an SQL condition over a dataset: (dataset, columns or None for all, condition) → rows."""


def open_run(path: str | os.PathLike[str], select: Select | None = None) -> Run:
    """Open a run for reading: run.json is read now, everything else when it is asked for.

    A run that is being written can be opened at any moment; each read sees what was flushed until then.

    Args:
        path: the run directory.
        select: evaluates ``where`` conditions given as SQL; without it only pyarrow expressions are taken.

    Raises:
        NotARunError: no such directory, or one that holds no run.
        UnreadableRunError: run.json is damaged and there are no tables beside it.
        FormatVersionError: the run was written in a newer format.
    """
    return Run(path, select)


class Run:
    """A run as analysis reads it; implements `core.records.RunSource`. See `open_run`."""

    def __init__(self, path: str | os.PathLike[str], select: Select | None = None) -> None:
        self.path: Path | None = Path(path)
        self._layout = Layout(Path(path))
        self._select = select
        self._problems: list[Problem] = []
        self._info = self._load()
        self._tables = {table: TableReader(self._layout, table, self._note) for table in TABLES}

    @property
    def info(self) -> Mapping[str, Any]:
        """run.json; empty when it is missing or damaged (then a problem says so)."""
        return self._info

    @property
    def problems(self) -> Sequence[Problem]:
        """What could not be read, so far: reading may find more."""
        return tuple(self._problems)

    @property
    def status(self) -> str:
        """running while a live process writes it, closed, or crashed."""
        if any(is_held(self._layout.journal_of(rank)) for rank in self._layout.journal_ranks()):
            return "running"
        status = str(self._info.get("status", "crashed"))
        return "crashed" if status == "running" else status

    @property
    def ranks(self) -> list[int]:
        """The ranks that recorded something."""
        return self._layout.ranks()

    @property
    def steps(self) -> list[int]:
        """The numbers of the steps that have a row in any table, sorted."""
        return sorted({step for table in TABLES for step in self._steps_of(table)})

    @property
    def first_nonfinite(self) -> FirstNonFinite | None:
        """The earliest non-finite value that was recorded as such, of training where there is one, else of evaluation; None
        when there is none."""
        events = self.events(where=ds.field("kind") == "nonfinite")
        of_evaluation = None
        for event in events.sort_by([("step", "ascending"), ("seq", "ascending")]).to_pylist():
            try:
                details = json.loads(event["details"])
                found = FirstNonFinite.from_details(details)
            except (ValueError, TypeError) as error:
                self._note(Problem("events", f"nonfinite event of step {event['step']}: details unreadable ({error})"))
                continue
            if not details.get("evaluation"):
                return found
            of_evaluation = of_evaluation or found
        return of_evaluation

    def __repr__(self) -> str:
        """One line: path, model, status, steps, ranks, the first non-finite value, problems. No tensors are read where there
        are scalars, which every step has."""
        model, ranks = self._info.get("model") or {}, self.ranks
        steps = sorted(self._steps_of("scalars")) or self.steps
        first = self.first_nonfinite
        parts = [
            f"{model['class']}, {_counted(model.get('modules', ()), 'module')}" if "class" in model else "",
            self.status,
            f"{_counted(steps, 'step')} ({steps[0]} to {steps[-1]})" if steps else "no steps",
            f"{len(ranks)} ranks" if len(ranks) > 1 else "",
            first.message.partition("\n")[0] if first else "",
            _counted(self._problems, "problem") if self._problems else "",
        ]
        return f"<Run {self.path}: {', '.join(filter(None, parts))}>"

    def dataset(self, table: str) -> ds.Dataset:
        """Every readable row of the table exactly once, with an int32 column ``rank`` added, as one lazy dataset.

        Rows of one rank come in the order they were written; sealed rows of all ranks come before those still in the
        journal. The footers of the parts are checked here (once), pages when they are scanned: a damaged one raises
        OSError; then call `verify`.
        """
        return self._table(table).dataset()

    def verify(self, table: str) -> None:
        """Read the table whole, set damaged row groups aside and note them in `problems`."""
        self._table(table).verify()

    def read(
        self, table: str, columns: Sequence[str] | None = None, where: str | ds.Expression | None = None
    ) -> pa.Table:
        """Rows of a table as Arrow, damaged row groups left out and noted in `problems`.

        Args:
            columns: the columns to read, ``rank`` among them; all by default.
            where: a condition over the columns: a pyarrow expression, or SQL when the run was opened with a ``select``.

        Raises:
            UnknownNameError: a table or column that does not exist; the nearest are listed.
            QueryError: an SQL condition and nothing to evaluate it.
            InvalidOptionError: an argument of another kind.
        """
        reader = self._table(table)
        if isinstance(columns, str) or not isinstance(columns, Sequence | None):
            raise InvalidOptionError("columns", shown(columns), "a list of names of columns, or None for all")
        if not isinstance(where, str | ds.Expression | None):
            raise InvalidOptionError("where", shown(where), "an SQL condition, a pyarrow.dataset.Expression, or None")
        for name in columns or ():
            if name not in read_schema(table).names:
                raise UnknownNameError("column", name, read_schema(table).names, table)
        try:
            return self._scan(reader, columns, where)
        except (QueryError, UnknownNameError):
            raise
        except Exception:
            # A damaged page shows as an error of whatever scanned it. If setting damage aside changes nothing, the
            # error was another one.
            if not reader.verify():
                raise
            return self._scan(reader, columns, where)

    def tensors(self, columns: Sequence[str] | None = None, where: str | ds.Expression | None = None) -> pa.Table:
        """One row for each tensor seen at one site in one step; arguments as in `read`."""
        return self.read("tensors", columns, where)

    def scalars(self, columns: Sequence[str] | None = None, where: str | ds.Expression | None = None) -> pa.Table:
        """Numbers that belong to a step; arguments as in `read`."""
        return self.read("scalars", columns, where)

    def masks(self, columns: Sequence[str] | None = None, where: str | ds.Expression | None = None) -> pa.Table:
        """One row for each mask seen; arguments as in `read`."""
        return self.read("masks", columns, where)

    def samples(self, columns: Sequence[str] | None = None, where: str | ds.Expression | None = None) -> pa.Table:
        """One row for each sample; arguments as in `read`."""
        return self.read("samples", columns, where)

    def events(self, columns: Sequence[str] | None = None, where: str | ds.Expression | None = None) -> pa.Table:
        """Things that happened once; arguments as in `read`."""
        return self.read("events", columns, where)

    def _scan(self, reader: TableReader, columns: Sequence[str] | None, where: str | ds.Expression | None) -> pa.Table:
        dataset = reader.dataset()
        if not isinstance(where, str):
            names = None if columns is None else list(columns)
            return dataset.to_table(columns=names, filter=where).unify_dictionaries()
        if self._select is None:
            raise QueryError(where, "this run was opened without an SQL engine; pass a pyarrow.dataset.Expression")
        return self._select(dataset, columns, where).unify_dictionaries()

    def _steps_of(self, table: str) -> set[int]:
        return set(pc.unique(self.read(table, ["step"])["step"]).to_pylist())

    def _table(self, table: str) -> TableReader:
        if table not in self._tables:
            raise UnknownNameError("table", str(table), self._tables, str(self.path))
        return self._tables[table]

    def _note(self, problem: Problem) -> None:
        if problem not in self._problems:
            self._problems.append(problem)

    def _load(self) -> dict[str, Any]:
        root = self._layout.root
        if not root.is_dir():
            raise NotARunError(root, "it is a file" if root.exists() else "there is no such directory")
        try:
            return load_info(self._layout.run_json)
        except FileNotFoundError:
            if not self._layout.holds_rows():
                raise NotARunError(root, "no run.json in it") from None
            self._note(Problem("run.json", "missing: what is known of this run are its tables"))
        except UnreadableRunError as error:
            if not self._layout.holds_rows():
                raise
            self._note(Problem("run.json", str(error)))
        return {}


def _counted(items: Sequence[Any], name: str) -> str:
    return f"{len(items)} {name}{'' if len(items) == 1 else 's'}"
