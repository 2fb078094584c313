"""The fast lane of the hooks: what is usual takes it, past all Python.

A hook written in Python costs more than measuring a small tensor: some ten calls, each of which misses the processor's
caches because a training step lies between any two. lane.cpp does the usual at one go: a dense tensor of torch's own
class in the host's memory, no mode, transform or tracing at work, a shape that was seen there before. Whatever else
comes is left to the methods of `Session` and `Recorder`, which do the same, and more.

What it shares with them: rows since the last flush and their numbers, what was measured and need not be again, how often
modules were called in this pass. `PlainLane` keeps the same where there is no native one, and takes nothing.
"""

from __future__ import annotations

import importlib
import itertools
import time
from array import array
from collections import OrderedDict
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from tracehooks import stats
from tracehooks.capture import torch_internals
from tracehooks.capture.transfer import host
from tracehooks.stats import cpu

if TYPE_CHECKING:
    from tracehooks.capture.places import Head, Place, Site

CLOSED, RECORDING, WATCHING = range(3)
"""Modes: the hooks of modules take the lane to record, to watch for non-finite values, or not at all."""

Drained = tuple[tuple["Head", ...], bytearray, bytearray, bytearray, bytearray, bytearray]
"""Heads, and int64 columns: steps, times in ns, numbers in the step, numbers of packed rows; the packed rows."""

KEY = RemovableHandle(OrderedDict()).id
"""Of our hook among those of a tensor: no handle of torch's has the same."""


class PlainSite:
    """What the lane needs of a site."""

    __slots__ = ("place", "returned")
    place: Place
    returned: bool

    def __new__(cls, place: Place, returned: bool) -> PlainSite:
        """A site that modules return what is seen at, or not."""
        self = super().__new__(cls)
        self.place, self.returned = place, returned
        return self


class PlainSeat:
    """The lane's side of one module's output hook."""

    def take(self, output: Any) -> bool:
        """A module returned this. False: nothing was done."""
        return False


class PlainLane:
    """Rows between two flushes."""

    def __init__(self, flags: int, width: int) -> None:
        self.step = self.micro = self.spent = 0
        """spent: nanoseconds that hooks took here in training passes."""
        self.mode, self.threads = CLOSED, 1
        self.training, self.finite = True, True
        """finite: every packed row on the host tells of finite values alone."""
        self.recording = self.outputs = self.gradients = self.reached = False
        """Whether gradients take the lane to be recorded; what is recorded of modules; whether the backward pass under way
        is known to have reached the model."""
        self._heads: list[Head] = []
        self._steps, self._times, self._sequence, self._numbers, self._packed = (array("q") for _ in range(5))
        self._width = width
        self._coming = itertools.count()

    def __len__(self) -> int:
        return len(self._numbers)

    def serve(self, *of_session: object) -> None:
        """Take the hooks of a session: how often modules were called; a list for weak references to the tables of tensor
        hooks that are set here; its lock; where errors go; how to hook a tensor that is not plain; a key in its table."""

    def take(self, x: Tensor, site: Site) -> bool:
        """A row of a tensor, measured unless it is known. False: nothing was done."""
        return False

    def take_many(self, tensors: list[Tensor], sites: list[Site], shown: list[Tensor]) -> bool:
        """Rows of many tensors, all measured in one call, that say dtype and shape of those ``shown``. False: nothing was
        done."""
        return False

    def keep(self, tensors: list[Tensor]) -> bool:
        """Keep the values of floating-point tensors until `take_changes`. False: nothing was done."""
        return False

    def take_changes(self, tensors: list[Tensor], sites: list[Site]) -> None:
        """Rows of what became of the tensors that were kept: differences, in float32 or wider. One whose memory is another
        by now has none."""

    def norm(self, tensors: list[Tensor]) -> float | None:
        """L2 norm over floating-point tensors. None where one is not plain, or not finite."""
        return None

    def arrived(self, site: Site, gradient: Tensor) -> bool:
        """The gradient of a forward row. False: nothing was done."""
        return False

    def returned(self, x: Tensor) -> bool:
        """Whether this tensor, unchanged since, was measured here where a module returned it."""
        return False

    def forget(self) -> None:
        """What was measured before may have changed unseen."""

    def put(self, rows: Tensor) -> int:
        """The number of the first of these packed rows, which were measured elsewhere."""
        number = len(self._packed) // self._width
        columns = host(rows).reshape(-1, self._width)
        self.finite = self.finite and not stats.nonfinite_rows(columns)
        self._packed.frombytes(columns.tobytes())
        return number

    def add(self, head: Head, number: int) -> None:
        """A row, now, of the packed row of this number: negative for one on a device."""
        self._heads.append(head)
        self._steps.append(self.step)
        self._times.append(time.time_ns())
        self._sequence.append(next(self._coming))
        self._numbers.append(number)

    def next(self) -> int:
        """The number in the step of what comes now."""
        return next(self._coming)

    def begin(self, step: int) -> None:
        """Numbers begin anew with a step."""
        self.step, self._coming = step, itertools.count()

    def drain(self) -> Drained:
        """Everything, which is forgotten."""
        heads, self._heads = tuple(self._heads), []
        columns = self._steps, self._times, self._sequence, self._numbers, self._packed
        self._steps, self._times, self._sequence, self._numbers, self._packed = (array("q") for _ in range(5))
        self.finite = True
        steps, times, sequence, numbers, packed = (bytearray(column.tobytes()) for column in columns)
        return heads, steps, times, sequence, numbers, packed


Lane = PlainLane


def _imported() -> Any:
    try:
        found = importlib.import_module("tracehooks.capture._lane")
    except ImportError:  # not built
        return None
    return found if getattr(found, "ABI", None) == cpu.ABI else None  # built from other sources than the kernel


_native = _imported()
SITE: Any = PlainSite if _native is None else _native.Site
"""What sites are made of."""


@cache
def native() -> Any:
    """The native lane, or None where there is none or torch's tensors do not show themselves to it."""
    capsule = getattr(Tensor, "__dlpack_c_exchange_api__", None)  # since torch 2.10
    entries = stats.entries()
    if _native is None or capsule is None or entries is None:
        return None
    known = torch_internals.LANE_QUESTIONS, torch_internals.LANE_NAMES
    connected = _native.connect(capsule, Tensor, Parameter, entries, *known, torch.is_grad_enabled, OrderedDict)
    return _native if connected else None


def lane(spec: stats.Spec) -> Lane:
    """A lane for rows of these statistics."""
    quick = native()
    return PlainLane(spec.flags, spec.width) if quick is None else quick.Lane(spec.flags)


def seat(of_lane: Lane, hook: object, path: str) -> PlainSeat:
    """The seat of a module's output hook: whoever has ``site()`` says where an output is seen."""
    quick = native()
    return PlainSeat() if quick is None or isinstance(of_lane, PlainLane) else quick.Seat(of_lane, hook, path)
