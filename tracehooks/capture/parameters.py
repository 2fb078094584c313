"""Parameters and buffers: their names, their values at the optimizer's step, and what the step did to them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from operator import methodcaller
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from tracehooks.capture.select import named_modules
from tracehooks.core.names import canonical


class Held(NamedTuple):
    """A parameter or buffer and where the model holds it. ``aliases`` are its further names (tied weights)."""

    module: str
    slot: str
    type: str
    tensor: Tensor
    aliases: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Canonical dotted name."""
        return f"{self.module}.{self.slot}" if self.module else self.slot


def held_parameters(root: nn.Module) -> list[Held]:
    """Every parameter once, in the model's order, with the names of its ties."""
    return _held(root, "_parameters")


def held_buffers(root: nn.Module) -> list[Held]:
    """Every buffer once, in the model's order."""
    return _held(root, "_buffers")


def _held(root: nn.Module, table: str) -> list[Held]:
    first: dict[int, Held] = {}
    for path, module in _all_modules(root):
        for slot, tensor in getattr(module, table, {}).items():
            if not isinstance(tensor, Tensor) or isinstance(tensor, UninitializedParameter | UninitializedBuffer):
                continue
            held = Held(path, slot, type(module).__name__, tensor)
            known = first.setdefault(id(tensor), held)
            if known is not held:
                first[id(tensor)] = known._replace(aliases=(*known.aliases, held.name))
    return list(first.values())


def _all_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules under every one of their names."""
    for path, module in root.named_modules(remove_duplicate=False):
        yield canonical(f".{path}").lstrip("."), module


_VALUES = methodcaller("values")


class Census:
    """Which parameters, buffers and modules the model had when last looked at; notices when that changed."""

    def __init__(self, root: nn.Module) -> None:
        self.parameters = held_parameters(root)
        self.buffers = held_buffers(root)
        self.modules = named_modules(root)
        self._tables = [table for module in self.modules.values() for table in (module._parameters, module._modules)]
        self._identities = self._now()
        self.lazy: list[Tensor] = [
            tensor
            for module in self.modules.values()
            for tensor in (*module._parameters.values(), *module._buffers.values())
            if isinstance(tensor, UninitializedParameter | UninitializedBuffer)
        ]
        """Parameters and buffers that have no shape yet."""

    def _now(self) -> tuple[list[int], list[int]]:
        """How much each table holds, and what: looked at in every pass, so past all Python code."""
        return list(map(len, self._tables)), list(map(id, chain.from_iterable(map(_VALUES, self._tables))))

    def outdated(self) -> bool:
        """Whether a parameter or module was added, removed or replaced since, or got its shape. Tensors that only stand in
        for parameters while torch.func.functional_call runs do not count."""
        return (self._identities != self._now() and not self._lent()) or self.grown()

    def grown(self) -> bool:
        """Whether a lazy parameter or buffer, which had no shape, has one by now: it stays the same object."""
        return any(not isinstance(tensor, UninitializedParameter | UninitializedBuffer) for tensor in self.lazy)

    def _lent(self) -> bool:
        entries = (entry for module in self.modules.values() for entry in module._parameters.values())
        return any(entry is not None and not isinstance(entry, nn.Parameter) for entry in entries)

    @property
    def names(self) -> dict[str, int]:
        """Identity of each parameter by name."""
        return {held.name: id(held.tensor) for held in self.parameters}
