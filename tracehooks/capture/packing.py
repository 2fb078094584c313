"""Packed statistics of tensors, none measured twice, kept where they were computed until they are read back together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tracehooks import stats
from tracehooks.capture.device_rows import BLOCK_ROWS, DeviceRows
from tracehooks.capture.measured import Measured
from tracehooks.capture.transfer import Transfer

HOST = torch.device("cpu")
LARGEST_BLOCK = 4096
"""A block has room for what one flush took, from BLOCK_ROWS up to this."""


class Packing:
    """Rows of packed statistics in preallocated blocks, on the host and on each device."""

    def __init__(self, spec: stats.Spec) -> None:
        self._spec = spec
        self._full: list[Tensor] = []
        """Blocks that are filled, without what they have left."""
        self._in_full = 0
        self._block = torch.empty((0, spec.width), dtype=torch.int64)
        self._rows: tuple[Tensor, ...] = ()
        """Rows of the block that is being filled, ``_used`` of them by now."""
        self._used = 0
        self._usual = BLOCK_ROWS
        self._devices: dict[torch.device, DeviceRows] = {}
        self._homes: list[torch.device] = []
        """Of each row on a device, which one."""
        self._measured = Measured()
        self._door = stats.door()
        self._address, self._row_bytes = 0, 8 * spec.width
        """Where the block begins, and the size of a row."""

    def number_of(self, x: Tensor, returned: bool) -> int | None:
        """The number by which `send` knows a tensor's statistics, measured now unless they are known; None where there is
        nothing to measure.

        Args:
            returned: a module has returned it.
        """
        if self._used == len(self._rows):
            self._make_room(1)
        if self._door is not None:
            coming, row = self._in_full + self._used, self._address + self._used * self._row_bytes
            number = self._door.once(x, self._measured.known, row, coming, self._spec.flags, returned)
            if number >= 0:
                self._used += number == coming
                return number
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
        return known is not None and known[1]

    def forget(self) -> None:
        """What was measured before may have changed unseen."""
        self._measured.forget()

    def measure_many(self, tensors: Sequence[Tensor]) -> list[int]:
        """The same for many tensors: one call of the kernel for those on the host, and one for those on each device."""
        if all(x.is_cpu for x in tensors):
            return self._measure_group(tensors, HOST)
        numbers = [0] * len(tensors)
        for device in dict.fromkeys(x.device for x in tensors):
            chosen = [i for i, x in enumerate(tensors) if x.device == device]
            group = [tensors[i] for i in chosen]
            for i, number in zip(chosen, self._measure_group(group, device), strict=True):
                numbers[i] = number
        return numbers

    @property
    def finite(self) -> bool:
        """Whether all rows are on the host and tell of finite values alone."""
        return not self._homes and not any(stats.nonfinite_rows(block) for block in self._host())

    def send(self, numbers: list[int], transfer: Transfer) -> Callable[[], NDArray[np.int64]]:
        """Forget all rows. Those of these numbers as one matrix on the host, once the transfer has arrived."""
        self.forget()
        on_host = self._in_full + self._used
        self._usual = min(max(self._usual, on_host), LARGEST_BLOCK)
        host = np.concatenate(self._host())
        sent = {device: transfer.add(rows.leave()) for device, rows in self._devices.items()}
        homes, self._homes = self._homes, []
        self._full, self._in_full, self._used = [], 0, 0

        def matrix() -> NDArray[np.int64]:
            place = np.arange(on_host + len(homes))
            parts, end = [host], on_host
            for device, rows in sent.items():
                chosen = np.flatnonzero([home == device for home in homes])
                place[on_host + chosen] = end + np.arange(len(chosen))
                parts.append(rows().numpy())
                end += len(chosen)
            order = np.array([n if n >= 0 else on_host - n - 1 for n in numbers], dtype=np.int64)
            return np.concatenate(parts)[place[order]]

        return matrix

    def _host(self) -> list[NDArray[np.int64]]:
        return [block.numpy() for block in [*self._full, self._block[: self._used]]]

    def _measure(self, x: Tensor) -> int:
        if not x.is_cpu:
            stats.summarize(x, self._spec, self._rows_on(x.device, 1)[0])
            return -len(self._homes)
        stats.summarize(x, self._spec, self._rows[self._used])
        self._used += 1
        return self._in_full + self._used - 1

    def _measure_group(self, tensors: Sequence[Tensor], device: torch.device) -> list[int]:
        count = len(tensors)
        if device.type != "cpu":
            stats.summarize_many(tensors, self._spec, self._rows_on(device, count))
            return list(range(count - len(self._homes) - 1, -len(self._homes) - 1, -1))
        if self._used + count > len(self._rows):
            self._make_room(count)
        stats.summarize_many(tensors, self._spec, self._block.narrow(0, self._used, count))
        self._used += count
        return list(range(self._in_full + self._used - count, self._in_full + self._used))

    def _rows_on(self, device: torch.device, count: int) -> Tensor:
        """Rows on a device that is not the host, noted as the next ones."""
        rows = self._devices.get(device)
        if rows is None:
            rows = self._devices[device] = DeviceRows(device, self._spec.width)
        self._homes += [device] * count
        return rows.take(count)

    def _make_room(self, rows: int) -> None:
        """Begin a block that has room for so many."""
        if self._used:
            self._full.append(self._block[: self._used])
            self._in_full, self._used = self._in_full + self._used, 0
        with torch.inference_mode(False):
            self._block = torch.empty((max(rows, self._usual), self._spec.width), dtype=torch.int64, device="cpu")
        self._rows, self._address = self._block.unbind(0), self._block.data_ptr()
