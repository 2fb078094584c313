"""Rows for storage's tests: fixed ones, and Hypothesis strategies for all that the format allows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from tracehooks.core.records import Batch
from tracehooks.core.schema import HISTOGRAM_EXPONENTS, SKETCH_SIZE, TABLES, Column

Row = dict[str, Any]

_INT64 = st.integers(-(2**63), 2**63 - 1)
_TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
_TYPES: dict[str, st.SearchStrategy[Any]] = {
    "int64": _INT64,
    "int32": st.integers(-(2**31), 2**31 - 1),
    "uint64": st.integers(0, 2**64 - 1),
    "float64": st.floats(),
    "bool": st.booleans(),
    "string": _TEXT,
    "dictionary": _TEXT,
    "list<int64>": st.lists(st.integers(0, 2**40), max_size=5).map(tuple),
    "sketch": st.lists(st.floats(width=32), min_size=SKETCH_SIZE, max_size=SKETCH_SIZE),
    "histogram": st.lists(st.integers(0, 2**40), min_size=len(HISTOGRAM_EXPONENTS), max_size=len(HISTOGRAM_EXPONENTS)),
}


def values(column: Column) -> st.SearchStrategy[Any]:
    """What one cell of a column can hold: NaN is a value only where null is not."""
    kind = _TYPES[column.type]
    if not column.nullable:
        return kind
    return st.none() | (st.floats(allow_nan=False) if column.type == "float64" else kind)


def rows(table: str, max_size: int = 8) -> st.SearchStrategy[list[Row]]:
    """Lists of rows of a table."""
    columns = {column.name: values(column) for column in TABLES[table].columns}
    return st.lists(st.fixed_dictionaries(columns), max_size=max_size)


def batch_of(table: str, rows: Sequence[Row]) -> Batch:
    """Rows as a batch of Python lists."""
    return Batch(table, {name: [row[name] for row in rows] for name in TABLES[table].names})


def tensor_rows(step: int, count: int = 4) -> list[Row]:
    """Rows of one step that know their place: ``mean`` is computed from step and seq, so that a wrong row shows."""
    return [
        {
            "step": step,
            "micro": 0,
            "time_ns": 1_700_000_000_000_000_000 + step * 1_000_000 + seq,
            "seq": seq,
            "phase": "forward",
            "module": f"blocks.{seq}",
            "type": "Linear",
            "slot": "output",
            "call": 0,
            "recompute": False,
            "dtype": "float32",
            "device": "cpu",
            "shape": (2, seq),
            "count": 2 * seq,
            "nan": 0,
            "posinf": 0,
            "neginf": 0,
            "zeros": 0,
            "min": None if seq == 0 else -1.5,
            "max": None if seq == 0 else 2.5,
            "mean": expected_mean(step, seq),
            "std": None if seq == 0 else 0.25,
            "rms": None if seq == 0 else 1.0,
            "absmax": None if seq == 0 else 2.5,
            "hash": (2**63 + step * 1000 + seq) if seq % 2 else None,
            "sketch": None,
            "histogram": None,
        }
        for seq in range(count)
    ]


def expected_mean(step: int, seq: int) -> float | None:
    """The mean that `tensor_rows` writes."""
    return None if seq == 0 else math.sqrt(step * 100 + seq)


def step_batches(step: int, count: int = 4) -> list[Batch]:
    """One step's flush: tensors and a scalar."""
    scalar = {"step": step, "micro": 0, "time_ns": step, "name": "loss", "value": 1.0 / (step + 1)}
    return [batch_of("tensors", tensor_rows(step, count)), batch_of("scalars", [scalar])]


def rows_of(table: pa.Table) -> list[Row]:
    """An Arrow table as comparable rows: tuples for lists, the column ``rank`` left out."""
    return [canonical(row) for row in table.to_pylist()]


def canonical(row: Row) -> Row:
    """Equal for equal rows: NaN becomes a word, -0.0 is told from 0.0, lists become tuples."""
    return {name: _canonical(value) for name, value in row.items() if name != "rank"}


def _canonical(value: Any) -> Any:
    if isinstance(value, float):
        return "nan" if math.isnan(value) else value.hex()
    if isinstance(value, list | tuple | np.ndarray):
        return tuple(_canonical(item) for item in value)
    return value


def files(root: Path, pattern: str) -> list[Path]:
    """Files of a run that match, sorted."""
    return sorted(path for path in root.rglob(pattern) if path.is_file())


def flips(data: bytes, start: int = 0, stride: int = 1) -> Iterator[tuple[int, bytes]]:
    """Copies of the data with one bit changed: one bit of each ``stride``-th byte, another bit each time."""
    for position in range(start, len(data), stride):
        changed = bytearray(data)
        changed[position] ^= 1 << (position // stride) % 8
        yield position, bytes(changed)
