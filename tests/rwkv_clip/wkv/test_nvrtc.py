"""Compiling the CUDA kernels, which needs no GPU, and choosing an engine where there is none."""

from __future__ import annotations

import itertools
import sys
import warnings

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
