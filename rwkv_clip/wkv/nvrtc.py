"""Compiling wkv6.cu at first use, and launching its kernels on torch's current stream.

NVRTC compiles through cuda.core, which needs neither nvcc nor a C++ compiler: ``pip install "tracehooks[cuda]"``. Nothing
is compiled at import, and compiling needs no GPU.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from dataclasses import dataclass
from importlib import resources
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from cuda.core import ObjectCode

__all__ = ["STORAGE", "Build", "EngineError", "Kernel", "compile_kernels", "load"]

STORAGE = {torch.float32: "float", torch.bfloat16: "BFloat16", torch.float16: "Half"}
"""Dtypes that tensors may have, with their names in wkv6.cu."""
CHUNK = 32
"""Positions of a chunk, L in wkv6.cu."""
PLAIN_SHARED_BYTES = 48 * 1024
"""Shared memory of a block that a kernel may use unasked. Source: CUDA C++ Programming Guide, compute capabilities."""


class EngineError(RuntimeError):
    """The CUDA engine cannot be used here: what was missing, and how to get it."""


@dataclass(frozen=True)
class Build:
    """What wkv6.cu is compiled for: N, the dtype of r, k, v and y, and that of w."""

    head_size: int
    input: torch.dtype
    decay: torch.dtype

    @property
    def threads(self) -> int:
        """Threads of a block, THREADS in wkv6.cu."""
        return self.head_size * CHUNK // 16

    def shared_bytes(self, name: str) -> int:
        """Bytes of shared memory of a block of that kernel, the size of (Backward)Memory in wkv6.cu."""
        columns = self.head_size // 4
        stride = self.head_size + 4 * (1 - columns % 2)
        matrices = 7 if name == "wkv6_backward" else 5
        return 4 * (matrices * CHUNK * stride + CHUNK * (CHUNK + 4) + stride)


def _cuda_core() -> ModuleType:
    try:
        return importlib.import_module("cuda.core")
    except ImportError as error:
        raise EngineError(f'the CUDA WKV kernel needs cuda.core ({error}): pip install "tracehooks[cuda]"') from error


@functools.cache
def compile_kernels(build: Build, arch: str) -> ObjectCode:
    """Compile both kernels to a cubin for ``arch``, such as ``sm_90``. Takes seconds and needs no GPU.

    Raises:
        EngineError: without cuda.core or NVRTC, or when NVRTC refuses, with its log.
    """
    core = _cuda_core()
    source = resources.files("rwkv_clip.wkv").joinpath("wkv6.cu").read_text(encoding="utf-8")
    macros = {"HEAD_SIZE": str(build.head_size), "INPUT": STORAGE[build.input], "DECAY": STORAGE[build.decay]}
    options = core.ProgramOptions(name="wkv6.cu", arch=arch, std="c++17", define_macro=list(macros.items()))
    try:
        return core.Program(source, "c++", options).compile("cubin")
    except Exception as error:  # the errors of cuda.core have no base of their own
        raise EngineError(f"NVRTC could not compile the CUDA WKV kernel for {arch}: {error}") from error


class Kernel:
    """One kernel on one device."""

    def __init__(self, name: str, build: Build, device: torch.device) -> None:
        self._name, self._build, self._device = name, build, device
        self._shared_bytes = build.shared_bytes(name)
        with torch.cuda.device(device):
            gpu = _cuda_core().Device(device.index)
            offered = gpu.properties.max_shared_memory_per_block_optin
            if self._shared_bytes > offered:
                raise EngineError(
                    f"the CUDA WKV kernel for heads of {build.head_size} channels needs {self._shared_bytes} bytes of "
                    f"shared memory, {gpu.name} offers {offered}"
                )
            gpu.set_current()
            self._kernel = compile_kernels(build, f"sm_{gpu.arch}").get_kernel(name)
            self._allow_shared_memory()
            blocks = self._kernel.occupancy.max_active_blocks_per_multiprocessor(build.threads, self._shared_bytes)
            if blocks == 0:
                raise EngineError(f"{gpu.name} cannot run a block of {name} for heads of {build.head_size} channels")
        self.resident: int = blocks * gpu.properties.multiprocessor_count
        """Blocks that the device runs at once."""

    def __call__(self, blocks: int, *arguments: Tensor | int) -> None:
        """Launch so many blocks on torch's current stream of the device; tensors are passed as pointers, ints as int."""
        core = _cuda_core()
        config = core.LaunchConfig(grid=blocks, block=self._build.threads, shmem_size=self._shared_bytes)
        values = [x.data_ptr() if isinstance(x, Tensor) else ctypes.c_int(x) for x in arguments]
        with torch.cuda.device(self._device):
            core.Device(self._device.index).set_current()
            core.launch(_CurrentStream(self._device), config, self._kernel, *values)

    def _allow_shared_memory(self) -> None:
        """Ask for more shared memory than a kernel gets unasked; cuda.core has no call for that."""
        from cuda.bindings import driver

        if self._shared_bytes <= PLAIN_SHARED_BYTES:
            return
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (status,) = driver.cuKernelSetAttribute(limit, self._shared_bytes, self._kernel.handle, self._device.index)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise EngineError(f"{self._name}: {self._shared_bytes} bytes of shared memory were refused: {status.name}")


@dataclass(frozen=True)
class _CurrentStream:
    """torch's current stream of a device, as cuda.core takes streams."""

    device: torch.device

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, torch.cuda.current_stream(self.device).cuda_stream


@functools.cache
def load(name: str, build: Build, device: torch.device) -> Kernel:
    """Return ``wkv6_forward`` or ``wkv6_backward`` on a device, compiled when first asked for.

    Raises:
        EngineError: when it cannot be compiled, does not fit the device, or the driver refuses it.
    """
    try:
        return Kernel(name, build, device)
    except EngineError:
        raise
    except Exception as error:  # the errors of cuda.core have no base of their own
        raise EngineError(f"the CUDA WKV kernel could not be loaded on {device}: {error}") from error
