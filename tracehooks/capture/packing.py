"""Packed statistics of many tensors, kept where they were computed until they are read back together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tracehooks import stats

BLOCK_ROWS = 512
LARGEST_BLOCK = 4096
"""A block has room for what one flush took, from BLOCK_ROWS up to this."""


class Packing:
    """Rows of packed statistics: on the host in preallocated blocks, on devices as they come."""

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
        self._on_devices: list[Tensor] = []

    def measure(self, x: Tensor) -> int:
        """Statistics of a tensor; the number by which `gather` knows them."""
        if not x.is_cpu:
            self._on_devices.append(stats.summarize(x, self._spec))
            return -len(self._on_devices)
        if self._used == len(self._rows):
            self._make_room(1)
        stats.summarize(x, self._spec, self._rows[self._used])
        self._used += 1
        return self._in_full + self._used - 1

    def measure_many(self, tensors: Sequence[Tensor]) -> list[int]:
        """The same for many tensors: one call of the kernel for those on the host."""
        host = [x for x in tensors if x.is_cpu]
        if host:
            if self._used + len(host) > len(self._rows):
                self._make_room(len(host))
            stats.summarize_many(host, self._spec, self._block.narrow(0, self._used, len(host)))
            self._used += len(host)
        on_host = iter(range(self._in_full + self._used - len(host), self._in_full + self._used))
        return [next(on_host) if x.is_cpu else self.measure(x) for x in tensors]

    def gather(self, numbers: list[int]) -> NDArray[np.int64]:
        """The rows of these numbers as one matrix on the host, and forget all. Waits once for each device."""
        rows = [block.numpy() for block in [*self._full, self._block[: self._used]]]
        on_host = self._in_full + self._used
        self._usual = min(max(self._usual, on_host), LARGEST_BLOCK)
        matrix = np.concatenate([*rows, self._from_devices()])
        order = np.array([n if n >= 0 else on_host - n - 1 for n in numbers], dtype=np.int64)
        self._full, self._in_full, self._used, self._on_devices = [], 0, 0, []
        return matrix[order]

    def _make_room(self, rows: int) -> None:
        """Begin a block that has room for so many."""
        if self._used:
            self._full.append(self._block[: self._used])
            self._in_full, self._used = self._in_full + self._used, 0
        with torch.inference_mode(False):
            self._block = torch.empty((max(rows, self._usual), self._spec.width), dtype=torch.int64, device="cpu")
        self._rows = self._block.unbind(0)

    def _from_devices(self) -> NDArray[np.int64]:
        matrix = np.zeros((len(self._on_devices), self._spec.width), dtype=np.int64)
        by_device: dict[torch.device, list[int]] = {}
        for i, row in enumerate(self._on_devices):
            by_device.setdefault(row.device, []).append(i)
        for indices in by_device.values():
            matrix[indices] = torch.stack([self._on_devices[i] for i in indices]).cpu().numpy()
        return matrix
