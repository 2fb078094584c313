"""Rows on their way: measured on the device, kept there as packed vectors, sent to the host once a flush.

The recorder knows the tables, not the model: the session says what a tensor is, the recorder measures it, numbers it
and turns everything since the last flush into batches.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tracehooks import stats
from tracehooks.capture import torch_internals
from tracehooks.capture.lane import lane
from tracehooks.capture.packing import Packing
from tracehooks.capture.places import Site, heads
from tracehooks.capture.rows import Resolved, Sequences
from tracehooks.capture.transfer import Transfer
from tracehooks.capture.watch import Seen, Watch
from tracehooks.stats.masks import summarize_mask

FULL = 50_000
"""Rows kept in memory at most before they go to the sink in the middle of a step."""
LIKENED = 4_096
"""Samples of each input and split whose likeness is taken, to find near-duplicates among them."""
JUDGED = ("loss", "ema/distance", "found_inf")
"""Scalars that say by themselves that something is wrong."""


class Number(NamedTuple):
    """A row of the scalars table; its value may be on a device still."""

    step: int
    micro: int
    time_ns: int
    seq: int
    name: str
    value: float | Tensor


class Drained(NamedTuple):
    """What one flush takes out of the recorder."""

    rows: Resolved
    scalars: list[tuple[Number, float]]
    """With their values."""
    masks: list[tuple[Any, ...]]
    samples: list[tuple[Any, ...]]
    events: list[tuple[Any, ...]]
    """Of the other tables, as `batches` makes them."""
    watched: list[Seen]
    """Tensors of steps that record none, which are not finite."""
    watched_outputs: dict[tuple[int, str], bool]
    """Of the root's outputs in such steps, by (micro, slot), whether they are not finite."""


class Sent(NamedTuple):
    """What a flush took out, on its way to the host."""

    step: int
    training: bool
    """The step, and whether the pass computed gradients, when it was sent."""
    transfer: Transfer
    finish: Callable[[], Drained]

    def arrived(self) -> bool:
        """Whether it is there, without waiting."""
        return self.transfer.arrived()

    def open(self) -> Drained:
        """All of it, once. Waits until it is there."""
        self.transfer.wait()
        return self.finish()


