"""Messages of the journal that differ in their numbers alone. Steps are alike: most flushes are the message of an earlier
one with other numbers in it, which costs a tenth of making it anew.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tracehooks.core.records import Batch
from tracehooks.core.schema import TABLES
from tracehooks.storage.journal import batch_message, stamped
from tracehooks.storage.rows import record_batch
from tracehooks.storage.schemas import journal_schema

MAX_FORMS, LONGEST = 16, 8192
"""Forms that are remembered at most, and of how many rows at most."""
MAX_KINDS = 64
"""Kinds of batches that are remembered at most after one was seen: a form is made at the second."""

NUMBERS = {"int64": np.int64, "int32": np.int32, "uint64": np.uint64, "float64": np.float64}
"""Types of columns whose numbers lie in a message as they lie in an array."""


class Form:
    """A message, and where in it the numbers of its varying columns lie."""

    def __init__(self, message: bytes, table: str, varying: Mapping[str, NDArray[Any]], kept: tuple[Any, ...]) -> None:
        self._message, self._kept = message, kept  # kept, so that their ids are nobody else's
        buffer = pa.py_buffer(message)
        batch = pa.ipc.read_record_batch(pa.ipc.read_message(buffer), journal_schema(table))
        self._places = [
            (name, values.dtype, batch.column(name).buffers()[1].address - buffer.address)
            for name, values in varying.items()
        ]

    def filled(self, varying: Mapping[str, NDArray[Any]]) -> bytes:
        """The message with these numbers."""
        data = bytearray(self._message)
        for name, dtype, offset in self._places:
            values = varying[name]
            np.frombuffer(data, dtype, len(values), offset)[:] = values
        return stamped(data)


class Forms:
    """The forms of one writer's messages."""

    def __init__(self) -> None:
        self._forms: dict[Hashable, Form] = {}
        self._seen: set[Hashable] = set()

    def message(self, batch: Batch) -> bytes:
        """A batch as the journal writes it; raises what `record_batch` does."""
        kind, varying, kept = _kind(batch)
        form = self._forms.get(kind)
        if form is not None:
            return form.filled(varying)
        message = batch_message(record_batch(batch), batch.table)
        if varying and 0 < len(batch) <= LONGEST:
            self._remember(kind, lambda: Form(message, batch.table, varying, kept))
        return message

    def _remember(self, kind: Hashable, form: Callable[[], Form]) -> None:
        if kind in self._seen:
            if len(self._forms) >= MAX_FORMS:
                self._forms.clear()
            self._forms[kind] = form()
        elif len(self._seen) >= MAX_KINDS:
            self._seen.clear()
        self._seen.add(kind)


def _kind(batch: Batch) -> tuple[Hashable, dict[str, NDArray[Any]], tuple[Any, ...]]:
    """What batches of one form have in common, the columns in which they differ, and those that are the same object.

    No columns differ where the batch is of a kind that has no form.
    """
    table = TABLES.get(batch.table)
    parts: list[Hashable] = [batch.table, len(batch)]
    varying, kept = {}, []
    for column in table.columns if table is not None else ():
        values = batch.columns.get(column.name)
        if values is None:
            parts.append(None)
        elif _never_changes(values):
            parts.append(id(values))
            kept.append(values)
        elif (
            isinstance(values, np.ndarray)
            and values.shape == (len(batch),)
            and values.dtype == NUMBERS.get(column.type)
        ):
            varying[column.name] = values
            parts.append(_missing(values) if column.nullable and column.type == "float64" else b"")
        else:
            return None, {}, ()
    unknown = table is None or not batch.columns.keys() <= set(table.names)
    return (None, {}, ()) if unknown else (tuple(parts), varying, tuple(kept))


def _never_changes(values: Any) -> bool:
    return type(values) is tuple or (isinstance(values, np.ndarray) and not values.flags.writeable)


def _missing(values: NDArray[Any]) -> bytes:
    """Which numbers stand for null."""
    missing = np.isnan(values)
    return missing.tobytes() if missing.any() else b""
