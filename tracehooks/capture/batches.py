"""From what flushes took out of the recorder to the batches that a sink takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tracehooks.capture.recorder import Drained, Number
from tracehooks.core.records import Batch
from tracehooks.stats.masks import unpack_masks


def batches(flushes: Sequence[Drained]) -> list[Batch]:
    """The rows of some flushes, in order: one batch a table, but one a flush of the tensors table."""
    tables = [
        *(drained.rows.batch() for drained in flushes),
        _scalars([one for drained in flushes for one in drained.scalars]),
        _masks([one for drained in flushes for one in drained.masks]),
        _samples([one for drained in flushes for one in drained.samples]),
        _events([one for drained in flushes for one in drained.events]),
    ]
    return [batch for batch in tables if len(batch)]


def _scalars(rows: list[tuple[Number, float]]) -> Batch:
    numbers = [number for number, _ in rows]
    return Batch(
        "scalars",
        {
            **_when(numbers),
            "name": [number.name for number in numbers],
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
    columns: dict[str, list[Any]] = {name: [] for name in ("step", "micro", "time_ns", "index", "name", "split")}
    columns["source_id"] = []
    hashes = []
    for step, micro, time_ns, name, split, found, source_ids in groups:
        values = found.numpy().astype(np.uint64)
        n = len(values)
        hashes.append(values)
        repeated = {"step": step, "micro": micro, "time_ns": time_ns, "name": name, "split": split}
        for column, value in repeated.items():
            columns[column].extend([value] * n)
        columns["index"].extend(range(n))
        columns["source_id"].extend(list(source_ids) if source_ids is not None else [None] * n)
    hash_column = np.concatenate(hashes) if hashes else np.zeros(0, dtype=np.uint64)
    return Batch("samples", {**columns, "hash": hash_column})


def _events(rows: list[tuple[Any, ...]]) -> Batch:
    names = ("seq", "kind", "severity", "module", "slot", "message", "details")
    return Batch("events", {**_when(rows), **{name: [row[3 + i] for row in rows] for i, name in enumerate(names)}})


def _when(rows: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
    return {name: [row[i] for row in rows] for i, name in enumerate(("step", "micro", "time_ns"))}
