"""Specification of the native kernel: everywhere the reference's numbers, one row whatever the machine does."""

from __future__ import annotations

import math
import multiprocessing
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tracehooks import stats
from tracehooks.stats import Spec, cpu, reference
from tracehooks.stats.plain import plain

from .measuring import (
    EIGHT_BIT,
    EVERYTHING,
    FLOATING,
    INTEGRAL,
    agree,
    any_bits,
    content_of,
    expected,
    of_kind,
    row_of,
    values_of,
)

KERNEL = cpu.library()
LEVELS = range(len(KERNEL.levels)) if KERNEL else []
KINDS = ("normal", "shifted", "holes", "tiny", "constant")

pytestmark = pytest.mark.skipif(KERNEL is None, reason="the native kernel is not built")


def native(x: Tensor, spec: Spec = EVERYTHING, level: int = cpu.BEST) -> Tensor:
    """The kernel's row of a tensor, which must not be None."""
    row = cpu.summarize(x, spec, level=level)
    assert row is not None
    return row


def equal_on_all_levels(x: Tensor) -> Tensor:
    """The kernel's row, the same bit for bit with every instruction set that this machine has."""
    first, *others = (native(x, level=level) for level in LEVELS)
    assert all(torch.equal(first, other) for other in others)
    return first


@contextmanager
def threads(number: int) -> Iterator[None]:
    """torch's number of threads, for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", FLOATING + INTEGRAL, ids=str)
@given(data=st.data())
def test_every_bit_pattern_of_every_dtype(dtype: torch.dtype, data: st.DataObject) -> None:
    """All statistics of any bits are the exact ones, with every instruction set."""
    x = data.draw(any_bits(dtype))
    agree(row_of(equal_on_all_levels(x)), expected(values_of(x), content_of(x)))


@pytest.mark.parametrize("dtype", FLOATING + INTEGRAL, ids=str)
@given(count=st.integers(0, 5000), start=st.integers(0, 9), kind=st.sampled_from(KINDS), seed=st.integers(0, 99))
def test_sizes_and_alignments(dtype: torch.dtype, count: int, start: int, kind: str, seed: int) -> None:
    """Any number of elements at any address gives the reference's row."""
    x = of_kind(kind, start + count, dtype, seed)[start:]
    agree(row_of(equal_on_all_levels(x)), row_of(reference.summarize(x, EVERYTHING)))


