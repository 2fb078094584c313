"""What a session sees beyond its model: optimizer steps, the start of backward, the GradScaler.

These are process-wide in torch, so there is one `Switchboard` for all sessions: it is set up with the first and taken
down with the last, and holds sessions weakly.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from tracehooks.capture.session import Session


class Switchboard:
    """Tells every live session of optimizer steps, backward passes and scaler steps, in the order they attached."""

    def __init__(self) -> None:
        self.watching = False
        """Whether there is any session to tell: what probes ask first, in compiled code too."""
        self._sessions: list[weakref.ref[Session]] = []
        self._handles: list[RemovableHandle] = []
        self._patched: list[tuple[object, str, Any, Any]] = []

    def connect(self, session: Session) -> None:
        """Tell this session from now on."""
        if not self._sessions:
            self._set_up()
        self._sessions.append(weakref.ref(session, lambda _: self._sweep()))

    def disconnect(self, session: Session) -> None:
        """Tell it no more; after the last one everything is as it was."""
        self._sessions = [ref for ref in self._sessions if ref() is not session]
        self._sweep()

    def live(self) -> list[Session]:
        """The sessions to tell."""
        return [session for ref in self._sessions if (session := ref()) is not None]

    def _here(self) -> list[Session]:
        """Those whose model is called in this thread."""
        return [session for session in self.live() if session.passes.here]

    def _sweep(self) -> None:
        self._sessions = [ref for ref in self._sessions if ref() is not None]
        if not self._sessions:
            self._take_down()

    def _set_up(self) -> None:
        self.watching = True
        self._handles = [
            register_optimizer_step_pre_hook(self._optimizer_begins),
            register_optimizer_step_post_hook(self._optimizer_ends),
        ]
        self._patch(torch.autograd, "backward", self._backward)
        self._patch(torch.autograd, "grad", self._grad)
        self._patch(torch.amp.GradScaler, "scale", self._scale)
        self._patch(torch.amp.GradScaler, "step", self._scaler_step)

    def _take_down(self) -> None:
        self.watching = False
        for handle in self._handles:
            handle.remove()
        for owner, name, original, ours in self._patched:
            if getattr(owner, name) is ours:  # somebody who wrapped ours keeps a wrapper that has nobody to tell
                setattr(owner, name, original)
        self._handles, self._patched = [], []

    def _patch(self, owner: object, name: str, wrapper: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def ours(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(*args, **kwargs)
            return wrapper(original, *args, **kwargs)

        self._patched.append((owner, name, original, ours))
        setattr(owner, name, ours)

    def _optimizer_begins(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 and args[0] is optimizer else None)
        for session in self.live():
            if session.passes.here:
                session.comes_next("optimizer")
            session.stepping.begins(optimizer, closure is not None)

    def _optimizer_ends(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for session in self.live():
            session.stepping.ends(optimizer)

    def _backward(
        self, original: Callable[..., Any], tensors: Tensor | Sequence[Tensor], *args: Any, **kwargs: Any
    ) -> Any:
        sessions = self._here()
        for session in sessions:
            session.comes_next("backward")
            session.backward_begins(tensors)
        try:
            return original(tensors, *args, **kwargs)
        finally:
            for session in sessions:
                session.backward_ends()
                session.comes_next("gradients")

    def _grad(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for session in self._here():
            session.comes_next("backward")
        return original(*args, **kwargs)

    def _scale(self, original: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        scaled = original(scaler, outputs)
        for session in self.live():
            session.loss_scaled(scaler, outputs, scaled)
        return scaled

    def _scaler_step(self, original: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        sessions = self.live()
        for session in sessions:
            session.stepping.scaler_begins(scaler, optimizer)
        result = original(scaler, optimizer, *args, **kwargs)
        for session in sessions:
            session.stepping.scaler_ends(scaler, optimizer)
        return result


SWITCHBOARD = Switchboard()
"""The one switchboard of the process: what it patches exists once in a process, too."""
