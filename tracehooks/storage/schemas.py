"""Arrow schemas of the tables, built from `core.schema`: one for the journal, one for parts, one for readers."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import pyarrow as pa

from tracehooks.core.schema import FORMAT_VERSION, SKETCH_SIZE, TABLES, Column
from tracehooks.storage import checksum

if TYPE_CHECKING:
    from tracehooks.core.schema import ColumnType

VERSION_KEY = b"tracehooks.format_version"
TABLE_KEY = b"tracehooks.table"
RANK = pa.field("rank", pa.int32())


@cache
def arrow_type(kind: ColumnType, *, encoded: bool) -> pa.DataType:
    """The Arrow type of a column's type; ``encoded`` keeps dictionary columns as dictionaries, else plain strings."""
    integers = pa.list_(pa.field("element", pa.int64(), nullable=False))
    types: dict[str, pa.DataType] = {
        "int64": pa.int64(),
        "int32": pa.int32(),
        "uint64": pa.uint64(),
        "float64": pa.float64(),
        "bool": pa.bool_(),
        "string": pa.string(),
        "dictionary": pa.dictionary(pa.int32(), pa.string()) if encoded else pa.string(),
        "list<int64>": integers,
        "histogram": integers,
        "sketch": pa.list_(pa.field("element", pa.float32()), SKETCH_SIZE),
    }
    return types[kind]


@cache
def journal_schema(table: str) -> pa.Schema:
    """Plain strings instead of dictionaries, so that each batch of the journal can be read by itself."""
    return _schema(table, encoded=False).with_metadata(
        _metadata(table) | {checksum.KEY.encode(): checksum.BLANK.encode()}
    )


@cache
def part_schema(table: str) -> pa.Schema:
    """What a sealed Parquet part holds."""
    return _schema(table, encoded=True).with_metadata(_metadata(table))


@cache
def read_schema(table: str) -> pa.Schema:
    """What readers give: a part's columns and the int32 column ``rank``."""
    return part_schema(table).append(RANK).remove_metadata()


def conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The batch with exactly the schema's columns: those that an older version did not write are null."""
    if batch.schema.equals(schema):
        return batch
    columns = [
        batch.column(field.name).cast(field.type)
        if field.name in batch.schema.names
        else pa.nulls(batch.num_rows, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _schema(table: str, *, encoded: bool) -> pa.Schema:
    return pa.schema([_field(column, encoded=encoded) for column in TABLES[table].columns])


def _field(column: Column, *, encoded: bool) -> pa.Field:
    return pa.field(column.name, arrow_type(column.type, encoded=encoded), nullable=column.nullable)


def _metadata(table: str) -> dict[bytes, bytes]:
    return {VERSION_KEY: str(FORMAT_VERSION).encode(), TABLE_KEY: table.encode()}
