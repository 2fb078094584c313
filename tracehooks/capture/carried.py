"""Gradients that an optimizer has used already and that are still there when the next backward pass adds to them.

They are looked at where backward begins. A parameter's old gradient counts as carried into a step when it was there, and
not zero, at every backward pass since the last step: so accumulation, and the players of a GAN, whose gradients are
cleared right before their own turn, do not count.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from tracehooks.capture import torch_internals

WATCHED = 2
"""Parameters of an optimizer that are looked at: the smallest ones, since it costs a pass over their gradients."""
STEPS = 32
"""Steps of an optimizer that are looked at."""


class Carried:
    """Old gradients of the parameters of one optimizer."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = sorted(parameters, key=Tensor.numel)[:WATCHED]
        self._steps = 0
        self._least: Tensor | None = None

    def backward_begins(self) -> None:
        """Look at what is there."""
        if not 0 < self._steps <= STEPS:
            return
        with torch.no_grad():
            norms = [norm for parameter in self._parameters if (norm := _norm(parameter.grad)) is not None]
            now = torch.stack(norms).amax() if norms else torch.zeros((), dtype=torch.float64)
            self._least = now if self._least is None else torch.minimum(self._least, now)

    def stepped(self) -> Tensor | None:
        """The optimizer has stepped: the norm of what was carried into this step, None where it was not looked at."""
        self._steps += 1
        least, self._least = self._least, None
        return least


def _norm(gradient: Tensor | None) -> Tensor | None:
    values = None if gradient is None else torch_internals.unwrapped(gradient)
    if values is None or values.layout != torch.strided or not values.numel():
        return None
    norm: Tensor = torch.linalg.vector_norm(values.detach()).double()
    return norm
