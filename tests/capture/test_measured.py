"""Nothing is measured twice: the number of readings is counted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tracehooks import stats
from tracehooks.capture import lane
from tracehooks.capture.measured import Measured
from tracehooks.capture.packing import Packing
from tracehooks.stats import cpu


@pytest.fixture(params=["native", "plain"])
def readings(request, monkeypatch) -> list[int]:
    """How many tensors each flush had read, with and without the native lane."""
    counts: list[int] = []
    send = Packing.send

    def counted(self, numbers, host, transfer):
        counts.append(len(host))
        return send(self, numbers, host, transfer)

    if request.param == "native" and lane.native() is None:
        pytest.skip("built without Python's headers, or an older torch")
    if request.param == "plain":
        monkeypatch.setattr(lane, "native", lambda: None)
    monkeypatch.setattr(Packing, "send", counted)
    return counts


class Chain(nn.Module):
    """Modules that return what they were given: the same tensor, a view of it, their child's result."""

    def __init__(self) -> None:
        super().__init__()
        self.flat, self.same, self.inner = nn.Flatten(), nn.Identity(), nn.Sequential(nn.Linear(6, 2))

    def forward(self, x):
        return self.inner(self.same(self.flat(x)))


def test_views_identities_and_parents_cost_no_reading(record, readings) -> None:
    """One for the input, whose view and itself go on as three outputs, and one for the linear layer's output, which two
    parents return; every row is there."""
    model = Chain()
    recorded = record(model, lambda trace: model(torch.ones(4, 2, 3)), record=("outputs",))
    assert recorded.sites() == [
        ("flat", "output", 0),
        ("same", "output", 0),
        ("inner.0", "output", 0),
        ("inner", "output", 0),
        ("", "output", 0),
    ]
    assert sum(readings) == 2
    hashes = recorded.rows(phase="forward").set_index("module")["hash"]
    assert hashes["flat"] == hashes["same"] == recorded.rows(phase="input")["hash"].item()
    assert hashes["inner.0"] == hashes["inner"] == hashes[""]


def test_what_was_changed_in_place_is_read_again(record, readings) -> None:
    """An activation in place changes the tensor that the layer before returned."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))
    recorded = record(model, lambda trace: model(-torch.ones(4, 3)), record=("outputs",))
    rows = recorded.rows(phase="forward").set_index("module")
    assert sum(readings) == 3  # input, linear, ReLU; the root returns the ReLU's
    assert rows.loc["0", "min"] < 0
    assert rows.loc["1", "min"] >= 0


def test_parameters_and_gradients_are_measured_in_one_call_each(record, monkeypatch) -> None:
    """Tied weights once; nothing of them one by one."""
    calls = []
    original = stats.summarize_many

    def summarize_many(tensors, spec, out):
        calls.append(len(tensors))
        return original(tensors, spec, out)

    monkeypatch.setattr(stats, "summarize_many", summarize_many)
    monkeypatch.setattr(lane, "native", lambda: None)
    record(tied := Tied(), tied.work, record=("parameters", "gradients", "updates"))
    assert calls == [3, 3, 3]


def test_tied_parameters_are_read_once(record, readings) -> None:
    """Three parameters, their gradients and updates, and the root's input."""
    record(tied := Tied(), tied.work, record=("parameters", "gradients", "updates"))
    assert sum(readings) == 10


class Tied(nn.Sequential):
    """Layers that share a weight."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), nn.Linear(3, 3))
        self[1].weight = self[0].weight

    def work(self, trace) -> None:
        """One step."""
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        self(torch.ones(4, 3)).sum().backward()
        optimizer.step()


def test_the_same_memory_is_not_always_the_same_tensor() -> None:
    """Another shape of it, a conjugate, another dtype, a tensor that took a dead one's place, a changed one."""
    known = Measured()
    x = torch.zeros(6, dtype=torch.complex64)
    known.add(x, 7, False)
    assert known.find(x.view(2, 3)) == (7, False)
    assert known.find(x[:3]) is None
    assert known.find(x.conj()) is None
    assert known.find(x.view(torch.float32)) is None
    assert known.find(x.view(2, 3).t()) is None
    x[0] = 1
    assert known.find(x) is None
    known.add(x, 8, False)
    del x
    for _ in range(100):  # one of them is where x was
        assert known.find(torch.zeros(6, dtype=torch.complex64)) is None


def test_what_has_no_memory_or_no_version_is_simply_not_known() -> None:
    """Sparse, meta and inference tensors."""
    known = Measured()
    with torch.inference_mode():
        frozen = torch.ones(3)
    for x in (frozen, torch.ones(3).to_sparse()):
        known.add(x, 1, False)
        assert known.find(x) is None


def test_what_does_not_lie_in_order_costs_the_others_no_second_reading(record, monkeypatch) -> None:
    """One transposed parameter among others: every list goes to the kernel once, recorded or only watched."""
    asked: list[int] = []
    for name in ("summarize_many", "nonfinite"):
        real = getattr(cpu, name)
        monkeypatch.setattr(
            cpu, name, lambda xs, *rest, real=real, **kw: asked.append(len(xs)) or real(xs, *rest, **kw)
        )
    model = nn.Linear(3, 4)
    model.weight = nn.Parameter(torch.randn(3, 4).t())
    assert not model.weight.is_contiguous()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def work(trace):
        for _ in range(2):
            asked.clear()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    record(model, work, record=("parameters", "gradients"))
    assert asked.count(2) == 2  # parameters, gradients
    record(model, work, every=10)
    assert asked.count(2) == 3  # input and output, gradients, parameters
