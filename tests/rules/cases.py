"""What a case is: a model, its training step, and what happens after each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import tracehooks
from tests import launching
from tests.rules import ranks


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

    def record(self, path: Path) -> None:
        """Train while the run is recorded."""
        trace = tracehooks.attach(self.model, path, quiet=True, **self.options)
        try:
            for number in range(self.steps):
                self.step(number)
                self.after(number, trace)
        except RuntimeError:
            if not self.raises:
                raise
        finally:
            trace.close()


@dataclass
class Resumed:
    """Training that ends and is resumed in the same directory."""

    before: Case
    after: Case

    def record(self, path: Path) -> None:
        """One after the other."""
        self.before.record(path)
        self.after.options["resume"] = True
        self.after.record(path)


@dataclass
class Ranks:
    """Training of several processes: `tests.rules.ranks` with the name of what they do."""

    what: str
    size: int = 2

    def record(self, path: Path) -> None:
        """All of them, until each has ended."""
        launching.run(ranks.main, path, self.what, ranks=self.size, log=path.with_suffix(".log"))


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


class Broken(NamedTuple):
    """A case and what must be found."""

    build: Callable[[], Case | Ranks | Resumed]
    rule: str
    cause: str | None
    evidence: dict[str, Any]
