"""The optimiser's parameter groups and the learning rate over a run."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

__all__ = ["Schedule", "learning_rate_factor", "make_optimizer", "make_scheduler", "parameter_groups"]

Schedule = Literal["cosine", "linear"]

START = 1 / 25
"""Share of the peak rate that a run starts with; one-cycle's ``div_factor``."""
END = 1 / 25e4
"""Share of the peak rate that a one-cycle run ends with; its ``div_factor`` times ``final_div_factor``."""


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


def learning_rate_factor(step: int, total: int, *, warmup: float, schedule: Schedule) -> float:
    """Return the learning rate of optimiser step ``step`` (from 0) of ``total``, as a share of the peak rate.

    ``warmup`` is the share of the run, in [0, 1], after which the peak is reached. ``cosine`` is one-cycle: from
    1/25 up to the peak and down to 1/250000, both along half a cosine (Smith & Topin, "Super-Convergence", 2018; equal
    to torch's OneCycleLR where that is defined). ``linear`` climbs to the peak and falls to zero along straight lines.
    Defined for every ``total`` >= 1 and every step; past the end it keeps the last value.
    """
    if schedule == "linear":
        peak = warmup * total
        if step < peak:
            return (step + 1) / (peak + 1)
        return max(0.0, (total - step) / (total - peak)) if total > peak else 0.0
    peak, last = warmup * total - 1, total - 1
    if step < peak:
        return _half_cosine(START, 1.0, step / peak)
    if peak < 0:
        peak = 0.0
    return _half_cosine(1.0, END, min(1.0, (step - peak) / (last - peak)) if last > peak else 0.0)


def _half_cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2


def make_scheduler(optimizer: torch.optim.Optimizer, total: int, *, warmup: float, schedule: Schedule) -> LambdaLR:
    """A scheduler to step once after every optimiser step; it changes the learning rate and nothing else."""
    return LambdaLR(optimizer, lambda step: learning_rate_factor(step, total, warmup=warmup, schedule=schedule))
