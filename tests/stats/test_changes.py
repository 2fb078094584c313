"""Specification of measured changes: the plain C interface, told of earlier elements, gives the row of the differences."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tracehooks.stats import Spec, cpu
from tracehooks.stats.layout import INTEGERS

from .measuring import EVERYTHING, FLOATING, INTEGRAL, agree, any_bits, content_of, expected, of_kind, row_of, values_of

KERNEL = cpu.library()
LEVELS = range(len(KERNEL.levels)) if KERNEL else []
HASH = INTEGERS.index("hash")

pytestmark = pytest.mark.skipif(KERNEL is None, reason="the native kernel is not built")


def change(
    after: Tensor, before: Tensor, spec: Spec = EVERYTHING, level: int = cpu.BEST, threads: int = 1
) -> Tensor | None:
    """The kernel's row of what became of some elements, None where it refuses."""
    row = torch.full((spec.width,), -7)
    options = cpu.DTYPES[after.dtype] | spec.flags << 8 | (level + 1) << 16 | threads << 32
    request = cpu.REQUEST.pack(after.data_ptr(), after.numel(), options, row.data_ptr(), before.data_ptr())
    if KERNEL.summarize(request):
        assert (row == -7).all()
        return None
    return row


def wide(x: Tensor) -> Tensor:
    """In what holds every element and calculates."""
    return x if x.dtype is torch.float64 else x.float()


def check(after: Tensor, before: Tensor) -> None:
    """The row is that of the difference, which torch computes, with every instruction set."""
    difference = wide(after) - wide(before)
    for level in LEVELS:
        found, wanted = change(after, before, level=level), cpu.summarize(difference, EVERYTHING, level=level)
        assert found is not None
        if difference.isnan().any():  # which bits it has is nobody's promise
            wanted[HASH] = found[HASH]
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@given(data=st.data())
def test_every_bit_pattern_of_every_dtype(dtype: torch.dtype, data: st.DataObject) -> None:
    """NaN, infinities, negative zero and subnormals among them."""
    a, b = data.draw(any_bits(dtype)), data.draw(any_bits(dtype))
    count = min(len(a), len(b))
    if count:
        check(a[:count].clone(), b[:count].clone())


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("kind", ["normal", "shifted", "holes", "tiny", "constant"])
@pytest.mark.parametrize("count", [1, 4095, 4096, 4097, 3 * 4096 + 5])
def test_more_than_a_block(kind: str, dtype: torch.dtype, count: int) -> None:
    """Of every kind, in any number of blocks."""
    check(of_kind(kind, count, dtype), of_kind(kind, count, dtype, seed=1))


@pytest.mark.parametrize("scale", [1e-310, 1e-200, 1.0, 1e200, 8e307])
def test_float64_of_extreme_magnitude(scale: float) -> None:
    """The numbers are exact where squares would overflow or vanish, and where only the difference is extreme."""
    after, before = (
        of_kind("normal", 5000, torch.float64) * scale / 8,
        of_kind("normal", 5000, torch.float64, 1) * scale / 8,
    )
    check(after, before)
    row = change(after, before)
    difference = after - before
    agree(row_of(row), expected(values_of(difference), content_of(difference)))
    close = before * (1 + 2.0**-52)
    check(close, before)


def test_threads_do_not_matter() -> None:
    """Nor whether there are any."""
    after, before = torch.randn(1 << 20), torch.randn(1 << 20)
    alone = change(after, before)
    assert alone is not None
    for threads in (2, 3, 8):
        assert torch.equal(change(after, before, threads=threads), alone)


@pytest.mark.parametrize("dtype", INTEGRAL, ids=str)
def test_only_floating_point_elements_have_changes(dtype: torch.dtype) -> None:
    """Others are refused, and nothing is written."""
    x = of_kind("normal", 10, dtype)
    assert change(x, x.clone()) is None


def test_a_change_of_nothing_is_zero() -> None:
    """Of a tensor beside itself, unless it is not finite there."""
    x = torch.randn(5000)
    row = row_of(change(x, x))
    assert (row["count"], row["zeros"], row["absmax"], row["rms"]) == (5000, 5000, 0, 0)
    x[7] = torch.inf
    assert row_of(change(x, x))["nan"] == 1
