"""attach(): wires the hooks of a model to a run directory."""

from __future__ import annotations

import atexit
import datetime
import itertools
import os
import sys
import weakref
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from tracehooks.capture import identity
from tracehooks.capture.parameters import held_parameters
from tracehooks.capture.select import selected, unwrap
from tracehooks.capture.session import Session
from tracehooks.capture.taps import SWITCHBOARD
from tracehooks.capture.torch_internals import sizes
from tracehooks.capture.trace import Trace
from tracehooks.core.config import Config, resolve
from tracehooks.core.errors import AlreadyAttachedError, InvalidOptionError, shown
from tracehooks.core.names import canonical
from tracehooks.core.records import Sink
from tracehooks.locate.live import LiveLocator
from tracehooks.locate.locator import StepLocator
from tracehooks.storage import RunWriter, open_run
from tracehooks.surface.live import DiagnosingSink


def attach(
    model: nn.Module,
    out: str | Path | None = None,
    *,
    optimizer: Optimizer | None = None,
    scaler: object | None = None,
    ema: nn.Module | None = None,
    config: Config | dict[str, Any] | str | Path | None = None,
    **options: Any,
) -> Trace:
    """Record a model's training into a run directory.

    Args:
        model: any module; wrappers such as DistributedDataParallel are looked through.
        out: the run's directory, by default ``runs/<UTC time>-<model class>``.
        optimizer: found by itself at its first step; naming it makes known from the start what it holds.
        scaler: found by itself at its first use; accepted so that a script may say what it uses.
        ema: a module that should follow the model; the distance between them is recorded.
        config: a `Config`, a mapping or a TOML file; ``options`` are fields of `Config` and win over it.

    Returns:
        The handle. Close it, or use it in a ``with`` block; at the end of the process it is closed by itself.

    Raises:
        AlreadyAttachedError: a live trace records this model already.
        UnknownNameError: an option, or a module pattern that matches no module; the nearest names are listed.
        InvalidOptionError: an argument of the wrong type or out of range, an ``ema`` whose parameters are not the model's.
        RunExistsError: ``out`` holds a run and ``resume`` is not set.
        RunBusyError: another process is writing it.
        UnwritableError: ``out`` cannot be written.
    """
    _check_types(model, out, optimizer, scaler, ema)
    settings = resolve(options, config)
    root = unwrap(model)
    if ema is not None:
        _check_average(root, ema)
    if (busy := _recording(root)) is not None:
        raise AlreadyAttachedError(type(root).__name__, busy.outbox.sink.path)
    selected(root, settings)  # a pattern that matches nothing is refused before anything is created
    path = Path(out) if out is not None else default_path(root)
    rank, _ = identity.world()
    info = identity.describe_run(model, settings)
    sink: Sink = RunWriter(path, info, rank=rank, durability=settings.durability, resume=settings.resume)
    say = _silent if settings.quiet else _say
    if settings.diagnose_every is not None and rank == 0:
        sink = DiagnosingSink(sink, settings.diagnose_every, settings.budget, say)
    keep = sink.keep if settings.snapshot else None
    locator = LiveLocator(root, keep, ema) if settings.locate == "ops" else StepLocator(root, keep, ema)
    session = Session(root, settings, sink, first_step=_next_step(path, settings), ema=ema, locator=locator, say=say)
    try:
        session.connect(optimizer)
    except BaseException:  # whatever it was, no hook and no half-made run stays behind
        session.close("crashed")
        raise
    if step := session.steps.step:
        session.recorder.event(
            "run_resumed", "info", f"recording goes on in this directory at step {step}", {"step": step}
        )
    atexit.register(_close_at_exit, weakref.ref(session))
    say(f"tracehooks: recording {type(root).__name__} into {path}")
    return Trace(session)


def default_path(root: nn.Module) -> Path:
    """``runs/<UTC time>-<model class>``, with a number behind it where that is taken."""
    name = f"{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%S}-{type(root).__name__}"
    candidates = (Path("runs") / (f"{name}-{i}" if i else name) for i in itertools.count())
    return next(path for path in candidates if not path.exists())


def _check_types(model: object, out: object, optimizer: object, scaler: object, ema: object) -> None:
    """Optimizers and scalers of other libraries need not be torch's classes: they are known by what they have."""
    if not isinstance(model, nn.Module):
        raise InvalidOptionError("model", shown(model), "a torch.nn.Module")
    if out is not None and not isinstance(out, str | os.PathLike):
        raise InvalidOptionError("out", shown(out), "the path of a directory")
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise InvalidOptionError("optimizer", shown(optimizer), "one optimizer; more are found at their first step")
    if scaler is not None and not (hasattr(scaler, "scale") and hasattr(scaler, "step")):
        raise InvalidOptionError("scaler", shown(scaler), "a torch.amp.GradScaler")
    if ema is not None and not isinstance(ema, nn.Module):
        raise InvalidOptionError("ema", shown(ema), "a torch.nn.Module that follows the model")


def _check_average(root: nn.Module, ema: nn.Module) -> None:
    """Its parameters are those of the model, by name and shape."""
    own = {held.name: sizes(held.tensor) for held in held_parameters(root)}
    theirs = {canonical(held.name): sizes(held.tensor) for held in held_parameters(ema)}
    if own and own.keys().isdisjoint(theirs):
        raise InvalidOptionError(
            "ema", type(ema).__name__, f"a copy of the model, with parameters like {next(iter(own))}"
        )
    for name in own:
        if theirs.get(name, own[name]) != own[name]:
            raise InvalidOptionError("ema", f"{name} of shape {theirs[name]}", f"shape {own[name]} as in the model")


def _next_step(path: Path, config: Config) -> int:
    """The step after the last one of a run that is resumed, else 0."""
    steps = open_run(path).steps if config.resume and (path / "run.json").exists() else []
    return max(steps) + 1 if steps else 0


def _recording(root: nn.Module) -> Session | None:
    """The live session whose hooks are on this root."""
    return next((session for session in SWITCHBOARD.live() if session.wiring.root is root), None)


def _close_at_exit(reference: weakref.ref[Session]) -> None:
    session = reference()
    if session is not None:
        session.close()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _silent(line: str) -> None:
    pass
