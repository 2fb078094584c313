"""Tar files of pairs, as WebDataset lays them out: ``000123.jpg`` and ``000123.txt`` are one pair.

A shard is indexed when it is opened, so that pairs can be read in any order, and a run resumed in the middle of one.
"""

from __future__ import annotations

import glob
import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from rwkv_clip.data.pairs import NO_LABEL
from rwkv_clip.data.pictures import Record
from rwkv_clip.errors import InputError

__all__ = ["ShardSource", "find_shards"]

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
TEXT, JSON, CLASS = ".txt", ".json", ".cls"


class _Span(NamedTuple):
    """Where a member's bytes lie in its shard."""

    offset: int
    size: int


class _Entry(NamedTuple):
    """One pair of the index."""

    shard: int
    key: str
    image: _Span
    caption: _Span
    is_json: bool
    label: _Span | None


def find_shards(name: str) -> list[Path]:
    """Return the tar files that a file, a directory or a pattern stands for, in the order of their names."""
    path = Path(name)
    if path.is_dir():
        return sorted(path.glob("*.tar"))
    return sorted(Path(found) for found in glob.glob(name) if found.endswith(".tar"))


class ShardSource:
    """Pairs of uncompressed tar files. Members of one name up to the first dot make a pair; what lacks its image or
    its caption, and what lies behind damage in a shard, is listed in ``problems``.

    The caption is the text of ``.txt``, or ``caption`` or ``captions`` of ``.json``; ``.cls`` holds a class number.

    Raises:
        InputError: when a shard cannot be opened, or holds no pair.
    """

    def __init__(self, shards: list[Path], *, limit: int | None = None) -> None:
        self.shards, self.problems = shards, list[str]()
        self._entries = [entry for shard in range(len(shards)) for entry in self._index(shard)][:limit]
        if not self._entries:
            raise InputError(f"{shards[0]}: holds no image with a caption (.jpg and .txt or .json of one name)")

    def _index(self, shard: int) -> Iterator[_Entry]:
        path, members = self.shards[shard], dict[str, dict[str, _Span]]()
        try:
            with tarfile.open(path, "r:") as archive:
                for member in self._members(archive, path):
                    name = PurePosixPath(member.name)
                    stem, dot, suffix = name.name.partition(".")
                    span = _Span(member.offset_data, member.size)
                    members.setdefault(str(name.with_name(stem)), {})[(dot + suffix).lower()] = span
        except (OSError, tarfile.ReadError) as error:
            raise InputError(f"cannot read the shard {path}: {error}; shards are uncompressed tar files") from error
        for key, parts in members.items():
            image = next((parts[suffix] for suffix in IMAGE_SUFFIXES if suffix in parts), None)
            caption = parts.get(JSON, parts.get(TEXT))
            if image is not None and caption is not None:
                yield _Entry(shard, key, image, caption, JSON in parts, parts.get(CLASS))
            else:
                self.problems.append(f"{path} member {key}: no {'image' if image is None else 'caption'}")

    def _members(self, archive: tarfile.TarFile, path: Path) -> Iterator[tarfile.TarInfo]:
        """The files of an archive up to where it is damaged."""
        size = path.stat().st_size
        try:
            for member in archive:
                if member.offset_data + member.size > size:
                    raise tarfile.ReadError(f"{member.name} ends beyond the file")
                if member.isfile():
                    yield member
        except tarfile.ReadError as error:
            self.problems.append(f"{path}: damaged, its rest is left out ({error})")

    def __len__(self) -> int:
        return len(self._entries)

    def place(self, index: int) -> str:
        """The shard and the member."""
        entry = self._entries[index]
        return f"{self.shards[entry.shard]} member {entry.key}"

    def captions(self, index: int) -> list[str]:
        """The captions of a pair.

        Raises:
            InputError: when the text holds none, or is no UTF-8 or JSON.
        """
        entry = self._entries[index]
        try:
            text = self._bytes(entry.shard, entry.caption).decode()
            found = _captions_of(json.loads(text)) if entry.is_json else [text.strip()]
        except ValueError as error:
            raise InputError(f"caption: {error}") from error
        captions = [caption for caption in found if caption.strip()]
        if not captions:
            raise InputError("no caption in its text")
        return captions

    def read(self, index: int) -> Record:
        """Read a pair; raises OSError or InputError when it cannot be read."""
        entry = self._entries[index]
        label = NO_LABEL if entry.label is None else int(self._bytes(entry.shard, entry.label))
        return Record(self._bytes(entry.shard, entry.image), self.captions(index), label)

    def _bytes(self, shard: int, span: _Span) -> bytes:
        with self.shards[shard].open("rb") as file:
            return os.pread(file.fileno(), span.size, span.offset)


def _captions_of(value: object) -> list[str]:
    if not isinstance(value, dict):
        return []
    found = value.get("captions", value.get("caption"))
    return [str(text) for text in (found if isinstance(found, list) else [found]) if text is not None]
