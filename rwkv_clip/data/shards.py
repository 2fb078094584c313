"""Tar files of pairs, as WebDataset lays them out: ``000123.jpg`` and ``000123.txt`` are one pair.

A shard is indexed when it is opened, so that pairs can be read in any order, and a run resumed in the middle of one.
"""

from __future__ import annotations

import bisect
import glob
import itertools
import json
import os
from pathlib import Path

from rwkv_clip.data.pairs import NO_LABEL, class_number
from rwkv_clip.data.pictures import Record
from rwkv_clip.data.shard_index import Entry, Span, index_shard
from rwkv_clip.errors import InputError

__all__ = ["ShardSource", "find_shards"]


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
        self.shards, self._indexes = shards, [index_shard(shard) for shard in shards]
        self.problems = [problem for index in self._indexes for problem in index.problems]
        *self._first, count = itertools.accumulate(map(len, self._indexes), initial=0)  # of each shard; of all
        self._count = count if limit is None else min(count, limit)
        if not count:
            raise InputError(f"{shards[0]}: holds no image with a caption (.jpg and .txt or .json of one name)")

    def _find(self, index: int) -> tuple[Path, Entry]:
        shard = bisect.bisect_right(self._first, index) - 1
        return self.shards[shard], self._indexes[shard][index - self._first[shard]]

    def __len__(self) -> int:
        return self._count

    def place(self, index: int) -> str:
        """The shard and the member."""
        shard, entry = self._find(index)
        return f"{shard} member {entry.key}"

    def captions(self, index: int) -> list[str]:
        """The captions of a pair.

        Raises:
            InputError: when the text holds none, or is no UTF-8 or JSON.
        """
        shard, entry = self._find(index)
        try:
            text = _bytes(shard, entry.caption).decode()
            found = _captions_of(json.loads(text)) if entry.is_json else [text.strip()]
        except ValueError as error:
            raise InputError(f"caption: {error}") from error
        captions = [caption for caption in found if caption.strip()]
        if not captions:
            raise InputError("no caption in its text")
        return captions

    def read(self, index: int) -> Record:
        """Read a pair; raises OSError or InputError when it cannot be read."""
        shard, entry = self._find(index)
        label = NO_LABEL if entry.label is None else class_number(_bytes(shard, entry.label).decode())
        return Record(_bytes(shard, entry.image), self.captions(index), label)


def _bytes(shard: Path, span: Span) -> bytes:
    with shard.open("rb") as file:
        return os.pread(file.fileno(), span.size, span.offset)


def _captions_of(value: object) -> list[str]:
    if not isinstance(value, dict):
        return []
    found = value.get("captions", value.get("caption"))
    return [str(text) for text in (found if isinstance(found, list) else [found]) if text is not None]
