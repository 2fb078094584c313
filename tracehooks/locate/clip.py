"""What changes gradients between backward and the optimizer's step: clipping, unscaling, user code.

Such code cannot be run again. From the end of backward to the optimizer a mode notes which op wrote to which memory, and
on which line: it reads no value, so it costs some microseconds for each op in place.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tracehooks.capture import torch_internals
from tracehooks.locate.loss import ModeStack
from tracehooks.locate.ops import Place, user_place

MAX_WRITES = 1_000
"""Ops that are remembered in one step at most."""


@dataclass(frozen=True)
class Write:
    """An op that changed tensors in place."""

    op: str
    place: Place | None
    storages: frozenset[int]

    def changed(self, x: Tensor) -> bool:
        """Whether it wrote to the memory of a tensor."""
        return torch_internals.storage_key(x) in self.storages


class WriteMode(torch_internals.DispatchMode):  # type: ignore[no-untyped-call]
    """Notes ops in place while it is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.active = True
        self.writes: list[Write] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if self.active and args and _in_place(func) and len(self.writes) < MAX_WRITES:
            written = args[0] if isinstance(args[0], tuple | list) else (args[0],)
            storages = frozenset(torch_internals.storage_key(x) for x in written if _has_storage(x))
            self.writes.append(Write(str(func), user_place(), storages))
        return output


class GradientWatch:
    """Watches from the end of backward to whatever comes next."""

    def __init__(self) -> None:
        self._mode = WriteMode()
        self._modes = ModeStack()

    def forget(self) -> None:
        """A new step."""
        self._mode.writes.clear()

    def enter(self) -> None:
        """Backward has returned."""
        self._modes.enter(self._mode)

    def leave(self) -> None:
        """Another backward pass, a forward pass or the optimizer begins."""
        self._modes.leave()

    def writers(self, gradients: Sequence[Tensor]) -> Iterator[Write]:
        """Ops that changed one of these gradients, in order."""
        return (write for write in self._mode.writes if any(write.changed(x) for x in gradients if _has_storage(x)))


@functools.cache
def _in_place(func: Any) -> bool:
    return bool(func._schema.is_mutable)


def _has_storage(x: object) -> bool:
    return (type(x) is Tensor or type(x) is torch.nn.Parameter) and x.layout is torch.strided
