"""Packed statistics of tensors that do not take the fast lane, none measured twice, kept where they were computed until
they are read back together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tracehooks import stats
from tracehooks.capture.device_rows import DeviceRows
from tracehooks.capture.lane import Lane
from tracehooks.capture.measured import Measured
from tracehooks.capture.transfer import Transfer

HOST = torch.device("cpu")

Rows = NDArray[np.int64]


class Packing:
    """Rows of packed statistics: those of the host in the lane, those of each device on it. The lane numbers its rows
    upwards from 0; rows on devices have numbers downwards from -1."""

    def __init__(self, spec: stats.Spec, lane: Lane) -> None:
        self._spec, self._lane = spec, lane
        self._devices: dict[torch.device, DeviceRows] = {}
        self._homes: list[torch.device] = []
        """Of each row on a device, which one."""
        self._measured = Measured()

    def number_of(self, x: Tensor, returned: bool) -> int | None:
        """The number of a tensor's statistics, measured now unless they are known; None where there is nothing to measure.

        Args:
            returned: a module has returned it.
        """
        if not stats.measurable(x):
            return None
        known = self._measured.find(x)
        number = self._measure(x) if known is None else known[0]
        if known is None or (returned and not known[1]):
            self._measured.add(x, number, returned)
        return number

    def returned(self, x: Tensor) -> bool:
        """Whether this tensor, unchanged since, is a module's output that was measured."""
        known = self._measured.find(x)
        return (known is not None and known[1]) or self._lane.returned(x)

    def forget(self) -> None:
        """What was measured before may have changed unseen."""
        self._measured.forget()
        self._lane.forget()

    def measure_many(self, tensors: Sequence[Tensor]) -> list[int]:
        """The same for many tensors: one call of the kernel for those on the host, and one for those on each device."""
        numbers = [0] * len(tensors)
        for device in dict.fromkeys(x.device for x in tensors):
            chosen = [i for i, x in enumerate(tensors) if x.device == device]
            for i, number in zip(chosen, self._measure_group([tensors[i] for i in chosen], device), strict=True):
                numbers[i] = number
        return numbers

    @property
    def finite(self) -> bool:
        """Whether all rows are on the host and tell of finite values alone."""
        return not self._homes and self._lane.finite

    def send(self, numbers: Rows, host: Rows, transfer: Transfer) -> Callable[[], Rows]:
        """Forget all rows. Those of these numbers as one matrix on the host, once the transfer has arrived.

        Args:
            host: the lane's rows, of shape (rows, width).
        """
        self.forget()
        sent = {device: transfer.add(rows.leave()) for device, rows in self._devices.items()}
        homes, self._homes = self._homes, []
        if not homes:
            matrix = host[numbers]
            return lambda: matrix

        def joined() -> Rows:
            place = np.arange(len(host) + len(homes))
            parts, end = [host], len(host)
            for device, rows in sent.items():
                chosen = np.flatnonzero([home == device for home in homes])
                place[len(host) + chosen] = end + np.arange(len(chosen))
                parts.append(rows().numpy())
                end += len(chosen)
            order = np.where(numbers >= 0, numbers, len(host) - numbers - 1)
            return np.concatenate(parts)[place[order]]

        return joined

    def _measure(self, x: Tensor) -> int:
        if x.is_cpu:
            return self._lane.put(stats.summarize(x, self._spec))
        stats.summarize(x, self._spec, self._rows_on(x.device, 1)[0])
        return -len(self._homes)

    def _measure_group(self, tensors: Sequence[Tensor], device: torch.device) -> list[int]:
        count = len(tensors)
        if device.type != "cpu":
            stats.summarize_many(tensors, self._spec, self._rows_on(device, count))
            return list(range(count - len(self._homes) - 1, -len(self._homes) - 1, -1))
        with torch.inference_mode(False):
            rows = torch.empty((count, self._spec.width), dtype=torch.int64, device=HOST)
        first = self._lane.put(stats.summarize_many(tensors, self._spec, rows))
        return list(range(first, first + count))

    def _rows_on(self, device: torch.device, count: int) -> Tensor:
        """Rows on a device that is not the host, noted as the next ones."""
        rows = self._devices.get(device)
        if rows is None:
            rows = self._devices[device] = DeviceRows(device, self._spec.width)
        self._homes += [device] * count
        return rows.take(count)
