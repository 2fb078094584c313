"""Parameters and buffers: their names, their values at the optimizer's step, and what the step did to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from tracehooks.capture import torch_internals
from tracehooks.capture.select import named_modules
from tracehooks.core.names import canonical

EXACT_BELOW = 65_536
"""Parameters of at most this many elements are copied whole to tell their update; of larger ones a sample is."""
SAMPLE = 4_096
"""Elements sampled from a larger parameter: the norm of its update is known to about 1/sqrt(2·4096) = 1 %."""


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


class Census:
    """Which parameters, buffers and modules the model had when last looked at; notices when that changed."""

    def __init__(self, root: nn.Module) -> None:
        self.parameters = held_parameters(root)
        self.buffers = held_buffers(root)
        self.modules = named_modules(root)
        self._tables = [table for module in self.modules.values() for table in (module._parameters, module._modules)]
        self._identities = self._now()

    def _now(self) -> list[tuple[int, ...]]:
        return [tuple(map(id, table.values())) for table in self._tables]

    def outdated(self) -> bool:
        """Whether a parameter or module was added, removed or replaced since. Tensors that only stand in for parameters
        while torch.func.functional_call runs do not count."""
        return self._identities != self._now() and not self._lent()

    def _lent(self) -> bool:
        entries = (entry for module in self.modules.values() for entry in module._parameters.values())
        return any(entry is not None and not isinstance(entry, nn.Parameter) for entry in entries)

    @property
    def names(self) -> dict[str, int]:
        """Identity of each parameter by name."""
        return {held.name: id(held.tensor) for held in self.parameters}


class UpdateProbe:
    """What an optimizer step does to parameters, without a copy of every weight.

    Small parameters are copied, large ones sampled at fixed, evenly spread, pseudo-random positions; the positions are
    drawn from a generator of our own, so the run's random state is not touched.
    """

    def __init__(self) -> None:
        self._positions: dict[tuple[int, torch.device], Tensor] = {}
        self._before: list[tuple[Held, Tensor]] = []

    def look(self, held: Iterable[Held]) -> None:
        """Remember the values before the step."""
        with torch.no_grad():
            self._before = [(entry, taken) for entry in held if (taken := self._take(entry.tensor, True)) is not None]

    def changes(self) -> Iterator[tuple[Held, Tensor]]:
        """After the step: each parameter and the change of its (sampled) elements, float64, 1-D."""
        before, self._before = self._before, []
        with torch.no_grad():
            for entry, old in before:
                new = self._take(entry.tensor, False)
                if new is not None and new.shape == old.shape:
                    yield entry, new.to(torch.float64) - old.to(torch.float64)

    def _take(self, parameter: Tensor, keep: bool) -> Tensor | None:
        values = torch_internals.unwrapped(parameter)
        if values is None or values.layout != torch.strided:
            return None
        values = torch.view_as_real(values.detach()) if values.is_complex() else values.detach()
        if values.numel() <= EXACT_BELOW:
            flat = values.reshape(-1)
            return flat.clone() if keep and flat.data_ptr() == values.data_ptr() else flat
        return torch.take(values, self._at(values.numel(), values.device))

    def _at(self, count: int, device: torch.device) -> Tensor:
        """``SAMPLE`` ascending positions, one in each of as many equal stretches."""
        if (count, device) not in self._positions:
            generator = torch.Generator().manual_seed(0)
            edges = torch.arange(SAMPLE, dtype=torch.float64) * (count / SAMPLE)
            jitter = torch.rand(SAMPLE, generator=generator, dtype=torch.float64) * (count / SAMPLE)
            self._positions[count, device] = (edges + jitter).to(torch.int64).clamp(max=count - 1).to(device)
        return self._positions[count, device]
