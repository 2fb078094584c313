"""Probes: functions that a model calls on a tensor of its own, without a handle, to have it recorded.

In compiled code a probe is an op that the graph keeps and that does its work outside of it. Whether any trace is attached
is a guard: without one the op is not there.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor

from tracehooks.capture import torch_internals
from tracehooks.capture.probed import Sighting
from tracehooks.capture.session import Session
from tracehooks.capture.taps import SWITCHBOARD

T = TypeVar("T")


def probe(x: T, name: str) -> T:
    """Record statistics of a tensor and of its gradient.

    Args:
        x: any tensor.
        name: what to call it; the site is this name within the module that calls the probe.

    Returns:
        ``x`` itself.
    """
    if SWITCHBOARD.watching:
        _see("probe", x, name)
    return x


def mask(m: T, name: str, *, keep: bool = True, dim: int = -1) -> T:
    """Record how empty a mask is.

    Args:
        m: a mask of at least one dimension. Bool and integer: True (not zero) means used. Floating: added to scores,
            where -inf (or the large negative number that stands for it) means dropped; one of zeros and ones, with a one
            among them, is read like a bool mask.
        name: as `probe` takes it.
        keep: False where True means dropped.
        dim: a row along this dimension that keeps nothing is empty: the keys of an attention mask.

    Returns:
        ``m`` itself.
    """
    if SWITCHBOARD.watching:
        _see("mask", m, name, keep, dim)
    return m


def tokens(ids: T, name: str, *, vocab_size: int | None = None, pad: int | None = None) -> T:
    """Record what token ids hold: range, padding share, distinct ids, longest repeat, ids out of the vocabulary.

    Args:
        ids: integers; the last dimension is the sequence.
        name: as `probe` takes it.
        vocab_size: ids from 0 to below it exist.
        pad: the id that fills up sequences.

    Returns:
        ``ids`` itself.
    """
    if SWITCHBOARD.watching:
        _see("tokens", ids, name, vocab_size, pad)
    return ids


def audio(x: T, name: str, *, sample_rate: float | None = None) -> T:
    """Record what a signal holds, per channel: RMS in dBFS, peak, clipped share, silent share, DC offset.

    Args:
        x: (samples,), (channels, samples) with up to 8 channels, (batch, samples) with more rows than that, or
            (…, channels, samples); full scale is 1, for integers their range.
        name: as `probe` takes it.
        sample_rate: in hertz, for frames of 20 ms in which silence is looked for; frames are of 1024 samples without it.

    Returns:
        ``x`` itself.
    """
    if SWITCHBOARD.watching:
        _see("audio", x, name, sample_rate)
    return x


def _see(kind: str, x: Any, name: str, *asked: Any) -> None:
    name = str(name)
    if not torch.compiler.is_compiling():
        _show(kind, x, None, name, asked)
    elif isinstance(x, Tensor) and not torch.compiler.is_exporting():
        within = _traced_path()
        if kind == "probe":
            asked = (x.requires_grad,)
        _OPS[kind](x.detach(), torch.is_grad_enabled(), within, name, *asked)
        if kind == "probe" and x.requires_grad:
            x.register_hook(lambda gradient: _OPS["gradient"](gradient, True, within, name))  # type: ignore[no-untyped-call]


def _show(kind: str, x: Any, within: str | None, name: str, asked: tuple[Any, ...]) -> None:
    """Show a tensor to every session whose model the caller is part of; to all of them where it is part of none.

    Args:
        within: path from the module that is called to the one that calls the probe, None outside of compiled code: there
            they are the same.
    """
    callers = [(session, _caller(session)) for session in SWITCHBOARD.live()]
    inside = any(path is not None for _, path in callers)
    for session, path in callers:
        if path is not None or not inside:
            site = _joined(session, path or "", within or "")
            session.probed.seen(Sighting(kind, site, name, asked, path is not None, within), x)


def _caller(session: Session) -> str | None:
    """Path of the innermost module whose call this thread is in, None where it is in no module of the session's.

    While a checkpoint recomputes part of a module's forward pass, its call is long over: then the module is whose methods
    are on the stack, up to where backward began. Variables of other frames are not asked for: Python would keep them.
    """
    recompute = torch_internals.graph_task_id() != -1
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not (recompute and frame.f_code.co_name == torch_internals.BACKWARD_CALL):
        if recompute or frame.f_code.co_name == torch_internals.ROOT_CALL:
            path = session.wiring.held.get(id(frame.f_locals.get("self")))
            if path is not None:
                return path
        frame = frame.f_back
    return None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _traced_path() -> str:
    """Path from the module that torch.compile began with to the one that it is in."""
    for session in SWITCHBOARD.live():
        held = session.wiring.held
        inner = [held[number] for number in torch_internals.traced_modules() if number in held]
        outer = _caller(session)
        if inner and (not outer or inner[-1].startswith(f"{outer}.")):
            return inner[-1].removeprefix(outer or "").removeprefix(".")
    return ""


def _joined(session: Session, outer: str, within: str) -> str:
    path = f"{outer}.{within}".strip(".")
    return path if path in session.wiring.modules else outer


def _op(kind: str, asked: str = "") -> Any:
    """An op that shows its tensor and returns nothing. It says of nothing that it changes it, so that the graph may be
    cached and the tensor saved for backward."""

    def show(x: Tensor, training: bool, within: str, name: str, *asked: Any) -> None:
        with torch.set_grad_enabled(training):  # compiled code runs without gradients, whatever it computes
            if kind == "gradient":
                for session in SWITCHBOARD.live():
                    session.probed.gradient_arrived((within, name), x)
            else:
                _show(kind, x, within, name, asked)

    name = f"show_{kind}"
    schema = f"{name}(Tensor x, bool training, str within, str name{asked}) -> ()"
    _LIBRARY.define(schema, tags=torch_internals.CUDA_GRAPHS_STOP_HERE)  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, show, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"tracehooks::{name}", lambda *_: None, lib=_LIBRARY)
    op = getattr(torch.ops.tracehooks, name).default
    torch_internals.keep_in_graph(op)
    return op


_LIBRARY = torch.library.Library("tracehooks", "FRAGMENT")  # type: ignore[no-untyped-call]
_OPS = {
    "probe": _op("probe", ", bool gradient"),
    "gradient": _op("gradient"),
    "mask": _op("mask", ", bool keep, int dim"),
    "tokens": _op("tokens", ", int? vocab_size, int? pad"),
    "audio": _op("audio", ", float? sample_rate"),
}
