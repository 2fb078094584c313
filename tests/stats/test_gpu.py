"""Specification of the GPU's kernel, run by Triton's interpreter on the CPU: the reference's numbers, from one launch.

That it is right on a real device is checked by benchmarks/gpu.py, where there is one.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tracehooks.stats import Spec, gpu, reference
from tracehooks.stats.plain import plain

from .measuring import EVERYTHING, FLOATING, INTEGRAL, agree, content_of, expected, of_kind, row_of, values_of

pytest.importorskip("triton")

from triton.runtime import interpreter

CPU = torch.device("cpu")
SPECIAL = (0.0, -0.0, math.nan, math.inf, -math.inf, 1.0, -1.0)


@pytest.fixture(autouse=True)
def patched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter replaces its language anew at every call inside a kernel; once a launch is enough, and takes
    half the time."""
    patch = interpreter._patch_lang

    def patch_once(fn: Any) -> Any:
        inner = fn.__module__.startswith("tracehooks.") and not fn.__name__.startswith("summarize")
        return None if inner else patch(fn)

    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)


def launched(x: Tensor, spec: Spec = EVERYTHING) -> Tensor:
    """The kernel's row of a tensor, which it must be able to measure; the row is poisoned before."""
    row = torch.full((spec.width,), -7)
    assert gpu.summarize(x, spec, row)
    return row


def special(dtype: torch.dtype) -> Tensor:
    """Every kind of float: zeros of both signs, NaN, infinities, extremes and subnormals, an odd number of them."""
    limits = torch.finfo(dtype)
    least = torch.tensor([1], dtype=torch.int64).view(torch.uint8)[: dtype.itemsize].view(dtype).item()
    return torch.tensor([*SPECIAL, limits.max, limits.min, limits.tiny, least, -least, 0.1], dtype=dtype)


