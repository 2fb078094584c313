"""Probes inside torch.compile: the same rows as in eager, one graph, and nothing is changed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tracehooks
from tests.capture.conftest import Record, Recorded
from tests.capture.test_probes import BACKWARD, FORWARD, IDS, seen
from tests.models import seed_everything
from tests.probed import Block, Probed

Compiled = Callable[[nn.Module], Any]


@pytest.fixture
def compiled(request: pytest.FixtureRequest) -> Iterator[Compiled]:
    """compiled(model): compiled without a graph break, by default up to where code would be made."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    backend = getattr(request, "param", "aot_eager")
    yield lambda model: torch.compile(model, fullgraph=True, backend=backend)
    torch._dynamo.reset()


backends = pytest.mark.parametrize("compiled", ["aot_eager", "inductor"], indirect=True)


def train(call: Any, model: nn.Module, x: Tensor, steps: int = 2) -> list[Tensor]:
    """Everything that two steps of SGD leave behind."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    kept = []
    for _ in range(steps):
        optimizer.zero_grad()
        out = call(x)
        out.float().square().sum().backward()
        kept += [out.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
    return kept


@contextlib.contextmanager
def not_watched(model: nn.Module) -> Iterator[None]:
    yield


def of(recorded: Recorded) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    """What probes say, by where and when."""
    rows = recorded.tensors
    rows = rows[rows["slot"].isin(["hidden", "inside", "last", "ids", "wave"]) & (rows["recompute"] == False)]  # noqa: E712
    names = ("step", "micro", "phase", "module", "slot", "call")
    found = {
        tuple(row[name] for name in names): (list(row["shape"]), pytest.approx(row["rms"], rel=1e-5))
        for row in rows.to_dict("records")
    }
    numbers = recorded.scalars[recorded.scalars["name"].str.contains("tokens/|audio/")]
    found |= {
        (step, name): pytest.approx(value, rel=1e-5) for step, name, value in numbers[["step", "name", "value"]].values
    }
    masks = recorded.masks[["step", "slot", "kept", "empty_rows", "convention"]]
    return found | {(step, slot): tuple(rest) for step, slot, *rest in masks.values.tolist()}


@backends
@pytest.mark.parametrize("reentrant", [None, False])
def test_rows_are_those_of_eager(record: Record, compiled: Compiled, reentrant: bool | None) -> None:
    """A model compiled as one graph shows every probe at the site, in the step and with the numbers of eager mode, under
    checkpointing too."""
    model = Probed(reentrant).eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    eager = record(model, lambda trace: train(model, model, IDS))
    model.load_state_dict(state)
    call = compiled(model)
    graph = record(model, lambda trace: train(call, model, IDS))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    assert of(graph) == of(eager)
    assert [site for site in seen(graph, "probe") if not site[3]] == FORWARD
    assert sorted(seen(graph, "backward")) == sorted(BACKWARD)


@backends
def test_nothing_is_changed(tmp_path: Path, compiled: Compiled) -> None:
    """Outputs and gradients in float32, and what dropout draws, are bit for bit those of the compiled model alone."""

    def run(watch: Callable[[nn.Module], contextlib.AbstractContextManager[Any]]) -> list[Tensor]:
        torch._dynamo.reset()
        seed_everything(0)
        model = Probed()
        call = compiled(model)
        with watch(model):
            return [*train(call, model, IDS), torch.rand(1)]

    alone = run(not_watched)
    watched = run(lambda model: tracehooks.attach(model, tmp_path / "run", quiet=True))
    assert len(alone) == len(watched)
    assert all(torch.equal(a, b) for a, b in zip(alone, watched, strict=True))


def test_a_trace_that_comes_and_goes(record: Record, compiled: Compiled) -> None:
    """Without a trace the graph holds no probe; one attached after the first call sees everything, and after it was
    closed the first graph is used again: two graphs in all."""
    model = Probed().eval()
    call = compiled(model)
    train(call, model, IDS)
    for _ in range(2):
        assert seen(record(model, lambda trace: train(call, model, IDS)), "probe") == FORWARD
        train(call, model, IDS)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_blocks_that_share_a_graph(record: Record, compiled: Compiled) -> None:
    """Where each block is compiled by itself, and one graph serves them all, probes stand at the block that ran."""

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block() for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    model = Stack()
    for i in range(3):
        model.blocks[i] = compiled(model.blocks[i])
    recorded = record(model, lambda trace: train(model, model, torch.randn(2, 4)))
    forward = [("blocks.0", "hidden", 0, False), ("blocks.1", "hidden", 0, False), ("blocks.2", "hidden", 0, False)]
    for step in range(2):
        assert seen(recorded, "probe", step) == forward
        assert seen(recorded, "backward", step) == forward[::-1]


def test_the_compiled_model_itself_is_attached(record: Record, compiled: Compiled) -> None:
    """What attach is given may be what torch.compile returned; evaluation has no gradients and no step of its own."""
    call = compiled(Probed())

    def work(trace: tracehooks.Trace) -> None:
        train(call, call, IDS)
        with torch.no_grad():
            call(IDS)

    recorded = record(call, work)
    assert seen(recorded, "probe") == FORWARD
    assert len(recorded.rows(phase="backward", slot="hidden")) == 4
    assert sorted(set(recorded.rows(phase="probe")["step"])) == [0, 1]


def test_bfloat16_under_autocast(tmp_path: Path) -> None:
    """The graph of a compiler that rounds where the program says so is bit for bit the same in bfloat16 too."""

    def run(watch: Callable[[nn.Module], contextlib.AbstractContextManager[Any]]) -> list[Tensor]:
        torch._dynamo.reset()
        seed_everything(0)
        model = nn.Sequential(nn.Linear(4, 4), Block(), nn.GELU(), Block())
        call = torch.compile(model, fullgraph=True, options={"emulate_precision_casts": True})
        with watch(model), torch.autocast("cpu", torch.bfloat16):
            return train(call, model, torch.randn(2, 4))

    alone = run(not_watched)
    watched = run(lambda model: tracehooks.attach(model, tmp_path / "run", quiet=True))
    assert all(torch.equal(a, b) for a, b in zip(alone, watched, strict=True))


def test_export(tmp_path: Path) -> None:
    """A model that is exported while a trace is attached holds no probe."""
    model = Probed().eval()
    with tracehooks.attach(model, tmp_path / "run", quiet=True):
        exported = torch.export.export(model, (IDS,))
    assert "tracehooks" not in str(exported.graph)
    assert torch.equal(exported.module()(IDS), model(IDS))
