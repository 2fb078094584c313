"""The module calls of a forward pass, by the autograd nodes at their edges: which module an op ran in, and where a path
for gradients ends."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tracehooks.capture import torch_internals
from tracehooks.capture.graph import Graph, leaf
from tracehooks.capture.leaves import leaves

MAX_CALLS = 20_000
"""Module calls that are remembered of a step at most."""


class End(NamedTuple):
    """A tensor that goes into a module or comes out of it."""

    node: int | None
    """Sequence number of the autograd node that made it."""
    floating: bool
    gradient: bool
    memory: Hashable
    """Token of what holds its values; None where that is not known."""


class Call(NamedTuple):
    """One call of a module."""

    path: str
    gradients: bool
    """Whether they were computed."""
    checkpointed: bool
    """Whether reentrant checkpointing had turned them off."""
    inputs: tuple[End, ...]
    outputs: tuple[End, ...]


class Calls:
    """Module calls since the last `begin`, in the order in which they returned."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget everything."""
        self.arguments: set[int] = set()
        """Identities of the tensors that the root was given."""
        self.given: dict[Hashable, str] = {}
        """Memory of what the root was given, and the names of the inputs in it."""
        self._calls: list[Call] = []
        self._made: dict[int, str] = {}
        """Innermost module that returned the result of an autograd node."""
        self._taken: dict[str, set[int]] = {}
        """Autograd nodes whose results a module was given."""

    def __iter__(self) -> Iterator[Call]:
        return iter(self._calls)

    def give(self, arguments: Sequence[tuple[str, Any]]) -> None:
        """The root is called with these."""
        for name, tensor in (named for argument in arguments for named in leaves(argument[1], argument[0])):
            self.arguments.add(id(tensor))
            self.given[_memory(tensor)] = name

    def takers(self) -> dict[str, list[str]]:
        """Modules that were given an input of the root as it is, by the input's name."""
        found: dict[str, list[str]] = {}
        for call in self._calls:
            for name in {self.given[end.memory] for end in call.inputs if end.memory in self.given}:
                if call.path and call.path not in found.setdefault(name, []):
                    found[name].append(call.path)
        return found

    def add(self, path: str, args: Any, output: Any) -> None:
        """A module returned."""
        if len(self._calls) >= MAX_CALLS:
            return
        gradients = torch.is_grad_enabled()
        call = Call(
            path,
            gradients,
            not gradients and torch_internals.in_reentrant_checkpoint(),
            tuple(_end(tensor) for _, tensor in leaves(args, "")),
            tuple(_end(tensor) for _, tensor in leaves(output, "")),
        )
        self._calls.append(call)
        for end in call.outputs:
            if end.node is not None:
                self._made.setdefault(end.node, path)
        self._taken.setdefault(path, set()).update(end.node for end in call.inputs if end.node is not None)

    def owners(self, graph: Graph, names: dict[int, str]) -> dict[Any, str | None]:
        """The module that each node's op ran in: the innermost, "" the root, None outside. ``names`` are the modules
        that hold parameters, by the parameters' identity."""
        owners: dict[Any, str | None] = {}
        for node in graph.nodes:
            variable = leaf(node)
            if variable is not None:
                owners[node] = names.get(id(variable))
                continue
            parent = graph.found_from[node]
            sequence = torch_internals.sequence_of(node)
            owners[node] = self._made.get(sequence, self._left(owners.get(parent), sequence))
        return owners

    def _left(self, path: str | None, sequence: int) -> str | None:
        """The module of an op inside or just before ``path``: an op whose result was given to it is outside of it."""
        while path is not None and (path not in self._taken or sequence in self._taken[path]):
            path = path.rpartition(".")[0] if path else None
        return path


def _end(tensor: Tensor) -> End:
    node = None if tensor.grad_fn is None else torch_internals.sequence_of(tensor.grad_fn)
    return End(node, tensor.is_floating_point() or tensor.is_complex(), tensor.requires_grad, _memory(tensor))


def _memory(tensor: Tensor) -> Hashable:
    values = torch_internals.unwrapped(tensor)
    if values is None or values.layout != torch.strided or values.is_nested:
        return None
    return torch_internals.memory_of(values)
