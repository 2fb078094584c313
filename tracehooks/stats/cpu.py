"""The native kernel for tensors in the processor's memory: cpu.cpp, loaded when it is first needed.

The library is an optional part of the package: where it could not be built, or cannot be loaded, every function here
returns None, the reference takes over, and a warning says so once.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import inspect
import multiprocessing
import os
import struct
import warnings
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from tracehooks.stats.layout import INTEGERS, Spec
from tracehooks.stats.plain import address, has_memory, plain

ABI = 6
PROCESS = os.getpid()
BEST = -1
"""The level of the widest registers that the processor has; levels count from 0, which needs nothing special."""

PARALLEL = 1 << 20
"""Bytes from which on threads are worth waking."""

BRIEF = 1 << 18
"""Bytes up to which a call keeps Python's lock: giving it away may cost more than the call."""

DTYPES = {
    dtype: code
    for code, dtype in enumerate(
        (
            torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool, torch.uint8, torch.int8,
            torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64, torch.int64,
        )
    )
}  # fmt: skip

REQUEST = struct.Struct("=qqqqq")
"""Arguments of ``summarize``: address, elements, options, address of the row, address of earlier elements or 0. One
argument costs ctypes least."""

MANY_REQUEST = struct.Struct("=qqq")
"""Arguments of ``summarize_many`` and ``nonfinite``: address of as many requests, how many, threads for those that ask
for none."""

ROWS_REQUEST = struct.Struct("=qqqqq")
"""Arguments of ``hash_rows``: address, rows, options, address of the hashes, bytes of a row."""

Entry = Callable[[bytes], int]


class Door(Protocol):
    """What door.cpp offers. It looks at tensors of torch's own two classes by itself; lists must be lists."""

    def measure(self, x: Tensor, out: Tensor, flags: int) -> bool:
        """Writes the row of a small tensor; whether it could."""

    def measure_many(self, tensors: list[Tensor], out: Tensor, flags: int, threads: int) -> list[int] | None:
        """Writes each tensor's row; the indices of those that it could not, None for all."""

    def nonfinite(self, tensors: list[Tensor], threads: int) -> tuple[int, list[int]]:
        """What tensors hold together, negative for all that it could not look at, and the indices of such."""


class UnusableError(Exception):
    """Why there is no native kernel."""


@dataclass(frozen=True)
class Library:
    """Entry points of cpu.cpp. The ``brief`` ones are the same without giving away Python's lock."""

    summarize: Entry
    brief: Entry
    summarize_many: Entry
    brief_many: Entry
    nonfinite: Entry
    brief_nonfinite: Entry
    hash_rows: Entry
    levels: tuple[str, ...]
    """Names of the instruction sets that this processor has, from the most portable to the widest."""
    addresses: tuple[int, int, int]
    """Of ``summarize``, ``summarize_many`` and ``nonfinite``."""
    door: Door | None
    """The quick way in, where the library has it."""


@cache
def library() -> Library | None:
    """The native kernel, or None after a warning."""
    try:
        return load(Path(__file__).parent)
    except UnusableError as reason:
        warnings.warn(
            f"tracehooks measures tensors without its native kernel, several times slower: {reason}. "
            "Reinstalling the package where a C++17 compiler is found builds it.",
            RuntimeWarning,
            stacklevel=3,
        )
        return None


