"""Compiling the CUDA kernels, which needs no GPU, and choosing an engine where there is none."""

from __future__ import annotations

import ctypes
import itertools
import sys
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from rwkv_clip.wkv import EngineError, cuda, nvrtc, wkv6_bidirectional
from rwkv_clip.wkv.nvrtc import Build, compile_kernels

from .cases import output_and_gradients, random_inputs

DTYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float16, torch.float16)]
ARCHITECTURES = ["sm_80", "sm_90", "sm_100"]
LEAST_SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}


def compiles(build: Build, arch: str) -> None:
    """The result is an ELF file for CUDA with both kernels in it, and they fit into a block's shared memory."""
    code = compile_kernels(build, arch).code
    assert isinstance(code, bytes)
    assert code[:4] == b"\x7fELF"
    assert int.from_bytes(code[18:20], "little") == 190  # EM_CUDA
    for name in ("wkv6_forward", "wkv6_backward"):
        assert b".text." + name.encode() in code
        assert build.shared_bytes(name) <= LEAST_SHARED_BYTES[arch]


@pytest.mark.parametrize(("arch", "dtypes", "N"), list(zip(ARCHITECTURES, DTYPES, (64, 80, 8), strict=True)))
def test_compiles_to_machine_code(arch, dtypes, N):
    """Each architecture and each dtype compiles to machine code, with one of the head sizes in use."""
    compiles(Build(N, *dtypes), arch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "dtypes", "N"), list(itertools.product(ARCHITECTURES, DTYPES, (4, 8, 12, 36, 64, 80, 96, 124, 128)))
)
def test_every_head_size_compiles_for_every_architecture(arch, dtypes, N):
    """The whole product of architectures, dtypes and head sizes compiles."""
    compiles(Build(N, *dtypes), arch)


def test_what_nvrtc_says_is_passed_on():
    """A refusal by NVRTC is an EngineError that names the architecture and carries its log."""
    with pytest.raises(EngineError, match=r"(?s)could not compile the CUDA WKV kernel for sm_1: .*arch"):
        compile_kernels(Build(8, torch.float32, torch.float32), "sm_1")


def test_without_cuda_core_it_is_named(monkeypatch):
    """Without cuda.core the error says so, and what to install."""
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(EngineError, match=r'needs cuda.core .*: pip install "tracehooks\[cuda\]"'):
        compile_kernels(Build(16, torch.float32, torch.float32), "sm_80")


def test_importing_loads_nothing_of_cuda(run_python):
    """Importing and using the operator on the CPU does not load cuda.core. (torch itself loads its bindings.)"""
    code = (
        "import sys, torch; from rwkv_clip.wkv import wkv6_bidirectional as f; x = torch.ones(1, 2, 1, 4)\n"
        "f(x, x, x, x, x[0, 0]); print([name for name in sys.modules if name.startswith('cuda.core')])"
    )
    assert run_python("-c", code).stdout.strip() == "[]"


def test_cuda_engine_refuses_cpu_tensors():
    """Asked for by name, the CUDA engine says that tensors must be on a CUDA device and where they are."""
    *inputs, _ = random_inputs(1, 2, 1, 4, "mid", 0, torch.float32)
    with pytest.raises(ValueError, match="'cuda': all inputs must be on one CUDA device; seen r on cpu"):
        wkv6_bidirectional(*inputs, engine="cuda")


class OnCuda(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize(
    ("N", "dtype", "problem"),
    [
        (128, torch.float32, None),
        (80, torch.bfloat16, None),
        (132, torch.float32, "heads may have at most 128 channels; seen 132"),
        (8, torch.float64, "inputs must be float32, bfloat16 or float16; seen r of torch.float64"),
    ],
)
def test_what_the_cuda_engine_takes(N, dtype, problem):
    """Heads of up to 128 channels in three dtypes; anything else is named."""
    *inputs, _ = (x.as_subclass(OnCuda) for x in random_inputs(1, 2, 1, N, "mid", 0, dtype))
    assert cuda.misfit(*inputs) == problem


def test_falls_back_and_says_why_once(monkeypatch):
    """Where the kernel cannot be had, auto warns once with the reason and gives the chunked engine's numbers."""

    def fail(*arguments):
        raise EngineError("nothing to compile with")

    monkeypatch.setattr(nvrtc, "load", fail)
    monkeypatch.setattr(cuda, "misfit", lambda *tensors: None)
    inputs = random_inputs(1, 5, 1, 12, "mid", 0, torch.float32)
    with pytest.warns(RuntimeWarning, match=r"nothing to compile with\. The chunked WKV engine is used instead"):
        seen = output_and_gradients(inputs, "auto")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = output_and_gradients(inputs, "auto")
    for first, second, expected in zip(seen, again, output_and_gradients(inputs, "chunked"), strict=True):
        assert torch.equal(first, expected)
        assert torch.equal(second, expected)


class FakeGpu:
    """As much of cuda.core, with one GPU, as a kernel asks for before and when it is launched."""

    arch, name = "90", "a GPU"

    def __init__(self, offered: int = 227 * 1024, blocks: int = 2) -> None:
        self.properties = SimpleNamespace(max_shared_memory_per_block_optin=offered, multiprocessor_count=132)
        occupancy = SimpleNamespace(max_active_blocks_per_multiprocessor=lambda threads, shared: blocks)
        self.kernel = SimpleNamespace(occupancy=occupancy, handle=None)
        self.launches: list[tuple[object, ...]] = []
        self.Device, self.LaunchConfig = lambda index: self, dict

    def set_current(self) -> None: ...

    def launch(self, *arguments: object) -> None:
        self.launches.append(arguments)

    def kernel_of(self, build: Build, name: str = "wkv6_forward") -> nvrtc.Kernel:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nvrtc, "_cuda_core", lambda: self)
            patch.setattr(torch.cuda, "device", lambda device: nullcontext())
            patch.setattr(nvrtc, "compile_kernels", lambda *_: SimpleNamespace(get_kernel=lambda name: self.kernel))
            kernel = nvrtc.load.__wrapped__(name, build, torch.device("cuda", 0))
            kernel(7, 3, torch.zeros(2))
            return kernel


SMALL = Build(8, torch.float32, torch.float32)


def test_launches_the_threads_and_shared_memory_of_the_build():
    """A launch has the build's threads and shared memory, the tensors' addresses, ints as 32 bits, torch's stream."""
    gpu = FakeGpu()
    kernel = gpu.kernel_of(SMALL)
    (stream, config, launched, number, address), *more = gpu.launches
    assert kernel.resident == 2 * 132
    assert config == {"grid": 7, "block": 16, "shmem_size": SMALL.shared_bytes("wkv6_forward")}
    assert (launched, type(number), number.value, type(address), more) == (gpu.kernel, ctypes.c_int, 3, int, [])
    assert stream.device == torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("gpu", "problem"),
    [
        (FakeGpu(offered=1024), r"heads of 8 channels needs \d+ bytes of shared memory, a GPU offers 1024"),
        (FakeGpu(blocks=0), "a GPU cannot run a block of wkv6_forward for heads of 8 channels"),
        (SimpleNamespace(Device=lambda index: 1 / 0), "could not be loaded on cuda:0: division by zero"),
    ],
)
def test_a_gpu_that_does_not_fit_is_named(gpu, problem):
    """Too little shared memory, no block at all, a driver that refuses: an EngineError says so."""
    with pytest.raises(EngineError, match=problem):
        FakeGpu.kernel_of(gpu, SMALL)
