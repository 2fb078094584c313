"""Test doubles for people who test their own models with traces, and for our own tests.

`MemorySink` keeps what a trace records in memory, `TraceBuilder` makes a trace without a model, and
`assert_same_trace` says which row and column of two traces differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa
import pyarrow.dataset as pa_dataset

from tracehooks.analysis.duck import select
from tracehooks.analysis.first import first
from tracehooks.core.errors import UnknownNameError
from tracehooks.core.records import Batch, FirstNonFinite, Problem, RunSource
from tracehooks.core.schema import EVENT_KINDS, FORMAT_VERSION, PHASES, TABLES
from tracehooks.storage.rows import record_batch
from tracehooks.storage.schemas import RANK, conform, read_schema

if TYPE_CHECKING:
    from tracehooks.storage import Run

INFO: Mapping[str, Any] = MappingProxyType(
    {
        "format_version": FORMAT_VERSION,
        "run_id": "01900000-0000-7000-8000-000000000000",
        "created": "2026-01-01T00:00:00Z",
        "status": "closed",
        "config": {},
    }
)
"""The least that run.json must hold; equal in all traces made here."""


class MemoryRun:
    """A run in memory, read like one on disk."""

    path: Path | None = None

    def __init__(self, tables: Mapping[str, pa.Table], info: Mapping[str, Any]) -> None:
        self._tables = dict(tables)
        self.info = dict(info)
        self.problems: tuple[Problem, ...] = ()

    def dataset(self, table: str) -> pa_dataset.Dataset:
        """The rows of one table, with their rank."""
        if table not in self._tables:
            raise UnknownNameError("table", table, self._tables, "dataset()")
        return pa_dataset.dataset(self._tables[table])

    def verify(self, table: str) -> None:
        """Nothing in memory is damaged."""

    def read(self, table: str, columns: Sequence[str] | None = None, where: str | None = None) -> pa.Table:
        """Rows of a table; ``where`` is an SQL condition."""
        return select(self.dataset(table), columns, where)

    @property
    def steps(self) -> list[int]:
        """The steps that have rows, ascending."""
        return sorted(
            {*self.read("tensors", ["step"])["step"].to_pylist(), *self.read("scalars", ["step"])["step"].to_pylist()}
        )

    @property
    def first_nonfinite(self) -> FirstNonFinite | None:
        """Where the first non-finite value was seen."""
        return first(self)


class MemorySink:
    """A sink that keeps batches in memory: hand it to a recorder in place of a run directory."""

    path: Path | None = None

    def __init__(self, info: Mapping[str, Any] | None = None) -> None:
        self.batches: list[Batch] = []
        self.info: dict[str, Any] = {**INFO, **(info or {})}
        self.kept: dict[str, bytes] = {}
        self.closed = False

    def keep(self, name: str, data: bytes) -> None:
        """Keep a file."""
        self.kept[name] = data

    def write(self, batches: Sequence[Batch]) -> None:
        """Keep the rows of one flush."""
        self.batches.extend(batches)

    def update_info(self, fields: Mapping[str, Any]) -> None:
        """Merge fields into the description of the run."""
        self.info.update(fields)

    def close(self, status: str = "closed") -> None:
        """Mark the run; a second call does nothing."""
        if not self.closed:
            self.closed = True
            self.info["status"] = status

    def run(self) -> MemoryRun:
        """What was kept, as a run of rank 0."""
        return _run([(0, self.batches)], self.info)


class TraceBuilder:
    """Builds a trace row by row, with what is not said set to something harmless.

    >>> run = TraceBuilder().step(0).tensor("blocks.0.fc", mean=0.5).scalar("loss", 1.0).run()
    >>> run.read("tensors", ["module", "mean"]).to_pylist()
    [{'module': 'blocks.0.fc', 'mean': 0.5}]
    """

    def __init__(self, info: Mapping[str, Any] | None = None) -> None:
        self._info: dict[str, Any] = {**INFO, **(info or {})}
        self._rows: dict[int, dict[str, list[dict[str, Any]]]] = {}
        self._at = {"step": 0, "micro": 0}
        self._rank = 0
        self._seq = 0

    def step(self, number: int) -> Self:
        """What follows belongs to this step (from micro-step 0, counting its rows from 0)."""
        self._at = {"step": number, "micro": 0}
        self._seq = 0
        return self

    def micro(self, number: int) -> Self:
        """What follows belongs to this forward pass of the step."""
        self._at["micro"] = number
        return self

    def rank(self, number: int) -> Self:
        """What follows was recorded by this rank, from step 0."""
        self._rank = number
        return self.step(0)

    def info(self, **fields: Any) -> Self:
        """Fields of run.json."""
        self._info.update(fields)
        return self

    def tensor(self, module: str, slot: str = "output", phase: str = "forward", **columns: Any) -> Self:
        """A tensor seen: any column of the tensors table by name.

        Statistics that are not given fit those that are: std 0, and rms, min, max and absmax those of a tensor whose
        elements all equal the mean (0). ``shape`` is (4,), and ``count`` its product.
        """
        _known("phase", phase, PHASES)
        return self._add(
            "tensors", _tensor_defaults(columns) | {"module": module, "slot": slot, "phase": phase} | columns
        )

    def scalar(self, name: str, value: float, **columns: Any) -> Self:
        """A number that belongs to the step."""
        return self._add("scalars", {"name": name, "value": value, **columns})

    def mask(self, module: str, slot: str = "input.mask", **columns: Any) -> Self:
        """A mask seen; by default of shape (2, 4) with every element kept."""
        defaults = {"shape": (2, 4), "count": 8, "kept": 8, "rows": 2, "empty_rows": 0, "min_kept": 4, "max_kept": 4,
                    "first_empty": None, "convention": "keep=True"}  # fmt: skip
        return self._add("masks", {**defaults, "module": module, "slot": slot, **columns})

    def sample(self, hash: int, index: int = 0, name: str = "input", **columns: Any) -> Self:
        """A sample's fingerprint; by default of the training split."""
        return self._add(
            "samples",
            {
                "split": "train",
                "source_id": None,
                "sketch": None,
                "index": index,
                "name": name,
                "hash": hash,
                **columns,
            },
        )

    def event(self, kind: str, message: str = "", details: Mapping[str, Any] | None = None, **columns: Any) -> Self:
        """Something that happened once."""
        _known("event kind", kind, EVENT_KINDS)
        row = {"severity": "info", "module": None, "slot": None, "message": message or kind}
        return self._add("events", {**row, "kind": kind, "details": json.dumps(dict(details or {})), **columns})

    def run(self) -> MemoryRun:
        """The trace in memory."""
        return _run([(rank, _batches(tables)) for rank, tables in sorted(self._rows.items())], self._info)

    def write(self, path: str | Path) -> Path:
        """The trace as a run directory; returns its path."""
        from tracehooks.storage import RunWriter

        for rank, tables in sorted(self._rows.items()) or [(0, {})]:
            writer = RunWriter(Path(path), self._info, rank=rank)
            writer.write(_batches(tables))
            writer.close(self._info["status"])
        return Path(path)

    def _add(self, table: str, row: dict[str, Any]) -> Self:
        for name in row:
            _known("column", name, TABLES[table].names)
        row = {**self._at, "time_ns": 0, "seq": self._seq, **row}
        if "seq" in TABLES[table].names:
            self._seq = row["seq"] + 1
        else:
            del row["seq"]
        self._rows.setdefault(self._rank, {}).setdefault(table, []).append(row)
        return self


