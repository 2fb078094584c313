"""A tensor as it lies in a checkpoint: described at once, read a stretch at a time."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracehooks.core.errors import CheckpointError

CHUNK = 1 << 20
"""Elements read at a time."""

_PLAIN = {
    "float64": np.float64, "float32": np.float32, "float16": np.float16, "int64": np.int64, "int32": np.int32,
    "int16": np.int16, "int8": np.int8, "uint64": np.uint64, "uint32": np.uint32, "uint16": np.uint16,
    "uint8": np.uint8, "bool": np.bool_, "complex64": np.complex64, "complex128": np.complex128,
}  # fmt: skip
_RAW = {**_PLAIN, "bfloat16": np.uint16, "float8_e4m3fn": np.uint8, "float8_e5m2": np.uint8}
SIZES = {name: np.dtype(kind).itemsize for name, kind in _RAW.items()}
"""Bytes an element of each dtype that can be read."""


@dataclass(frozen=True)
class Region:
    """Bytes of a file, or bytes that had to be unpacked (then ``held``)."""

    path: Path
    start: int
    length: int
    held: bytes | None = field(default=None, repr=False, compare=False)

    def read(self, offset: int, size: int) -> bytes:
        """``size`` bytes from ``offset`` on.

        Raises:
            CheckpointError: the file ends before them.
        """
        if offset + size > self.length:
            raise CheckpointError(self.path, f"bytes {offset + size} of a storage of {self.length} are asked for")
        if self.held is not None:
            return self.held[offset : offset + size]
        with self.path.open("rb") as file:
            file.seek(self.start + offset)
            found = file.read(size)
        if len(found) < size:
            raise CheckpointError(
                self.path, f"ends at byte {self.start + offset + len(found)} in the middle of a tensor"
            )
        return found

    def whole(self) -> NDArray[np.uint8]:
        """All bytes, without reading them yet where they lie in a file."""
        if self.held is not None or not self.length:
            return np.frombuffer(self.held or b"", np.uint8)
        if self.path.stat().st_size < self.start + self.length:
            raise CheckpointError(self.path, "ends in the middle of a tensor")
        with self.path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return np.frombuffer(mapped, np.uint8, self.length, self.start)


@dataclass(frozen=True)
class Stored:
    """A strided view of a region: shape, strides and offset count elements. Dtypes as torch prints them."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    region: Region

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def place(self) -> tuple[Any, ...]:
        """Equal for two names of one tensor: tied weights share every byte. None of it is known of empty ones."""
        return (self.region.path, self.region.start, self.offset, self.shape, self.strides, self.dtype)

    def chunks(self) -> Iterator[NDArray[Any]]:
        """The elements in logical order, flat, at most `CHUNK` at a time, as numbers NumPy computes with.

        Raises:
            CheckpointError: the file ends before them, or the dtype cannot be read.
        """
        if self.dtype not in _RAW:
            raise CheckpointError(self.region.path, f"dtype {self.dtype} cannot be read, only {', '.join(_RAW)}")
        if not self.count:
            return
        if self.strides == contiguous(self.shape):
            size = SIZES[self.dtype]
            for start in range(0, self.count, CHUNK):
                number = min(CHUNK, self.count - start)
                raw = self.region.read((self.offset + start) * size, number * size)
                yield decoded(np.frombuffer(raw, _RAW[self.dtype]), self.dtype)
        else:
            view = self._view()
            for start in range(0, self.count, CHUNK):
                flat = view.flat[start : start + CHUNK]
                yield decoded(np.ascontiguousarray(flat), self.dtype)

    def read(self) -> NDArray[Any]:
        """All elements, in the tensor's shape; those of complex tensors with their two components last."""
        parts = list(self.chunks())
        whole = np.concatenate(parts) if parts else np.empty(0, np.float32)
        return whole.reshape((*self.shape, 2) if self.dtype.startswith("complex") else self.shape)

    def _view(self) -> NDArray[Any]:
        size = SIZES[self.dtype]
        last = self.offset + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        if (last + 1) * size > self.region.length:
            raise CheckpointError(self.region.path, f"a tensor of {last + 1} elements in {self.region.length} bytes")
        elements: NDArray[Any] = self.region.whole()[: self.region.length // size * size].view(_RAW[self.dtype])
        steps = tuple(stride * size for stride in self.strides)
        return np.lib.stride_tricks.as_strided(elements[self.offset :], self.shape, steps, writeable=False)


@dataclass(frozen=True)
class Assembled:
    """A tensor that lies in pieces, each at an offset of the whole; put together when it is read."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[tuple[int, ...], Stored], ...]

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def place(self) -> tuple[Any, ...]:
        """Equal for two names of one tensor."""
        return tuple(piece.place for _, piece in self.pieces)

    def chunks(self) -> Iterator[NDArray[Any]]:
        """The elements in logical order, flat."""
        yield self.read().reshape(-1)

    def read(self) -> NDArray[Any]:
        """All elements, in the tensor's shape.

        Raises:
            CheckpointError: the pieces do not make up the whole.
        """
        held = sum(piece.count for _, piece in self.pieces)
        if held != self.count:
            raise CheckpointError(
                self.pieces[0][1].region.path, f"pieces of {held} elements of a tensor of {self.count}"
            )
        parts = [(at, piece.read()) for at, piece in self.pieces]
        whole = np.empty(self.shape + parts[0][1].shape[len(self.shape) :], parts[0][1].dtype)
        for at, part in parts:
            whole[tuple(slice(start, start + size) for start, size in zip(at, part.shape, strict=False))] = part
        return whole


Kept = Stored | Assembled
"""A tensor of a checkpoint."""


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides, in elements, of a row-major tensor."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def decoded(raw: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Raw elements as numbers: bfloat16 and 8-bit floats become float32, complex ones their components."""
    if dtype == "bfloat16":
        return np.asarray(np.left_shift(raw, 16, dtype=np.uint32)).view(np.float32)
    if dtype.startswith("float8"):
        return np.take(_EIGHT_BITS[dtype], raw)
    return np.asarray(raw.view(raw.real.dtype)) if dtype.startswith("complex") else raw


def _eight_bit_floats(exponent_bits: int, *, finite: bool) -> NDArray[np.float32]:
    """All 256 values of an 8-bit float (Micikevicius et al., "FP8 formats for deep learning", 2022); ``finite``: without
    infinities, all ones being the only NaN."""
    mantissa_bits = 7 - exponent_bits
    codes = np.arange(256)
    exponent, mantissa = (codes & 127) >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    bias, top = (1 << (exponent_bits - 1)) - 1, (1 << exponent_bits) - 1
    share = mantissa / (1 << mantissa_bits)
    values = np.where(exponent == 0, share * 2.0 ** (1 - bias), (1 + share) * 2.0 ** (exponent.astype(float) - bias))
    if finite:
        values[(codes & 127) == 127] = np.nan
    else:
        values[(exponent == top) & (mantissa == 0)], values[(exponent == top) & (mantissa > 0)] = np.inf, np.nan
    return np.where(codes > 127, -values, values).astype(np.float32)


_EIGHT_BITS = {
    "float8_e4m3fn": _eight_bit_floats(4, finite=True),
    "float8_e5m2": _eight_bit_floats(5, finite=False),
}
