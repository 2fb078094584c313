"""Where gradients that arrive as nothing but zeros are lost: the autograd node that receives some and sends none.

What the recorded gradients show decides when it is worth a look: parameters whose gradient was all zero in two steps
running. Then the nodes of one backward pass tell, on the device, whether what they receive and what they send holds
anything but zeros; the answers are read with the next flush.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from tracehooks.capture import torch_internals
from tracehooks.capture.findings import of_gradient
from tracehooks.capture.graph import Graph, leaf
from tracehooks.capture.recorder import Drained
from tracehooks.capture.rows import Resolved

PATIENCE = 2
"""Steps running in which a gradient is all zero before its graph is looked at: one such step is usual where training
starts from zeros, as LoRA does."""
LOOKS = 3
"""Backward passes that are looked at in a run at most."""


class Killer(NamedTuple):
    """A node at which gradients end."""

    op: str
    module: str | None
    shape: tuple[int, ...]
    """Of the op's result."""
    dimension: int | None
    """Size of the dimension, or of the group, that a softmax or a normalisation runs over."""
    parameters: list[str]


class VanishingPoint:
    """Looks for killers where gradients stay zero."""

    def __init__(self) -> None:
        self._zero_for: dict[str, int] = {}
        self._explained: set[str] = set()
        self._looks = 0
        self._graph: _Watched | None = None
        self._handles: list[RemovableHandle] = []

    @property
    def wanted(self) -> bool:
        """Whether the next backward pass is worth a look."""
        return self._looks < LOOKS and self._graph is None and bool(self._lost())

    def judge(self, drained: Drained) -> list[Killer]:
        """Take note of the gradients in a flush; what the watched pass, if there was one, tells."""
        found = self._graph.killers(self._lost()) if self._graph is not None and not self._handles else []
        if self._graph is not None and not self._handles:
            self._explained |= set(self._lost())
            self._graph = None
        if self._looks < LOOKS:
            self._count(drained.rows)
        return found

    def _count(self, rows: Resolved) -> None:
        """For how many steps running the gradient of each parameter is all zero."""
        gradients = rows.heads.those(of_gradient)
        counts, zeros = rows.columns["count"][gradients], rows.columns["zeros"][gradients]
        empty = (counts > 0) & (counts == zeros)
        if not (self._zero_for or empty.any()):
            return
        for i, is_empty in zip(map(int, gradients), empty, strict=True):
            place = rows.heads[i].place
            name = f"{place.module}.{place.slot}".lstrip(".")
            if is_empty:
                self._zero_for[name] = self._zero_for.get(name, 0) + 1
            else:
                self._zero_for.pop(name, None)

    def watch(self, graph: Graph, owners: dict[Any, str | None], names: dict[int, str]) -> None:
        """Look at the backward pass that begins: ``owners`` are modules of nodes, ``names`` those of parameters."""
        self._looks += 1
        self._graph = _Watched(graph, owners, names)
        self._handles = [node.register_hook(self._graph.hook(node)) for node in graph.nodes if leaf(node) is None]

    def backward_ends(self) -> None:
        """It is over: take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._graph is not None:
            self._graph.forget_nodes()

    def _lost(self) -> list[str]:
        return [name for name, steps in self._zero_for.items() if steps >= PATIENCE and name not in self._explained]


class _Watched:
    """The graph of one backward pass as numbers, and what its nodes received and sent."""

    def __init__(self, graph: Graph, owners: dict[Any, str | None], names: dict[int, str]) -> None:
        self._numbers = {node: number for number, node in enumerate(graph.nodes)}
        self._ops = [node.name() for node in graph.nodes]
        self._modules = [owners.get(node) for node in graph.nodes]
        self._shapes = [next(iter(torch_internals.result_shapes(node)), ()) for node in graph.nodes]
        self._dimensions = [_dimension(node, shape) for node, shape in zip(graph.nodes, self._shapes, strict=True)]
        self._parents: dict[int, list[tuple[int, int]]] = defaultdict(list)
        """For each node the nodes that send to it, and as how-manieth of what they send."""
        self._leaves: dict[str, int] = {}
        for number, node in enumerate(graph.nodes):
            variable = leaf(node)
            if variable is not None and id(variable) in names:
                self._leaves[names[id(variable)]] = number
            for position, (child, _) in enumerate(node.next_functions):
                if child in self._numbers:
                    self._parents[self._numbers[child]].append((number, position))
        self._flags: list[Tensor] = []
        self._received: dict[int, list[int]] = {}
        self._sent: dict[int, list[int | None]] = {}

    def forget_nodes(self) -> None:
        """Let go of the graph."""
        self._numbers = {}

    def hook(self, node: Any) -> Any:
        """A hook for a node; autograd calls it with what the node sends and what it was sent."""
        number = self._numbers[node]

        def seen(sends: Sequence[Tensor | None], receives: Sequence[Tensor | None]) -> None:
            if torch_internals.modes_active():
                return
            with torch_internals.without_torch_function(), torch.no_grad():
                self._received[number] = [flag for x in receives if (flag := self._flag(x)) is not None]
                self._sent[number] = [self._flag(x) for x in sends]

        return seen

    def _flag(self, x: Tensor | None) -> int | None:
        """Number of the answer whether a gradient holds anything but zeros; None where there is no gradient."""
        values = None if x is None else torch_internals.unwrapped(x)
        if values is None or values.layout != torch.strided or values.is_nested:
            return None
        self._flags.append(values.detach().any())
        return len(self._flags) - 1

    def killers(self, lost: Sequence[str]) -> list[Killer]:
        """The nodes at which the gradients of these parameters end. Waits for the device."""
        answers = torch.stack([flag.cpu() for flag in self._flags]).tolist() if self._flags else []
        killed: dict[int, list[str]] = defaultdict(list)
        for name in lost:
            for number in self._ends(self._leaves.get(name), answers):
                killed[number].append(name)
        return [
            Killer(self._ops[n], self._modules[n], self._shapes[n], self._dimensions[n], sorted(names))
            for n, names in sorted(killed.items())
        ]

    def _ends(self, start: int | None, answers: list[bool]) -> set[int]:
        """From a parameter up to the nodes that received something and sent nothing its way."""
        ends: set[int] = set()
        todo, seen = [start] if start is not None else [], {start}
        while todo:
            for parent, position in self._parents[todo.pop()]:
                sent = self._sent.get(parent, [])
                flag = sent[position] if position < len(sent) else None
                if flag is not None and answers[flag]:
                    ends.add(parent)  # what it sends is cancelled by what another node, or it itself, sends there too
                elif any(answers[received] for received in self._received.get(parent, ())):
                    ends.add(parent)
                elif parent not in seen:
                    seen.add(parent)
                    todo.append(parent)
        return ends


def _dimension(node: Any, shape: tuple[int, ...]) -> int | None:
    name = node.name()
    if name in ("SoftmaxBackward0", "LogSoftmaxBackward0"):
        dim = torch_internals.saved(node, "dim")
        return None if dim is None or not shape else shape[(dim - (1 << 64) if dim >= 1 << 63 else dim) % len(shape)]
    if name == "NativeLayerNormBackward0":
        normalised = torch_internals.saved(node, "normalized_shape")
        return None if normalised is None else int(torch.Size(normalised).numel())
    return None
