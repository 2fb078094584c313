"""The CUDA kernels' arithmetic: their very source, compiled for the host, against the reference and the original."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rwkv_clip.wkv import cuda, nvrtc
from rwkv_clip.wkv.reference import wkv6_reference, wkv6_reference_backward

from .cases import CASES, DECAYS, RESULTS, largest_error, output_and_gradients, random_inputs, recorded_case
from .emulation import COMPILER, SANITIZED, SOURCE, Emulation, compile_for_host, emulated_results

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++")

DECAY_OF = {torch.bfloat16: torch.float32, torch.float16: torch.float16}
LENGTHS = [1, 2, 3, 31, 32, 33, 49, 77, 196, 256, 1025]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where libraries are kept, shared by all test workers."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "wkv6"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def session_emulation(folder: Path) -> Emulation:
    """The kernels, on the host."""
    return Emulation(folder)


@pytest.fixture
def emulation(session_emulation: Emulation, monkeypatch: pytest.MonkeyPatch) -> Emulation:
    """The kernels, on the host, where the CUDA engine loads its own."""
    monkeypatch.setattr(nvrtc, "load", session_emulation)
    monkeypatch.setattr(session_emulation, "seed", 0)
    return session_emulation


def reference_results(inputs: list[Tensor]) -> list[Tensor]:
    wide = [x.double() for x in inputs]
    return [wkv6_reference(*wide[:5]), *wkv6_reference_backward(*wide)]


def agrees_with_the_reference(inputs: list[Tensor], tolerance: float) -> None:
    for name, seen, expected, like in zip(
        RESULTS, emulated_results(inputs), reference_results(inputs), [inputs[2], *inputs[:5]], strict=True
    ):
        assert seen.dtype == like.dtype, name
        assert largest_error(seen, expected) < tolerance, name


@pytest.mark.usefixtures("emulation")
@pytest.mark.parametrize("case", CASES)
def test_agrees_with_the_original(numbers, case):
    """Output and all five gradients equal the original's to float32 rounding, for every recorded case."""
    inputs, expected = recorded_case(numbers("wkv_cases.npz"), case, torch.float32)
    for name, seen, value in zip(RESULTS, emulated_results(inputs), expected, strict=True):
        assert largest_error(seen, value) < 3e-6, name


@pytest.mark.usefixtures("emulation")
@pytest.mark.parametrize(("T", "N"), list(zip(LENGTHS, itertools.cycle([64, 80]), strict=False)))
def test_every_length_agrees_with_the_reference(T, N):
    """For lengths in, at and over one chunk of time and every kind of decay, all results are the recurrence's."""
    for decay in DECAYS if T < 100 else ("mixed", "saturated"):
        size = 2 if T < 100 else 1
        agrees_with_the_reference(random_inputs(size, T, size, N, decay, T, torch.float32), 3e-6)


@pytest.mark.usefixtures("emulation")
@pytest.mark.parametrize("dtype", DECAY_OF, ids=str)
def test_half_precision_is_computed_in_single(dtype):
    """Half inputs give results in their own dtypes, as near as those can hold them; w may have another than r, k, v."""
    r, k, v, w, u, gy = random_inputs(2, 35, 2, 8, "mid", 0)
    inputs = [x.to(dtype) for x in (r, k, v)] + [x.to(DECAY_OF[dtype]) for x in (w, u)] + [gy.to(dtype)]
    agrees_with_the_reference(inputs, torch.finfo(dtype).eps)


@pytest.mark.usefixtures("emulation")
@pytest.mark.parametrize("saturated", [5.0, 12.0, 20.0, 40.0, 88.0, 89.0, 300.0])
def test_decay_gradient_beside_saturated_channels(saturated):
    """Where decays underflow to zero their gradient is zero, and their neighbours' is right, in float32."""
    inputs = random_inputs(1, 77, 1, 64, "mid", 0, torch.float32)
    inputs[3][..., ::2] = saturated
    gw, expected = emulated_results(inputs)[4], reference_results(inputs)[4]
    assert float(expected[..., 1::2].abs().max()) > 0.5
    assert largest_error(gw, expected) < 1e-5
    assert float(gw[..., ::2].abs().max()) < 1e-40 or saturated == 5.0


def test_no_order_of_threads_changes_a_bit(emulation):
    """Between barriers threads may run in any order: shuffled, they give the same bits."""
    inputs = random_inputs(2, 70, 2, 8, "mixed", 0, torch.float32)
    in_order = emulated_results(inputs)
    for seed in range(1, 6):
        emulation.seed = seed
        for seen, expected in zip(emulated_results(inputs), in_order, strict=True):
            assert torch.equal(seen, expected)


