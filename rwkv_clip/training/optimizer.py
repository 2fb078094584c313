"""The optimiser, and which parameters decay."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["make_optimizer", "parameter_groups"]


def parameter_groups(model: nn.Module, weight_decay: float, *, decay_all: bool = False) -> list[dict[str, Any]]:
    """Split the parameters that train into a group with weight decay and one without.

    Only the matrices of linear maps, convolutions and embeddings decay. Biases, norms, mixing weights, decays
    (``time_decay``), bonuses (``time_faaaa``), position and class embeddings and the logit scale do not, unless
    ``decay_all``. Empty groups are left out.
    """
    kept: list[nn.Parameter] = []
    decayed: list[nn.Parameter] = []
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                is_map = name == "weight" and isinstance(module, nn.Linear | nn.Conv2d | nn.Embedding)
                low_rank = name in ("time_maa_w1", "time_maa_w2", "time_decay_w1", "time_decay_w2")
                (decayed if decay_all or is_map or low_rank else kept).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def make_optimizer(
    model: nn.Module, *, lr: float, betas: tuple[float, float], weight_decay: float, decay_all: bool = False
) -> torch.optim.AdamW:
    """AdamW over :func:`parameter_groups`. Source: Loshchilov & Hutter, "Decoupled Weight Decay" (2019)."""
    return torch.optim.AdamW(parameter_groups(model, weight_decay, decay_all=decay_all), lr=lr, betas=betas)
