"""Sealed parts: Parquet files that any tool reads, written whole or not at all, with every byte under a checksum.

Pages carry Parquet's own CRC-32. The footer, which says where pages lie and which values they hold, carries ours: one
changed bit there can silently move a column, and the Parquet format would not notice.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tracehooks.core.schema import TABLES
from tracehooks.storage import checksum
from tracehooks.storage.durable import sync_directory, write_all
from tracehooks.storage.schemas import part_schema

ROWS_PER_GROUP = 65_536
BYTES_PER_GROUP = 32 << 20
"""A row group is written when it holds this many rows or journal bytes: sealing holds one in memory."""

_MAGIC = b"PAR1"
_TAIL = 8
_LONGEST_FOOTER = 64 << 20


class DamagedPartError(Exception):
    """A part whose footer cannot be trusted; the message says why. Never leaves storage."""


def write_part(temporary: Path, part: Path, table: str, batches: Iterable[pa.RecordBatch]) -> int:
    """Write a part under its temporary name, fsync it, rename it. Returns the number of rows; no rows, no part.

    Raises:
        OSError: it cannot be written; the temporary file is removed.
    """
    rows = 0
    part.parent.mkdir(parents=True, exist_ok=True)
    try:
        with pq.ParquetWriter(temporary, part_schema(table), **_options(table)) as writer:
            for group in _groups(batches):
                writer.write_table(_encoded(group, table), row_group_size=ROWS_PER_GROUP)
                rows += group.num_rows
            writer.add_key_value_metadata({checksum.KEY: checksum.BLANK})
        if rows:
            _stamp_footer(temporary)
            os.replace(temporary, part)
            sync_directory(part.parent)
    finally:
        temporary.unlink(missing_ok=True)
    return rows


def check_footer(part: Path) -> None:
    """Check a part's footer against its checksum, without parsing it: opening a run does this for every part.

    Raises:
        DamagedPartError: truncated, changed, or not written by tracehooks.
    """
    try:
        with part.open("rb", buffering=0) as file:
            footer = _footer(file.fileno())
    except OSError as error:
        raise DamagedPartError(f"footer: {error.strerror or error}") from error
    if not checksum.intact(footer):
        raise DamagedPartError("footer: checksum does not match")


def _encoded(group: pa.Table, table: str) -> pa.Table:
    schema = part_schema(table)
    columns = [
        column.dictionary_encode() if pa.types.is_dictionary(field.type) else column
        for field, column in zip(schema, group.columns, strict=True)
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _groups(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        held.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if rows >= ROWS_PER_GROUP or size >= BYTES_PER_GROUP:
            group = pa.Table.from_batches(held).combine_chunks()
            held, rows, size = [], 0, 0  # before yielding: the batches are free while their group is written
            yield group
    if held:
        yield pa.Table.from_batches(held).combine_chunks()


_COUNTERS = ("seq", "time_ns", "index")
"""Columns that climb from row to row: their differences are small where their values are not."""


def _options(table: str) -> dict[str, Any]:
    """How each column is encoded; all of it without loss."""
    encodings: dict[str, str] = {}
    dictionaries = []
    for column in TABLES[table].columns:
        if column.type == "float64":
            encodings[column.name] = "BYTE_STREAM_SPLIT"
        elif column.type == "sketch":
            encodings[f"{column.name}.list.element"] = "BYTE_STREAM_SPLIT"
        elif column.type == "uint64" or column.name in ("details", "message"):
            encodings[column.name] = "PLAIN"
        elif column.name in _COUNTERS:
            encodings[column.name] = "DELTA_BINARY_PACKED"
        elif column.type in ("list<int64>", "histogram"):
            dictionaries.append(f"{column.name}.list.element")
        elif column.type != "bool":
            dictionaries.append(column.name)
    return {
        "compression": "zstd",
        "compression_level": 3,
        "use_dictionary": dictionaries,
        "column_encoding": encodings,
        "write_page_checksum": True,
    }


def _stamp_footer(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR)
    try:
        footer = bytearray(_footer(descriptor))
        checksum.stamp(footer)
        write_all(descriptor, footer, os.fstat(descriptor).st_size - _TAIL - len(footer))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _footer(descriptor: int) -> bytes:
    size = os.fstat(descriptor).st_size
    tail = os.pread(descriptor, _TAIL, max(0, size - _TAIL))
    length = int.from_bytes(tail[:4], "little")
    if tail[4:] != _MAGIC or not 0 < length <= min(size - _TAIL - len(_MAGIC), _LONGEST_FOOTER):
        raise DamagedPartError(f"footer: {size} bytes that do not end as a Parquet file does")
    return os.pread(descriptor, length, size - _TAIL - length)
