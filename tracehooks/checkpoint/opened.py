"""A checkpoint, whatever its format: its tensors by name, described and not yet read."""

from __future__ import annotations

import io
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from tracehooks.checkpoint import torch_files
from tracehooks.checkpoint.pickles import Inert, tensors_in, values_in
from tracehooks.checkpoint.stored import Assembled, Kept, Region, Stored, contiguous
from tracehooks.core.errors import CheckpointError, InvalidOptionError, shown

_SAFETENSORS = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "C64": "complex64",
}  # fmt: skip
INDEX = ".index.json"
LARGEST_HEADER = 100_000_000
"""Bytes; the format's own limit."""


@dataclass(frozen=True)
class Checkpoint:
    """What a file or directory holds."""

    path: Path
    format: str
    """safetensors, torch or distributed."""
    tensors: Mapping[str, Kept]
    values: Mapping[str, Any] = field(default_factory=dict)
    """Numbers, texts and truth values beside the tensors: epoch, hyper-parameters, metadata."""
    unknown: tuple[str, ...] = ()
    """Classes that the file names and that were left inert."""

    @property
    def tied(self) -> dict[str, tuple[str, ...]]:
        """Names that are one tensor, by the first of them."""
        groups: dict[tuple[Any, ...], list[str]] = {}
        for name, stored in self.tensors.items():
            if stored.count:
                groups.setdefault(stored.place, []).append(name)
        return {names[0]: tuple(names[1:]) for names in groups.values() if len(names) > 1}


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint: ``.safetensors``, what torch.save wrote, a sharded safetensors index or its directory, or a
    directory of torch.distributed.checkpoint. Only descriptions are read.

    Raises:
        CheckpointError: there is no such thing, or it is damaged; what was seen is said.
        InvalidOptionError: something that is no path.
    """
    if not isinstance(path, str | os.PathLike):
        raise InvalidOptionError("checkpoint", shown(path), "the path of a file or directory")
    where = Path(path)
    try:
        if where.is_dir():
            return _directory(where)
        if where.name.endswith(INDEX):
            return _sharded(where)
        with where.open("rb") as file:
            head = file.read(9)
    except FileNotFoundError:
        raise CheckpointError(where, "there is no such file or directory") from None
    except OSError as error:
        raise CheckpointError(where, error.strerror or str(error)) from error
    if len(head) == 9 and head[8:] == b"{":
        tensors, metadata = _safetensors(where)
        return Checkpoint(where, "safetensors", tensors, metadata)
    loaded = torch_files.load(where)
    return Checkpoint(where, "torch", tensors_in(loaded.tree), values_in(loaded.tree), loaded.unknown)


def _directory(path: Path) -> Checkpoint:
    if (path / ".metadata").exists():
        return _distributed(path)
    indexes = sorted(path.glob(f"*.safetensors{INDEX}"))
    if indexes:
        return _sharded(indexes[0])
    for pattern, kind in (("*.safetensors", "safetensors"), ("*.pt", "torch"), ("*.pth", "torch"), ("*.bin", "torch")):
        files = sorted(path.glob(pattern))
        if files:
            parts = [open_checkpoint(file) for file in files]
            return Checkpoint(path, kind, _together(path, [part.tensors for part in parts]))
    raise CheckpointError(path, "a directory without .safetensors, .pt, .pth or .bin files and without .metadata")


def _sharded(index: Path) -> Checkpoint:
    try:
        described = json.loads(index.read_text())
        weight_map = dict(described["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(index, f"not an index of shards ({type(error).__name__}: {error})") from error
    tensors = _together(index, [_safetensors(index.parent / name)[0] for name in sorted(set(weight_map.values()))])
    for name, file in weight_map.items():
        if name not in tensors:
            raise CheckpointError(index, f"promises {name} in {file}, which does not have it")
    return Checkpoint(index.parent, "safetensors", tensors)


def _together(path: Path, parts: list[Mapping[str, Kept]]) -> dict[str, Kept]:
    whole: dict[str, Kept] = {}
    for part in parts:
        for name, stored in part.items():
            if name in whole:
                raise CheckpointError(path, f"{name} is in two of its files")
            whole[name] = stored
    return whole


def _safetensors(path: Path) -> tuple[dict[str, Kept], dict[str, Any]]:
    """Tensors and metadata of one file (the format: github.com/huggingface/safetensors, README)."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(LARGEST_HEADER, size - 8):
                raise CheckpointError(path, f"a header of {length} bytes in a file of {size}")
            header = json.loads(file.read(length))
        metadata = header.pop("__metadata__", {})
        tensors: dict[str, Kept] = {name: _entry(path, 8 + length, item) for name, item in header.items()}
    except OSError as error:
        raise CheckpointError(path, error.strerror or str(error)) from error
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise CheckpointError(path, f"its header cannot be read ({type(error).__name__}: {error})") from error
    return tensors, metadata


def _entry(path: Path, start: int, item: Mapping[str, Any]) -> Stored:
    first, last = item["data_offsets"]
    shape = tuple(int(size) for size in item["shape"])
    dtype = _SAFETENSORS.get(item["dtype"], item["dtype"])
    return Stored(dtype, shape, contiguous(shape), 0, Region(path, start + first, last - first))


def _distributed(path: Path) -> Checkpoint:
    """A directory of torch.distributed.checkpoint: ``.metadata`` names, for each piece of each tensor, the file, offset
    and length of what torch.save wrote of it."""
    metadata = torch_files.load_pickle((path / ".metadata").read_bytes(), path / ".metadata")
    if not isinstance(metadata, Inert) or "state_dict_metadata" not in metadata.state:
        raise CheckpointError(path / ".metadata", "not the metadata of torch.distributed.checkpoint")
    with torch_files.understood(path / ".metadata", "what it says of files and tensors"):
        return _put_together(path, metadata)


def _put_together(path: Path, metadata: Inert) -> Checkpoint:
    pieces: dict[str, list[tuple[tuple[int, ...], Stored]]] = {}
    values: dict[str, Any] = {}
    unknown: set[str] = set()
    for index, info in metadata.state["storage_data"].items():
        name, at = index.state["fqn"], tuple(index.state.get("offset") or ())
        loaded = _blob(path / info.state["relative_path"], info.state["offset"], info.state["length"])
        unknown.update(loaded.unknown)
        if isinstance(loaded.tree, Stored):
            pieces.setdefault(name, []).append((at, loaded.tree))
        else:
            values |= values_in(loaded.tree, name)
    described = metadata.state["state_dict_metadata"]
    tensors = {name: _assembled(tuple(described[name].state["size"]), parts) for name, parts in pieces.items()}
    return Checkpoint(path, "distributed", tensors, values, tuple(sorted(unknown)))


def _assembled(shape: tuple[int, ...], parts: list[tuple[tuple[int, ...], Stored]]) -> Kept:
    if len(parts) == 1 and parts[0][1].shape == shape:
        return parts[0][1]
    return Assembled(parts[0][1].dtype, shape, tuple(parts))


def _blob(path: Path, start: int, length: int) -> torch_files.Loaded:
    try:
        with path.open("rb") as file:
            return torch_files.load_archive(path, io.BufferedReader(_Stretch(file, start, length)), path, base=start)
    except OSError as error:
        raise CheckpointError(path, error.strerror or str(error)) from error


class _Stretch(io.RawIOBase):
    """Some bytes of a file as a file: only what is asked for is read."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """As of a file that begins and ends with the stretch."""
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        """As much as fits and is there."""
        self._file.seek(self._start + self._at)
        data = self._file.read(max(0, min(len(buffer), self._length - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
