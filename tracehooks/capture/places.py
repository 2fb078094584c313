"""A site, while it is on its way into a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

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