def assert_same_trace(
    a: Run | MemoryRun | str | Path, b: Run | MemoryRun | str | Path, ignore: Iterable[str] = ("time_ns",)
) -> None:
    """Assert that two traces hold the same rows, in whatever order: every table, every column but those to ignore.

    Raises:
        AssertionError: naming the first row and column that differ, in the order of steps.
    """
    ignored = set(ignore)
    run_a, run_b = _opened(a), _opened(b)
    for name in TABLES:
        _assert_same_table(name, run_a.read(name), run_b.read(name), ignored)


def _assert_same_table(name: str, a: pa.Table, b: pa.Table, ignored: set[str]) -> None:
    columns = [column for column in a.schema.names if column not in ignored and column in b.schema.names]
    rows_a, rows_b = _sorted_rows(a, columns), _sorted_rows(b, columns)
    for number, (row_a, row_b) in enumerate(zip(rows_a, rows_b, strict=False)):
        for column in columns:
            if repr(row_a[column]) != repr(row_b[column]):
                place = _place(row_a)
                raise AssertionError(
                    f"{name} row {number} ({place}): {column} is {row_a[column]!r} in a, {row_b[column]!r} in b"
                )
    if len(rows_a) != len(rows_b):
        longer, side = (rows_a, "a") if len(rows_a) > len(rows_b) else (rows_b, "b")
        number = min(len(rows_a), len(rows_b))
        raise AssertionError(
            f"{name} row {number} ({_place(longer[number])}): only in {side} ({len(rows_a)} and {len(rows_b)} rows)"
        )


