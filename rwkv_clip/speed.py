"""The line a training run prints every few steps: throughput, learning rate, loss, time to go."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Interval", "SpeedCallBack"]

SECONDS_PER_HOUR = 3600


@dataclass(frozen=True, slots=True)
class Interval:
    """What was measured over the last interval of steps."""

    step: int  # optimiser steps done
    samples_per_second: float  # of this rank
    total_samples_per_second: float  # of all ranks
    loss: float  # mean over the interval's steps, nats
    grad_norm: float  # largest of the interval's steps, before clipping
    hours_left: float


class SpeedCallBack:
    """Call it after every optimiser step; every ``frequent`` steps it logs a line, from the first interval on.

    Losses and gradient norms are summed on their device and read once an interval, so the call itself never waits for
    the device.

    Args:
        frequent: steps of an interval, at least 1.
        steps_total: steps of the whole run.
        batch_size: samples a step on this rank.
        world_size: number of ranks; the total is this rank's speed times it.
        logger: where the line goes; the ``rwkv_clip`` logger by default.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        frequent: int,
        steps_total: int,
        batch_size: int,
        *,
        world_size: int = 1,
        logger: logging.Logger | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.frequent, self.steps_total, self.batch_size = frequent, steps_total, batch_size
        self.world_size = world_size
        self._logger = logger or logging.getLogger("rwkv_clip")
        self._clock = clock
        self._steps = 0
        self._loss, self._grad_norm = torch.zeros(()), torch.zeros(())
        self._started = clock()

    def __call__(
        self, step: int, *, loss: Tensor, grad_norm: Tensor, learning_rate: float, scale: Tensor
    ) -> Interval | None:
        """Count one step; return the interval's measurements when one ends, else None.

        Args:
            step: optimiser steps done, from 1.
            loss, grad_norm: (), of this step; the norm before clipping.
            learning_rate: of this step.
            scale: (), exp(logit_scale).
        """
        self._loss = self._loss + loss.detach()
        self._grad_norm = torch.maximum(self._grad_norm, grad_norm.detach())
        self._steps += 1
        if step % self.frequent:
            return None
        interval = self._measure(step)
        self._logger.info(
            f"rank:{int(interval.samples_per_second)} total:{int(interval.total_samples_per_second)} "
            f"lr:[{learning_rate:.8f}] step:{step}/{self.steps_total} loss:{interval.loss:.4f} "
            f"grad_norm:{interval.grad_norm:.3f} scale:{float(scale.detach()):.2f} "
            f"required:{interval.hours_left:.1f} hours"
        )
        self._begin()
        return interval

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time this block takes (an evaluation, a checkpoint) out of the running interval."""
        began = self._clock()
        try:
            yield
        finally:
            self._started += self._clock() - began

    def _begin(self) -> None:
        self._steps = 0
        self._loss, self._grad_norm = torch.zeros(()), torch.zeros(())
        self._started = self._clock()

    def _measure(self, step: int) -> Interval:
        loss = float(self._loss) / self._steps
        seconds = max(self._clock() - self._started, 1e-9)
        speed = self._steps * self.batch_size / seconds
        left = (self.steps_total - step) * seconds / self._steps / SECONDS_PER_HOUR
        return Interval(step, speed, speed * self.world_size, loss, float(self._grad_norm), left)
