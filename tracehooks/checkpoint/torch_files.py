"""``.pt``, ``.pth``, ``.bin``: what torch.save writes, as a zip archive or in the format before that, without torch."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tracehooks.checkpoint.pickles import DType, Inert, Pickle
from tracehooks.checkpoint.stored import SIZES, Region, Stored, contiguous
from tracehooks.core.errors import CheckpointError

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C


@dataclass
class Storage:
    """A storage that a pickle names; where it lies may be known only later."""

    dtype: str
    region: Region
    root: Storage | None = None
    """The storage that this one is a view of."""
    offset: int = 0
    """Elements of the root before this view."""


@dataclass(frozen=True)
class Loaded:
    """What a file held: the pickled object with `Stored` for tensors, and the classes that were left inert."""

    tree: Any
    unknown: tuple[str, ...]


def load(path: Path) -> Loaded:
    """Read what torch.save wrote.

    Raises:
        CheckpointError: not such a file, or a TorchScript archive.
    """
    with path.open("rb") as file:
        if zipfile.is_zipfile(file):
            return load_archive(path, file, path)
        file.seek(0)
        return _load_legacy(path, file)


def load_archive(path: Path, file: BinaryIO, shown: Path, base: int = 0) -> Loaded:
    """Read a zip archive that begins ``base`` bytes into the file at ``path``; ``file`` begins with it."""
    with understood(shown, "its archive"):
        return _archive(path, file, shown, base)


def _archive(path: Path, file: BinaryIO, shown: Path, base: int) -> Loaded:
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
        pickles = [name for name in names if name.endswith("/data.pkl")]
        if not pickles:
            raise CheckpointError(shown, "a zip archive without data.pkl; expected what torch.save writes")
        prefix = pickles[0].removesuffix("data.pkl")
        if f"{prefix}constants.pkl" in names:
            raise CheckpointError(shown, "a TorchScript archive, which is a program; save its state_dict() instead")
        if f"{prefix}byteorder" in names and archive.read(f"{prefix}byteorder") != b"little":
            raise CheckpointError(shown, "written on a big-endian machine; load and save it again on this one")

        def storage(pid: tuple[Any, ...]) -> Storage:
            _, kind, key, _, size = pid
            return Storage(str(kind), _member(archive, f"{prefix}data/{key}", path, base, size * SIZES[str(kind)]))

        reader = Pickle(archive.read(pickles[0]), storage, _tensor)
        return Loaded(_unpickled(reader.load, shown), tuple(reader.unknown))


def load_pickle(data: bytes, shown: Path) -> Any:
    """A bare pickle without tensors."""

    def storage(pid: Any) -> Any:
        raise CheckpointError(shown, f"names a storage where none is expected: {pid!r}")

    return _unpickled(Pickle(data, storage, _tensor).load, shown)


def _member(archive: zipfile.ZipFile, name: str, path: Path, base: int, length: int) -> Region:
    """Where an entry's bytes lie; a compressed one is unpacked."""
    try:
        info = archive.getinfo(name)
    except KeyError:
        raise CheckpointError(path, f"the archive lacks {name}, which a tensor needs") from None
    if info.compress_type != zipfile.ZIP_STORED:
        return Region(path, info.header_offset, info.file_size, archive.read(name))
    assert archive.fp is not None
    archive.fp.seek(info.header_offset)
    header = archive.fp.read(30)
    skipped = 30 + sum(struct.unpack("<HH", header[26:30]))
    return Region(path, base + info.header_offset + skipped, min(length, info.file_size))


def _load_legacy(path: Path, file: BinaryIO) -> Loaded:
    storages: dict[str, Storage] = {}

    def storage(pid: tuple[Any, ...]) -> Storage:
        _, kind, key, _, size, view = pid
        root = storages.setdefault(key, Storage(str(kind), Region(path, 0, size * SIZES[str(kind)])))
        return root if view is None else Storage(str(kind), root.region, root, view[1])

    def part() -> Any:
        reader = Pickle(file, storage, _deferred)
        found = _unpickled(reader.load, path)
        unknown.update(reader.unknown)
        return found

    unknown: dict[str, Any] = {}
    try:
        magic = part()
    except CheckpointError:
        magic = None
    if magic != LEGACY_MAGIC:
        raise CheckpointError(path, "neither a zip archive nor a pickle of torch.save")
    part(), part()  # protocol and system
    tree, keys = part(), part()
    with understood(path, "the place of its tensors"):
        for key in keys:
            (number,) = struct.unpack("<q", file.read(8) or bytes(8))
            root = storages[key]
            size = number * SIZES[root.dtype]
            root.region = Region(path, file.tell(), size)
            file.seek(size, io.SEEK_CUR)
        return Loaded(_settled(tree), tuple(unknown))


@dataclass
class _Deferred:
    """A tensor whose storage's place in the file is not known yet."""

    storage: Storage
    view: tuple[Any, ...]


def _deferred(storage: Storage, *view: Any) -> _Deferred:
    return _Deferred(storage, view)


def _settled(tree: Any) -> Any:
    """The object with its tensors in place."""
    if isinstance(tree, _Deferred):
        return _tensor(tree.storage, *tree.view)
    if isinstance(tree, dict):
        return {key: _settled(item) for key, item in tree.items()}
    if isinstance(tree, list | tuple):
        return [_settled(item) for item in tree]
    if isinstance(tree, Inert):
        tree.state = _settled(tree.state)
    return tree


def _tensor(storage: Storage, offset: int, shape: Any, strides: Any, *rest: Any) -> Stored:
    """`_rebuild_tensor_v2`, and v3, which names the dtype of an untyped storage behind requires_grad and hooks."""
    dtype = next((str(item) for item in rest if isinstance(item, DType)), storage.dtype)
    region = (storage.root or storage).region
    return Stored(dtype, tuple(shape), _plain(tuple(shape), tuple(strides)), storage.offset + offset, region)


def _plain(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of dimensions of one element, which say nothing, as those of a row-major tensor."""
    usual = contiguous(shape)
    return tuple(u if n <= 1 else s for n, s, u in zip(shape, strides, usual, strict=True))


def _unpickled(load: Callable[[], Any], path: Path) -> Any:
    with understood(path, "its pickle"):
        return load()


_NONSENSE = (
    ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, NotImplementedError, OSError, TypeError, ValueError,
    pickle.UnpicklingError, struct.error, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
"""What bytes that were changed can raise: anything that a reader meets where it expects something else."""


@contextmanager
def understood(path: Path, what: str) -> Iterator[None]:
    """Damage is one error, whatever it does to a reader."""
    try:
        yield
    except CheckpointError:
        raise
    except _NONSENSE as error:
        raise CheckpointError(path, f"{what} cannot be read ({type(error).__name__}: {error})") from error
