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
SHORTEST = 1e-9  # seconds


def _nothing() -> tuple[Tensor, Tensor]:
    """A sum and a largest value to begin with."""
    return torch.zeros(()), torch.full((), torch.nan)


def _alone(value: tuple[float, float]) -> list[tuple[float, float]]:
    return [value]


@dataclass(frozen=True, slots=True)
class Interval:
    """What was measured over the last interval of steps."""

    step: int  # optimiser steps done
    samples_per_second: float  # of this rank, in the time that it did not wait for others
    ranks: list[float]  # the same of every rank
    total_samples_per_second: float  # of all ranks, by the clock on the wall
    loss: float  # mean over the interval's steps and the ranks, nats
    grad_norm: float  # largest of the interval's steps that were made, before clipping; nan when none was
    skipped: int  # steps of the whole run that the scaler skipped
    hours_left: float


class SpeedCallBack:
    """Call it after every optimiser step; every ``frequent`` steps it logs a line, from the first interval on.

    Losses and gradient norms are summed on their device and read once an interval, so the call itself never waits for
    the device.

    Args:
        frequent: steps of an interval, at least 1.
        steps_total: steps of the whole run.
        batch_size: samples a step on this rank.
        gather: what each rank passed, in the order of ranks; called once an interval, by every rank.
        skipped: steps skipped so far, of a run that goes on.
        logger: where the line goes; the ``rwkv_clip`` logger by default.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        frequent: int,
        steps_total: int,
        batch_size: int,
        *,
        gather: Callable[[tuple[float, float]], list[tuple[float, float]]] = _alone,
        skipped: int = 0,
        logger: logging.Logger | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.frequent, self.steps_total, self.batch_size = frequent, steps_total, batch_size
        self.skipped = skipped
        self._gather, self._logger, self._clock = gather, logger or logging.getLogger("rwkv_clip"), clock
        self._steps, self._waited = 0, 0.0
        self._loss, self._grad_norm = _nothing()
        self._started = clock()

    def __call__(
        self,
        step: int,
        *,
        loss: Tensor,
        grad_norm: Tensor,
        learning_rate: float,
        scale: Tensor,
        amp: float = 1.0,
        skipped: bool = False,
        waited: float = 0.0,
    ) -> Interval | None:
        """Count one step; return the interval's measurements when one ends, else None.

        Args:
            step: optimiser steps done, from 1.
            loss, grad_norm: (), of this step; the norm before clipping.
            learning_rate: of this step.
            scale: (), exp(logit_scale).
            amp: the gradient scaler's scale, 1 without one.
            skipped: whether the scaler skipped this step.
            waited: seconds of this step that this rank waited for others.
        """
        self._loss = self._loss + loss.detach()
        if skipped:
            self.skipped += 1
        else:
            self._grad_norm = torch.fmax(self._grad_norm, grad_norm.detach())
        self._steps += 1
        self._waited += waited
        if step % self.frequent:
            return None
        interval = self._measure(step)
        ranks = f" ranks:[{' '.join(str(int(speed)) for speed in interval.ranks)}]" if len(interval.ranks) > 1 else ""
        self._logger.info(
            f"rank:{int(interval.samples_per_second)} total:{int(interval.total_samples_per_second)}{ranks} "
            f"lr:[{learning_rate:.8f}] step:{step}/{self.steps_total} amp:{amp:g} skipped:{interval.skipped} "
            f"loss:{interval.loss:.4f} grad_norm:{interval.grad_norm:.3f} scale:{float(scale.detach()):.2f} "
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
        self._steps, self._waited = 0, 0.0
        self._loss, self._grad_norm = _nothing()
        self._started = self._clock()

    def _measure(self, step: int) -> Interval:
        seconds = max(self._clock() - self._started, SHORTEST)
        samples = self._steps * self.batch_size
        own = samples / max(seconds - self._waited, SHORTEST)
        gathered = self._gather((own, float(self._loss) / self._steps))
        ranks, losses = zip(*gathered, strict=True)
        left = (self.steps_total - step) * seconds / self._steps / SECONDS_PER_HOUR
        total = samples / seconds * len(gathered)
        return Interval(
            step, own, list(ranks), total, sum(losses) / len(losses), float(self._grad_norm), self.skipped, left
        )
