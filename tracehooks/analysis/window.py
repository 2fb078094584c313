"""A stretch of steps of one run as NumPy columns, in execution order: what two traces are aligned and compared from.

Names (phase, module, slot, dtype, device) are whole numbers from a `Vocabulary` that both runs share, so that a million
rows are compared without touching a string.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tracehooks.core.schema import SKETCH_SIZE

Ints = NDArray[np.integer[Any]]
"""Whole numbers, as wide as they are stored: a million of them stay small."""
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

Reader = Callable[[Sequence[str]], pa.Table]
"""Columns of some rows, in the same order at every call."""

KEY = ("step", "micro", "phase", "module", "slot", "call", "recompute", "rank")
"""What makes a row the counterpart of another."""

STATISTICS = ("min", "max", "mean", "std", "rms", "absmax")
NONFINITE = ("nan", "posinf", "neginf")
_NAMES = ("phase", "module", "slot", "dtype", "device")
_NARROW = (*KEY, "seq", "dtype", "device", "shape", "hash")
_WIDE = ("count", *NONFINITE, "zeros", *STATISTICS, "sketch")


class Vocabulary:
    """Names as whole numbers, the same for both runs of a diff and for all threads that read them."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._codes: dict[str, int] = {}
        self._lock = Lock()

    def code(self, name: str) -> int:
        """The number of a name, given out at its first mention."""
        with self._lock:
            if name not in self._codes:
                self._codes[name] = len(self.names)
                self.names.append(name)
            return self._codes[name]

    def encode(self, column: pa.ChunkedArray, rename: Callable[[str], str] | None = None) -> Ints:
        """A column of strings, plain or dictionary-encoded, as numbers. Null becomes the empty name."""
        encoded = column if pa.types.is_dictionary(column.type) else pc.dictionary_encode(column)
        parts = [np.empty(0, np.int32)]
        for chunk in encoded.chunks:
            names = [name or "" for name in chunk.dictionary.to_pylist()]
            codes = [self.code(rename(name) if rename else name) for name in names]
            lookup = np.array([*codes, self.code("")], np.int32)
            indices = chunk.indices.fill_null(len(codes)) if chunk.indices.null_count else chunk.indices
            parts.append(lookup[indices.to_numpy(zero_copy_only=False)])
        return np.concatenate(parts)


@dataclass(frozen=True)
class Window:
    """Rows of the tensors table of some steps. ``columns`` has `KEY`, seq, dtype and device as whole numbers."""

    columns: dict[str, Ints]
    hash: NDArray[np.uint64]
    has_hash: Bools
    order: Ints
    """Position of each row where it was read."""
    read: Reader = field(repr=False)
    shapes: pa.ListArray = field(repr=False, default=None)
    """In the order in which they were read; None of rows that have none."""

    def __len__(self) -> int:
        return len(self.order)

    def only(self, rows: Ints) -> Window:
        """Some of the rows."""
        columns = {name: column[rows] for name, column in self.columns.items()}
        return Window(columns, self.hash[rows], self.has_hash[rows], self.order[rows], self.read, self.shapes)

    def wide(self, rows: Ints) -> dict[str, NDArray[Any]]:
        """Counts, statistics (NaN where null) and, where any were recorded, sketches (NaN where null) of some rows."""
        chosen = self.order[rows]
        if len(chosen) == len(self) and np.array_equal(chosen, np.arange(len(self))):
            return self._numbers
        return {name: column[chosen] for name, column in self._numbers.items()}

    def shape(self, row: int) -> tuple[int, ...]:
        """The shape of one row."""
        return tuple(self.shapes[int(self.order[row])].as_py() or ())

    @cached_property
    def shape_digests(self) -> Ints:
        """A number for each row's shape, as `shape_digests`."""
        return shape_digests(self.shapes)[self.order]

    @cached_property
    def _numbers(self) -> dict[str, NDArray[Any]]:
        """Read at the first need, which two equal traces never have; kept as long as the window."""
        table = self.read(_WIDE)
        columns: dict[str, NDArray[Any]] = {name: table[name].to_numpy() for name in _WIDE if name != "sketch"}
        if table["sketch"].null_count < len(table):
            columns["sketch"] = _sketches(table["sketch"])
        return columns


def window_of(read: Reader, vocabulary: Vocabulary, renamed: Callable[[str], str]) -> Window:
    """Rows in execution order: by step, seq and rank. ``renamed`` is applied to module paths."""
    table = read(_NARROW)
    columns: dict[str, Ints] = {name: _ints(table[name]) for name in _NARROW if name not in (*_NAMES, "shape", "hash")}
    for name in _NAMES:
        columns[name] = vocabulary.encode(table[name], renamed if name == "module" else None)
    order = execution_order(columns["step"], columns["seq"], columns["rank"])
    hashes, shapes = table["hash"], table["shape"].combine_chunks()
    has_hash = hashes.is_valid().to_numpy()
    values = (hashes.fill_null(0) if hashes.null_count else hashes).to_numpy()
    if order is None:
        return Window(columns, values, has_hash, np.arange(len(table)), read, shapes)
    columns = {name: column[order] for name, column in columns.items()}
    return Window(columns, values[order], has_hash[order], order, read, shapes)


def same_shapes(a: Window, b: Window, rows_a: Ints, rows_b: Ints) -> Bools:
    """Whether pairs of rows have equal shapes. Two traces of one model have the same shapes in the same order, which is
    seen without looking at each."""
    if np.array_equal(a.order[rows_a], b.order[rows_b]) and a.shapes.equals(b.shapes):
        return np.ones(len(rows_a), bool)
    return np.asarray(a.shape_digests[rows_a] == b.shape_digests[rows_b])


def execution_order(step: Ints, seq: Ints, rank: Ints) -> Ints | None:
    """The permutation that sorts rows by step, seq and rank; None where they are sorted already."""
    same_step, later_step = step[1:] == step[:-1], step[1:] > step[:-1]
    same_seq, later_seq = seq[1:] == seq[:-1], seq[1:] > seq[:-1]
    if (later_step | (same_step & (later_seq | (same_seq & (rank[1:] >= rank[:-1]))))).all():
        return None
    return np.lexsort((rank, seq, step))


def shape_digests(rows: pa.ListArray) -> Ints:
    """A 64-bit digest of each shape, so that shapes compare as numbers; null digests like no other shape.

    The digest is a sum of the sizes times fixed odd numbers, one for each dimension, modulo 2⁶⁴.
    """
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
    """Null becomes 0."""
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    numbers: Ints = (column.fill_null(0) if column.null_count else column).to_numpy()
    return numbers


def _sketches(column: pa.ChunkedArray) -> NDArray[np.float32]:
    rows = column.combine_chunks()
    known: NDArray[np.float32] = rows.flatten().to_numpy(zero_copy_only=False).reshape(-1, SKETCH_SIZE)
    if not rows.null_count:
        return known
    sums = np.full((len(rows), SKETCH_SIZE), np.nan, np.float32)
    sums[rows.is_valid().to_numpy(zero_copy_only=False)] = known
    return sums
