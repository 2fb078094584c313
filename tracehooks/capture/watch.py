"""The watch for non-finite values in steps that record no tensors. It runs in every step: no op-level work, one reading of
each tensor.

In the processor's memory the kernel of `stats.nonfinite` says at once what a tensor holds. On a device a sum is kept and
read back with the flush: it is not finite when an element is not. It can also overflow where every element is finite;
what the watch sees is therefore looked at again by the locator before it becomes a finding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tracehooks import stats
from tracehooks.capture import torch_internals
from tracehooks.capture.lane import Lane
from tracehooks.capture.places import Place
from tracehooks.capture.transfer import Transfer


class Seen(NamedTuple):
    """A tensor that holds, or whose sum is, something not finite. ``kinds`` are the bits of `stats`."""

    step: int
    seq: int
    place: Place
    training: bool
    kinds: int


When = tuple[int, int, bool]
"""Step, number in it, and whether the forward pass computes gradients."""

AT_ONCE = 1 << 20
"""Bytes of tensors on the host that wait to be looked at in one call: small ones are held that long, larger ones not."""

_MOMENTS = stats.Spec(hash=False)


class Watch:
    """What was watched since the last flush."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._found: list[Seen] = []
        self._places: list[tuple[When, Place]] = []
        self._sums: list[Tensor] = []
        self._outputs: dict[tuple[int, str], bool] = {}
        self._queue: list[tuple[Tensor, Place, When]] = []
        self._queued = 0

    def tensor(self, x: Tensor, place: Place, when: When) -> None:
        """Watch a tensor."""
        values = torch_internals.unwrapped(x)
        if values is None or not _may_overflow(values):
            return
        if not values.is_cpu:
            self._sum(values, place, when)
            return
        self._queue.append((values, place, when))
        self._queued += values.numel() * values.element_size()
        if self._queued > AT_ONCE:
            self._look()

    def tensors(self, tensors: Sequence[Tensor], places: Sequence[Place], when: When) -> None:
        """Watch many tensors in one call."""
        if not torch_internals.modes_active():
            kinds, others = stats.nonfinite_at_hand(tensors)
            if not kinds and not others:
                return
            if not kinds:  # only those are left that the kernel does not take as they are
                left = set(map(id, others))
                pairs = [(x, place) for x, place in zip(tensors, places, strict=True) if id(x) in left]
                tensors, places = [x for x, _ in pairs], [place for _, place in pairs]
        host = []
        for x, place in zip(tensors, places, strict=True):
            values = torch_internals.unwrapped(x)
            if values is None or not _may_overflow(values):
                continue
            if values.is_cpu:
                host.append((values, place))
            else:
                self._sum(values, place, when)
        self._look_at(host, when)

    def norms(self, tensors: Sequence[Tensor], places: Sequence[Place], when: When) -> Tensor | float | None:
        """Watch tensors by their L2 norms; the norm over all of them, None when there is none."""
        if tensors and (norm := self._lane.norm(list(tensors))) is not None:
            return norm
        if tensors and torch_internals.all_plain(tensors):
            return self._norm_on_host(tensors, places, when)
        host: list[tuple[Tensor, Place]] = []
        squares: list[Tensor] = []
        for x, place in zip(tensors, places, strict=True):
            values = torch_internals.unwrapped(x)
            if values is None or not _may_overflow(values):
                continue
            if values.is_cpu:
                host.append((values, place))
            elif values.layout is torch.strided:
                with torch.no_grad():
                    norm = torch.linalg.vector_norm(values.detach(), dtype=_wide_enough(values))
                self._places.append((when, place))
                self._sums.append(norm)
                squares.append(norm.double().square())
        total = self._norm_on_host([x for x, _ in host], [place for _, place in host], when) if host else None
        if not squares:
            return total
        on_device = torch.stack([square.to(squares[0].device) for square in squares]).sum()
        return (on_device + (total or 0.0) ** 2).sqrt()

    def drain_outputs(self) -> dict[tuple[int, str], bool]:
        """Of each output of the root that was watched on the host, by (micro, slot), whether it is not finite."""
        self._look()
        outputs, self._outputs = self._outputs, {}
        return outputs

    def send(self, transfer: Transfer) -> Callable[[], list[Seen]]:
        """Forget what was watched. What was not finite, in order, once the transfer has arrived."""
        self._look()
        found, self._found = self._found, []
        places, self._places = self._places, []
        sums, self._sums = self._sums, []
        sent = []
        for device in dict.fromkeys(value.device for value in sums):
            chosen = [i for i, value in enumerate(sums) if value.device == device]
            sent.append((chosen, transfer.add(torch.stack([sums[i].double() for i in chosen]))))

        def seen() -> list[Seen]:
            for chosen, values in sent:
                for i, value in zip(chosen, values().tolist(), strict=True):
                    if not math.isfinite(value):
                        (step, seq, training), place = places[i]
                        found.append(Seen(step, seq, place, training, _kinds(value)))
            return sorted(found, key=lambda entry: entry[:2])

        return seen

    @property
    def silent(self) -> bool:
        """Whether nothing waits on a device, and all that was watched on the host is finite."""
        self._look()
        return not (self._found or self._sums)

    def _look(self) -> None:
        """Look at the tensors that wait for it."""
        queue, self._queue, self._queued = self._queue, [], 0
        if not queue:
            return
        tensors = list({id(x): x for x, _, _ in queue}.values())  # what a parent returns is often its child's
        alarm = stats.nonfinite(tensors)
        for x, place, when in queue:
            kinds = stats.nonfinite((x,)) if alarm else 0
            if kinds:
                self._see(kinds, place, when)
            if place.module == "" and place.phase == "forward" and not place.recompute:
                self._outputs[place.micro, place.slot] = bool(kinds)

    def _look_at(self, pairs: Sequence[tuple[Tensor, Place]], when: When) -> None:
        if pairs and stats.nonfinite([x for x, _ in pairs]):
            for x, place in pairs:
                if kinds := stats.nonfinite((x,)):
                    self._see(kinds, place, when)

    def _see(self, kinds: int, place: Place, when: When) -> None:
        step, seq, training = when
        self._found.append(Seen(step, seq, place, training, kinds))

    def _sum(self, x: Tensor, place: Place, when: When) -> None:
        if x.layout is torch.strided:
            with torch.no_grad():
                self._sums.append(x.detach().sum(dtype=_wide_enough(x)))
            self._places.append((when, place))

    def _norm_on_host(self, tensors: Sequence[Tensor], places: Sequence[Place], when: When) -> float:
        rows = torch.empty((len(tensors), _MOMENTS.width), dtype=torch.int64, device="cpu")
        stats.summarize_many(tensors, _MOMENTS, rows)
        columns: dict[str, Any] = stats.unpack(rows.numpy(), _MOMENTS)
        if any(columns[name].any() for name in _KINDS):
            for i, place in enumerate(places):
                if kinds := sum(bit * bool(columns[name][i]) for name, bit in _KINDS.items()):
                    self._see(kinds, place, when)
        return l2_norm(columns)


_KINDS = {"nan": stats.NAN, "posinf": stats.POSINF, "neginf": stats.NEGINF}


def l2_norm(columns: Mapping[str, Any], finite: bool = False) -> float:
    """L2 norm over all the tensors of these rows; NaN or inf when one holds such. ``finite``: none is known to."""
    if finite and not math.isnan(norm := math.sqrt((columns["rms"] ** 2 * columns["count"]).sum())):
        return norm
    if columns["nan"].any():
        return math.nan
    if columns["posinf"].any() or columns["neginf"].any():
        return math.inf
    return float(np.sqrt((np.nan_to_num(columns["rms"]) ** 2 * columns["count"]).sum()))


def _may_overflow(x: Tensor) -> bool:
    return (x.is_floating_point() or x.is_complex()) and x.element_size() > 1 and x.numel() > 0


def _wide_enough(x: Tensor) -> torch.dtype | None:
    return torch.float32 if x.element_size() == 2 else None


def _kinds(value: float) -> int:
    return stats.NAN if math.isnan(value) else stats.POSINF if value > 0 else stats.NEGINF
