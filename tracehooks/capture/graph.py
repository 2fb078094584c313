"""The autograd graph below a loss, walked while it is whole: before backward frees it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction

LIMIT = 20_000
"""Nodes that are walked at most, at about a microsecond each. A graph that has more is no evidence of what it lacks."""

LEAF = "torch::autograd::AccumulateGrad"


class Graph:
    """The nodes below some tensors, each once, those nearer to the tensors first. Keep it no longer than backward lasts."""

    def __init__(self, starts: Iterable[Any], limit: int = LIMIT) -> None:
        self.nodes: list[Any] = []
        self.found_from: dict[Any, Any] = {}
        """The node that led to each node first; None for the starts."""
        todo: deque[Any] = deque()
        for start in starts:
            if start is not None and start not in self.found_from:
                self.found_from[start] = None
                todo.append(start)
        while todo and len(self.nodes) < limit:
            node = todo.popleft()
            self.nodes.append(node)
            for child in children(node):
                if child not in self.found_from:
                    self.found_from[child] = node
                    todo.append(child)
        self.complete = not todo

    def leaves(self) -> Iterator[Tensor]:
        """The tensors whose gradients backward will accumulate."""
        return (variable for node in self.nodes if (variable := leaf(node)) is not None)

    @property
    def opaque(self) -> bool:
        """Whether more may be reached than the nodes show: a custom function runs a backward pass of its own (so does
        reentrant checkpointing), or the graph is too large."""
        return not self.complete or any(isinstance(node, BackwardCFunction) for node in self.nodes)


def children(node: Any) -> list[Any]:
    """The nodes that a node sends gradients to."""
    return [child for child, _ in node.next_functions if child is not None]


def leaf(node: Any) -> Tensor | None:
    """The tensor whose gradient a node accumulates; None for every other node."""
    variable = node.variable if node.name() == LEAF else None
    return variable if isinstance(variable, Tensor) else None