def load(folder: Path) -> Library:
    """The library that the package's build left in a folder; raises UnusableError."""
    names = [f"_cpu{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    path = next((folder / name for name in names if (folder / name).exists()), None)
    if path is None:
        raise UnusableError("it was not built for this Python when the package was installed")
    try:
        free, held = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        found = int(free.tracehooks_abi())
        if found != ABI:
            raise UnusableError(f"{path.name} belongs to another version of tracehooks")
        name_of = free.tracehooks_level_name
        name_of.restype = ctypes.c_char_p
        levels = tuple(name_of(level).decode() for level in range(free.tracehooks_level() + 1))
        free.tracehooks_use_team(_team())
    except (OSError, AttributeError) as error:
        raise UnusableError(f"{path.name} cannot be loaded ({error})") from error
    return Library(
        free.tracehooks_summarize,
        held.tracehooks_summarize,
        free.tracehooks_summarize_many,
        held.tracehooks_summarize_many,
        free.tracehooks_nonfinite,
        held.tracehooks_nonfinite,
        free.tracehooks_hash_rows,
        levels,
        (
            _address(free.tracehooks_summarize),
            _address(free.tracehooks_summarize_many),
            _address(free.tracehooks_nonfinite),
        ),
        _door(path),
    )


def _team() -> ctypes.c_void_p:
    """The function by which the OpenMP runtime that torch runs on gives its threads work, null where there is none.

    After fork these runtimes wait forever for threads that are gone: a child that may be such has threads of its own.
    """
    if os.getpid() == PROCESS and multiprocessing.parent_process() is None:
        for path in (Path(inspect.getfile(torch)).parent / "lib").glob("libtorch_cpu.*"):
            try:
                return ctypes.cast(ctypes.CDLL(str(path)).GOMP_parallel, ctypes.c_void_p)
            except (OSError, AttributeError):
                continue
    return ctypes.c_void_p()


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _door(path: Path) -> Door | None:
    """The quick way into the library, if it was built with Python's headers and torch's tensors show themselves."""
    capsule = getattr(Tensor, "__dlpack_c_exchange_api__", None)  # since torch 2.10
    loader = importlib.machinery.ExtensionFileLoader("tracehooks.stats._cpu", str(path))
    try:
        module = importlib.util.module_from_spec(importlib.machinery.ModuleSpec(loader.name, loader, origin=str(path)))
    except ImportError:
        return None
    return module if capsule is not None and module.connect(capsule, Tensor, Parameter) else None


def measured(x: Tensor, spec: Spec, out: Tensor) -> bool:
    """Writes the statistics of a small tensor on the CPU to a row; whether x and out were such."""
    kernel = library()
    return kernel is not None and kernel.door is not None and kernel.door.measure(x, out, spec.flags)


def summarize(x: Tensor, spec: Spec, out: Tensor | None = None, *, level: int = BEST) -> Tensor | None:
    """Packed statistics of a tensor on the CPU, or None where this kernel cannot measure it."""
    kernel = library()
    if kernel is None:
        return None
    if out is None:
        out = torch.empty(spec.width, dtype=torch.int64, device="cpu")
        if level == BEST and measured(x, spec, out):
            return out
    data = address(x, DTYPES)
    if data is None:
        return _converted(x, spec, out, level)
    count = x.numel()
    size = count * x.itemsize
    options = DTYPES[x.dtype] | spec.flags << 8 | (level + 1) << 16
    if size <= BRIEF:
        return None if kernel.brief(REQUEST.pack(data, count, options, out.data_ptr(), 0)) else out
    if size >= PARALLEL:
        options |= torch.get_num_threads() << 32
    return None if kernel.summarize(REQUEST.pack(data, count, options, out.data_ptr(), 0)) else out


def summarize_many(tensors: Sequence[Tensor], spec: Spec, out: Tensor) -> list[int]:
    """Packed statistics of many tensors in one call, tensor i's in row i of ``out``.

    Returns:
        The indices of those that it does not measure, whose rows it leaves as they are.
    """
    kernel = library()
    if kernel is None:
        return list(range(len(tensors)))
    if kernel.door is not None:
        left = kernel.door.measure_many(list(tensors), out, spec.flags, torch.get_num_threads())
        return list(range(len(tensors))) if left is None else left
    requests, others, total = array("q"), [], 0
    row, stride, threads, flags = out.data_ptr(), out.stride(0) * out.itemsize, torch.get_num_threads(), spec.flags << 8
    for i, x in enumerate(tensors):
        data = address(x, DTYPES) if x.is_cpu else None
        if data is None:
            others.append(i)
            continue
        count = x.numel()
        size = count * x.itemsize
        options = DTYPES[x.dtype] | flags | (threads << 32 if size >= PARALLEL else 0)
        requests.extend((data, count, options, row + i * stride, 0))
        total += size
    call = kernel.brief_many if total <= BRIEF else kernel.summarize_many
    start, words = requests.buffer_info()
    if call(MANY_REQUEST.pack(start, words // 5, threads if total >= PARALLEL else 1)):
        return list(range(len(tensors)))
    return others


def nonfinite(tensors: Sequence[Tensor], *, level: int = BEST) -> tuple[int, list[Tensor]]:
    """Which non-finite values tensors on the CPU hold together, in the bits of `layout`, and those not looked at."""
    kernel = library()
    if kernel is None:
        return 0, list(tensors)
    if kernel.door is not None and level == BEST:
        found, left = kernel.door.nonfinite(list(tensors), torch.get_num_threads())
        return (found, [tensors[i] for i in left]) if found >= 0 else (0, list(tensors))
    requests, others, total = array("q"), [], 0
    threads = torch.get_num_threads()
    for x in tensors:
        data = address(x, DTYPES)
        if data is None:
            others.append(x)
            continue
        count = x.numel()
        size = count * x.itemsize
        options = DTYPES[x.dtype] | (level + 1) << 16 | (threads << 32 if size >= PARALLEL else 0)
        requests.extend((data, count, options, 0, 0))
        total += size
    call = kernel.brief_nonfinite if total <= BRIEF else kernel.nonfinite
    start, words = requests.buffer_info()
    found = call(MANY_REQUEST.pack(start, words // 5, 1))
    return (found, others) if found >= 0 else (0, list(tensors))


def hash_rows(x: Tensor, *, level: int = BEST) -> Tensor | None:
    """Content hash of each row of a dense real (rows, elements) tensor on the CPU, or None."""
    kernel = library()
    if kernel is None or not (x.is_cpu and has_memory(x)):
        return None
    x = x.contiguous()
    rows, size = x.shape[0], x.shape[1] * x.itemsize
    out = torch.empty(rows, dtype=torch.int64, device="cpu")
    threads = torch.get_num_threads() if rows * size >= PARALLEL else 1
    options = (level + 1) << 16 | threads << 32
    return None if kernel.hash_rows(ROWS_REQUEST.pack(x.data_ptr(), rows, options, out.data_ptr(), size)) else out


def _converted(x: Tensor, spec: Spec, out: Tensor | None, level: int) -> Tensor | None:
    """The same for a tensor whose elements do not lie in memory as they are and in order, by way of one that does."""
    with torch.no_grad():
        dense = plain(x)
        if not (dense.is_cpu and has_memory(dense)):
            return None
        dense = dense.contiguous().as_subclass(Tensor)
        if dense.dtype in DTYPES:
            return summarize(dense, spec, out, level=level)
        return _of_bytes(dense, spec, out, level)


def _of_bytes(x: Tensor, spec: Spec, out: Tensor | None, level: int) -> Tensor | None:
    """Statistics of an eight-bit float, all of which float32 holds: the values converted, the hash of the bytes."""
    if not x.is_floating_point() or x.itemsize != 1:
        return None
    content = hash_rows(x.view(1, -1), level=level) if spec.hash else None
    row = summarize(x.to(torch.float32), spec, out, level=level)
    if row is not None and content is not None:
        row[INTEGERS.index("hash")] = content[0]
    return row
