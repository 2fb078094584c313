"""A stretch of steps of one run as NumPy columns, in execution order: what two traces are aligned and compared from.

Names (phase, module, slot, dtype, device) are whole numbers from a `Vocabulary` that both runs share, so that a million
rows are compared without touching a string.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pa_dataset
from numpy.typing import NDArray

from tracehooks.core.records import RunSource

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

WINDOW_ROWS = 1 << 18
"""Rows of one side that are held at a time with all their statistics; a step is never split."""

KEY = ("step", "micro", "phase", "module", "slot", "call", "recompute", "rank")
"""What makes a row the counterpart of another."""

STATISTICS = ("min", "max", "mean", "std", "rms", "absmax")
NONFINITE = ("nan", "posinf", "neginf")
_NAMES = ("phase", "module", "slot", "dtype", "device")
_NARROW = (*KEY, "seq", "dtype", "device", "shape", "hash")
_WIDE = ("count", *NONFINITE, "zeros", *STATISTICS, "sketch")


class Vocabulary:
    """Names as whole numbers, the same for both runs of a diff."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._codes: dict[str, int] = {}

    def code(self, name: str) -> int:
        """The number of a name, given out at its first mention."""
        if name not in self._codes:
            self._codes[name] = len(self.names)
            self.names.append(name)
        return self._codes[name]

    def encode(self, column: pa.ChunkedArray, rename: Callable[[str], str] | None = None) -> Ints:
        """A column of strings, plain or dictionary-encoded, as numbers. Null becomes the empty name."""
        encoded = column if pa.types.is_dictionary(column.type) else pc.dictionary_encode(column)
        parts = [np.empty(0, np.int64)]
        for chunk in encoded.chunks:
            names = [name or "" for name in chunk.dictionary.to_pylist()]
            codes = [self.code(rename(name) if rename else name) for name in names]
            lookup = np.array([*codes, self.code("")], np.int64)
            parts.append(lookup[chunk.indices.fill_null(len(codes)).to_numpy(zero_copy_only=False)])
        return np.concatenate(parts)


@dataclass(frozen=True)
class Window:
    """Rows of the tensors table of some steps. ``columns`` has `KEY`, seq, dtype, device, and ``shape`` as a digest."""

    columns: dict[str, Ints]
    hash: NDArray[np.uint64]
    has_hash: Bools
    order: Ints
    """Position in the dataset of each row."""
    read: Callable[[Sequence[str]], pa.Table] = field(repr=False)
    """Further columns of these rows, in the dataset's order."""

    def __len__(self) -> int:
        return len(self.order)

    def only(self, rows: Ints) -> Window:
        """Some of the rows."""
        columns = {name: column[rows] for name, column in self.columns.items()}
        return Window(columns, self.hash[rows], self.has_hash[rows], self.order[rows], self.read)

    def wide(self, rows: Ints) -> dict[str, NDArray[Any]]:
        """Counts, statistics (NaN where null) and, where any were recorded, sketches (NaN where null) of some rows."""
        chosen = self.order[rows]
        if len(chosen) == len(self) and np.array_equal(chosen, np.arange(len(self))):
            return self._numbers
        return {name: column[chosen] for name, column in self._numbers.items()}

    def shape(self, row: int) -> tuple[int, ...]:
        """The shape of one row."""
        return tuple(self._shapes[int(self.order[row])].as_py() or ())

    @cached_property
    def _shapes(self) -> pa.ChunkedArray:
        return self.read(["shape"])["shape"]

    @cached_property
    def _numbers(self) -> dict[str, NDArray[Any]]:
        """Read at the first need, which two equal traces never have; kept as long as the window."""
        table = self.read(_WIDE)
        columns: dict[str, NDArray[Any]] = {name: table[name].to_numpy() for name in _WIDE if name != "sketch"}
        if table["sketch"].null_count < len(table):
            columns["sketch"] = _sketches(table["sketch"])
        return columns


@dataclass(frozen=True)
class Overview:
    """What a tensors table holds."""

    steps: Ints
    """Those that have rows, ascending."""
    rows: Ints
    """How many rows each has."""
    modules: list[str]
    """Paths as recorded."""
    ranks: list[int]


