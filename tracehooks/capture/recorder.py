"""Rows on their way: measured on the device, kept there as packed vectors, read back once a flush.

The recorder knows the tables, not the model: the session says what a tensor is, the recorder measures it, numbers it
and turns everything since the last flush into batches.
"""

from __future__ import annotations

import itertools
import json
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tracehooks import stats
from tracehooks.capture import torch_internals
from tracehooks.capture.packing import Packing
from tracehooks.capture.places import Place
from tracehooks.capture.watch import Seen, Watch
from tracehooks.core.records import Batch
from tracehooks.stats.masks import summarize_mask, unpack_masks

Array = NDArray[Any]


Pending = tuple[int, int, int, int, str, float | Tensor]
"""A scalar on its way: step, micro, time_ns, seq, name, value."""


class Row(NamedTuple):
    """A tensors row whose numbers are still packed."""

    step: int
    time_ns: int
    seq: int
    place: Place
    dtype: str
    device: str
    shape: tuple[int, ...]
    packed: int
    training: bool


class Drained(NamedTuple):
    """What one flush takes out of the recorder."""

    batches: list[Batch]
    rows: list[Row]
    columns: dict[str, Array]
    scalars: list[tuple[int, int, str, float]]
    """(seq, step, name, value)."""
    watched: list[Seen]
    """Tensors of steps that record none, whose sum is not finite."""