@pytest.mark.parametrize("dtype", [*FLOATING, torch.int64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_large_tensors(kind: str, dtype: torch.dtype) -> None:
    """A tensor of many blocks, odd in size, gives the reference's row."""
    x = of_kind(kind, 234_567, dtype)
    agree(row_of(equal_on_all_levels(x)), row_of(reference.summarize(x, EVERYTHING)))


@pytest.mark.parametrize("dtype", EIGHT_BIT, ids=str)
def test_eight_bit_floats(dtype: torch.dtype) -> None:
    """Eight-bit floats are measured as their values and hashed as their bytes."""
    x = torch.arange(256, dtype=torch.uint8).repeat(3).view(dtype)[1:]
    agree(row_of(native(x)), row_of(reference.summarize(x, EVERYTHING)))


@pytest.mark.parametrize("exponent", [-1074, -1060, -1022, -700, -460, -400, 0, 400, 500, 600, 1000, 1022])
def test_magnitudes_of_float64(exponent: int) -> None:
    """Moments of float64 neither overflow nor vanish, whatever the magnitude."""
    x = (torch.randn(9000, dtype=torch.float64).clamp(-1.9, 1.9) * 2.0 ** (exponent / 2)) * 2.0 ** (exponent / 2)
    agree(row_of(equal_on_all_levels(x)), expected(values_of(x), content_of(x)))
    x[::5], x[1::5] = math.nan, math.inf
    agree(row_of(equal_on_all_levels(x)), expected(values_of(x), content_of(x)))


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("sign", [1, -1, 0])
def test_extremes_that_hardly_differ(dtype: torch.dtype, sign: int) -> None:
    """Minimum and maximum are exact in every block, also where only the last bits of elements tell them apart."""
    x = 1 + torch.arange(20_000, dtype=torch.float64) * (2.0**-40 if dtype is torch.float64 else 2.0**-23)
    x = torch.roll(x, 7_777).to(dtype) * (sign or 1)
    x[::2] *= sign or -1
    agree(row_of(equal_on_all_levels(x)), row_of(reference.summarize(x, EVERYTHING)))


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_zeros_of_one_sign(dtype: torch.dtype) -> None:
    """Zeros of either sign are found among others of either sign, wherever they are, and subnormals are none."""
    for zero in (0.0, -0.0, torch.finfo(dtype).smallest_normal / 4):
        for others in (1, -1):
            x = torch.full((9000,), others, dtype=dtype)
            x[4097], x[8999] = zero, zero
            row = row_of(equal_on_all_levels(x))
            assert row["zeros"] == (0 if zero else 2)
            assert row["max"] == max(others, x[4097].item())


def test_every_power_of_two() -> None:
    """The histogram has a bucket for each magnitude that float64 has, subnormal ones among them."""
    x = torch.tensor([2.0**exponent for exponent in range(-1074, 1024)], dtype=torch.float64)
    agree(row_of(equal_on_all_levels(x)), row_of(reference.summarize(x, EVERYTHING)))


def test_an_outlier_in_every_place() -> None:
    """One huge element, wherever it stands, costs the moments of the others no accuracy beyond rounding."""
    for place in (0, 1, 4095, 4096, 8190):
        x = of_kind("normal", 8191, torch.float32)
        x[place] = 3e38
        agree(row_of(native(x)), expected(values_of(x), content_of(x)))


@pytest.mark.parametrize(
    "like",
    [
        lambda x: x.t(),
        lambda x: x[:, ::2],
        lambda x: x[1:, 1:],
        lambda x: x[0, 0],
        lambda x: x[:, :1].expand(-1, 9),
        lambda x: x.view(6, 2, 3).permute(2, 0, 1),
        lambda x: x.to(torch.complex64).conj(),
        lambda x: x.to(torch.complex64).conj().imag,
        lambda x: torch._neg_view(x),
        lambda x: x.to_sparse(),
        lambda x: x.to_mkldnn(),
        lambda x: x.requires_grad_() * 2,
        lambda x: torch.nn.Parameter(x),
        lambda x: torch.nn.Buffer(x),
        lambda x: x.as_subclass(type("Named", (Tensor,), {})),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_tensors_that_are_not_plain_memory(like: Any) -> None:
    """Views, complex, sparse, negated, tracked and named tensors have the row of their values in logical order."""
    x = like(torch.randn(6, 6))
    row = stats.summarize(x, EVERYTHING)
    assert type(row) is Tensor
    assert not row.requires_grad
    agree(row_of(row), row_of(reference.summarize(plain(x).as_subclass(Tensor), EVERYTHING)))


@pytest.mark.filterwarnings("ignore")  # nested tensors announce that they are new
def test_nested_tensors() -> None:
    """A nested tensor has the row of its parts one after the other."""
    parts = [torch.randn(2, 3), torch.randn(4, 3)]
    whole = torch.cat([part.reshape(-1) for part in parts])
    for layout in (torch.strided, torch.jagged):
        assert torch.equal(stats.summarize(torch.nested.nested_tensor(parts, layout=layout), EVERYTHING), native(whole))


def test_inside_vmap() -> None:
    """Inside torch.func transforms, whose tensors have no memory of their own, the reference measures."""
    x = torch.randn(3, 50)
    rows = torch.vmap(lambda row: stats.summarize(row, Spec(hash=False)))(x)
    assert rows.shape == (3, Spec(hash=False).width)
    assert torch.equal(rows[:, 0], torch.full((3,), 50))


def test_fake_tensors() -> None:
    """A tensor without values, as torch.compile traces with, has a row without values."""
    with FakeTensorMode():
        row = stats.summarize(torch.randn(5), Spec())
    assert isinstance(row, FakeTensor)
    assert row.shape == (Spec().width,)


@pytest.mark.parametrize("count", [1000, 300_000, 2_500_003])
def test_threads_do_not_matter(count: int) -> None:
    """The row is the same bit for bit with one thread, two and seven, and while other threads measure too."""
    x = of_kind("holes", count, torch.float32)
    rows = []
    for number in (1, 2, 7):
        with threads(number):
            rows.append(native(x))
    found: list[Tensor] = []
    workers = [threading.Thread(target=lambda: found.extend(native(x) for _ in range(5))) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == 20
    assert all(torch.equal(row, rows[0]) for row in rows + found)


def test_the_mode_of_subnormals_does_not_matter() -> None:
    """Subnormals are not zeros, also where the thread flushes them, and the thread's mode is left as it was."""
    x = torch.tensor([1e-41, -1e-42, 0.0] * 500_000)
    row, short = native(x), native(x[:999])
    assert torch.set_flush_denormal(True)
    try:
        assert torch.equal(native(x), row)
        assert torch.equal(native(x[:999]), short)
        assert (torch.tensor([1e-41]) * 1.0).item() == 0
    finally:
        torch.set_flush_denormal(False)
    assert row_of(row)["zeros"] == 500_000


def _measure_in_child(x: Tensor, results: Any) -> None:
    results.put(stats.summarize(x, EVERYTHING).tolist())


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_measures() -> None:
    """After fork, even in the middle of a measurement, a child measures large tensors too, and does not hang."""
    x = of_kind("normal", 1_000_003, torch.float32)
    context = multiprocessing.get_context("fork")
    done = threading.Event()

    def measure_all_the_time() -> None:
        while not done.is_set():
            native(x)

    with threads(2):
        row = native(x).tolist()
        worker = threading.Thread(target=measure_all_the_time)
        worker.start()
        try:
            for _ in range(8):
                results = context.SimpleQueue()
                child = context.Process(target=_measure_in_child, args=(x, results))
                child.start()
                child.join(30)
                if child.exitcode is None:
                    child.kill()
                assert child.exitcode == 0
                assert results.get() == row
        finally:
            done.set()
            worker.join()


def test_the_lock_is_given_away() -> None:
    """Other Python threads run while a large tensor is measured."""
    x = torch.zeros(30_000_000)
    ticks = 0
    done = threading.Event()

    def measure() -> None:
        with threads(1):
            native(x)
        done.set()

    worker = threading.Thread(target=measure)
    worker.start()
    while not done.is_set():
        time.sleep(0.0005)
        ticks += 1
    worker.join()
    assert ticks > 3


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64], ids=str)
@given(rows=st.integers(0, 6), columns=st.integers(0, 2500), start=st.integers(0, 3))
def test_fingerprints(dtype: torch.dtype, rows: int, columns: int, start: int) -> None:
    """The fingerprint of each sample is its content hash by the reference, with every instruction set."""
    x = of_kind("normal", rows * columns + start, dtype)[start:].reshape(rows, columns)
    wanted = reference.hash_rows(x)
    assert torch.equal(stats.fingerprints(x), wanted)
    for level in LEVELS:
        found = cpu.hash_rows(x, level=level)
        assert found is not None
        assert torch.equal(found, wanted)


def test_fingerprints_of_batches() -> None:
    """Samples of any shape and strides are hashed in logical order, large batches in threads."""
    x = torch.randn(50, 3, 64, 64)
    with threads(2):
        found = stats.fingerprints(x.to(memory_format=torch.channels_last))
    assert torch.equal(found, reference.hash_rows(x.reshape(50, -1)))
    assert torch.equal(stats.fingerprints(x[:, 0, 0, 0]), reference.hash_rows(x[:, 0, 0, :1]))
    assert stats.fingerprints(torch.empty(3, 0, 2)).unique().numel() == 1


def test_writing_into_a_row() -> None:
    """Given a row, the statistics are written there and nowhere else, by either kernel."""
    x = torch.randn(1000)
    for given_x in (x, x.to_sparse()):
        table = torch.full((3, EVERYTHING.width), -7)
        returned = stats.summarize(given_x, EVERYTHING, table[1])
        assert returned.data_ptr() == table[1].data_ptr()
        assert torch.equal(table[1], native(x))
        assert (table[::2] == -7).all()


@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_many_tensors_at_once(number: int) -> None:
    """Each tensor of a list, whatever its kind, has in its row what it has by itself, with any number of threads."""
    kinds = [of_kind("holes", count, dtype) for count in (0, 1, 1023, 4097, 300_001) for dtype in FLOATING + INTEGRAL]
    kinds += [torch.randn(20, 30).t(), torch.randn(5, dtype=torch.complex64), torch.eye(9).to_sparse()]
    kinds += [torch.nn.Parameter(torch.randn(700_000)), torch.ones(0), torch.ones(7).to(torch.float8_e5m2)]
    with threads(number):
        for spec in (Spec(hash=False), EVERYTHING):
            out = torch.full((len(kinds), spec.width), -7)
            assert stats.summarize_many(kinds, spec, out) is out
            for x, row in zip(kinds, out, strict=True):
                assert torch.equal(row, stats.summarize(x, spec))


def test_no_tensors_at_once() -> None:
    """A list may be empty."""
    assert stats.summarize_many([], EVERYTHING, torch.empty(0, EVERYTHING.width, dtype=torch.int64)).numel() == 0


@pytest.mark.parametrize("shape", [(1, Spec().width), (2, Spec().width + 1), (2 * Spec().width,)])
def test_rows_that_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    """A matrix of another shape is refused before anything is written."""
    with pytest.raises(ValueError, match=r"contiguous int64 tensor of shape \(2, 12\)"):
        stats.summarize_many([torch.ones(3)] * 2, Spec(), torch.empty(shape, dtype=torch.int64))


@pytest.mark.parametrize(
    "out",
    [
        torch.empty(11, dtype=torch.int64),
        torch.empty(13, dtype=torch.int64),
        torch.empty(12, dtype=torch.float64),
        torch.empty(24, dtype=torch.int64)[::2],
        torch.empty(24, dtype=torch.int32),
    ],
)
def test_a_row_that_does_not_fit_is_refused(out: Tensor) -> None:
    """A row of another size, type or stride is refused before anything is written."""
    with pytest.raises(ValueError, match="contiguous int64"):
        stats.summarize(torch.randn(5), Spec(), out)


@pytest.mark.parametrize(
    "mode",
    [
        torch.no_grad,
        torch.enable_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.device("meta"),
    ],
)
def test_modes_do_not_matter(mode: Any) -> None:
    """Gradients, inference, autocast and the default device neither change the row nor are changed."""
    x = torch.randn(1000, requires_grad=True)
    row = native(x)
    state = torch.get_rng_state()
    with mode():
        enabled = torch.is_grad_enabled()
        assert torch.equal(stats.summarize(x, EVERYTHING), row)
        assert torch.equal(stats.summarize(x.detach()[::2], EVERYTHING), native(x.detach()[::2]))
        assert torch.is_grad_enabled() == enabled
    assert torch.equal(torch.get_rng_state(), state)
    assert x._version == 0


def test_deterministic_mode_does_not_matter() -> None:
    """torch's deterministic mode changes nothing."""
    x = torch.randn(1000)
    torch.use_deterministic_algorithms(True)
    try:
        row = stats.summarize(x, EVERYTHING)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(row, native(x))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
def test_the_threads_are_those_of_torch() -> None:
    """Where torch runs on OpenMP, a large tensor is measured by its threads: there are no more of them afterwards."""
    code = """if True:
        import os, torch
        from tracehooks import stats
        torch.set_num_threads(2)
        x = torch.randn(3_000_000)
        stats.summarize(x[:10], stats.Spec()), (x + 1).sum()
        before = len(os.listdir("/proc/self/task"))
        stats.summarize(x, stats.Spec())
        assert len(os.listdir("/proc/self/task")) == before
    """
    if not torch.backends.openmp.is_available():
        pytest.skip("torch without OpenMP")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_level_that_the_processor_lacks_is_not_run() -> None:
    """Asked for registers that the processor does not have, the kernel does nothing."""
    assert cpu.summarize(torch.randn(5), Spec(), level=len(LEVELS)) is None


def test_names() -> None:
    """The kernel of a device is named, on the CPU with its instruction set."""
    assert KERNEL is not None
    assert stats.kernel_name("cpu") == stats.kernel_name(torch.device("cpu")) == f"native {KERNEL.levels[-1]}"
    assert stats.kernel_name("meta") == "reference"
