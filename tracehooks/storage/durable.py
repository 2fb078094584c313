"""Writes that are whole or absent, whatever dies in between."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tracehooks.core.errors import TracehooksError, UnwritableError


def write_atomic(path: Path, data: bytes) -> None:
    """Replace the file's content by way of a temporary file beside it; a reader sees the old content or the new."""
    temporary = path.with_name(f".{path.name}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        write_all(descriptor, data, 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(temporary, path)
    sync_directory(path.parent)


def write_all(descriptor: int, data: bytes | bytearray, offset: int) -> None:
    """Write at an offset. One system call unless the file system takes less than it was given (a full disk does)."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def sync_directory(path: Path) -> None:
    """Make the names in a directory survive the machine."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the operating system's refusals into `UnwritableError` with one clear line."""
    try:
        yield
    except TracehooksError:
        raise
    except OSError as error:
        raise UnwritableError(path, error.strerror or str(error)) from error
