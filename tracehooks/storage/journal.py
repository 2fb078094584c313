"""The journal: rows on disk at the end of every step, before they are sealed into a Parquet part.

A segment is one Arrow IPC stream of one table: a schema message, then one record batch a flush. Every message carries
a checksum of itself (see `checksum`) in its metadata, so that a torn or changed batch is recognised, never misread. An
undamaged segment can be read with plain ``pyarrow.ipc.open_stream``.
"""

from __future__ import annotations

import os
import weakref
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pyarrow as pa

from tracehooks.storage import checksum
from tracehooks.storage.durable import sync_directory, write_all
from tracehooks.storage.schemas import conform, journal_schema

_CONTINUATION = b"\xff\xff\xff\xff"
_PREFIX = 8
"""Bytes before a message's metadata: the continuation marker and the metadata's length."""
_LONGEST_METADATA = 1 << 20
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Damage:
    """A byte range of a segment that holds no intact message."""

    start: int
    end: int
    at_end: bool
    """It reaches the end of the file: a write that was cut short, as far as one can tell."""

    def __str__(self) -> str:
        cause = "torn: the last write was cut short or damaged" if self.at_end else "damaged: checksum does not match"
        return f"bytes {self.start}-{self.end}: {cause}"


class Segment:
    """The open segment of one table that the writer appends to.

    Raises:
        OSError: the file cannot be created or written. What was appended before stays readable.
    """

    def __init__(self, path: Path, table: str, *, fsync: bool = False) -> None:
        self.path = path
        self.rows = 0
        self.size = 0
        self.usable = True
        """False once a failed append could not be taken back: the writer must go on in a new segment."""
        self._table = table
        self._fsync = fsync
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        # By finalizer, not __del__: it runs once, also when a writer is dropped without close().
        self._close = weakref.finalize(self, os.close, self._descriptor)
        if fsync:
            sync_directory(path.parent)

    def append(self, message: bytes, rows: int) -> None:
        """Append one flush with one write; all of it or, when that fails, nothing of it is in the segment.

        Args:
            message: of so many rows, as `batch_message` makes it.
        """
        data = message if self.size else _schema_message(self._table) + message
        try:
            write_all(self._descriptor, data, self.size)
            if self._fsync:
                os.fsync(self._descriptor)
        except OSError:
            self._take_back()
            raise
        self.size += len(data)
        self.rows += rows

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._close()

    def _take_back(self) -> None:
        try:
            os.ftruncate(self._descriptor, self.size)
        except OSError:
            self.usable = False


def read_segment(path: Path, table: str) -> Iterator[pa.RecordBatch | Damage]:
    """Every intact batch of a segment in order, and every damaged byte range, holding one batch in memory at a time.

    A damaged schema message costs nothing as long as the batches were written with the schema of this version.

    Raises:
        OSError: the file is not there or cannot be opened.
    """
    schema = journal_schema(table)
    named = _schema_name(_schema_message(table))
    for found in _messages(path):
        if isinstance(found, Damage):
            yield found
            continue
        start, data = found
        message = pa.ipc.read_message(pa.py_buffer(data))
        if message.type == "schema":
            schema, named = pa.ipc.read_schema(message), _schema_name(data)
        elif named in data[: _head_length(data)]:
            yield conform(pa.ipc.read_record_batch(message, schema), journal_schema(table))
        else:
            yield Damage(start, start + len(data), at_end=False)


@cache
def _schema_message(table: str) -> bytes:
    data = bytearray(journal_schema(table).serialize())
    checksum.stamp(data)
    return bytes(data)


def _schema_name(message: bytes) -> bytes:
    return b"schema:%08x" % zlib.crc32(message)


def batch_message(batch: pa.RecordBatch, table: str) -> bytes:
    """The rows of one flush as a segment of a table holds them."""
    sink = pa.BufferOutputStream()
    writer = pa.ipc.new_stream(sink, batch.schema)
    writer.write_batch(batch, {checksum.KEY: checksum.BLANK, "tracehooks.schema": _schema_name(_schema_message(table))})
    # The writer puts the schema's message first: only what follows it is the batch.
    return stamped(bytearray(memoryview(sink.getvalue())[len(_schema_message(table)) :]))


def stamped(message: bytearray) -> bytes:
    """A message whose bytes are final, with its checksum: one that it had from other bytes does not count."""
    checksum.stamp(message, _head_length(message))
    return bytes(message)


def _head_length(data: bytes | bytearray) -> int:
    return _PREFIX + int.from_bytes(data[4:8], "little")


def _messages(path: Path) -> Iterator[tuple[int, bytes] | Damage]:
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        position = 0
        while position < size:
            data = _message_at(file.fileno(), position, size)
            if data is None:
                end = _next_message(file.fileno(), position + 8, size)
                yield Damage(position, end, at_end=end == size)
                position = end
            else:
                yield position, data
                position += len(data)


def _message_at(descriptor: int, position: int, size: int) -> bytes | None:
    prefix = os.pread(descriptor, _PREFIX, position)
    length = int.from_bytes(prefix[4:8], "little")
    if prefix[:4] != _CONTINUATION or not 0 < length <= min(size - position - _PREFIX, _LONGEST_METADATA):
        return None
    head = os.pread(descriptor, _PREFIX + length, position)
    total = checksum.claimed_length(head)
    if total is None or not len(head) <= total <= size - position:
        return None
    data = _pread(descriptor, total, position)
    return data if checksum.intact(data, len(head)) else None


def _pread(descriptor: int, length: int, position: int) -> bytes:
    """Like os.pread, which may return less than asked for (at most 2 GiB, or when a signal arrives)."""
    parts = []
    while length > 0 and (part := os.pread(descriptor, length, position)):
        parts.append(part)
        length, position = length - len(part), position + len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _next_message(descriptor: int, start: int, size: int) -> int:
    """The offset of the next intact message, or the file's size. Messages start at multiples of 8."""
    position = -(-start // 8) * 8
    while position < size:
        chunk = os.pread(descriptor, _CHUNK, position)
        at = chunk.find(_CONTINUATION)
        while at >= 0:
            if at % 8 == 0 and _message_at(descriptor, position + at, size) is not None:
                return position + at
            at = chunk.find(_CONTINUATION, at + 1)
        position += _CHUNK
    return size
