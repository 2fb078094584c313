"""What is kept of a run for people to look at: TensorBoard's curves, and a trace."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rwkv_clip.errors import InputError
from rwkv_clip.training.run import Run
from rwkv_clip.training.speed import Interval

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["Curves", "Scalars", "curves", "traced"]


class Scalars(Protocol):
    """What takes a named number of the run: a trace, or nothing."""

    def scalar(self, name: str, value: float) -> None:
        """Record ``value`` under ``name`` at the current step."""


class _Untraced:
    """Stands in for a trace when none is asked for."""

    def scalar(self, name: str, value: float) -> None:
        """Do nothing."""


class Curves:
    """Draws TensorBoard curves; nothing without a writer, as on ranks other than the first."""

    def __init__(self, writer: SummaryWriter | None) -> None:
        self._writer = writer

    def interval(self, interval: Interval, *, learning_rate: float, logit_scale: float, amp: float) -> None:
        """Points at the interval's last step: its mean loss and largest gradient norm, the rest as of that step."""
        self.points(
            interval.step,
            {
                "loss": interval.loss,
                "lr": learning_rate,
                "logit_scale": logit_scale,
                "grad_norm": interval.grad_norm,
                "scale": amp,
                "skipped_steps": interval.skipped,
                "samples_per_second": interval.total_samples_per_second,
            },
        )

    def points(self, step: int, values: Mapping[str, float]) -> None:
        """One point on each of these curves, on disk when this returns."""
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()


@contextlib.contextmanager
def curves(run: Run) -> Iterator[Curves]:
    """The run's curves in ``<output>/tensorboard``. Points that a killed run drew beyond its checkpoint are hidden."""
    if not run.place.leads:
        yield Curves(None)
        return
    from torch.utils.tensorboard import SummaryWriter

    folder = run.args.output / "tensorboard"
    purge = run.step + 1 if run.step else None
    with contextlib.closing(SummaryWriter(str(folder), purge_step=purge)) as writer:
        yield Curves(writer)


@contextlib.contextmanager
def traced(run: Run) -> Iterator[Scalars]:
    """The trace of the run, of every rank; ``--trace`` is the only thing that imports tracehooks."""
    if run.args.trace is None:
        yield _Untraced()
        return
    try:
        import tracehooks
    except ImportError as error:
        raise InputError("--trace needs the package tracehooks: pip install tracehooks") from error
    resume = run.args.resume is not None and (Path(run.args.trace) / "run.json").exists()
    try:
        trace = tracehooks.attach(
            run.model, run.args.trace, optimizer=run.updater.optimizer, every=run.args.trace_every, resume=resume
        )
    except tracehooks.TracehooksError as error:
        raise InputError(f"--trace {run.args.trace}: {error}") from error
    with trace:
        yield trace
