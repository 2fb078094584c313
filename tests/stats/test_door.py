"""Specification of the quick way to the native kernel: small dense tensors get the same rows, the rest is left alone."""

from __future__ import annotations

import math
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
