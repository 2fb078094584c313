"""A moving average of a model: whether its buffers follow those of the model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tracehooks.capture.parameters import held_buffers
from tracehooks.core.names import canonical

LARGEST = 1 << 20
"""Elements of a buffer that is copied to be compared with at most."""


class AveragedBuffers:
    """Floating buffers of a model and of its average as they were at first."""

    def __init__(self, model: nn.Module, average: nn.Module) -> None:
        own = _buffers(model)
        pairs = {name: (own[name], theirs) for name, theirs in _buffers(average).items() if name in own}
        self._pairs = {name: (a, a.clone(), b, b.clone()) for name, (a, b) in pairs.items()}

    def stale(self) -> list[str]:
        """Those that are as they were while the model's have changed. Waits for the device."""
        return [
            name
            for name, (own, first, theirs, their_first) in self._pairs.items()
            if not torch.equal(own, first) and torch.equal(theirs, their_first)
        ]


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    """By canonical name; an average that wraps a copy of the model has its names behind a ``module.``."""
    return {
        canonical(held.name): held.tensor.detach()
        for held in held_buffers(model)
        if held.tensor.is_floating_point() and held.tensor.numel() <= LARGEST and not held.tensor.is_meta
    }
