"""Recording a few lines of training and reading back what was recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

import tracehooks


class Recorded:
    """What a run directory says, as data frames."""

    def __init__(self, path: Path) -> None:
        self.run = tracehooks.open(path)
        self.tensors: pd.DataFrame = self.run.tensors().to_pandas()
        self.scalars: pd.DataFrame = self.run.scalars().to_pandas()
        self.masks: pd.DataFrame = self.run.masks().to_pandas()
        self.samples: pd.DataFrame = self.run.samples().to_pandas()
        self.events: pd.DataFrame = self.run.events().to_pandas()
        assert not self.run.problems

    def rows(self, **where: object) -> pd.DataFrame:
        """Tensor rows in which every named column has the given value, in order of observation."""
        found = self.tensors
        for column, value in where.items():
            found = found[found[column] == value]
        return found.sort_values(["step", "seq"])

    def sites(self, phase: str = "forward", step: int = 0) -> list[tuple[str, str, int]]:
        """(module, slot, call) of each row of a phase in a step, in order."""
        found = self.rows(phase=phase, step=step)
        return list(zip(found["module"], found["slot"], found["call"], strict=True))

    def values(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of a scalar."""
        found = self.scalars[self.scalars["name"] == name]
        return list(zip(found["step"], found["value"], strict=True))

    def kinds(self) -> list[str]:
        """Kinds of events."""
        return list(self.events["kind"])


@pytest.fixture(autouse=True)
def _one_thread_and_seed() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


Record = Callable[..., Recorded]


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """record(model, work, **options): attach, run ``work(trace)``, close, read. No recorder error may have happened."""

    def run(model: nn.Module, work: Callable[[Any], object], *, errors: bool = False, **options: Any) -> Recorded:
        path = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        with tracehooks.attach(model, path, quiet=True, **options) as trace:
            work(trace)
        recorded = Recorded(path)
        if not errors:
            assert "recorder_error" not in recorded.kinds(), recorded.events.to_string()
        return recorded

    return run


@pytest.fixture
def train() -> Callable[..., Callable[[Any], None]]:
    """train(model, x, steps): a loop with SGD over one batch, to hand to ``record``."""

    def make(model: nn.Module, x: Any, steps: int = 1, lr: float = 0.1) -> Callable[[Any], None]:
        def work(trace: Any) -> None:
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr)
            for _ in range(steps):
                optimizer.zero_grad()
                total(model(x)).backward()
                optimizer.step()

        return work

    return make


def total(output: Any) -> torch.Tensor:
    """A loss over every tensor in an output."""
    from tracehooks.capture.leaves import leaves

    parts = [t.float().square().sum() for _, t in leaves(output, "output") if t.is_floating_point() and t.requires_grad]
    return torch.stack(parts).sum()


@contextlib.contextmanager
def no_change(thing: Any) -> Iterator[None]:
    """``thing()`` gives the same before and after."""
    before = thing()
    yield
    assert thing() == before
