"""A checkpoint's weights into a live model, in any format that checkpoints are read in."""

from __future__ import annotations

import os

import torch
from torch import nn

from tracehooks.checkpoint.names import prefix
from tracehooks.checkpoint.opened import open_checkpoint
from tracehooks.core.errors import CheckpointError


def load_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Load every parameter and buffer of a model from a checkpoint; a prefix of its names is taken off.

    Raises:
        CheckpointError: it cannot be read, lacks a tensor of the model, or has one of another shape.
    """
    kept = open_checkpoint(path).tensors
    wanted = model.state_dict()
    _, before = prefix(wanted, kept)
    loaded = {name.removeprefix(before): tensor for name, tensor in kept.items() if name.startswith(before)}
    missing = [name for name in wanted if name not in loaded]
    misshapen = [name for name in wanted if name in loaded and tuple(wanted[name].shape) != loaded[name].shape]
    if missing or misshapen:
        raise CheckpointError(
            path, f"lacks {missing[:3]} and has other shapes of {misshapen[:3]}, which the model needs"
        )
    model.load_state_dict({name: torch.from_numpy(loaded[name].read().copy()) for name in wanted})
