"""From the columns of a `Batch` to an Arrow record batch, without a Python loop over rows where that can be helped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from tracehooks.core.errors import InvalidRowsError, UnknownNameError
from tracehooks.core.records import Batch
from tracehooks.core.schema import TABLES, Column
from tracehooks.storage.schemas import arrow_type, journal_schema


def record_batch(batch: Batch) -> pa.RecordBatch:
    """The batch as the journal writes it: columns as `journal_schema` has them.

    Raises:
        UnknownNameError: a table or column that the format does not have.
        InvalidRowsError: a column that is missing, too short, of the wrong type, or null where it must not be.
    """
    if batch.table not in TABLES:
        raise UnknownNameError("table", batch.table, TABLES, "write()")
    table = TABLES[batch.table]
    for name in batch.columns:
        if name not in table.names:
            raise UnknownNameError("column", name, table.names, f"write({batch.table})")
    arrays = [_column(batch, column) for column in table.columns]
    return pa.RecordBatch.from_arrays(arrays, schema=journal_schema(batch.table))


def _column(batch: Batch, column: Column) -> pa.Array:
    rows = len(batch)
    values = batch.columns.get(column.name)
    if values is None:
        array = pa.nulls(rows, arrow_type(column.type, encoded=False))
    else:
        try:
            array = _CONVERTERS.get(column.type, _numbers)(values, column)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise InvalidRowsError(batch.table, column.name, str(error).splitlines()[0]) from error
    if len(array) != rows:
        raise InvalidRowsError(batch.table, column.name, f"{len(array)} values, other columns have {rows}")
    if array.null_count and not column.nullable:
        raise InvalidRowsError(batch.table, column.name, f"{array.null_count} of {rows} values are null")
    return array


def _numbers(values: Any, column: Column) -> pa.Array:
    # NaN stands for null only where statistics can be missing; a scalar that is NaN is a value.
    missing = column.nullable and column.type == "float64"
    return pa.array(values, type=arrow_type(column.type, encoded=False), from_pandas=missing)


def _strings(values: Sequence[str | None], column: Column) -> pa.Array:
    try:
        return pa.array(values, type=pa.string())
    except UnicodeEncodeError:
        # Lone surrogates (undecodable file names) are no UTF-8: written as their escapes rather than refused.
        clean = [None if text is None else text.encode("utf-8", "backslashreplace").decode() for text in values]
        return pa.array(clean, type=pa.string())


def _integer_lists(values: Any, column: Column) -> pa.Array:
    kind = arrow_type(column.type, encoded=False)
    if isinstance(values, np.ndarray) and values.ndim == 2:
        offsets = np.arange(values.shape[0] + 1, dtype=np.int32) * np.int32(values.shape[1])
        return pa.ListArray.from_arrays(offsets, pa.array(values.reshape(-1), type=pa.int64()), type=kind)
    if column.nullable:
        return pa.array(list(values), type=kind)
    offsets = np.zeros(len(values) + 1, dtype=np.int32)
    np.cumsum(np.fromiter(map(len, values), dtype=np.int32, count=len(values)), out=offsets[1:])
    flat = np.fromiter(chain.from_iterable(values), dtype=np.int64, count=int(offsets[-1]))
    return pa.ListArray.from_arrays(offsets, flat, type=kind)


def _sketches(values: Any, column: Column) -> pa.Array:
    kind = arrow_type(column.type, encoded=False)
    if isinstance(values, np.ndarray) and values.ndim == 2 and values.shape[1] == kind.list_size:
        flat = pa.array(np.ascontiguousarray(values, dtype=np.float32).reshape(-1))
        return pa.FixedSizeListArray.from_arrays(flat, type=kind)
    return pa.array(list(values), type=kind)


_CONVERTERS: dict[str, Callable[[Any, Column], pa.Array]] = {
    "string": _strings,
    "dictionary": _strings,
    "list<int64>": _integer_lists,
    "histogram": _integer_lists,
    "sketch": _sketches,
}
