"""A lane by itself, and what a test needs to look into it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tracehooks.capture import lane
from tracehooks.capture.hooks import TensorHooks
from tracehooks.capture.places import Head, Place, Site
from tracehooks.stats import Spec

EVERYTHING = Spec(hash=True, sketch=True, histogram=True)

needs_native = pytest.mark.skipif(lane.native() is None, reason="built without Python's headers, or an older torch")


class Told(NamedTuple):
    """What a lane is drained of."""

    heads: tuple[Head, ...]
    steps: list[int]
    sequence: list[int]
    numbers: list[int]
    packed: Tensor


class Served:
    """A lane that serves no session, but has all that one gives it."""

    def __init__(self, spec: Spec = EVERYTHING) -> None:
        self.spec, self.lane = spec, lane.lane(spec)
        self.calls: dict[Any, int] = {}
        self.hooks, self.lock = TensorHooks(), threading.RLock()
        self.failures: list[tuple[str, BaseException]] = []
        self.otherwise: list[Tensor] = []
        self.lane.serve(self.calls, self.hooks.tables, self.lock, self._failed, self._hook, lane.KEY)

    def site(self, slot: str = "output", phase: str = "forward") -> Site:
        """A place of a module."""
        return Site(Place(phase, "m", "Linear", slot))

    def drain(self) -> Told:
        """Everything, as lists and one matrix of packed rows."""
        heads, *columns = self.lane.drain()
        steps, _, sequence, numbers, packed = (np.frombuffer(column, np.int64) for column in columns)
        rows = torch.from_numpy(packed.reshape(-1, self.spec.width).copy())
        return Told(heads, steps.tolist(), sequence.tolist(), numbers.tolist(), rows)

    def _failed(self, where: str, error: BaseException) -> None:
        self.failures.append((where, error))

    def _hook(self, tensor: Tensor, hook: Any) -> None:
        self.otherwise.append(tensor)
        self.hooks.add(tensor, hook)


class Gate:
    """An output hook's side of a seat: one site for each call, and a hook for its gradient."""

    def __init__(self, served: Served, hook: Callable[[Tensor], object] = lambda gradient: None) -> None:
        self.served, self.hook = served, hook
        self.asked: list[tuple[str, int, int, bool]] = []

    def site(self, slot: str, call: int, micro: int, recompute: bool) -> tuple[Site, Any]:
        """As `OutputHook.site`."""
        self.asked.append((slot, call, micro, recompute))
        return Site(Place("forward", "m", "Linear", slot, call, micro)), self.hook


def seated(served: Served, mode: int = lane.RECORDING, path: str = "m", **how: Any) -> tuple[Any, Gate]:
    """An open seat and its gate."""
    gate = Gate(served, **how)
    served.lane.mode, served.lane.outputs, served.lane.gradients = mode, True, True
    return lane.seat(served.lane, gate, path), gate


class Named(Tensor):
    """A subclass."""


X = torch.arange(36.0).view(6, 6)


def freed() -> Tensor:
    """A tensor whose storage was given back."""
    x = X.clone()
    x.untyped_storage().resize_(0)
    return x


LEFT: dict[str, Callable[[], Any]] = {
    "transposed": lambda: X.t(),
    "every other": lambda: X[:, ::2],
    "expanded": lambda: X[0].expand(6, 6),
    "negative": lambda: torch._neg_view(X),
    "complex": lambda: X.to(torch.complex64),
    "imaginary part of a conjugate": lambda: X.to(torch.complex64).conj().imag,
    "sparse": lambda: X.to_sparse(),
    "compressed": lambda: X.to_sparse_csr(),
    "meta": lambda: X.to("meta"),
    "float8": lambda: X.to(torch.float8_e4m3fn),
    "nested": lambda: torch.nested.nested_tensor([X[0], X[1, :3]]),
    "jagged": lambda: torch.nested.nested_tensor([X[0], X[1, :3]], layout=torch.jagged),
    "quantised": lambda: torch.quantize_per_tensor(X, 0.1, 0, torch.qint8),
    "functional": lambda: torch._to_functional_tensor(X),
    "zeros without memory": lambda: torch._efficientzerotensor(3),
    "freed": freed,
    "subclass": lambda: X.as_subclass(Named),
    "uninitialised": lambda: nn.parameter.UninitializedParameter(),
    "no tensor": lambda: X.numpy(),
}
"""What no lane takes."""
