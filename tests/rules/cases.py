"""What a case is: a model, its training step, and what happens after each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Case:
    """A few steps of training."""

    model: nn.Module
    step: Callable[[int], object]
    steps: int = 8
    options: dict[str, Any] = field(default_factory=dict)
    after: Callable[[int, Any], object] = lambda number, trace: None
    raises: bool = False
    """Whether the failure ends in a RuntimeError of torch's own."""


Loss = Callable[[nn.Module, int], Tensor]


def trained(
    model: nn.Module,
    loss: Loss,
    *,
    optimizer: Any = None,
    lr: float = 1e-2,
    clear: bool = True,
    **rest: Any,
) -> Case:
    """An ordinary training loop: clear, loss, backward, step."""
    made = optimizer if optimizer is not None else torch.optim.Adam(model.parameters(), lr)

    def step(number: int) -> None:
        if clear:
            made.zero_grad()
        loss(model, number).backward()
        made.step()

    return Case(model, step, **rest)


def batches(*shape: int, count: int = 8, seed: int = 1) -> Tensor:
    """Normal numbers, one batch a step."""
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed))
