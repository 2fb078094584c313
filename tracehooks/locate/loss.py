"""What happens outside the model: the ops between its output and the start of backward, and their nodes in backward.

User code there cannot be run again, so it is watched live: an op-level mode from the end of the root's forward pass to
the start of backward, and hooks on the few autograd nodes between the loss and the root's outputs. The mode is entered
only where no other mode is active and nothing was compiled, and leaves the stack of modes as it found it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from tracehooks import stats
from tracehooks.capture import torch_internals
from tracehooks.locate.ops import Describe, Op, OpMode, Status, status_of

MAX_OPS = 1_000
"""Ops outside the model that are remembered in one step at most: a loop without steps must not pile them up."""
MAX_NODES = 400
"""Autograd nodes of the loss that are watched at most."""


@dataclass
class BackwardBirth:
    """An autograd node outside the model that made the first gradient that is not finite."""

    node: str
    status: Status
    made_by: Op | None
    dtype: torch.dtype
    """Of the gradients that it sent on."""


class WatchingMode(Protocol):
    """A dispatch mode that can be told to do nothing."""

    active: bool


class ModeStack:
    """Modes that are on some thread's stack of dispatch modes while the user's code runs."""

    def __init__(self) -> None:
        self._on: list[tuple[WatchingMode, int]] = []

    def enter(self, mode: WatchingMode) -> bool:
        """Put a mode on the stack, where nothing else is active and nothing was compiled; whether it is there."""
        if (
            self._on
            or torch_internals.modes_active()
            or torch_internals.entangled()
            or torch_internals.anything_compiled()
        ):
            return any(on is mode and on.active for on, _ in self._on)
        mode.active = True
        torch_internals.push_mode(mode)
        self._on.append((mode, threading.get_ident()))
        return True

    def leave(self) -> None:
        """Take modes off the stack. Where that is not possible (inside inference mode, on another thread) they do nothing
        from now on, and go later."""
        if not self._on:
            return
        for mode, _ in self._on:
            mode.active = False
        if torch_internals.entangled():
            return
        here = threading.get_ident()
        for mode, thread in list(self._on):
            if thread == here:
                torch_internals.remove_mode(mode)
                self._on.remove((mode, thread))


class LossWatch:
    """Watches from the end of one forward pass of the root to the end of the backward pass."""

    def __init__(self, describe: Describe) -> None:
        self._describe = describe
        self.mode: OpMode | None = None
        self.loss: int | None = None
        """Index of the op that wrote the tensor backward started from."""
        self.birth: BackwardBirth | None = None
        self._outputs: set[int] = set()
        """Sequence numbers of the nodes that made the root's outputs."""
        self._handles: list[RemovableHandle] = []
        self._modes = ModeStack()
        self._waiting = False
        """A pass has ended, and backward has not begun."""

    def forget(self) -> None:
        """A new step."""
        self.mode, self.loss, self.birth, self._waiting = None, None, None, False
        self._outputs.clear()
        self._drop_handles()

    def outputs_are(self, outputs: Sequence[Tensor]) -> None:
        """The root returned these."""
        # numbers, not nodes: a node would keep its whole graph alive
        self._outputs |= {torch_internals.sequence_of(x.grad_fn) for x in outputs if x.grad_fn is not None}

    def enter(self, outputs: Sequence[Tensor]) -> None:
        """The root returned these, and what follows is the loss."""
        self.outputs_are(outputs)
        if self._outputs:
            self._waiting = True
            if self.mode is None or len(self.mode.ops) > MAX_OPS:
                self.mode = OpMode(lambda: None, self._describe, waits=False)
            self._modes.enter(self.mode)

    def leave(self) -> None:
        """The root is called again, backward or an optimizer begins, or the step ends."""
        self._modes.leave()

    def left(self) -> float | None:
        """The last number that was computed from the outputs of a pass on which backward was never called, where it is not
        finite: a loss that the user saw and skipped."""
        index = self.mode.last_number if self.mode is not None else None
        if not self._waiting or self.mode is None or index is None or not self.mode.ops[index].output.bad:
            return None
        self._waiting, self.loss = False, index
        status = self.mode.ops[index].output
        return math.nan if status.nan else math.inf if status.posinf else -math.inf

    def backward_begins(self, loss: Tensor | None) -> None:
        """Backward starts from a loss: its nodes are hooked down to the root's outputs."""
        self._waiting = False
        if loss is None or loss.grad_fn is None or not self._outputs:
            return
        if self.mode is not None:
            self.loss = self.mode.writer(loss)
        for node in _between(loss.grad_fn, self._outputs):
            self._handles.append(node.register_hook(self._check(node.name(), torch_internals.sequence_of(node))))

    def backward_ends(self) -> None:
        """It is over."""
        self._drop_handles()
        self._outputs.clear()

    def _check(self, node: str, sequence: int) -> Callable[[Any, Any], None]:
        def hook(into: Sequence[Tensor | None], out_of: Sequence[Tensor | None]) -> None:
            # autograd calls it with what the node sends on and what it was sent
            if self.birth is not None or torch_internals.modes_active():
                return
            with torch_internals.without_torch_function():
                if (status := _bad(into)) is not None and _bad(out_of) is None:
                    made = self.mode.made_node(sequence) if self.mode is not None else None
                    self.birth = BackwardBirth(node, status, made, next(x.dtype for x in into if x is not None))

        return hook

    def _drop_handles(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _between(start: Any, ends: set[int]) -> list[Any]:
    """Autograd nodes from ``start`` down to and without ``ends``; leaves without."""
    found: list[Any] = []
    todo, seen = [start], {start}
    while todo and len(found) < MAX_NODES:
        node = todo.pop()
        if torch_internals.sequence_of(node) in ends or node.name() == "torch::autograd::AccumulateGrad":
            continue
        found.append(node)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return found


def _bad(gradients: Sequence[Tensor | None]) -> Status | None:
    """What is not finite in gradients on the host; None when nothing is. On a device it is not asked: that would wait."""
    host = [x for x in gradients if type(x) is Tensor and x.is_cpu and x.layout is torch.strided]
    kinds = stats.nonfinite([x.detach() for x in host])
    return status_of(kinds) if kinds else None
