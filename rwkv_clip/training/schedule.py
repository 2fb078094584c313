"""The learning rate, and if asked the first beta, at every step of a run: pure functions of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

__all__ = ["Schedule", "Shape", "learning_rate_factor"]

Shape = Literal["cosine", "linear"]

START = 1 / 25
"""Share of the peak rate that a run starts with; one-cycle's ``div_factor``."""
END = 1 / 25e4
"""Share of the peak rate that a one-cycle run ends with; its ``div_factor`` times ``final_div_factor``."""
CYCLED_BETA1 = (0.95, 0.85)
"""One-cycle's ``max_momentum``, at both ends of the run, and ``base_momentum``, at the peak rate."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The settings of AdamW that change with the step. It keeps no state: a resumed run asks for its own step."""

    peak: float  # learning rate after the warm-up
    total: int  # optimiser steps of the run
    warmup: float  # share of the run until the peak
    shape: Shape = "cosine"
    cycle_momentum: bool = False  # let beta1 fall while the rate rises, and rise while it falls

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of optimiser step ``step``, from 0."""
        return self.peak * learning_rate_factor(step, self.total, warmup=self.warmup, shape=self.shape)

    def beta1(self, step: int) -> float | None:
        """Return the first beta of optimiser step ``step``; None where it stays as the optimiser has it."""
        if not self.cycle_momentum:
            return None
        ends, peak = CYCLED_BETA1
        return _one_cycle(step, self.total, self.warmup, at_start=ends, at_peak=peak, at_end=ends)

    def apply(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Set what ``step`` is to be made with."""
        rate, beta1 = self.learning_rate(step), self.beta1(step)
        for group in optimizer.param_groups:
            group["lr"] = rate
            if beta1 is not None:
                group["betas"] = (beta1, group["betas"][1])


def learning_rate_factor(step: int, total: int, *, warmup: float, shape: Shape) -> float:
    """Return the learning rate of optimiser step ``step`` (from 0) of ``total``, as a share of the peak rate.

    ``warmup`` is the share of the run, in [0, 1], after which the peak is reached. ``cosine`` is one-cycle: from
    1/25 up to the peak and down to 1/250000, both along half a cosine (Smith & Topin, "Super-Convergence", 2018; equal
    to torch's OneCycleLR where that is defined). ``linear`` climbs to the peak and falls to zero along straight lines.
    Defined for every ``total`` >= 1 and every step; past the end it keeps the last value.
    """
    if shape == "cosine":
        return _one_cycle(step, total, warmup, at_start=START, at_peak=1.0, at_end=END)
    peak = warmup * total
    if step < peak:
        return (step + 1) / (peak + 1)
    return max(0.0, (total - step) / (total - peak)) if total > peak else 0.0


def _one_cycle(step: int, total: int, warmup: float, *, at_start: float, at_peak: float, at_end: float) -> float:
    peak, last = warmup * total - 1, total - 1
    if step < peak:
        return _half_cosine(at_start, at_peak, step / peak)
    peak = max(peak, 0.0)
    return _half_cosine(at_peak, at_end, min(1.0, (step - peak) / (last - peak)) if last > peak else 0.0)


def _half_cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2