@pytest.mark.parametrize("dtype", FLOATING + INTEGRAL, ids=str)
def test_every_dtype_and_size(dtype: torch.dtype) -> None:
    """No element, one, an odd number and several chunks with holes give the reference's row."""
    for count in (0, 1, 1023, 16384 // dtype.itemsize + 1):
        x = of_kind("holes", count, dtype)
        agree(row_of(launched(x)), row_of(reference.summarize(x, EVERYTHING)))


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_special_values(dtype: torch.dtype) -> None:
    """NaN, infinities, zeros of both signs, extremes and subnormals count as what they are."""
    x = special(dtype)
    agree(row_of(launched(x)), expected(values_of(x), content_of(x)))
    assert row_of(launched(x))["zeros"] == 2
    nothing = x[2:5]  # NaN, +inf, -inf
    agree(row_of(launched(nothing)), expected(values_of(nothing), content_of(nothing)))


@pytest.mark.parametrize("kind", ["normal", "shifted", "tiny", "constant"])
def test_many_chunks_in_a_part(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of several chunks, as large tensors have them, merges their moments without loss."""
    monkeypatch.setattr(gpu, "PARTS", 2)
    x = of_kind(kind, 3 * 2048 + 5, torch.float64)
    agree(row_of(launched(x)), expected(values_of(x), content_of(x)))


@pytest.mark.parametrize("exponents", [(-1074,), (1000,), (-1022, 1000), (300, -300), (-700, 0)])
def test_magnitudes_of_float64(exponents: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Moments of float64 neither overflow nor vanish, also where chunks are of different magnitude."""
    monkeypatch.setattr(gpu, "PARTS", 2)
    chunk = of_kind("normal", 2048, torch.float64).clamp(-1.9, 1.9)
    x = torch.cat([(chunk * 2.0 ** (e / 2)) * 2.0 ** (e / 2) for e in (*exponents, *exponents)])
    agree(row_of(launched(x)), expected(values_of(x), content_of(x)))


@pytest.mark.parametrize("spec", [Spec(False), Spec(True), Spec(False, True, False), Spec(False, False, True)], ids=str)
def test_each_statistic_can_be_switched(spec: Spec) -> None:
    """What is not asked for is not there, and the rest is as it was."""
    x = of_kind("holes", 4100, torch.bfloat16)
    wanted, found = row_of(reference.summarize(x, spec), spec), row_of(launched(x, spec), spec)
    agree(found | {"histogram": 0, "hash": 0}, wanted | {"histogram": 0, "hash": 0}, sketch=spec.sketch)
    assert found.get("hash") == wanted.get("hash")
    assert str(found.get("histogram")) == str(wanted.get("histogram"))


@pytest.mark.filterwarnings("ignore:Sparse")
def test_tensors_that_are_not_plain_memory() -> None:
    """Views at odd addresses, strided, complex, sparse and negated tensors have the row of their values in order."""
    base = torch.randn(300)
    kinds: list[Tensor] = [
        base[1:], base[:10].to(torch.bfloat16)[3:], base.view(20, 15).t(), base[:6].to(torch.complex64).conj(),
        torch.eye(5).to_sparse(), torch._neg_view(base), torch.nn.Parameter(base),
    ]  # fmt: skip
    for x in kinds:
        agree(row_of(launched(x)), row_of(reference.summarize(plain(x), EVERYTHING)))
    assert not gpu.summarize(base.to(torch.float8_e5m2), EVERYTHING, torch.empty(EVERYTHING.width, dtype=torch.int64))


def test_a_list_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of many sizes and dtypes have in their rows what each has alone, from one launch."""
    launches = []
    kernel = gpu.kernels(CPU)
    assert kernel is not None
    start = type(kernel.summarize_list).run

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        launches.append(kwargs["grid"])
        return start(self, *args, **kwargs)

    monkeypatch.setattr(type(kernel.summarize_list), "run", counted)
    sizes = (2049, 0, 5000, 1023, 1, 2, 64, 77, 3)
    tensors = [of_kind("holes", n, dtype) for n, dtype in zip(sizes, FLOATING + INTEGRAL, strict=False)]
    tensors.insert(3, torch.ones(5).to(torch.float8_e5m2))
    out = torch.full((len(tensors), Spec().width), -7)
    assert gpu.summarize_many(tensors, Spec(), out) == [3]
    assert len(launches) == 1
    for i, x in enumerate(tensors):
        if i == 3:
            assert (out[i] == -7).all()
        else:
            assert torch.equal(out[i], launched(x, Spec()))


def test_both_sides_agree_on_sizes() -> None:
    """Who starts the kernel cuts tensors as the kernel does."""
    kernel = gpu.kernels(CPU)
    assert kernel is not None
    assert kernel.PARTS.value == gpu.PARTS
    assert 8 * kernel.TILES.value * kernel.PAIRS.value == gpu.CHUNK
    assert len({*gpu.KINDS.values()}) == len(gpu.KINDS) - 1  # bool is measured as uint8


def test_an_empty_list() -> None:
    """Nothing is launched for no tensors."""
    assert gpu.summarize_many([], Spec(), torch.empty(0, Spec().width, dtype=torch.int64)) == []


def test_launches_share_their_memory() -> None:
    """After any launch the counters are zero, so that the next one, larger or smaller, starts afresh."""
    rows = [launched(of_kind("normal", n, torch.float32), Spec()) for n in (4097, 10, 4097)]
    assert torch.equal(rows[0], rows[2])
    assert not gpu._of_stream(CPU, 0).counters.any()


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Triton cannot be imported nothing is measured here, and one warning says why."""
    monkeypatch.setitem(sys.modules, "tracehooks.stats.kernel", None)
    monkeypatch.delattr("tracehooks.stats.kernel", raising=False)
    gpu.kernels.cache_clear()
    row = torch.empty(Spec().width, dtype=torch.int64)
    try:
        with pytest.warns(RuntimeWarning, match="several times slower"):
            assert not gpu.summarize(torch.ones(3), Spec(), row)
        assert gpu.summarize_many([torch.ones(3)], Spec(), row[None]) == [0]  # a second warning would be an error
    finally:
        gpu.kernels.cache_clear()


def compiled(tmp_path: Path, *which: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.stats.compiling", *which]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-2000:]


def test_it_compiles(tmp_path: Path) -> None:
    """For the A100 and the H100 the compiler makes code that keeps subnormals and adds no float atomically."""
    compiled(tmp_path)


@pytest.mark.slow
def test_all_of_it_compiles(tmp_path: Path) -> None:
    """The same for every dtype, with every statistic."""
    compiled(tmp_path, "everything")
