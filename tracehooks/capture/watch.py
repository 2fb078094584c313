"""The watch for non-finite values in steps that record no tensors: one number a tensor, read back with the flush.

A sum over a tensor is not finite when an element is not. It can also overflow where every element is finite; what the
watch sees is therefore looked at again by the locator before it becomes a finding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tracehooks.capture import torch_internals
from tracehooks.capture.places import Place


class Seen(NamedTuple):
    """A tensor whose sum is not finite."""

    step: int
    seq: int
    place: Place
    training: bool
    value: float


class Watch:
    """Sums of watched tensors since the last flush."""

    def __init__(self) -> None:
        self._places: list[tuple[int, int, Place, bool]] = []
        self._sums: list[Tensor] = []

    def tensor(self, x: Tensor, place: Place, step: int, seq: int, training: bool) -> None:
        """Watch a floating tensor."""
        values = torch_internals.unwrapped(x)
        if values is None or not _summable(values):
            return
        with torch.no_grad():
            self._sums.append(_sum(values.detach()))
        self._places.append((step, seq, place, training))

    def norms(self, tensors: Sequence[Tensor], places: Sequence[Place], step: int, seq: int) -> Tensor | None:
        """Watch tensors by their L2 norms; the norm over all of them, None when there is none."""
        values = [
            (x, place)
            for x, place in zip(map(torch_internals.unwrapped, tensors), places, strict=True)
            if x is not None
        ]
        values = [(x.detach(), place) for x, place in values if _summable(x)]
        if not values:
            return None
        with torch.no_grad():
            norms = [
                torch.linalg.vector_norm(x, dtype=torch.float32 if x.element_size() == 2 else None) for x, _ in values
            ]
            self._sums += norms
            self._places += [(step, seq, place, True) for _, place in values]
            together = torch.stack([norm.to(norms[0].device, torch.float64) for norm in norms])
            total: Tensor = torch.linalg.vector_norm(together)
            return total

    def drain(self) -> list[Seen]:
        """What was not finite, in order; waits for the device once."""
        places, self._places = self._places, []
        sums, self._sums = self._sums, []
        found = []
        for where, value in zip(places, _read(sums), strict=True):
            if not math.isfinite(value):
                found.append(Seen(*where, value))
        return found


def _summable(x: Tensor) -> bool:
    return x.is_floating_point() and x.layout == torch.strided and x.element_size() > 1 and x.numel() > 0


def _sum(x: Tensor) -> Tensor:
    return x.sum(dtype=torch.float32 if x.element_size() == 2 else None)


def _read(sums: list[Tensor]) -> list[float]:
    if all(value.device.type == "cpu" for value in sums):
        return [float(value) for value in sums]
    return torch.stack([value.double() for value in sums]).tolist()