@pytest.mark.usefixtures("emulation")
def test_what_the_caller_hands_over_may_be_strided_unaligned_or_of_mixed_dtypes():
    """Views, broadcast gradients, addresses off by one element, r, k, v of different dtypes: the same numbers."""
    inputs = random_inputs(2, 7, 2, 8, "mid", 7, torch.float32)
    inputs[5] = torch.ones_like(inputs[5])
    expected = emulated_results(inputs)
    strided = [x.mT.contiguous().mT for x in inputs]
    strided[5] = torch.ones(()).expand_as(inputs[5])
    strided[1] = torch.cat([torch.zeros(1), inputs[1].flatten()])[1:].view_as(inputs[1])
    assert strided[1].is_contiguous()
    for seen, value in zip(emulated_results(strided), expected, strict=True):
        assert torch.equal(seen, value)
    inputs[0] = inputs[0].bfloat16()
    agrees_with_the_reference(inputs, torch.finfo(torch.bfloat16).eps)


@pytest.mark.usefixtures("emulation")
def test_few_blocks_when_states_would_take_much_memory(monkeypatch):
    """When the states of all blocks exceed the limit, fewer run, at least one, with the same bits; no batch, no block."""
    inputs = random_inputs(2, 70, 2, 8, "mid", 1, torch.float32)
    expected = emulated_results(inputs)
    monkeypatch.setattr(cuda, "MOST_SCRATCH", 1)
    for seen, value in zip(emulated_results(inputs), expected, strict=True):
        assert torch.equal(seen, value)
    empty = emulated_results([x[:0] if x.dim() == 4 else x for x in inputs])
    assert [x.shape[0] for x in empty[:5]] == [0] * 5
    assert not bool(empty[5].any())


