"""Rows of the tensors table between two flushes, as columns: what a row adds must be cheap, and nothing that the garbage
collector would have to look at.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracehooks.capture.places import Head
from tracehooks.core.records import Batch

Array = NDArray[Any]

MAX_SEQUENCES = 16
"""Sequences of heads that are remembered at most: training steps, evaluation passes, micro-batches."""


class Heads:
    """The heads of rows that follow one another, and all that follows from them."""

    def __init__(self, heads: tuple[Head, ...]) -> None:
        known: dict[Head, int] = {}
        self._of_rows = heads
        self._which = np.array([known.setdefault(head, len(known)) for head in heads], dtype=np.int64)
        self._distinct = tuple(known)
        self._answers: dict[Callable[[Head], bool], NDArray[np.bool_]] = {}

    @property
    def recur(self) -> bool:
        """Whether later flushes may have the same."""
        return all(head.place.returns for head in self._distinct)

    def __len__(self) -> int:
        return len(self._of_rows)

    def __getitem__(self, row: int) -> Head:
        return self._of_rows[row]

    def that(self, is_so: Callable[[Head], bool]) -> NDArray[np.bool_]:
        """Which rows have a head that is so: bool of shape (rows,). Remembered for each function."""
        if is_so not in self._answers:
            self._answers[is_so] = np.array([is_so(head) for head in self._distinct], dtype=np.bool_)[self._which]
        return self._answers[is_so]

    @cached_property
    def columns(self) -> dict[str, Any]:
        """The columns that name sites and kinds, which never change."""
        places = [head.place for head in self._distinct]

        def numbers(values: list[int] | list[bool], dtype: type) -> Array:
            column: Array = np.array(values, dtype=dtype)[self._which]
            column.flags.writeable = False
            return column

        def values(of_heads: list[Any]) -> tuple[Any, ...]:
            return tuple(of_heads[i] for i in self._which)

        return {
            "phase": values([place.phase for place in places]),
            "module": values([place.module for place in places]),
            "type": values([place.type for place in places]),
            "slot": values([place.slot for place in places]),
            "call": numbers([place.call for place in places], np.int32),
            "recompute": numbers([place.recompute for place in places], np.bool_),
            "dtype": values([head.dtype for head in self._distinct]),
            "device": values([head.device for head in self._distinct]),
            "shape": values([head.shape for head in self._distinct]),
            "micro": numbers([place.micro for place in places], np.int32),
        }


class Rows:
    """Rows whose numbers are still packed, where `Packing` holds them under a number."""

    def __init__(self) -> None:
        self._heads: list[Head] = []
        self._steps: list[int] = []
        self._times: list[int] = []
        self._seqs: list[int] = []
        self.packed: list[int] = []

    def __len__(self) -> int:
        return len(self._heads)

    def add(self, head: Head, step: int, seq: int, packed: int) -> None:
        """One more row, now."""
        self._heads.append(head)
        self._steps.append(step)
        self._times.append(time.time_ns())
        self._seqs.append(seq)
        self.packed.append(packed)

    def extend(self, heads: list[Head], step: int, seqs: Iterator[int], packed: list[int]) -> None:
        """More rows, now, numbered as they come."""
        count = len(heads)
        self._heads += heads
        self._steps += [step] * count
        self._times += [time.time_ns()] * count
        self._seqs += itertools.islice(seqs, count)
        self.packed += packed

    def resolved(self, columns: dict[str, Any], sequences: dict[tuple[Head, ...], Heads]) -> Resolved:
        """The rows with their numbers: one array a statistic, in order. Steps are alike: ``sequences`` are the heads of
        earlier flushes."""
        key = tuple(self._heads)
        heads = sequences.get(key)
        if heads is None:
            heads = Heads(key)
            if heads.recur:
                if len(sequences) >= MAX_SEQUENCES:
                    sequences.clear()
                sequences[key] = heads
        steps, times, seqs = (np.array(values, dtype=np.int64) for values in (self._steps, self._times, self._seqs))
        return Resolved(heads, steps, times, seqs, columns)


@dataclass(frozen=True)
class Resolved:
    """Rows of one flush."""

    heads: Heads
    steps: Array
    times: Array
    seqs: Array
    columns: dict[str, Any]

    def __len__(self) -> int:
        return len(self.heads)

    def nonfinite(self) -> Array:
        """Elements of each row that are not finite: int64 of shape (rows,)."""
        return np.asarray(self.columns["nan"] + self.columns["posinf"] + self.columns["neginf"])

    def batch(self) -> Batch:
        """As the sink takes them."""
        when = {"step": self.steps, "time_ns": self.times, "seq": self.seqs}
        return Batch("tensors", {**when, **self.heads.columns, **self.columns})
