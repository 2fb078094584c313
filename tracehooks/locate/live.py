"""The locator for code that cannot be run again: every op of every step is seen while it runs.

It costs some ten microseconds an op, keeps an op-level mode on the stack of dispatch modes from the first forward pass of a
step to its optimizer, and is for runs in which something is looked for.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from tracehooks.capture.leaves import leaves
from tracehooks.locate.locator import Keep, StepLocator
from tracehooks.locate.loss import ModeStack
from tracehooks.locate.ops import OpMode
from tracehooks.locate.replay import Pass, Record, paths_followed


class LiveRecord:
    """What ran in a step so far."""

    def __init__(self, mode: OpMode, root: nn.Module) -> None:
        self.mode, self.root = mode, root
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.outputs: list[int | None] = []
        self.slots: list[str] = []
        self.failed: Exception | None = None


class LiveLocator(StepLocator):
    """Implements `core.records.Locator` by watching instead of running again."""

    def __init__(self, root: nn.Module, keep: Keep | None = None, ema: nn.Module | None = None) -> None:
        super().__init__(root, keep, ema)
        self._stack: list[str] = []
        self._followed = contextlib.ExitStack()
        self._followed.enter_context(paths_followed(root, self._stack))
        self._modes = ModeStack()
        self._live = LiveRecord(OpMode(self._running, self._describe), root)

    def step_begins(self) -> None:
        """Forget the last step."""
        super().step_begins()
        self._live.mode.reset()  # the mode itself may be on the stack already, and stays there
        self._live.outputs.clear()

    def comes_next(self, what: str) -> None:
        """The mode is on from a pass to an optimizer."""
        if what == "pass":
            self._modes.enter(self._live.mode)
        elif what in ("optimizer", "close"):
            self._modes.leave()

    def pass_ends(self, output: Any) -> None:
        """It returned."""
        tensors = [tensor for _, tensor in leaves(output, "output")]
        self._live.outputs += [self._live.mode.writer(tensor) for tensor in tensors]
        if torch.is_grad_enabled():
            self._loss.outputs_are(tensors)
            self._loss.mode = self._live.mode

    def close(self) -> None:
        """Let go of the model."""
        self._live.root = nn.Module()
        self._followed.close()
        super().close()

    def _record(self, taken: Pass) -> Record:
        if not taken.training:  # it is asked about before it has ended: its last op stands for its output
            self._live.outputs.append(len(self._live.mode.ops) - 1)
        self._live.args, self._live.kwargs = taken.args, taken.kwargs
        return self._live

    def _running(self) -> str | None:
        return self._stack[-1] if self._stack else None