@pytest.mark.usefixtures("emulation")
def test_a_model_trains_on_it(model_of, inputs_of, monkeypatch):
    """A whole model on the kernels has the features and gradients of one on the chunked engine, in float32."""
    monkeypatch.setattr(cuda, "misfit", lambda *tensors: None)
    results = []
    for engine in ("chunked", "cuda"):
        model = model_of("tiny", torch.float32, wkv_engine=engine)
        image, text, _ = model(*inputs_of("tiny"))
        (image.sum() + text.sum()).backward()
        results.append([image.detach(), text.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    for seen, expected in zip(*reversed(results), strict=True):
        assert float((seen - expected).abs().max()) < 1e-4 * max(1.0, float(expected.abs().max()))


@pytest.mark.usefixtures("emulation")
def test_the_operator_passes_gradients_on(monkeypatch):
    """Asked for by name, the kernels are the operator, forward and backward."""
    monkeypatch.setattr(cuda, "misfit", lambda *tensors: None)
    inputs = random_inputs(1, 9, 2, 8, "mid", 3, torch.float32)
    for seen, expected in zip(output_and_gradients(inputs, "cuda"), emulated_results(inputs), strict=True):
        assert torch.equal(seen, expected)


@pytest.mark.parametrize("dtype", DECAY_OF, ids=str)
def test_storage_types_convert_as_torch_does(folder, dtype):
    """Every bit pattern widens to torch's number, and floats narrow to torch's nearest, subnormals and ties included."""
    library = ctypes.CDLL(str(compile_for_host(nvrtc.Build(8, dtype, DECAY_OF[dtype]), folder)))
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)
    wide = torch.empty(1 << 16)
    library.widen_all(ctypes.c_void_p(every.data_ptr()), ctypes.c_void_p(wide.data_ptr()), ctypes.c_size_t(1 << 16))
    assert torch.equal(wide.nan_to_num(nan=7.0), every.float().nan_to_num(nan=7.0))
    assert torch.equal(wide.isnan(), every.isnan())

    steps = torch.tensor([-1, 0, 1, 1 << 12, 1 << 15], dtype=torch.int32)  # about ties of both types
    floats = (wide.view(torch.int32).unsqueeze(1) + steps).flatten().view(torch.float32)
    narrow = torch.empty(floats.numel(), dtype=dtype)
    library.narrow_all(
        ctypes.c_void_p(floats.data_ptr()), ctypes.c_void_p(narrow.data_ptr()), ctypes.c_size_t(floats.numel())
    )
    expected = floats.to(dtype)
    assert torch.equal(narrow.isnan(), expected.isnan())
    finite = ~expected.isnan()
    assert torch.equal(narrow[finite].view(torch.int16), expected[finite].view(torch.int16))


def run_sanitized(source: Path, folder: Path, N: int = 8) -> subprocess.CompletedProcess[str]:
    """Run the kernels under the address and undefined-behaviour sanitizers, in a process of their own."""
    compile_for_host(nvrtc.Build(N, torch.bfloat16, torch.float32), folder, source, SANITIZED)
    runtime = subprocess.run([COMPILER, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    environment = {**os.environ, "LD_PRELOAD": runtime.stdout.strip(), "ASAN_OPTIONS": "detect_leaks=0"}
    command = [sys.executable, "-m", "tests.rwkv_clip.wkv.test_emulation", str(source), str(folder), str(N)]
    root = Path(__file__).parents[3]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False, timeout=300)


def under_the_sanitizer(source: str, folder: str, N: str) -> None:
    """What runs there: lengths in, at and over a chunk, wide and narrow storage."""
    nvrtc.load = Emulation(Path(folder), Path(source), SANITIZED)
    for T in (1, 2, 32, 35, 70):
        r, k, v, w, u, gy = random_inputs(1, T, 2, int(N), "mixed", T, torch.float32)
        agrees_with_the_reference([r.bfloat16(), k.bfloat16(), v.bfloat16(), w, u, gy.bfloat16()], 2**-7)


def test_no_access_out_of_bounds(folder):
    """Neither global nor shared memory is touched outside what was allocated."""
    done = run_sanitized(SOURCE, folder)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("N", [4, 20, 64, 80, 128])
def test_no_access_out_of_bounds_for_other_heads(folder, N):
    """Nor for head sizes whose rows are not padded, or that have more or fewer threads."""
    done = run_sanitized(SOURCE, folder, N)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "changed", "complaint"),
    [
        ("if (t >= of.count(chunk)) break;", "", "heap-buffer-overflow"),
        ("t < of.count(chunk)) {", "true) {", "heap-buffer-overflow"),
        ("chunks((T_ + L - 1) / L)", "chunks((T_ + L) / L)", "AddressSanitizer"),
        ("if (channel() < N) walk(m.e", "walk(m.e", "out of bounds"),
    ],
)
def test_the_sanitizer_would_see_it(folder, tmp_path, text, changed, complaint):
    """Sources with a planted mistake in their bounds fail that test."""
    source = SOURCE.read_text()
    assert text in source
    broken = tmp_path / "wkv6.cu"
    broken.write_text(source.replace(text, changed))
    done = run_sanitized(broken, folder)
    assert done.returncode != 0
    assert complaint in done.stderr


BARRIERS = SOURCE.read_text().count("__syncthreads();")


@pytest.mark.slow
@pytest.mark.parametrize("which", range(BARRIERS))
def test_every_barrier_is_needed(folder, tmp_path, monkeypatch, which):
    """Without any one of the barriers, some order of threads gives other numbers."""
    pieces = SOURCE.read_text().split("__syncthreads();")
    broken = tmp_path / "wkv6.cu"
    broken.write_text("__syncthreads();".join(pieces[: which + 1]) + ";" + "__syncthreads();".join(pieces[which + 1 :]))
    emulation = Emulation(folder, broken)
    monkeypatch.setattr(nvrtc, "load", emulation)
    inputs = random_inputs(2, 70, 2, 8, "mid", 0, torch.float32)
    expected = reference_results(inputs)
    errors = []
    for emulation.seed in range(6):
        seen = emulated_results(inputs)
        errors += [bool(((a - b).abs() < 1e-5 * b.abs().max()).all()) for a, b in zip(seen, expected, strict=True)]
    assert not all(errors)


@pytest.mark.slow
@pytest.mark.usefixtures("emulation")
@pytest.mark.parametrize("N", [4, 8, 12, 20, 32, 36, 64, 80, 96, 100, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_head_size_dtype_length_and_decay(N, dtype):
    """The whole product of head sizes, dtypes, lengths and decays agrees with the reference."""
    for T, decay in itertools.product(LENGTHS[:-1], DECAYS):
        inputs = [x.to(dtype) for x in random_inputs(1, T, 1, N, decay, T)]
        agrees_with_the_reference(inputs, max(3e-6, torch.finfo(dtype).eps))


if __name__ == "__main__":
    under_the_sanitizer(*sys.argv[1:])
