"""Rows of the tensors table that one flush takes out, as columns. Steps are alike: what follows from the heads of their rows
is found out once.
"""

from __future__ import annotations

from collections.abc import Callable
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


class Sequences:
    """The heads of earlier flushes."""

    def __init__(self) -> None:
        self._known: dict[tuple[Head, ...], Heads] = {}

    def of(self, heads: tuple[Head, ...]) -> Heads:
        """These heads: the same object for the same ones."""
        known = self._known.get(heads)
        if known is None:
            known = Heads(heads)
            if known.recur:
                if len(self._known) >= MAX_SEQUENCES:
                    self._known.clear()
                self._known[heads] = known
        return known


class Heads:
    """The heads of rows that follow one another, and all that follows from them."""

    def __init__(self, heads: tuple[Head, ...]) -> None:
        known: dict[Head, int] = {}
        self._of_rows = heads
        self._which = np.array([known.setdefault(head, len(known)) for head in heads], dtype=np.int64)
        self._distinct = tuple(known)
        self._answers: dict[Callable[[Head], bool], NDArray[np.bool_]] = {}
        self._numbers: dict[Callable[[Head], bool], NDArray[np.int64]] = {}

    @property
    def recur(self) -> bool:
        """Whether later flushes may have the same."""
        return all(head.place.returns for head in self._distinct)

    def __len__(self) -> int:
        return len(self._of_rows)

    def __getitem__(self, row: int) -> Head:
        return self._of_rows[row]

    def those(self, are_so: Callable[[Head], bool]) -> NDArray[np.int64]:
        """The numbers of these rows, remembered for each function."""
        if are_so not in self._numbers:
            self._numbers[are_so] = np.flatnonzero(self.that(are_so))
        return self._numbers[are_so]

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

    @cached_property
    def nonfinite(self) -> Array:
        """Elements of each row that are not finite: int64 of shape (rows,)."""
        return np.asarray(self.columns["nan"] + self.columns["posinf"] + self.columns["neginf"])

    def batch(self) -> Batch:
        """As the sink takes them."""
        when = {"step": self.steps, "time_ns": self.times, "seq": self.seqs}
        return Batch("tensors", {**when, **self.heads.columns, **self.columns})
