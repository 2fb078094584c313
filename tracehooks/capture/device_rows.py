"""Rows of packed statistics in a device's memory, from the kernel that writes them to the transfer that takes them away."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_ROWS = 512


class DeviceRows:
    """Rows on one device, in blocks that are allocated once: after a transfer has begun they are written anew, which the
    device does later, since it works in order.
    """

    def __init__(self, device: torch.device, width: int) -> None:
        self._device, self._width = device, width
        self._blocks: list[Tensor] = []
        self._at = self._used = 0
        """The block that is being filled, and how many of its rows are."""
        self._filled: list[Tensor] = []
        self._streams: set[torch.cuda.Stream] = set()

    def take(self, count: int) -> Tensor:
        """The next rows to write to: contiguous int64 of shape (count, width)."""
        if self._device.type == "cuda":
            self._streams.add(torch.cuda.current_stream(self._device))
        if not self._blocks or self._used + count > len(self._blocks[self._at]):
            self._next_block(count)
        rows = self._blocks[self._at].narrow(0, self._used, count)
        self._used += count
        return rows

    def leave(self) -> Tensor:
        """A copy of everything taken since, in order. Streams that wrote rows wait for it before they write them anew."""
        self._close_block()
        filled, streams = self._filled, self._streams
        self._filled, self._streams, self._at = [], set(), 0
        if not filled:
            return torch.empty((0, self._width), dtype=torch.int64)
        if not streams:
            return torch.cat(filled)
        current = torch.cuda.current_stream(self._device)
        for stream in streams - {current}:
            current.wait_stream(stream)
        rows = torch.cat(filled)
        for stream in streams - {current}:
            stream.wait_stream(current)
        return rows

    def _next_block(self, count: int) -> None:
        if self._blocks:
            self._close_block()
            self._at += 1
        if self._at == len(self._blocks) or len(self._blocks[self._at]) < count:
            with torch.inference_mode(False):
                shape = max(count, BLOCK_ROWS), self._width
                self._blocks.insert(self._at, torch.empty(shape, dtype=torch.int64, device=self._device))
        self._used = 0

    def _close_block(self) -> None:
        if self._used:
            self._filled.append(self._blocks[self._at][: self._used])
        self._used = 0
