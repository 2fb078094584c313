"""Which tensors were just measured, so that none is read twice: one module's output is often another's input, a view of
it, or returned once more by its parent.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

Known = tuple[weakref.ref[Tensor], int, int, torch.dtype, bool, int, bool]
"""A tensor that was measured: itself; the version of its storage (torch counts changes in place, shared by all views); how
many elements it has, of which dtype; whether they lie in memory in their logical order; the number of its packed
statistics; whether a module returned it. The native kernel's `once` reads and writes the same."""


class Measured:
    """Tensors by address. While one of them lives its memory is nobody else's: another tensor at the same address with as
    many elements is the same content, if both are in order and nothing was changed since.

    torch does not count changes that go around autograd (``x.data``, kernels that do not tell): what is known must be
    forgotten wherever such are usual, between passes and around an optimizer's step.
    """

    def __init__(self) -> None:
        self.known: dict[int, Known] = {}

    def add(self, x: Tensor, number: int, returned: bool) -> None:
        """A tensor was measured, which a module has returned or not."""
        try:
            address, version = x.data_ptr(), x._version
        except RuntimeError:  # no memory of its own, or of inference mode, where changes are not counted
            return
        if address:
            self.known[address] = weakref.ref(x), version, x.numel(), x.dtype, x.is_contiguous(), number, returned

    def find(self, x: Tensor) -> tuple[int, bool] | None:
        """The number of this tensor's statistics, or of one that is the same, and whether a module returned it."""
        try:
            known = self.known.get(x.data_ptr())
            if known is None or known[1] != x._version:
                return None
        except RuntimeError:
            return None
        measured, _, elements, dtype, in_order, number, returned = known
        tensor = measured()
        if tensor is x:
            return number, returned
        same = (
            tensor is not None
            and in_order
            and elements == x.numel()
            and dtype == x.dtype
            and x.is_contiguous()
            and tensor.is_neg() == x.is_neg()
            and tensor.is_conj() == x.is_conj()
        )
        return (number, returned) if same else None

    def forget(self) -> None:
        """Everything."""
        self.known.clear()
