"""An op that made something non-finite as rules see it, and what they say of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Cause(NamedTuple):
    """A tag, a sentence with the numbers, and what to check or change."""

    tag: str
    sentence: str
    next_check: str


class Case(NamedTuple):
    """An op that made something non-finite, with its operands; in-place ops with what they overwrote."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: tuple[Tensor, ...]
    """Floating and complex operands as they were before the op ran."""
    output: Tensor | None
    """Of several results the first that is not finite."""
    makers: tuple[str, ...] = ()
    """The op that made each floating operand, empty where none was seen."""


Rule = Callable[[Case], Cause | None]


def case_of(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
    copies: tuple[Any, ...] = (),
    makers: tuple[str, ...] = (),
) -> Case:
    """A case from what a dispatch mode sees. ``copies`` are the operands before an in-place op."""
    given = (*args, *kwargs.values())
    floating = tuple(x for x in given if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()))
    lists = tuple(x for arg in given if isinstance(arg, list | tuple) for x in arg if isinstance(x, Tensor))
    results = [x for x in (output if isinstance(output, tuple | list) else (output,)) if isinstance(x, Tensor)]
    damaged = (x for x in results if not bool(torch.isfinite(x).all()))
    first = next(damaged, results[0] if results else None)
    return Case(func.overloadpacket.__name__.rstrip("_"), args, kwargs, copies or floating + lists, first, makers)


def operand(case: Case, index: int) -> Any:
    """An operand by position, as it was before an in-place op."""
    if index < len(case.args):
        value = case.args[index]
        return (
            case.tensors[0]
            if index == 0 and case.tensors and isinstance(value, Tensor) and value.is_floating_point()
            else value
        )
    return case.tensors[index] if index < len(case.tensors) else None


def finite(x: Tensor) -> Tensor:
    """The finite elements, in float64; a zero where there are none."""
    wide = x.detach().to(torch.float64)
    kept = wide[torch.isfinite(wide)]
    return kept if kept.numel() else wide.new_zeros(1)


def dtype_of(x: Tensor) -> str:
    """The dtype as torch prints it, without ``torch.``"""
    return str(x.dtype).removeprefix("torch.")
