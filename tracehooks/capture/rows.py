"""Rows of the tensors table between two flushes, as columns: what a row adds must be cheap, and nothing that the garbage
collector would have to look at.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracehooks.capture.places import Head
from tracehooks.core.records import Batch

Array = NDArray[Any]


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

    def resolved(self, columns: dict[str, Any]) -> Resolved:
        """The rows with their numbers: one array a statistic, in order."""
        known: dict[Head, int] = {}
        indices = [known.setdefault(head, len(known)) for head in self._heads]
        steps, times, seqs = (np.array(values, dtype=np.int64) for values in (self._steps, self._times, self._seqs))
        return Resolved(list(known), indices, steps, times, seqs, columns)


@dataclass(frozen=True)
class Resolved:
    """Rows of one flush."""

    heads: list[Head]
    which: list[int]
    """Of each row, which of ``heads`` it has."""
    steps: Array
    times: Array
    seqs: Array
    columns: dict[str, Any]

    def __len__(self) -> int:
        return len(self.which)

    @cached_property
    def _which(self) -> Array:
        return np.array(self.which, dtype=np.int64)

    def that(self, is_so: Callable[[Head], bool]) -> NDArray[np.bool_]:
        """Which rows have a head that is so: bool of shape (rows,)."""
        return np.array([is_so(head) for head in self.heads], dtype=np.bool_)[self._which]

    def head_of(self, row: int) -> Head:
        """The head of a row."""
        return self.heads[self.which[row]]

    def nonfinite(self) -> Array:
        """Elements of each row that are not finite: int64 of shape (rows,)."""
        return np.asarray(self.columns["nan"] + self.columns["posinf"] + self.columns["neginf"])

    def batch(self) -> Batch:
        """As the sink takes them."""
        places = [head.place for head in self.heads]

        def numbers(values: list[int] | list[bool], dtype: type) -> Array:
            return np.array(values, dtype=dtype)[self._which]

        def values(of_heads: list[Any]) -> list[Any]:
            return [of_heads[i] for i in self.which]

        return Batch(
            "tensors",
            {
                "step": self.steps,
                "micro": numbers([place.micro for place in places], np.int32),
                "time_ns": self.times,
                "seq": self.seqs,
                "phase": values([place.phase for place in places]),
                "module": values([place.module for place in places]),
                "type": values([place.type for place in places]),
                "slot": values([place.slot for place in places]),
                "call": numbers([place.call for place in places], np.int32),
                "recompute": numbers([place.recompute for place in places], np.bool_),
                "dtype": values([head.dtype for head in self.heads]),
                "device": values([head.device for head in self.heads]),
                "shape": values([head.shape for head in self.heads]),
                **self.columns,
            },
        )
