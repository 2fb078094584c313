"""What an optimizer step does to parameters, without a copy of every weight."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tracehooks.capture import torch_internals
from tracehooks.capture.lane import Lane
from tracehooks.capture.parameters import Held

EXACT_BELOW = 65_536
"""Parameters of at most this many elements are copied whole to tell their update; of larger ones a sample is."""
SAMPLE = 4_096
"""Elements sampled from a larger parameter: the norm of its update is known to about 1/sqrt(2·4096) = 1 %."""


class Copied(NamedTuple):
    """A parameter whose values are copied whole, and where to; the copies are kept from step to step."""

    held: Held
    address: int
    values: Tensor
    before: Tensor
    after: Tensor
    """The values themselves, or room for them in a wider type: a difference of neighbours is exact in float32."""


class UpdateProbe:
    """Small parameters are copied, by the fast lane if they are plain, large ones sampled at fixed, evenly spread,
    pseudo-random positions; the positions are drawn from a generator of our own, so the run's random state is not touched.
    All are read in a few calls.
    """

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._looked_at: list[Held] = []
        self._small: list[Held] = []
        self._large: list[Held] = []
        self._tensors: list[Tensor] = []
        """Parameters that were looked at last, and those of them that are copied whole."""
        self._kept: list[Held] = []
        """Parameters whose values the lane holds."""
        self._known: dict[int, Copied] = {}
        self._positions: dict[tuple[int, torch.device], Tensor] = {}
        self._copied: list[Copied] = []
        self._sampled: list[tuple[Held, Tensor]] = []

    def look(self, held: list[Held]) -> None:
        """Remember the values before the step. The same list holds the same parameters."""
        self._kept, self._copied, self._sampled = [], [], []
        if held is not self._looked_at:
            self._looked_at = held
            self._small = [one for one in held if one.tensor.numel() <= EXACT_BELOW]
            self._large = [one for one in held if one.tensor.numel() > EXACT_BELOW]
            self._tensors = [one.tensor for one in self._small]
        small, large = self._small, self._large
        if self._lane.keep(self._tensors):
            self._kept, small = small, []
        with torch.no_grad():
            for one in [*small, *large]:
                values = torch_internals.unwrapped(one.tensor)
                if values is None or values.layout is not torch.strided:
                    continue
                if values.numel() <= EXACT_BELOW:
                    self._copied.append(self._place_for(one, values))
                else:
                    self._sampled.append((one, self._sample(values)))
            torch_internals.copy_each([one.before for one in self._copied], [one.values for one in self._copied])

    def kept(self) -> tuple[list[Held], list[Tensor]]:
        """After the step: parameters whose values the lane holds, in the order in which it does."""
        kept, self._kept = self._kept, []
        return kept, self._tensors

    def changes(self) -> tuple[list[Held], list[Tensor]]:
        """After the step: the other parameters and the change of their (sampled) elements, in float32 or wider."""
        copied = [one for one in self._copied if one.held.tensor.data_ptr() == one.address]  # .data was not exchanged
        sampled = [(one, before) for one, before in self._sampled if one.tensor.numel() > EXACT_BELOW]
        self._copied, self._sampled = [], []
        with torch.no_grad():
            wider = [one for one in copied if one.after is not one.values]
            torch_internals.copy_each([one.after for one in wider], [one.values for one in wider])
            now = [
                self._sample(values)
                for one, _ in sampled
                if (values := torch_internals.unwrapped(one.tensor)) is not None
            ]
            new = [one.after for one in copied] + now
            old = [one.before for one in copied] + [before for _, before in sampled]
            return [one.held for one in copied] + [one for one, _ in sampled], torch_internals.differences(new, old)

    def _place_for(self, held: Held, values: Tensor) -> Copied:
        known = self._known.get(id(held.tensor))
        if known is not None and known.held is held and known.address == held.tensor.data_ptr():
            return known
        values = torch.view_as_real(values.detach()) if values.is_complex() else values.detach()
        dtype = torch.float32 if values.is_floating_point() and values.element_size() < 4 else values.dtype
        before = torch.empty(values.shape, dtype=dtype, device=values.device)
        after = values if dtype is values.dtype else torch.empty_like(before)
        made = self._known[id(held.tensor)] = Copied(held, held.tensor.data_ptr(), values, before, after)
        return made

    def _sample(self, values: Tensor) -> Tensor:
        values = torch.view_as_real(values.detach()) if values.is_complex() else values.detach()
        taken = torch.take(values, self._at(values.numel(), values.device))
        return taken.to(torch.float32) if taken.is_floating_point() and taken.element_size() < 4 else taken

    def _at(self, count: int, device: torch.device) -> Tensor:
        """``SAMPLE`` ascending positions, one in each of as many equal stretches."""
        if (count, device) not in self._positions:
            generator = torch.Generator().manual_seed(0)
            edges = torch.arange(SAMPLE, dtype=torch.float64) * (count / SAMPLE)
            jitter = torch.rand(SAMPLE, generator=generator, dtype=torch.float64) * (count / SAMPLE)
            self._positions[count, device] = (edges + jitter).to(torch.int64).clamp(max=count - 1).to(device)
        return self._positions[count, device]
