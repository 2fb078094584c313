"""The loss as it is seen where backward starts, and whether that backward pass was this model's."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tracehooks.capture import torch_internals
from tracehooks.capture.recorder import Recorder


class Losses:
    """Turns the tensor that backward starts from into the scalar ``loss``, divided by no loss scale."""

    def __init__(self, recorder: Recorder) -> None:
        self.scaling = False
        """A GradScaler is at work."""
        self.reached = False
        """The backward pass under way has reached this model."""
        self._recorder = recorder
        self._scaled: list[tuple[weakref.ref[Tensor], Tensor]] = []
        self._candidate: Tensor | None = None

    def scaled(self, outputs: Any, scaled: Any) -> None:
        """A GradScaler made ``scaled`` of ``outputs``."""
        if isinstance(scaled, Tensor) and isinstance(outputs, Tensor) and scaled is not outputs:
            self.scaling = True
            self._scaled = [(ref, value) for ref, value in self._scaled if ref() is not None]
            self._scaled.append((weakref.ref(scaled), outputs.detach()))

    def scaler_begins(self, scaler: object, optimizer: object) -> None:
        """A GradScaler is about to step an optimizer: the loss scale, and whether gradients are unscaled already."""
        scale, scaled = torch_internals.loss_scale(scaler), torch_internals.still_scaled(scaler, optimizer)
        if scale is not None:
            self._recorder.scalar("scale", scale)
        if scaled is not None:
            self._recorder.scalar("scale/unscaled", float(not scaled))

    def backward_begins(self, tensors: Tensor | Sequence[Tensor]) -> None:
        """Backward starts from these."""
        self.reached = False
        self._candidate = None
        tensor = tensors[0] if isinstance(tensors, tuple | list) and len(tensors) == 1 else tensors
        if isinstance(tensor, Tensor) and torch_internals.unwrapped(tensor) is not None and tensor.numel() == 1:
            unscaled = next((value for ref, value in self._scaled if ref() is tensor), tensor)
            self._candidate = unscaled.detach().reshape(()).clone()

    def backward_ends(self, micro: int) -> bool:
        """It is over. Whether it reached this model; only then is its loss recorded."""
        if self.reached and self._candidate is not None:
            self._recorder.scalar("loss", self._candidate, micro)
        self._candidate = None
        return self.reached

    def left(self, loss: float | None, micro: int) -> bool:
        """A loss that the user saw not to be finite and never called backward on, if there is one. Whether there is."""
        if loss is not None:
            self._recorder.scalar("loss", loss, micro)
        return loss is not None
