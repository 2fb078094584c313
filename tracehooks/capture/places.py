"""A site, while it is on its way into a row."""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """Where a tensor was seen: the columns of a tensors row that name the site."""

    phase: str
    module: str
    type: str
    slot: str
    call: int = 0
    micro: int = 0
    recompute: bool = False
