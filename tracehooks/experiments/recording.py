"""One step of a live model, recorded on purpose and leaving the model as it was."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tracehooks.capture import identity
from tracehooks.capture.select import unwrap
from tracehooks.capture.session import Session
from tracehooks.capture.taps import SWITCHBOARD
from tracehooks.capture.trace import Trace
from tracehooks.core.config import resolve
from tracehooks.experiments.given import a_seed, one_batch
from tracehooks.locate.locator import StepLocator
from tracehooks.locate.replay import Randomness
from tracehooks.storage import RunWriter

LossFn = Callable[[nn.Module, Any], Any]
"""Feeds a batch to a model: (model, batch) → the loss, or whatever comes out; a scalar that needs a gradient is
differentiated."""

RECORDED = ("outputs", "inputs", "output_grads", "parameters", "gradients", "masks", "samples")


def record_step(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    out: str | Path,
    *,
    seed: int = 0,
    notes: tuple[str, ...] = (),
    options: Mapping[str, Any] | None = None,
) -> Path:
    """Record one forward and, where there is a loss, backward pass of a model on a batch into a run directory.

    With sketches, inputs of modules, and every generator seeded. Buffers, gradients, modes of modules and generators are
    put back afterwards; parameters are not touched.

    Raises:
        RunExistsError: ``out`` holds a run.
        InvalidOptionError: no model, no function, no seed, or where batches are from instead of one.
    """
    one_batch(model, loss_fn, batch)
    a_seed(seed)
    with untouched(model), recording(model, out, {"record": RECORDED, **(options or {})}, notes) as trace:
        seed_all(seed)
        with trace.step_scope(), torch.enable_grad():
            loss = loss_fn(model, batch)
            if isinstance(loss, Tensor) and loss.requires_grad and loss.numel() == 1:
                loss.backward()  # type: ignore[no-untyped-call]
            elif isinstance(loss, Tensor) and loss.numel() == 1:
                trace.scalar("loss", loss.detach())
    return Path(out)


@contextlib.contextmanager
def recording(
    model: nn.Module, out: str | Path, options: Mapping[str, Any], notes: tuple[str, ...] = ()
) -> Iterator[Trace]:
    """A trace of the model into a run directory, by default with sketches and without a word."""
    settings = resolve({"quiet": True, "sketch": True, **options})
    root = unwrap(model)
    sink = RunWriter(Path(out), {**identity.describe_run(model, settings), "notes": list(notes)})
    session = Session(root, settings, sink, locator=StepLocator(root))
    try:
        session.connect()
    except BaseException:  # no hook and no half-made run stays behind
        session.close("crashed")
        raise
    with Trace(session) as trace:
        yield trace


@contextlib.contextmanager
def untouched(*models: nn.Module) -> Iterator[None]:
    """Put back buffers, gradients, modes and generators when the block is left, also by an exception. Traces of these
    models that are under way see nothing of it."""
    randomness = Randomness()
    watching = [s for s in SWITCHBOARD.live() if not s.silent and any(s.wiring.root is unwrap(m) for m in models)]
    for session in watching:
        session.silent = True
    buffers = [(buffer, buffer.detach().clone()) for model in models for buffer in model.buffers()]
    gradients = [(parameter, parameter.grad) for model in models for parameter in model.parameters()]
    modes = [(module, module.training) for model in models for module in model.modules()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, training in modes:
            module.training = training
        randomness.restore()
        for session in watching:
            session.silent = False


def seed_all(seed: int) -> None:
    """Seed torch's, NumPy's and Python's generators.

    Raises:
        InvalidOptionError: ``seed`` is none that all of them take.
    """
    a_seed(seed)
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
