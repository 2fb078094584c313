"""The optimizers that hold a model's parameters: found by themselves, described for run.json, read at their steps."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from tracehooks.capture.parameters import Held


class Optimizers:
    """Optimizers seen so far, in order; those of other models are told apart by their parameters."""

    def __init__(self, parameters: list[Held], lazy: list[Tensor]) -> None:
        self._ids = {id(held.tensor) for held in parameters} | set(map(id, lazy))
        self._known: list[weakref.ref[Optimizer]] = []
        self._held: dict[int, set[int]] = {}
        """ids of the parameters of each optimizer that was asked about since the last `look`, by its id."""
        self._searched = False

    def update(self, parameters: list[Held]) -> None:
        """The model's parameters changed."""
        self._ids |= {id(held.tensor) for held in parameters}

    def add(self, optimizer: Optimizer) -> None:
        """Remember an optimizer."""
        if not any(ref() is optimizer for ref in self._known):
            self._known.append(weakref.ref(optimizer))

    def look(self) -> None:
        """From now on optimizers may hold others than before."""
        self._held.clear()

    def ids_of(self, optimizer: Optimizer) -> set[int]:
        """ids of the parameters an optimizer holds."""
        known = self._held.get(id(optimizer))
        if known is None:
            known = self._held[id(optimizer)] = ids_of(optimizer)
        return known

    def holds_ours(self, optimizer: Optimizer) -> bool:
        """Whether it holds a parameter of this model."""
        return not self._ids.isdisjoint(self.ids_of(optimizer))

    def index(self, optimizer: Optimizer) -> int:
        """Its number, in the order in which optimizers were seen."""
        return next(i for i, ref in enumerate(self._known) if ref() is optimizer)

    def any(self) -> bool:
        """Whether some optimizer trains this model. Where none has stepped yet the process is searched, once: only so
        can a second micro-batch be told from a second step of a loop that updates by hand."""
        if not self._known and not self._searched:
            self._searched = True
            for optimizer in _all_of_them():
                if self.holds_ours(optimizer):
                    self.add(optimizer)
        return bool(self.living())

    def living(self) -> list[Optimizer]:
        """Those that still exist."""
        return [optimizer for ref in self._known if (optimizer := ref()) is not None]

    def held(self) -> set[int]:
        """ids of the parameters that some known optimizer holds."""
        return set().union(*map(self.ids_of, self.living()))


def _all_of_them() -> Iterator[Optimizer]:
    """Every optimizer of this process."""
    for thing in gc.get_objects():
        # type(), not isinstance(): __class__ may be computed and warn, and this looks at everybody's objects
        if issubclass(type(thing), Optimizer) and hasattr(thing, "param_groups"):
            yield thing


def held_by_any_optimizer() -> set[int]:
    """ids of the tensors that some optimizer of this process holds, of whichever model."""
    return set().union(*map(ids_of, _all_of_them()))


def strangers_like(parameters: list[Tensor]) -> Iterator[Optimizer]:
    """Optimizers that hold none of these parameters but tensors of at least half of their shapes: made for another, or an
    earlier, copy of the model."""
    own, shapes = {id(parameter) for parameter in parameters}, [parameter.shape for parameter in parameters]
    for optimizer in _all_of_them():
        held = list(parameters_of(optimizer))
        alike = sum(shape in {tensor.shape for tensor in held} for shape in shapes)
        if held and 2 * alike >= len(shapes) and not any(id(tensor) in own for tensor in held):
            yield optimizer


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Every parameter an optimizer holds."""
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def ids_of(optimizer: Optimizer) -> set[int]:
    """ids of the parameters an optimizer holds."""
    return set(map(id, parameters_of(optimizer)))


def learning_rates(optimizer: Optimizer) -> list[float | Tensor]:
    """The learning rate of each parameter group that has one."""
    return [group["lr"] for group in optimizer.param_groups if "lr" in group]


def state_tensors(optimizer: Optimizer, held: Held) -> Iterator[tuple[str, Tensor]]:
    """The optimizer's state of one parameter: names like ``weight.exp_avg``, tensors of at least one dimension."""
    for name, value in optimizer.state.get(held.tensor, {}).items():
        if isinstance(value, Tensor) and value.ndim:
            yield f"{held.slot}.{name}", value


def describe(optimizer: Optimizer, names: dict[int, str]) -> dict[str, Any]:
    """An optimizer for run.json: class, the hyper-parameters and parameter names of each group, and the shapes of what it
    holds that is not this model's; whether it had state before its first step here."""
    groups = []
    for group in optimizer.param_groups:
        settings = {key: _jsonable(value) for key, value in group.items() if key != "params"}
        own = [names[id(parameter)] for parameter in group["params"] if id(parameter) in names]
        groups.append({**settings, "parameters": own})
    foreign = [list(tensor.shape) for tensor in parameters_of(optimizer) if id(tensor) not in names]
    known = {"class": type(optimizer).__name__, "groups": groups, "foreign": foreign}
    return {**known, "had_state": any(bool(state) for state in optimizer.state.values())}


def _jsonable(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 and value.device.type == "cpu" else f"tensor on {value.device}"
    if isinstance(value, tuple | list):
        return [_jsonable(item) for item in value]
    return value if isinstance(value, bool | int | float | str | type(None)) else str(value)


def unscaled(gradient: Tensor, scale: Tensor | None) -> Tensor:
    """A gradient as a fused optimizer uses it: divided by the scale that it was handed."""
    if scale is None or gradient.layout != torch.strided:
        return gradient
    return gradient.detach() / scale.detach().to(gradient.device)
