"""The CUDA source itself, compiled for the host, in the place of the kernels that a GPU would run."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rwkv_clip.wkv import nvrtc
from rwkv_clip.wkv.cuda import wkv6_cuda, wkv6_cuda_backward

HERE = Path(__file__).parent
SOURCE = Path(nvrtc.__file__).with_name("wkv6.cu")
COMPILER = shutil.which("g++")
FLAGS = ["-std=c++17", "-fPIC", "-shared", "-fno-strict-aliasing", "-Wno-unknown-pragmas"]
PLAIN = ("-O1", "-g0")
SANITIZED = ("-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def compile_for_host(build: nvrtc.Build, folder: Path, source: Path = SOURCE, flags: tuple[str, ...] = PLAIN) -> Path:
    """A library of the source for one build; an earlier one of the same text is used again."""
    types = (nvrtc.STORAGE[build.input], nvrtc.STORAGE[build.decay])
    macros = {"HEAD_SIZE": build.head_size, "INPUT": types[0], "DECAY": types[1], "WKV6_SOURCE": f'"{source}"'}
    arguments = [*FLAGS, *flags, *(f"-D{name}={value}" for name, value in macros.items())]
    read = (
        source.read_bytes(),
        *(file.read_bytes() for file in sorted(HERE.glob("*.[ch]*"))),
        repr(arguments).encode(),
    )
    library = folder / f"{hashlib.sha256(b''.join(read)).hexdigest()[:16]}.so"
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another test worker may be at it
        if not library.exists():
            unfinished = library.with_suffix(".unfinished")
            command = [COMPILER or "g++", *arguments, str(HERE / "emulate.cpp"), "-o", str(unfinished)]
            subprocess.run(command, check=True)
            unfinished.replace(library)
    return library


@dataclass(frozen=True)
class EmulatedKernel:
    """What ``nvrtc.Kernel`` is, on the host. Few blocks, so that each works through several heads."""

    name: str
    build: nvrtc.Build
    library: ctypes.CDLL
    seed: int
    resident: int = 3

    def __call__(self, blocks: int, *arguments: Tensor | int) -> None:
        values = [ctypes.c_void_p(x.data_ptr()) if isinstance(x, Tensor) else ctypes.c_int(x) for x in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        backward = ctypes.c_bool(self.name == "wkv6_backward")
        shared_bytes = ctypes.c_size_t(self.build.shared_bytes(self.name))
        self.library.launch.restype = ctypes.c_char_p
        error = self.library.launch(backward, blocks, self.build.threads, shared_bytes, self.seed, pointers)
        if error:
            raise RuntimeError(error.decode())


class Emulation:
    """Stands in for ``nvrtc.load``. ``seed`` 0: threads run in ascending order between barriers; else shuffled."""

    def __init__(self, folder: Path, source: Path = SOURCE, flags: tuple[str, ...] = PLAIN) -> None:
        self.seed = 0
        self.library = functools.cache(lambda build: ctypes.CDLL(str(compile_for_host(build, folder, source, flags))))

    def __call__(self, name: str, build: nvrtc.Build, device: torch.device) -> EmulatedKernel:
        return EmulatedKernel(name, build, self.library(build), self.seed)


@contextmanager
def poisoned() -> Iterator[None]:
    """New memory is full of NaN, so that what a kernel leaves out shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def emulated_results(inputs: list[Tensor]) -> list[Tensor]:
    """y and the gradients of r, k, v, w, u, from r, k, v, w, u and gy, where ``nvrtc.load`` is an emulation."""
    with poisoned():
        return [wkv6_cuda(*inputs[:5]), *wkv6_cuda_backward(*inputs)]
