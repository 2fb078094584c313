"""Which parameters a loss reaches and which not, why not, and which tensors it reaches that are nobody's parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from tracehooks.capture.calls import Call, Calls
from tracehooks.capture.graph import Graph
from tracehooks.capture.optimizers import held_by_any_optimizer
from tracehooks.capture.parameters import Held
from tracehooks.capture.select import named_modules

SEARCHED = 4
"""Levels of containers and plain objects below a module that are searched for a tensor nobody registered."""


class Break(NamedTuple):
    """Why a parameter gets no gradient."""

    cause: str
    """detach, no_grad_region, reentrant_checkpoint_without_grad_input, integer_conversion, branch_not_in_loss,
    module_not_called."""
    module: str
    """Where: the first module behind the break, or the one whose result is not used."""


class Strangers(NamedTuple):
    """Tensors that a loss reaches and that are no parameters of the model."""

    owner: str | None
    """The module in one of whose attributes they are; None where they are in none."""
    attribute: str | None
    names: list[str]
    shapes: list[list[int]]
    in_optimizer: bool
    """Whether some optimizer of the process holds them all."""


def broken(held: Held, calls: Calls) -> Break:
    """Why no gradient reaches a parameter that requires one, from the calls of the pass."""
    here = [call for call in calls if call.path == held.module]
    if not here:
        return Break("module_not_called", held.module)
    if not any(call.gradients for call in here):
        checkpointed = any(call.checkpointed for call in here)
        cause = "reentrant_checkpoint_without_grad_input" if checkpointed else "no_grad_region"
        return Break(cause, _outermost_without_gradients(here[0], calls))
    if not any(end.gradient for call in here for end in call.outputs):
        return Break("detach", held.module)
    returned = {end.memory for call in calls if not call.path for end in call.outputs}
    if any(end.memory is not None and end.memory in returned for call in here for end in call.outputs):
        return Break("branch_not_in_loss", held.module)
    return _lost_after(here[-1], calls) or Break("branch_not_in_loss", held.module)


def strangers(graph: Graph, known: set[int], inside: set[int], root: nn.Module) -> Iterator[Strangers]:
    """Leaves of the graph that require a gradient and are not ``known``: those in an attribute of a module of the model,
    and parameters used ``inside`` the model that are in none."""
    unknown = {id(x): x for x in graph.leaves() if id(x) not in known}
    if not unknown:
        return
    found: dict[tuple[str, str], list[tuple[str, Tensor]]] = {}
    for owner, attribute, name, tensor in _unregistered(root):
        if unknown.pop(id(tensor), None) is not None:
            found.setdefault((owner, attribute), []).append((name, tensor))
    held = held_by_any_optimizer()
    for (owner, attribute), members in found.items():
        names, tensors = [name for name, _ in members], [x for _, x in members]
        yield Strangers(owner, attribute, names, [list(x.shape) for x in tensors], all(id(x) in held for x in tensors))
    lost = [x for x in unknown.values() if isinstance(x, nn.Parameter) and id(x) in inside and id(x) not in held]
    if lost:
        yield Strangers(None, None, [], [list(x.shape) for x in lost], False)


def _within(module: str, path: str) -> bool:
    return module == path or not path or module.startswith(f"{path}.")


def _outermost_without_gradients(call: Call, calls: Calls) -> str:
    """The outermost module around a call that ran without gradients as well."""
    without = {other.path for other in calls if not other.gradients}
    path = call.path
    while path and (parent := path.rpartition(".")[0]) in without:
        path = parent
    return path


def _lost_after(source: Call, calls: Calls) -> Break | None:
    """The first module called after ``source`` that takes a tensor which came from inside the model without a gradient:
    behind a detach, or as whole numbers."""
    later = False
    numbers: Break | None = None
    made_without = {end.memory for call in calls for end in call.outputs if not end.gradient}
    for call in calls:
        if call is source:
            later = True
        elif later and not _within(source.path, call.path) and call.gradients:
            for end in call.inputs:
                if end.gradient or end.memory is None or end.memory in calls.given or end.memory in made_without:
                    continue
                if end.floating:
                    return Break("detach", call.path)
                numbers = numbers or Break("integer_conversion", call.path)
    return numbers


def _unregistered(root: nn.Module) -> Iterator[tuple[str, str, str, Tensor]]:
    """Tensors that require a gradient in attributes of modules where nn.Module does not look for them: (module,
    attribute, name, tensor)."""
    for path, module in named_modules(root).items():
        for attribute, value in vars(module).items():
            if attribute not in _TABLES:
                for name, tensor in _tensors_in(value, attribute, SEARCHED, set()):
                    yield path, attribute, f"{path}.{name}".lstrip("."), tensor


_TABLES = frozenset({"_parameters", "_buffers", "_modules"})


def _tensors_in(value: Any, name: str, depth: int, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if value.requires_grad and value.is_leaf:
            yield name, value
    elif isinstance(value, nn.Module):
        yield from ((f"{name}.{inner}", parameter) for inner, parameter in value.named_parameters())
    elif depth and id(value) not in seen:
        seen.add(id(value))
        for key, item in _items(value):
            yield from _tensors_in(item, f"{name}.{key}", depth - 1, seen)


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, list | tuple | set | frozenset):
        yield from enumerate(value)
    elif isinstance(value, dict):
        yield from list(value.items())
    elif not isinstance(value, type) and type(value).__module__ != "builtins" and hasattr(value, "__dict__"):
        yield from list(vars(value).items())