class Recorder:
    """Everything measured since the last flush."""

    def __init__(self, spec: stats.Spec) -> None:
        self.spec = spec
        self.step = 0
        self.only_watching = False
        """This step records no tensors: they are watched for non-finite values."""
        self.watch = Watch()
        self.training = True
        """Whether the forward pass under way computes gradients: kept with each row, not written."""
        self._seq = itertools.count()
        self._rows: list[Row] = []
        self._packing = Packing(spec)
        self._scalars: list[Pending] = []
        self._masks: list[tuple[Any, ...]] = []
        self._samples: list[tuple[Any, ...]] = []
        self._events: list[tuple[Any, ...]] = []
        self._last: tuple[weakref.ref[Tensor], int, int] | None = None
        self._outputs: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._names: dict[object, str] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def begin_step(self, step: int) -> None:
        """Number what follows as a new step."""
        self.step = step
        self._seq = itertools.count()

    def tensor(
        self, x: Tensor, place: Place, *, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Measure a tensor. ``shape`` and ``dtype`` override what the row says, for a sample of a larger tensor."""
        if self.only_watching:
            self.watch.tensor(x, place, self.step, next(self._seq), self.training)
            return
        values = torch_internals.unwrapped(x)
        if values is None or not stats.measurable(values):
            return
        if place.phase == "forward":
            self._outputs[id(values)] = weakref.ref(values), _version(values)
        self._rows.append(
            Row(
                self.step,
                time.time_ns(),
                next(self._seq),
                place,
                self._name(dtype or values.dtype),
                self._name(values.device),
                torch_internals.sizes(values) if shape is None else tuple(shape),
                self._measure(values),
                self.training,
            )
        )

    def watch_gradients(self, gradients: Sequence[Tensor], places: Sequence[Place]) -> None:
        """Watch parameter gradients all at once; their norm is the scalar grad_norm."""
        norm = self.watch.norms(gradients, places, self.step, next(self._seq))
        if norm is not None:
            self.scalar("grad_norm", norm)

    def begin_pass(self) -> None:
        """A forward pass begins: outputs of the last one are forgotten."""
        self._outputs.clear()

    def returned(self, x: Tensor) -> bool:
        """Whether this tensor, unchanged since, is a module's output that was measured in this forward pass."""
        known = self._outputs.get(id(x))
        return known is not None and known[0]() is x and known[1] == _version(x)

    def scalar(self, name: str, value: float | Tensor, micro: int = 0, step: int | None = None) -> None:
        """A number; a 0-dim tensor is read at the next flush."""
        if isinstance(value, Tensor):
            held = torch_internals.unwrapped(value)
            if held is None:  # a fake tensor has no value
                return
            value = held.detach().clone()
        self._scalars.append((self.step if step is None else step, micro, time.time_ns(), next(self._seq), name, value))

    def mask(self, x: Tensor, module: str, slot: str, micro: int, convention: str | None) -> None:
        """Emptiness of a mask. ``convention`` None: it is told from the values."""
        values = torch_internals.unwrapped(x)
        if self.only_watching or values is None or values.ndim == 0:
            return
        packed = summarize_mask(values, convention)
        self._masks.append(
            (self.step, micro, time.time_ns(), next(self._seq), module, slot, tuple(values.shape), packed)
        )

    def samples(self, x: Tensor, name: str, split: str, micro: int, source_ids: Sequence[str] | None = None) -> None:
        """Fingerprints of the samples of a batch."""
        values = torch_internals.unwrapped(x)
        if (
            self.only_watching
            or values is None
            or values.ndim == 0
            or values.layout != torch.strided
            or not stats.measurable(values)
        ):
            return
        hashes = stats.fingerprints(values)
        self._samples.append((self.step, micro, time.time_ns(), name, split, hashes, source_ids))

    def event(
        self,
        kind: str,
        severity: str,
        message: str,
        details: Mapping[str, Any] | None = None,
        *,
        micro: int = 0,
        module: str | None = None,
        slot: str | None = None,
        step: int | None = None,
    ) -> None:
        """Something that happened once."""
        step = self.step if step is None else step
        text = json.dumps(details or {}, default=str)
        self._events.append((step, micro, time.time_ns(), next(self._seq), kind, severity, module, slot, message, text))

    def drain(self) -> Drained:
        """Take everything out, as batches, and forget it. Waits for the device once."""
        rows, self._rows = self._rows, []
        self._last = None
        matrix = self._packing.gather([row.packed for row in rows])
        columns: dict[str, Any] = stats.unpack(matrix, self.spec)
        scalars = _resolved(self._scalars)
        batches = [
            _tensors(rows, columns),
            _scalars(scalars),
            _masks(self._masks),
            _samples(self._samples),
            _events(self._events),
        ]
        self._scalars, self._masks, self._samples, self._events = [], [], [], []
        named = [(seq, step, name, value) for step, _, _, seq, name, value in scalars]
        return Drained([batch for batch in batches if len(batch)], rows, columns, named, self.watch.drain())

    def _measure(self, x: Tensor) -> int:
        """Index of the packed statistics; a tensor that was just measured and not changed since is not read again."""
        version = _version(x)
        if self._last is not None and version >= 0 and self._last[0]() is x and self._last[1] == version:
            return self._last[2]
        number = self._packing.measure(x)
        self._last = (weakref.ref(x), version, number)
        return number

    def _name(self, what: object) -> str:
        name = self._names.get(what)
        if name is None:
            name = self._names[what] = str(what).removeprefix("torch.")
        return name


def _version(x: Tensor) -> int:
    """Counts changes in place; -1 where torch does not count them."""
    return -1 if x.is_inference() else x._version


def _resolved(scalars: Iterable[Pending]) -> list[tuple[int, int, int, int, str, float]]:
    return [(*head, float(value)) for *head, value in scalars]  # type: ignore[misc]


def _tensors(rows: list[Row], columns: dict[str, Any]) -> Batch:
    places = [row.place for row in rows]
    return Batch(
        "tensors",
        {
            "step": np.array([row.step for row in rows], dtype=np.int64),
            "micro": np.array([place.micro for place in places], dtype=np.int32),
            "time_ns": np.array([row.time_ns for row in rows], dtype=np.int64),
            "seq": np.array([row.seq for row in rows], dtype=np.int64),
            "phase": [place.phase for place in places],
            "module": [place.module for place in places],
            "type": [place.type for place in places],
            "slot": [place.slot for place in places],
            "call": np.array([place.call for place in places], dtype=np.int32),
            "recompute": np.array([place.recompute for place in places], dtype=np.bool_),
            "dtype": [row.dtype for row in rows],
            "device": [row.device for row in rows],
            "shape": [row.shape for row in rows],
            **columns,
        },
    )


def _scalars(rows: list[tuple[int, int, int, int, str, float]]) -> Batch:
    return Batch(
        "scalars",
        {
            **_when(rows),
            "name": [row[4] for row in rows],
            "value": np.array([row[5] for row in rows], dtype=np.float64),
        },
    )


def _masks(rows: list[tuple[Any, ...]]) -> Batch:
    shapes = [row[6] for row in rows]
    return Batch(
        "masks",
        {
            **_when(rows),
            "seq": np.array([row[3] for row in rows], dtype=np.int64),
            "module": [row[4] for row in rows],
            "slot": [row[5] for row in rows],
            "shape": shapes,
            **unpack_masks([row[7].cpu().tolist() for row in rows], shapes),
        },
    )


def _samples(groups: list[tuple[Any, ...]]) -> Batch:
    columns: dict[str, list[Any]] = {name: [] for name in ("step", "micro", "time_ns", "index", "name", "split")}
    columns["source_id"] = []
    hashes = []
    for step, micro, time_ns, name, split, found, source_ids in groups:
        values = found.cpu().numpy().astype(np.uint64)
        n = len(values)
        hashes.append(values)
        repeated = {"step": step, "micro": micro, "time_ns": time_ns, "name": name, "split": split}
        for column, value in repeated.items():
            columns[column].extend([value] * n)
        columns["index"].extend(range(n))
        columns["source_id"].extend(list(source_ids) if source_ids is not None else [None] * n)
    hash_column = np.concatenate(hashes) if hashes else np.zeros(0, dtype=np.uint64)
    return Batch("samples", {**columns, "hash": hash_column})


def _events(rows: list[tuple[Any, ...]]) -> Batch:
    names = ("seq", "kind", "severity", "module", "slot", "message", "details")
    return Batch("events", {**_when(rows), **{name: [row[3 + i] for row in rows] for i, name in enumerate(names)}})


def _when(rows: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
    return {name: [row[i] for row in rows] for i, name in enumerate(("step", "micro", "time_ns"))}
