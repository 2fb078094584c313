"""Which tensors were just measured, so that none is read twice: one module's output is often another's input, a view of
it, or returned once more by its parent.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor


class Known(NamedTuple):
    """A tensor that was measured, by what can be asked of it cheaply."""

    tensor: weakref.ref[Tensor]
    version: int
    """Of its storage: torch counts changes in place, shared by all views."""
    elements: int
    dtype: torch.dtype
    in_order: bool
    """Its elements lie in memory as they are in logical order."""
    number: int
    """Of its packed statistics."""
    returned: bool
    """A module returned it."""


class Measured:
    """Tensors by address. While one of them lives its memory is nobody else's: another tensor at the same address with as
    many elements is the same content, if both are in order and nothing was changed since.

    torch does not count changes that go around autograd (``x.data``, kernels that do not tell): what is known must be
    forgotten wherever such are usual, between passes and around an optimizer's step.
    """

    def __init__(self) -> None:
        self._known: dict[int, Known] = {}

    def add(self, x: Tensor, number: int, returned: bool) -> None:
        """A tensor was measured, which a module has returned or not."""
        try:
            address, version = x.data_ptr(), x._version
        except RuntimeError:  # no memory of its own, or of inference mode, where changes are not counted
            return
        if address:
            self._known[address] = Known(
                weakref.ref(x), version, x.numel(), x.dtype, x.is_contiguous(), number, returned
            )

    def find(self, x: Tensor) -> Known | None:
        """What is known of this tensor, or of one that is the same."""
        try:
            known = self._known.get(x.data_ptr())
            if known is None or known.version != x._version:
                return None
        except RuntimeError:
            return None
        measured = known.tensor()
        if measured is x:
            return known
        same = (
            measured is not None
            and known.in_order
            and known.elements == x.numel()
            and known.dtype == x.dtype
            and x.is_contiguous()
            and measured.is_neg() == x.is_neg()
            and measured.is_conj() == x.is_conj()
        )
        return known if same else None

    def forget(self) -> None:
        """Everything."""
        self._known.clear()
