"""Which row of one trace is the counterpart of which row of the other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracehooks.analysis.window import KEY, Ints, Window


@dataclass(frozen=True)
class Alignment:
    """Pairs of rows in execution order; −1 where the counterpart is missing."""

    a: Ints
    b: Ints


def align(a: Window, b: Window, *, by_rank: bool) -> Alignment:
    """Pair rows of equal key; rows that share a key (they should not) pair off in the order they were seen.

    The order is a's execution order; a row that only b has follows the row that precedes it in b.
    """
    names = KEY if by_rank else tuple(name for name in KEY if name != "rank")
    if len(a) == len(b) and all(np.array_equal(a.columns[name], b.columns[name]) for name in names):
        return Alignment(np.arange(len(a)), np.arange(len(b)))
    keys = _numbered(dense([np.concatenate((a.columns[name], b.columns[name])) for name in names]), len(a))
    keys_a, keys_b = keys[: len(a)], keys[len(a) :]
    found = np.full(int(keys.max(initial=-1)) + 1, -1, np.int64)
    found[keys_b] = np.arange(len(b))
    b_of_a = found[keys_a]
    found.fill(-1)
    found[keys_a] = np.arange(len(a))
    return _in_order(a, b, b_of_a, found[keys_b])


def dense(columns: list[Ints]) -> Ints:
    """One number for each distinct combination of the columns' values, from 0 up."""
    combined = np.zeros(len(columns[0]), np.int64)
    span = 1
    for column in columns:
        low = int(column.min(initial=0))
        width = int(column.max(initial=0)) - low + 1
        if width >= 2**31:
            column = np.unique(column, return_inverse=True)[1]
            low, width = 0, int(column.max(initial=0)) + 1
        if span * width >= 2**62:
            combined = np.unique(combined, return_inverse=True)[1]
            span = int(combined.max(initial=0)) + 1
        combined = combined * width + (column - low)
        span *= width
    return np.unique(combined, return_inverse=True)[1]


def _numbered(keys: Ints, first_of_b: int) -> Ints:
    """The keys with rows of one side that share a key told apart by the order in which they come."""
    side = np.arange(len(keys)) >= first_of_b
    order = np.lexsort((side, keys))
    opens = np.ones(len(keys), bool)
    opens[1:] = (keys[order][1:] != keys[order][:-1]) | (side[order][1:] != side[order][:-1])
    starts = np.flatnonzero(opens)
    copies = np.empty(len(keys), np.int64)
    copies[order] = np.arange(len(keys)) - np.repeat(starts, np.diff(starts, append=len(keys)))
    return keys if not copies.any() else dense([keys, copies])


def _in_order(a: Window, b: Window, b_of_a: Ints, a_of_b: Ints) -> Alignment:
    lonely = np.flatnonzero(a_of_b < 0)
    if not len(lonely):
        return Alignment(np.arange(len(a)), b_of_a)
    last_paired = np.maximum.accumulate(np.where(a_of_b >= 0, np.arange(len(b)), -1))[lonely]
    anchor = np.where(last_paired >= 0, a_of_b[last_paired], -1)
    rows_a = np.concatenate((np.arange(len(a)), np.full(len(lonely), -1)))
    rows_b = np.concatenate((b_of_a, lonely))
    step = np.concatenate((a.columns["step"], b.columns["step"][lonely]))
    after = np.concatenate((np.arange(len(a)), anchor))
    order = np.lexsort((rows_b, rows_a < 0, after, step))
    return Alignment(rows_a[order], rows_b[order])
