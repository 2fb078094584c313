"""Specification of the quick way to the native kernel: small dense tensors get the same rows, the rest is left alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tracehooks.stats import Spec, cpu

from .measuring import EVERYTHING, FLOATING, INTEGRAL, of_kind

KERNEL = cpu.library()

pytestmark = pytest.mark.skipif(
    KERNEL is None or KERNEL.door is None, reason="built without Python's headers, or an older torch"
)


@pytest.mark.parametrize("dtype", FLOATING + INTEGRAL, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (1, 3, 1), (1000,), (2, 250)])
def test_what_it_takes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Every native dtype in any shape, views with an offset and what requires a gradient among them."""
    x = of_kind("normal", 1007, dtype)[7:][: math.prod(shape)].view(shape)
    for tensor in (x, torch.nn.Parameter(x, requires_grad=dtype.is_floating_point)):
        out = torch.zeros(EVERYTHING.width, dtype=torch.int64)
        assert cpu.measured(tensor, EVERYTHING, out)
        assert torch.equal(out, cpu.summarize(x, EVERYTHING, torch.zeros_like(out)))


@pytest.mark.parametrize(
    "like",
    [
        lambda x: x.t(),
        lambda x: x[:, ::2],
        lambda x: x[0].expand(6, 6),
        lambda x: torch._neg_view(x),
        lambda x: x.to_sparse(),
        lambda x: x.to(torch.complex64),
        lambda x: x.to(torch.float8_e4m3fn),
        lambda x: x.to("meta"),
        lambda x: torch.zeros(1 << 17),
        lambda x: x.as_subclass(type("Named", (Tensor,), {})),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_what_it_leaves(like: Any) -> None:
    """Other tensors are left to the caller, and nothing is written."""
    out = torch.full((EVERYTHING.width,), -7)
    assert not cpu.measured(like(torch.randn(6, 6)), EVERYTHING, out)
    assert (out == -7).all()


@pytest.mark.parametrize("misfit", [torch.zeros(13, dtype=torch.int64), torch.zeros(12), torch.zeros(24).long()[::2]])
def test_rows_that_it_leaves(misfit: Tensor) -> None:
    """A row of another size, type or stride is left to the caller."""
    assert not cpu.measured(torch.ones(5), Spec(), misfit)
    assert not misfit.any()


def odd_ones() -> list[Tensor]:
    """Tensors that the door takes among such as it leaves, at 2, 4 and 6."""
    x = torch.randn(40, 50)
    x[3, 4], x[5, 6] = torch.inf, torch.nan
    return [
        x,
        x[7],
        x.t(),
        torch.nn.Parameter(x.half()),
        x.to_sparse(),
        torch.arange(9),
        torch._neg_view(x),
        x.bfloat16(),
    ]


@pytest.fixture
def without_door(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Takes the door away."""
    return lambda: monkeypatch.setattr(cpu, "library", lambda: replace(KERNEL, door=None))


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("large", [False, True])
def test_many_are_the_same_with_and_without_it(large: bool, without_door: Callable[[], None]) -> None:
    """Rows of a list, and which tensors are left to the caller; with threads, too."""
    tensors = odd_ones() + ([torch.randn(1 << 19), torch.randn(1 << 19)] if large else [])
    out, plainly = torch.full((2, len(tensors), EVERYTHING.width), -7)
    left = cpu.summarize_many(tensors, EVERYTHING, out)
    without_door()
    assert left == cpu.summarize_many(tensors, EVERYTHING, plainly) == [2, 4, 6]
    assert torch.equal(out, plainly)
    assert (out[left] == -7).all()


@pytest.mark.filterwarnings("ignore:Sparse")
def test_the_watch_sees_the_same_with_and_without_it(without_door: Callable[[], None]) -> None:
    """What a list holds together, and which tensors were not looked at."""
    everything = odd_ones()
    lists = [everything, everything[1:2], everything[5:7], [torch.full((1 << 19,), -torch.inf)], []]
    seen = [cpu.nonfinite(tensors) for tensors in lists]
    without_door()
    for tensors, (kinds, left) in zip(lists, seen, strict=True):
        plain_kinds, plain_left = cpu.nonfinite(tensors)
        assert kinds == plain_kinds
        assert [id(x) for x in left] == [id(x) for x in plain_left]


def test_rows_for_many_that_it_leaves() -> None:
    """Rows of another size leave all to the caller."""
    assert KERNEL.door.measure_many([torch.ones(5)], torch.zeros(13, dtype=torch.int64), 1, 1) is None