class Trace:
    """The tensors table of one run, read a window at a time. Any of its reads may raise at a damaged page."""

    def __init__(self, run: RunSource, vocabulary: Vocabulary, rename: Callable[[str], str] | None = None) -> None:
        self._vocabulary = vocabulary
        self._rename = rename
        self._dataset = run.dataset("tensors")

    def overview(self) -> Overview:
        """What there is, in one pass over the table that holds little of it."""
        rows: dict[int, int] = {}
        modules: set[str] = set()
        ranks: set[int] = set()
        for batch in self._dataset.to_batches(columns=["step", "module", "rank"]):
            if not len(batch):
                continue
            steps = batch["step"].to_numpy()
            starts = np.flatnonzero(np.diff(steps, prepend=steps[0] - 1))
            for step, count in zip(steps[starts].tolist(), np.diff(starts, append=len(steps)).tolist(), strict=True):
                rows[step] = rows.get(step, 0) + count
            modules.update(pc.unique(batch["module"]).to_pylist())
            ranks.update(pc.unique(batch["rank"]).to_pylist())
        recorded = sorted(rows)
        counts = np.array([rows[step] for step in recorded], np.int64)
        return Overview(np.array(recorded, np.int64), counts, sorted(modules), sorted(ranks))

    def looks(self, steps: Ints) -> list[tuple[str, tuple[Any, ...]]]:
        """Path, and class with the shapes of outputs, parameters and buffers, of each module that has rows in these
        steps, in the order in which they were first seen."""
        columns = ["seq", "module", "type", "phase", "slot", "shape"]
        rows = self._table(columns, pa_dataset.field("step").isin(steps.tolist())).sort_by("seq")
        found: dict[str, tuple[str, set[Any]]] = {}
        for row in rows.to_pylist():
            if row["phase"] in ("forward", "parameter", "buffer"):
                kind = found.setdefault(row["module"], (row["type"], set()))
                kind[1].add((row["phase"], row["slot"], tuple(row["shape"] or ())))
        return [(path, (kind, frozenset(shapes))) for path, (kind, shapes) in found.items()]

    def window(self, chosen: pa_dataset.Expression | None) -> Window:
        """The rows that a condition on ``step`` selects (None: all), in execution order: by step, seq and rank."""

        def read(columns: Sequence[str]) -> pa.Table:
            return self._table(columns, chosen)

        table = read(_NARROW)
        columns = {name: _ints(table[name]) for name in _NARROW if name not in (*_NAMES, "shape", "hash")}
        for name in _NAMES:
            columns[name] = self._vocabulary.encode(table[name], self._rename if name == "module" else None)
        columns["shape"] = shape_digests(table["shape"])
        order = execution_order(columns["step"], columns["seq"], columns["rank"])
        if order is not None:
            columns = {name: column[order] for name, column in columns.items()}
        hashes = table["hash"]
        has_hash = hashes.is_valid().to_numpy()
        values = hashes.fill_null(0).to_numpy()
        if order is None:
            return Window(columns, values, has_hash, np.arange(len(table)), read)
        return Window(columns, values[order], has_hash[order], order, read)

    def _table(self, columns: Sequence[str], chosen: pa_dataset.Expression | None) -> pa.Table:
        return self._dataset.to_table(columns=list(columns), filter=chosen)


def windows(steps: Ints, counts: Ints, limit: int = WINDOW_ROWS) -> Iterator[Ints]:
    """The steps in runs whose rows together stay under ``limit`` where a single step does."""
    start, held = 0, 0
    for position, count in enumerate(counts.tolist()):
        if held and held + count > limit:
            yield steps[start:position]
            start, held = position, 0
        held += count
    if start < len(steps):
        yield steps[start:]


def execution_order(step: Ints, seq: Ints, rank: Ints) -> Ints | None:
    """The permutation that sorts rows by step, seq and rank; None where they are sorted already."""
    same_step, later_step = step[1:] == step[:-1], step[1:] > step[:-1]
    same_seq, later_seq = seq[1:] == seq[:-1], seq[1:] > seq[:-1]
    if (later_step | (same_step & (later_seq | (same_seq & (rank[1:] >= rank[:-1]))))).all():
        return None
    return np.lexsort((rank, seq, step))


def shape_digests(column: pa.ChunkedArray) -> Ints:
    """A 64-bit digest of each shape, so that shapes compare as numbers; null digests like no other shape.

    The digest is a sum of the sizes times fixed odd numbers, one for each dimension, modulo 2⁶⁴.
    """
    rows = column.combine_chunks()
    lengths = pc.list_value_length(rows).fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    sizes = np.maximum(lengths, 0)
    values = pc.list_flatten(rows).to_numpy(zero_copy_only=False)
    starts = np.cumsum(sizes) - sizes
    digests: Ints = lengths * _ODD[-1]
    for dimension in range(int(sizes.max(initial=0))):
        deep = np.flatnonzero(sizes > dimension)
        digests[deep] += values[starts[deep] + dimension] * _ODD[dimension % (len(_ODD) - 1)] + dimension
    return digests


def _odd_numbers(count: int) -> Ints:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014) over 1, 2, …, made odd."""
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed | np.uint64(1)).view(np.int64)


_ODD = _odd_numbers(33)


def _ints(column: pa.ChunkedArray) -> Ints:
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    numbers: Ints = column.fill_null(0).to_numpy().astype(np.int64, copy=False)
    return numbers


def _sketches(column: pa.ChunkedArray) -> NDArray[np.float32]:
    rows = column.combine_chunks()
    if not rows.null_count:
        whole: NDArray[np.float32] = rows.flatten().to_numpy(zero_copy_only=False).reshape(-1, rows.type.list_size)
        return whole
    sums = np.full((len(rows), rows.type.list_size), np.nan, np.float32)
    valid = rows.is_valid().to_numpy(zero_copy_only=False)
    sums[valid] = rows.flatten().to_numpy(zero_copy_only=False).reshape(-1, rows.type.list_size)
    return sums
