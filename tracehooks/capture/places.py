"""A site, while it is on its way into a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tracehooks.capture import torch_internals
from tracehooks.capture.lane import SITE

FEW_PASSES, FEW_CALLS = 32, 512
"""What is remembered of a place is kept for so many passes of a step and calls of a pass."""


class Place(NamedTuple):
    """Where a tensor was seen: the columns of a tensors row that name the site."""

    phase: str
    module: str
    type: str
    slot: str
    call: int = 0
    micro: int = 0
    recompute: bool = False

    @property
    def returns(self) -> bool:
        """Whether later steps come here again: not to ever higher numbers of calls and of passes without an end."""
        return self.micro < FEW_PASSES and self.call < FEW_CALLS


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """What rows of one place have in common as long as the tensor there does not change its kind."""

    place: Place
    dtype: str
    device: str
    shape: tuple[int, ...]
    training: bool
    """Whether the forward pass under way computes gradients: not written."""


class Site(SITE):  # type: ignore[misc]
    """A place, and the head that its last row had: the next one has the same, as a rule."""

    __slots__ = ("device", "dtype", "last")
    place: Place
    returned: bool
    """Whether a module returns what is seen here."""

    def __new__(cls, place: Place) -> Site:
        """The site of what is seen at a place."""
        return super().__new__(cls, place, place.phase == "forward")  # type: ignore[no-any-return]

    def __init__(self, place: Place) -> None:
        self.last: Head | None = None
        self.dtype: torch.dtype | None = None
        self.device: torch.device | None = None
        """Of the last row here."""

    def head(self, x: Tensor, training: bool) -> Head:
        """The head of a tensor's row here."""
        known = self.last
        shape = x.shape if x.layout is torch.strided and not x.is_nested else torch_internals.sizes(x)
        if (
            known is not None
            and known.shape == shape
            and x.dtype is self.dtype
            and known.training is training
            and x.device == self.device
        ):
            return known
        self.dtype, self.device = x.dtype, x.device
        made = Head(self.place, str(x.dtype).removeprefix("torch."), str(x.device), torch_internals.sizes(x), training)
        self.last = made
        return made


def heads(sites: Sequence[Site], tensors: Sequence[Tensor], training: bool) -> list[Head]:
    """The head of each tensor's row at its site."""
    return [
        known
        if (known := site.last) is not None
        and x.dtype is site.dtype
        and known.training is training
        and not x.is_nested
        and x.shape == known.shape
        and x.device == site.device
        else site.head(x, training)
        for site, x in zip(sites, tensors, strict=True)
    ]
