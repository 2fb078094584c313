"""Numbers on their way from a device to the host, for which nothing has to wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Copy:
    """A copy that was begun: ``host`` holds it when the device has passed ``event``, at once where there is none."""

    host: Tensor
    event: Any = None

    def arrived(self) -> bool:
        """Whether it is there, without waiting."""
        return self.event is None or bool(self.event.query())

    def wait(self) -> None:
        """Until it is there."""
        if self.event is not None:
            self.event.synchronize()


def here(x: Tensor) -> bool:
    """Whether a tensor can be read without waiting for a device."""
    return x.is_cpu


def host(rows: Tensor) -> NDArray[np.int64]:
    """Packed rows of the host."""
    return rows.numpy()


def begin_copy(x: Tensor) -> Copy:
    """Copy a tensor to the host: by way of pinned memory, which waits for nothing, where the device has it."""
    if x.device.type != "cuda":
        return Copy(x.cpu())
    with torch.cuda.device(x.device):
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        host.copy_(x, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
    return Copy(host, event)


class Transfer:
    """Tensors that travel together, all of one device in one copy. What is added may change once the transfer is started,
    by later work on the same stream."""

    def __init__(self) -> None:
        self._leaving: dict[torch.device, list[tuple[int, Tensor]]] = {}
        self._copies: list[tuple[Copy, list[tuple[int, Tensor]]]] = []
        self._here: dict[int, Tensor] = {}
        self._added = 0

    def add(self, x: Tensor) -> Callable[[], Tensor]:
        """Take a dense tensor of a real dtype along. What is returned gives it on the host, once, when it has arrived."""
        self._added += 1
        number = self._added
        if here(x):
            self._here[number] = x
        else:
            self._leaving.setdefault(x.device, []).append((number, x))
        return lambda: self._here.pop(number)

    def start(self) -> None:
        """Begin to copy what was added."""
        if not self._leaving:
            return
        with torch.no_grad(), torch.inference_mode(False):
            for entries in self._leaving.values():
                octets = torch.cat([x.detach().reshape(-1).view(torch.uint8) for _, x in entries])
                like = [(number, torch.empty_like(x, device="meta")) for number, x in entries]
                self._copies.append((begin_copy(octets), like))
        self._leaving.clear()

    def arrived(self) -> bool:
        """Whether everything is there, without waiting."""
        return all(copy.arrived() for copy, _ in self._copies)

    def wait(self) -> None:
        """Until everything is there."""
        for copy, entries in self._copies:
            copy.wait()
            parts = torch.split(copy.host, [like.nbytes for _, like in entries])
            for (number, like), octets in zip(entries, parts, strict=True):
                self._here[number] = octets.clone().view(like.dtype).view(like.shape)
        self._copies.clear()
