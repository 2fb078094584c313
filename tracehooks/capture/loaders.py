"""The data loaders of this process, as far as they say how samples are drawn."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import DataLoader


class Loaders:
    """Data loaders that existed when the model was first trained."""

    def __init__(self) -> None:
        self._known: list[weakref.ref[DataLoader[Any]]] = []

    def find(self) -> None:
        """Look for them among all objects, once."""
        # type(), not isinstance(): __class__ may be computed, and this looks at everybody's objects
        self._known = [weakref.ref(thing) for thing in gc.get_objects() if issubclass(type(thing), DataLoader)]

    def describe(self) -> Iterator[dict[str, Any]]:
        """Each that still exists: how many samples, batches, which sampler, whether it shuffles, its epoch."""
        for number, reference in enumerate(self._known):
            loader = reference()
            if loader is None:
                continue
            sampler = getattr(loader, "sampler", None)
            yield {
                "number": number,
                "dataset": type(loader.dataset).__name__,
                "samples": len(loader.dataset) if isinstance(loader.dataset, Sized) else None,
                "batch_size": loader.batch_size,
                "workers": loader.num_workers,
                "sampler": type(sampler).__name__,
                "shuffle": _shuffles(sampler),
                "epoch": _number(getattr(sampler, "epoch", None)),
            }


def _shuffles(sampler: object) -> bool | None:
    """Whether a sampler of torch's draws in random order; None for others."""
    name = type(sampler).__name__
    if name == "DistributedSampler":
        return bool(getattr(sampler, "shuffle", False))
    return {"RandomSampler": True, "SequentialSampler": False, "SubsetRandomSampler": True}.get(name)


def _number(value: object) -> int | None:
    return value if isinstance(value, int) else None