def _sorted_rows(table: pa.Table, columns: list[str]) -> list[dict[str, Any]]:
    leading = [name for name in ("rank", "step", "seq", "name", "index", "micro") if name in columns]
    rows = table.select(columns).to_pylist()
    return sorted(rows, key=lambda row: ([row[name] for name in leading], repr(row)))


def _place(row: Mapping[str, Any]) -> str:
    names = ("rank", "step", "micro", "phase", "module", "slot", "call", "name", "index", "kind")
    return ", ".join(f"{name} {row[name]}" for name in names if name in row and (name != "rank" or row[name]))


def _opened(run: Run | MemoryRun | str | Path) -> RunSource:
    if isinstance(run, str | Path):
        from tracehooks.storage import open_run

        return open_run(run)
    return run


def _tensor_defaults(columns: Mapping[str, Any]) -> dict[str, Any]:
    shape = columns.get("shape", (4,))
    count = 1
    for size in shape:
        count *= size
    mean = columns.get("mean", 0.0)
    std = columns.get("std", 0.0)
    low, high = columns.get("min", mean), columns.get("max", mean)
    known = None not in (mean, std, low, high)
    return {
        "type": "Linear", "call": 0, "recompute": False, "dtype": "float32", "device": "cpu",
        "shape": shape, "count": count, "nan": 0, "posinf": 0, "neginf": 0, "zeros": 0,
        "min": low, "max": high, "mean": mean, "std": std,
        "rms": (mean**2 + std**2) ** 0.5 if known else None,
        "absmax": max(abs(low), abs(high)) if known else None,
        "hash": None, "sketch": None, "histogram": None,
    }  # fmt: skip


def _batches(tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Batch]:
    return [
        Batch(name, {column: _column([row[column] for row in rows]) for column in TABLES[name].names})
        for name, rows in tables.items()
    ]


def _column(values: list[Any]) -> list[Any] | None:
    return None if all(value is None for value in values) else values


def _run(ranks: Sequence[tuple[int, Sequence[Batch]]], info: Mapping[str, Any]) -> MemoryRun:
    tables = {}
    for name in TABLES:
        schema = read_schema(name)
        parts = [_ranked(batch, rank, schema) for rank, batches in ranks for batch in batches if batch.table == name]
        tables[name] = pa.Table.from_batches(parts, schema=schema)
    return MemoryRun(tables, info)


def _ranked(batch: Batch, rank: int, schema: pa.Schema) -> pa.RecordBatch:
    rows = record_batch(batch)
    return conform(rows.append_column(RANK, pa.array([rank] * len(rows), RANK.type)), schema)


def _known(kind: str, name: str, known: Iterable[str]) -> None:
    if name not in known:
        raise UnknownNameError(kind, name, known, "TraceBuilder")