class Recorder:
    """Everything measured since the last flush."""

    def __init__(self, spec: stats.Spec) -> None:
        self.spec = spec
        self.lane = lane(spec)
        self.only_watching = False
        """This step records no tensors: they are watched for non-finite values."""
        self.watch = Watch(self.lane)
        self._alarm = False
        """A scalar says, or may say, that something is wrong."""
        self.readers: list[Callable[[Drained], None]] = []
        """Told of every flush; what they record goes out with the next."""
        self._packing = Packing(spec, self.lane)
        self._scalars: list[Number] = []
        self._masks: list[tuple[Any, ...]] = []
        self._samples: list[tuple[Any, ...]] = []
        self._likened: Counter[tuple[str, str]] = Counter()
        self._events: list[tuple[Any, ...]] = []
        self._sequences = Sequences()

    def __len__(self) -> int:
        return len(self.lane)

    @property
    def step(self) -> int:
        """The step under way."""
        return self.lane.step

    @property
    def training(self) -> bool:
        """Whether the forward pass under way computes gradients: kept with each row, not written."""
        return self.lane.training

    @property
    def full(self) -> bool:
        """Whether what is kept should go to the sink."""
        return len(self.lane) > FULL

    def begin_step(self, step: int) -> None:
        """Number what follows as a new step."""
        self.lane.begin(step)
        self.lane.threads = torch.get_num_threads()

    def tensor(self, x: Tensor, site: Site) -> None:
        """Measure a tensor."""
        if self.only_watching:
            self.watch.tensor(x, site.place, (self.step, self.lane.next(), self.training))
            return
        values = torch_internals.unwrapped(x)
        if values is None or self.lane.take(values, site):
            return
        number = self._packing.number_of(values, site.returned)
        if number is not None:
            self.lane.add(site.head(values, self.training), number)

    def tensors(self, tensors: Sequence[Tensor], sites: Sequence[Site], shown: Sequence[Tensor] | None = None) -> None:
        """Measure many tensors in one call. ``shown``: tensors whose dtype and shape the rows say instead of theirs, for
        samples of larger ones."""
        if not tensors:
            return
        if self.only_watching:
            places = [site.place for site in sites]
            self.watch.tensors(tensors, places, (self.step, self.lane.next(), self.training))
            return
        shown = tensors if shown is None else shown
        if self.lane.take_many(list(tensors), list(sites), list(shown)):
            return
        shown = [torch_internals.local(x) for x in shown]
        if not (
            torch_internals.all_plain(tensors) and all(map(stats.measurable, {x.dtype: x for x in tensors}.values()))
        ):
            kept = [
                (values, site, values if like is x else like)
                for x, site, like in zip(tensors, sites, shown, strict=True)
                if (values := torch_internals.unwrapped(x)) is not None and stats.measurable(values)
            ]
            tensors, sites, shown = (
                [x for x, _, _ in kept],
                [site for _, site, _ in kept],
                [like for _, _, like in kept],
            )
        numbers = self._packing.measure_many(tensors)
        for head, number in zip(heads(sites, shown, self.training), numbers, strict=True):
            self.lane.add(head, number)

    def watch_gradients(self, gradients: Sequence[Tensor], sites: Sequence[Site]) -> None:
        """Watch parameter gradients all at once; their norm is the scalar grad_norm."""
        places = [site.place for site in sites]
        norm = self.watch.norms(gradients, places, (self.step, self.lane.next(), self.training))
        if norm is not None:
            self.scalar("grad_norm", norm)

    def begin_pass(self, training: bool, micro: int) -> None:
        """A forward pass begins, this one of the step: what was measured before may have changed unseen.

        Args:
            training: it computes gradients.
        """
        self.lane.training, self.lane.micro, self.lane.reached = training, micro, False
        self._packing.forget()

    def returned(self, x: Tensor) -> bool:
        """Whether this tensor, unchanged since, is a module's output that was measured in this forward pass."""
        values = torch_internals.unwrapped(x)
        return values is not None and self._packing.returned(values)

    def scalar(self, name: str, value: float | Tensor, micro: int = 0, step: int | None = None) -> None:
        """A number; a 0-dim tensor travels with the next flush."""
        if isinstance(value, Tensor):
            held = torch_internals.unwrapped(value)
            if held is None:  # a fake tensor has no value
                return
            value = held.detach().clone()
        self._alarm = self._alarm or (name in JUDGED and not _is_fine(name, value))
        self._scalars.append(self.number(name, value, micro, step))

    def number(self, name: str, value: float | Tensor, micro: int = 0, step: int | None = None) -> Number:
        """A row of the scalars table, now."""
        when = self.step if step is None else step, micro, time.time_ns(), self.lane.next()
        return Number(*when, name, value)

    def mask(self, x: Tensor, module: str, slot: str, micro: int, convention: str | None) -> None:
        """Emptiness of a mask. ``convention`` None: it is told from the values."""
        values = torch_internals.unwrapped(x)
        if self.only_watching or values is None or values.ndim == 0:
            return
        packed = summarize_mask(values, convention)
        self._masks.append(
            (self.step, micro, time.time_ns(), self.lane.next(), module, slot, tuple(values.shape), packed)
        )

    def samples(
        self, x: Tensor, name: str, split: str, micro: int, source_ids: Sequence[str | None] | None = None
    ) -> None:
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
        self._likened[name, split] += len(hashes)
        found = stats.likeness(values) if self._likened[name, split] <= LIKENED else None
        packed = hashes if found is None else torch.stack([hashes, found])
        self._samples.append((self.step, micro, time.time_ns(), name, split, packed, source_ids))

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
        self._events.append(
            (step, micro, time.time_ns(), self.lane.next(), kind, severity, module, slot, message, text)
        )

    @property
    def holds_anything(self) -> bool:
        """Whether there is anything to send."""
        return bool(len(self.lane) or self._scalars or self._masks or self._samples or self._events)

    @property
    def nothing_to_judge(self) -> bool:
        """Whether what was kept is known without waiting to hold nothing that anybody would ask about: only finite
        values."""
        return self._packing.finite and not self._alarm and self.watch.silent

    def send(self) -> Sent:
        """Take everything out and forget it. It is on its way to the host; nothing waits for it here."""
        transfer = Transfer()
        heads, *columns = self.lane.drain()
        steps, times, sequence, numbers, packed = (np.frombuffer(column, dtype=np.int64) for column in columns)
        matrix = self._packing.send(numbers, packed.reshape(-1, self.spec.width), transfer)
        scalars = [(one, transfer.add(x) if isinstance(x := one.value, Tensor) else x) for one in self._scalars]
        masks = [(*head, transfer.add(packed)) for *head, packed in self._masks]
        samples = [(*head, transfer.add(hashes), ids) for *head, hashes, ids in self._samples]
        events, seen, outputs = self._events, self.watch.send(transfer), self.watch.drain_outputs()
        self._scalars, self._masks, self._samples, self._events = [], [], [], []
        self._alarm = False

        def drained() -> Drained:
            measured = stats.unpack(matrix(), self.spec)
            rows = Resolved(self._sequences.of(heads), steps, times, sequence, measured)
            values = [(one, float(value() if callable(value) else value)) for one, value in scalars]
            found = Drained(
                rows,
                values,
                [(*head, packed()) for *head, packed in masks],
                [(*head, hashes(), ids) for *head, hashes, ids in samples],
                events,
                seen(),
                outputs,
            )
            for reader in self.readers:
                reader(found)
            return found

        transfer.start()
        return Sent(self.step, self.training, transfer, drained)


def _is_fine(name: str, value: float | Tensor) -> bool:
    if isinstance(value, Tensor) and not value.is_cpu:
        return False
    return math.isfinite(float(value)) and name != "found_inf"
