"""Packed statistics of many tensors, kept where they were computed until they are read back together."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tracehooks import stats

BLOCK_ROWS = 512


class Packing:
    """Rows of packed statistics: on the host in preallocated blocks, on devices as they come."""

    def __init__(self, spec: stats.Spec) -> None:
        self._spec = spec
        self._blocks: list[Tensor] = []
        self._free: Iterator[Tensor] = iter(())
        self._on_host = 0
        self._on_devices: list[Tensor] = []

    def measure(self, x: Tensor) -> int:
        """Statistics of a tensor; the number by which `gather` knows them."""
        if not x.is_cpu:
            self._on_devices.append(stats.summarize(x, self._spec))
            return -len(self._on_devices)
        row = next(self._free, None)
        if row is None:
            row = self._more()
        stats.summarize(x, self._spec, row)
        self._on_host += 1
        return self._on_host - 1

    def gather(self, numbers: list[int]) -> NDArray[np.int64]:
        """The rows of these numbers as one matrix on the host, and forget all. Waits once for each device."""
        host = [block.numpy() for block in self._blocks]
        rows = np.concatenate(host)[: self._on_host] if host else np.zeros((0, self._spec.width), dtype=np.int64)
        matrix = np.concatenate([rows, self._from_devices()])
        order = np.array([n if n >= 0 else self._on_host - n - 1 for n in numbers], dtype=np.int64)
        self._blocks, self._free, self._on_host, self._on_devices = [], iter(()), 0, []
        return matrix[order]

    def _more(self) -> Tensor:
        with torch.inference_mode(False):
            block = torch.empty((BLOCK_ROWS, self._spec.width), dtype=torch.int64, device="cpu")
        self._blocks.append(block)
        self._free = iter(block.unbind(0))
        return next(self._free)

    def _from_devices(self) -> NDArray[np.int64]:
        matrix = np.zeros((len(self._on_devices), self._spec.width), dtype=np.int64)
        by_device: dict[torch.device, list[int]] = {}
        for i, row in enumerate(self._on_devices):
            by_device.setdefault(row.device, []).append(i)
        for indices in by_device.values():
            matrix[indices] = torch.stack([self._on_devices[i] for i in indices]).cpu().numpy()
        return matrix
