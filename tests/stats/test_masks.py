"""Specification of `stats.masks`: how much of a mask is empty, against loops in Python."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from torch import Tensor

from tracehooks.stats.masks import CONVENTIONS, summarize_mask, unpack_masks

SHAPES = array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4)


def looped(x: Tensor, kept: Any, convention: str) -> list[int]:
    """The six numbers of a mask, element by element."""
    if x.shape[-1]:
        rows = [sum(kept(value) for value in row) for row in x.reshape(-1, x.shape[-1]).tolist()]
    else:
        rows = [0] * math.prod(x.shape[:-1])
    empty = [i for i, row in enumerate(rows) if row == 0]
    code = CONVENTIONS.index(convention)
    if not rows:
        return [0, 0, -1, -1, -1, code]
    return [sum(rows), len(empty), min(rows), max(rows), empty[0] if empty else -1, code]


@given(mask=arrays(bool, SHAPES), convention=st.sampled_from(["keep=True", "keep=False", None]))
def test_boolean_masks(mask: Any, convention: str | None) -> None:
    """A boolean mask keeps what is True, or what is False if that is its convention; unsaid, True is kept."""
    x = torch.from_numpy(mask)
    drops = convention == "keep=False"
    wanted = looped(x, lambda value: value != drops, convention or "keep=True")
    assert summarize_mask(x, convention).tolist() == wanted


@given(mask=arrays("int64", SHAPES, elements=st.integers(0, 2)))
def test_integer_masks(mask: Any) -> None:
    """An integer mask without negative elements keeps what is not zero."""
    x = torch.from_numpy(mask)
    assert summarize_mask(x, None).tolist() == looped(x, lambda value: value != 0, "keep=True")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fill", [-math.inf, "minimum", -1e9, -1e4])
def test_additive_masks(dtype: torch.dtype, fill: float | str) -> None:
    """A mask with a negative element is added to scores: every customary filling drops, zeros and small biases keep."""
    value = torch.finfo(dtype).min if fill == "minimum" else float(fill)
    x = torch.zeros(3, 4, dtype=torch.float64)
    x[0, 1:], x[1], x[2, 0] = value, value, -3.0
    assert summarize_mask(x.to(dtype), None).tolist() == [5, 1, 0, 4, 1, CONVENTIONS.index("additive")]


def test_an_additive_mask_that_drops_nothing() -> None:
    """Said to be additive, a mask of zeros keeps all, which unsaid it would drop."""
    x = torch.zeros(2, 3)
    assert summarize_mask(x, "additive").tolist() == [6, 0, 3, 3, -1, 2]
    assert summarize_mask(x, None).tolist() == [0, 2, 0, 0, 0, 0]


def test_columns() -> None:
    """The numbers become the columns of the masks table, with null for what does not exist."""
    masks = [torch.tensor([[True, False], [False, False]]), torch.ones(0, 3, dtype=torch.bool)]
    packed = [summarize_mask(x, None).tolist() for x in masks]
    assert unpack_masks(packed, [tuple(x.shape) for x in masks]) == {
        "count": [4, 0],
        "kept": [1, 0],
        "rows": [2, 0],
        "empty_rows": [1, 0],
        "min_kept": [0, None],
        "max_kept": [1, None],
        "first_empty": [1, None],
        "convention": ["keep=True", "keep=True"],
    }


def test_no_gradient_is_tracked() -> None:
    """Measuring a mask that has a gradient leaves no trace in autograd."""
    x = torch.zeros(2, 2, requires_grad=True)
    assert not summarize_mask(x * 1, "additive").requires_grad


@pytest.mark.parametrize("keep", [True, False])
def test_floating_masks_of_a_probe(keep: bool) -> None:
    """Said to keep or to drop, a floating mask has truth values where it holds ones, and nothing but ones and zeros;
    any other is added to scores, one of zeros too."""
    said = f"keep={keep}"
    assert summarize_mask(torch.tensor([[1.0, 0, 0], [0, 0, 0]]), said).tolist()[:2] == ([1, 1] if keep else [5, 0])
    assert summarize_mask(torch.zeros(2, 3), said).tolist() == [6, 0, 3, 3, -1, CONVENTIONS.index("additive")]
    dropped = torch.tensor([[0.0, -math.inf], [-math.inf, -math.inf]])
    assert summarize_mask(dropped, said).tolist() == [1, 1, 0, 1, 1, CONVENTIONS.index("additive")]
    biased = torch.tensor([[1.0, 0.5], [0.0, -1e9]])
    assert summarize_mask(biased, said).tolist()[:2] == [3, 0]
