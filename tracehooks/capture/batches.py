"""From what flushes took out of the recorder to the batches that a sink takes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from tracehooks.capture.recorder import Drained, Number
from tracehooks.core.records import Batch
from tracehooks.stats.masks import unpack_masks


def batches(flushes: Sequence[Drained]) -> list[Batch]:
    """The rows of some flushes, in order: one batch a table, but one a flush of the tensors table."""
    made = [drained.rows.batch() for drained in flushes if len(drained.rows)]
    for build, kind in ((_scalars, "scalars"), (_masks, "masks"), (_samples, "samples"), (_events, "events")):
        rows = [row for drained in flushes for row in getattr(drained, kind)]
        if rows:
            made.append(build(rows))
    return made


def _scalars(rows: list[tuple[Number, float]]) -> Batch:
    numbers = [number for number, _ in rows]
    return Batch(
        "scalars",
        {
            **_when(numbers),
            "name": _same(tuple(number.name for number in numbers)),
            "value": np.array([value for _, value in rows], dtype=np.float64),
        },
    )


def _masks(rows: list[tuple[Any, ...]]) -> Batch:
    shapes = [row[6] for row in rows]
    return Batch(
        "masks",
        {
            **_when(rows),
            "seq": np.array([row[3] for row in rows], dtype=np.int64),
            "module": [row[4] for row in rows],
            "slot": [row[5] for row in rows],
            "shape": shapes,
            **unpack_masks([row[7].tolist() for row in rows], shapes),
        },
    )


def _samples(groups: list[tuple[Any, ...]]) -> Batch:
    packed = [np.atleast_2d(found.numpy().astype(np.uint64)) for *_, found, _ in groups]
    hashes = [rows[0] for rows in packed]
    sizes = [len(values) for values in hashes]
    ids = [None if ids is None else list(ids) for *_, ids in groups]
    return Batch(
        "samples",
        {
            **{name: np.repeat(column, sizes) for name, column in _when(groups).items()},
            "index": np.concatenate([np.arange(size) for size in sizes], dtype=np.int64),
            "name": _repeated(tuple(group[3] for group in groups), tuple(sizes)),
            "split": _repeated(tuple(group[4] for group in groups), tuple(sizes)),
            "hash": np.concatenate(hashes),
            "source_id": _each(ids, sizes),
            "sketch": _each([rows[1].tolist() if len(rows) > 1 else None for rows in packed], sizes),
        },
    )


def _each(given: list[list[Any] | None], sizes: list[int]) -> list[Any] | None:
    """What was given for each sample of some groups; None where nothing was."""
    if all(values is None for values in given):
        return None
    return [one for values, size in zip(given, sizes, strict=True) for one in values or [None] * size]


def _events(rows: list[tuple[Any, ...]]) -> Batch:
    names = ("seq", "kind", "severity", "module", "slot", "message", "details")
    return Batch("events", {**_when(rows), **{name: [row[3 + i] for row in rows] for i, name in enumerate(names)}})


def _when(rows: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
    types = {"step": np.int64, "micro": np.int32, "time_ns": np.int64}
    return {name: np.array([row[i] for row in rows], dtype=kind) for i, (name, kind) in enumerate(types.items())}


@lru_cache(maxsize=64)
def _same(column: tuple[str, ...]) -> tuple[str, ...]:
    """The same object for equal columns, by which a sink knows that they are equal."""
    return column


@lru_cache(maxsize=64)
def _repeated(texts: tuple[str, ...], times: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(text for text, count in zip(texts, times, strict=True) for _ in range(count))
