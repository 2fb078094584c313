"""What lies where in a tar shard: one pass over its headers, kept in a file beside it for the runs to come."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import pyarrow as pa

from rwkv_clip.checkpoint import write_atomically
from rwkv_clip.errors import InputError

__all__ = ["Entry", "ShardIndex", "Span", "index_path", "index_shard"]

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
TEXT, JSON, CLASS = ".txt", ".json", ".cls"
FORMAT = b"1"
SPAN = pa.struct([pa.field("offset", pa.int64()), pa.field("size", pa.int64())])
SCHEMA = pa.schema(
    [
        pa.field("key", pa.string()),
        pa.field("image", SPAN),
        pa.field("caption", SPAN),
        pa.field("is_json", pa.bool_()),
        pa.field("label", SPAN),
    ]
)


class Span(NamedTuple):
    """Where a member's bytes lie in its shard."""

    offset: int
    size: int


class Entry(NamedTuple):
    """One pair of the index."""

    key: str
    image: Span
    caption: Span
    is_json: bool
    label: Span | None


class ShardIndex:
    """The pairs of one shard. They lie in the index's file, which all processes of a machine share, until they are read."""

    def __init__(self, shard: Path, rows: pa.RecordBatch) -> None:
        self._rows = rows
        self.problems = [f"{shard}{problem}" for problem in json.loads(rows.schema.metadata[b"problems"])]

    def __len__(self) -> int:
        return int(self._rows.num_rows)

    def __getitem__(self, row: int) -> Entry:
        key, image, caption, is_json, label = (column[row].as_py() for column in self._rows.columns)
        return Entry(key, Span(**image), Span(**caption), is_json, Span(**label) if label else None)


def index_path(shard: Path) -> Path:
    """Return where the index of a shard is kept: beside it, with ``.index`` added to its name."""
    return shard.with_name(f"{shard.name}.index")


def index_shard(shard: Path) -> ShardIndex:
    """Return a shard's index, from the file beside it if that is of the very shard, else made anew and kept there.

    Where nothing can be written the index lives in memory.

    Raises:
        InputError: when the shard cannot be opened.
    """
    try:
        status = shard.stat()
        metadata = {b"format": FORMAT, b"shard": f"{status.st_size} {status.st_mtime_ns}".encode()}
        kept = _kept(index_path(shard), metadata)
        rows = _made(shard, metadata) if kept is None else kept
    except (OSError, tarfile.ReadError) as error:
        raise InputError(f"cannot read the shard {shard}: {error}; shards are uncompressed tar files") from error
    return ShardIndex(shard, rows)


def _kept(path: Path, metadata: dict[bytes, bytes]) -> pa.RecordBatch | None:
    """What the file holds; None where there is none, or it is damaged or of another state of the shard."""
    try:
        rows = pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)
    except (OSError, pa.ArrowInvalid):
        return None
    found = rows.schema.metadata or {}
    return rows if all(found.get(name) == value for name, value in metadata.items()) else None


def _made(shard: Path, metadata: dict[bytes, bytes]) -> pa.RecordBatch:
    problems = list[str]()
    entries = [_row(entry) for entry in _entries(shard, problems)]
    schema = SCHEMA.with_metadata(metadata | {b"problems": json.dumps(problems).encode()})
    rows = pa.RecordBatch.from_pylist(entries, schema=schema)
    try:
        write_atomically(index_path(shard), lambda file: _write(rows, file))
    except OSError:  # a read-only place
        return rows
    return rows if (kept := _kept(index_path(shard), metadata)) is None else kept


def _write(rows: pa.RecordBatch, file: object) -> None:
    with pa.ipc.new_file(file, rows.schema) as writer:
        writer.write_batch(rows)


def _row(entry: Entry) -> dict[str, object]:
    return {name: value._asdict() if isinstance(value, Span) else value for name, value in entry._asdict().items()}


def _entries(shard: Path, problems: list[str]) -> Iterator[Entry]:
    """The pairs of a shard, in the order of their first members; what is wrong is added to ``problems``."""
    members = dict[str, dict[str, Span]]()
    with tarfile.open(shard, "r:") as archive:
        for member in _members(archive, shard.stat().st_size, problems):
            name = PurePosixPath(member.name)
            stem, dot, suffix = name.name.partition(".")
            span = Span(member.offset_data, member.size)
            members.setdefault(str(name.with_name(stem)), {})[(dot + suffix).lower()] = span
    for key, parts in members.items():
        image = next((parts[suffix] for suffix in IMAGE_SUFFIXES if suffix in parts), None)
        caption = parts.get(JSON, parts.get(TEXT))
        if image is not None and caption is not None:
            yield Entry(key, image, caption, JSON in parts, parts.get(CLASS))
        else:
            problems.append(f" member {key}: no {'image' if image is None else 'caption'}")


def _members(archive: tarfile.TarFile, size: int, problems: list[str]) -> Iterator[tarfile.TarInfo]:
    """The files of an archive up to where it is damaged."""
    try:
        for member in archive:
            if member.offset_data + member.size > size:
                raise tarfile.ReadError(f"{member.name} ends beyond the file")
            if member.isfile():
                yield member
    except tarfile.ReadError as error:
        problems.append(f": damaged, its rest is left out ({error})")
