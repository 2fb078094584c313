"""How much memory the process holds, asked of the system and of the allocator: neither waits for a device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

STATM = Path("/proc/self/statm")
"""Linux's count of pages; the second number is those resident."""


def used() -> Iterator[tuple[str, float]]:
    """``resident``: bytes of this process in memory, where the system says so. ``device``: bytes that tensors hold on
    GPUs."""
    try:
        pages = int(STATM.read_bytes().split()[1])
        yield "resident", float(pages * os.sysconf("SC_PAGE_SIZE"))
    except (OSError, ValueError, IndexError):  # another system
        pass
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        yield "device", float(sum(torch.cuda.memory_allocated(i) for i in range(torch.cuda.device_count())))
