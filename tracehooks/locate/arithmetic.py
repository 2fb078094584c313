"""What sums, products and quotients make of large and of infinite operands.

Of finite operands a sum of products is NaN only where terms, or sums on the way, overflow to infinities of both signs. Of
infinite ones three forms are no number: inf - inf, 0 · inf and inf / inf (IEEE 754, invalid operations).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tracehooks.locate.case import Case, Cause, Rule, dtype_of, operand

OVERFLOWS = ("overflow", "fp16_overflow")


def overflow(case: Case) -> Cause | None:
    """Finite operands, an infinite result: more than the dtype holds."""
    x = case.output
    if x is None or not bool(torch.isinf(x).any()) or holds_infinity(case):
        return None
    return overflowed(x, f"the result is more than {_held(x)}; operands go up to {_largest(case):.6g}")


def overflowed(x: Tensor, sentence: str, next_check: str = "") -> Cause:
    """A value that is beyond the dtype of ``x``."""
    if x.dtype == torch.float16:
        usual = "compute this layer in float32 or bfloat16, or scale its input down"
        return Cause("fp16_overflow", sentence, next_check or usual)
    usual = "look for the value that grew: weights, learning rate, an unscaled input"
    return Cause("overflow", sentence, next_check or usual)


def contraction(first: int, second: int, inner: tuple[int, int] = (-1, -2)) -> Rule:
    """A sum of products of two operands, given by their positions, over dimension ``inner`` of each."""

    def rule(case: Case) -> Cause | None:
        if not makes_nan(case):
            return None
        if not holds_infinity(case):
            return _cancelled(case)
        a, b = (_by(_numbers(operand(case, at)), dim) for at, dim in zip((first, second), inner, strict=True))
        met = (torch.isinf(a).any(-1) & (b == 0).any(-1)) | ((a == 0).any(-1) & torch.isinf(b).any(-1))
        return _zero_times_inf(case) if bool(met.any()) else _inf_minus_inf(case)

    return rule


def products(case: Case) -> Cause | None:
    """Sums of products of all operands, over several dimensions."""
    if not makes_nan(case):
        return None
    if not holds_infinity(case):
        return _cancelled(case)
    infinite = [bool(torch.isinf(x).any()) for x in case.tensors]
    zero = [bool((x == 0).any()) for x in case.tensors]
    met = any(a and b for i, a in enumerate(infinite) for j, b in enumerate(zero) if i != j)
    return _zero_times_inf(case) if met else _inf_minus_inf(case)


def total(case: Case) -> Cause | None:
    """A sum of elements, or something that takes one on its way."""
    if not makes_nan(case):
        return None
    return _inf_minus_inf(case) if holds_infinity(case) else _cancelled(case)


def mean(case: Case) -> Cause | None:
    """A mean, of which the sum may be too large where the mean itself is not."""
    x = case.output
    if x is None or holds_infinity(case) or not bool(torch.isinf(x).any()):
        return total(case)
    return overflowed(x, f"the sum under the mean is more than {_held(x)}; elements go up to {_largest(case):.6g}")


def difference(case: Case) -> Cause | None:
    """A sum or difference of two operands, element by element."""
    a, b = _numbers(operand(case, 0)), _numbers(operand(case, 1))
    return _inf_minus_inf(case) if makes_nan(case) and bool((torch.isinf(a) & torch.isinf(b)).any()) else None


def product(case: Case) -> Cause | None:
    """A product of two operands, element by element."""
    a, b = _numbers(operand(case, 0)), _numbers(operand(case, 1))
    met = (torch.isinf(a) & (b == 0)) | ((a == 0) & torch.isinf(b))
    return _zero_times_inf(case) if makes_nan(case) and bool(met.any()) else None


def own_product(case: Case) -> Cause | None:
    """A product of elements of one operand, or of each and a share of it that is zero at -inf."""
    return _zero_times_inf(case) if makes_nan(case) and holds_infinity(case) else None


def quotient(case: Case) -> Cause | None:
    """A quotient whose divisor is not zero."""
    a, b = _numbers(operand(case, 0)), _numbers(operand(case, 1))
    if makes_nan(case) and bool((torch.isinf(a) & torch.isinf(b)).any()):
        return Cause(
            "inf_over_inf", f"an infinity divided by an infinity in {_count(case)}", _WHERE_INFINITIES_ARE_FROM
        )
    return small_divisor(case, b)


def small_divisor(case: Case, divisor: Tensor) -> Cause | None:
    """A divisor so close to zero that the quotient overflows."""
    x = case.output
    if x is None or not bool(torch.isinf(x).any()) or holds_infinity(case) or not divisor.numel():
        return None
    smallest = float(divisor.abs().min())
    if not 0 < smallest < 1:
        return None
    return overflowed(
        x,
        f"divided by values as small as {smallest:.4g}, the result is more than {_held(x)}",
        "add a small epsilon to the divisor or clamp it away from zero",
    )


def makes_nan(case: Case) -> bool:
    """Whether there is a NaN in the result."""
    return case.output is not None and bool(torch.isnan(case.output).any())


def holds_infinity(case: Case) -> bool:
    """Whether an operand, a tensor or a number, is not finite."""
    numbers = any(isinstance(x, float) and not math.isfinite(x) for x in (*case.args, *case.kwargs.values()))
    return numbers or any(not bool(torch.isfinite(x).all()) for x in case.tensors)


def _cancelled(case: Case) -> Cause | None:
    """Finite operands of a sum, and NaN without an infinity beside it."""
    x = case.output
    if x is None or bool(torch.isinf(x).any()):
        return None
    largest = ", ".join(f"{float(t.abs().max()):.6g}" for t in case.tensors[:3] if t.numel())
    return overflowed(
        x,
        f"on the way to the result terms of both signs are more than {_held(x)}, and inf - inf is no number: NaN in "
        f"{_count(case)}; operands go up to {largest}",
    )


_WHERE_INFINITIES_ARE_FROM = (
    "look where the infinities are from: a row that is masked entirely, or a mask of infinities where a large finite number "
    "would do"
)


def _inf_minus_inf(case: Case) -> Cause:
    sentence = f"{case.name} adds infinities of both signs, or takes one from another, in {_count(case)}"
    return Cause("inf_minus_inf", sentence, _WHERE_INFINITIES_ARE_FROM)


def _zero_times_inf(case: Case) -> Cause:
    return Cause(
        "zero_times_inf",
        f"{case.name} multiplies an infinity by zero: NaN in {_count(case)}",
        "choose with torch.where or masked_fill instead of multiplying by a mask, or mask with a large finite number",
    )


def _by(x: Tensor, dim: int) -> Tensor:
    """A matrix with one row for each index of a dimension; of a vector, of its elements."""
    dim = max(dim, -x.ndim)
    return x.movedim(dim, 0).reshape(x.shape[dim], -1)


def _numbers(value: Any) -> Tensor:
    return value.detach() if isinstance(value, Tensor) else torch.as_tensor(value)


def _count(case: Case) -> str:
    x = case.output
    assert x is not None
    return f"{int(torch.isnan(x).sum()):,} of {x.numel():,} elements"


def _largest(case: Case) -> float:
    return max((float(x.abs().max()) for x in case.tensors if x.numel()), default=0.0)


def _held(x: Tensor) -> str:
    return f"{dtype_of(x)} holds ({torch.finfo(x.dtype).max:.6g})"
