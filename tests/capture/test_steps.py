"""Where one step ends and the next begins, on the state machine alone and on real loops."""

from __future__ import annotations

from threading import Thread, get_ident

import pytest
import torch
from torch import nn

from tracehooks.capture.losses import Losses
from tracehooks.capture.steps import Steps


def numbered(steps: Steps, *what: str) -> list[tuple[int, int]]:
    """(step, micro) of each pass among events: f forward, e evaluation, b backward, o optimizer, p another optimizer."""
    seen = []
    for event in what:
        if event in "fe":
            steps.pass_begins(event == "f")
            seen.append((steps.step, steps.micro))
        elif event == "b":
            steps.backward_seen()
        else:
            steps.optimizer_begins(ord(event), False)
            steps.optimizer_ends(ord(event))
    return seen


@pytest.mark.parametrize(
    ("events", "optimizer", "expected"),
    [
        ("fbofbo", True, [(0, 0), (1, 0)]),
        ("fbfbofbo", True, [(0, 0), (0, 1), (1, 0)]),
        ("fboeefbo", True, [(0, 0), (0, 1), (0, 2), (1, 0)]),
        ("efbo", True, [(0, 0), (0, 1)]),
        ("fbopfbop", True, [(0, 0), (1, 0)]),
        ("fbfb", False, [(0, 0), (1, 0)]),
        ("ffbfb", False, [(0, 0), (0, 1), (1, 0)]),
        ("febf", False, [(0, 0), (0, 1), (1, 0)]),
    ],
)
def test_steps_follow_the_rules(events: str, optimizer: bool, expected: list[tuple[int, int]]) -> None:
    """Optimizers end a step, evaluation never does, without any optimizer a forward pass after backward begins one."""
    assert numbered(Steps(lambda: optimizer), *events) == expected


def test_an_optimizer_that_steps_again_unseen_begins_a_step() -> None:
    """Where forward passes cannot be seen (a compiled model), each step of the same optimizer is one."""
    steps = Steps(lambda: True)
    for expected in range(3):
        steps.optimizer_begins(1, False)
        steps.optimizer_ends(1)
        assert steps.step == expected


def loop(model, optimizer, steps, micro=1, evaluate=0):
    def work(trace):
        x = torch.ones(2, 3)
        for _ in range(steps):
            for _ in range(micro):
                model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            for _ in range(evaluate):
                with torch.no_grad():
                    model(x)

    return work


def passes(recorded):
    rows = recorded.rows(phase="forward", module="")
    return list(zip(rows["step"], rows["micro"], strict=True))


def test_accumulation_and_evaluation_belong_to_one_step(record) -> None:
    """Micro-batches before the optimizer steps and evaluation after it carry the step's number, in order of passes."""
    model = nn.Linear(3, 2)
    recorded = record(model, loop(model, torch.optim.SGD(model.parameters(), 0.1), 2, micro=2, evaluate=1))
    assert passes(recorded) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


def test_two_optimizers_make_one_step(record) -> None:
    """Every optimizer that holds a part of the model steps inside the same step; learning rates are numbered on."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    first, second = torch.optim.SGD(model[0].parameters(), 0.1), torch.optim.Adam(model[1].parameters(), 0.2)

    def work(trace):
        for _ in range(2):
            model(torch.ones(2, 3)).sum().backward()
            first.step()
            second.step()

    recorded = record(model, work)
    assert passes(recorded) == [(0, 0), (1, 0)]
    assert recorded.values("lr/0") == [(0, 0.1), (1, 0.1)]
    assert recorded.values("lr/1") == [(0, 0.2), (1, 0.2)]
    for step in (0, 1):
        assert len(recorded.rows(phase="gradient", step=step)) == 4
        assert len(recorded.rows(phase="update", step=step)) == 4


def test_another_models_optimizer_does_not_count(record) -> None:
    """An optimizer that holds no parameter of the model does not end its steps, nor does another model's backward."""
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    mine, theirs = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(other.parameters(), 0.1)

    def work(trace):
        for _ in range(2):
            for _ in range(2):
                other(torch.ones(1, 3)).sum().backward()
                theirs.step()
            model(torch.ones(2, 3)).sum().backward()
            mine.step()

    recorded = record(model, work)
    assert passes(recorded) == [(0, 0), (1, 0)]
    assert len(recorded.values("loss")) == 2


def test_updates_by_hand(record) -> None:
    """Without an optimizer every forward pass after backward is a step, with local gradients and parameters."""
    model = nn.Linear(3, 2)

    def work(trace):
        for _ in range(3):
            model(torch.ones(2, 3)).sum().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None

    recorded = record(model, work)
    assert passes(recorded) == [(0, 0), (1, 0), (2, 0)]
    assert len(recorded.rows(phase="gradient_local")) == 6
    assert len(recorded.rows(phase="parameter")) == 6
    assert not len(recorded.rows(phase="gradient"))


def test_accumulation_in_the_very_first_step(record) -> None:
    """Before any optimizer has stepped, one that exists is found, so that micro-batches are not taken for steps."""
    model = nn.Linear(3, 2)
    recorded = record(model, loop(model, torch.optim.SGD(model.parameters(), 0.1), 1, micro=3))
    assert passes(recorded) == [(0, 0), (0, 1), (0, 2)]


def test_closure_makes_micro_steps(record) -> None:
    """LBFGS evaluates its closure several times in one step: one step with several micro-steps."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    x, y = torch.randn(8, 3), torch.randn(8, 1)

    def closure():
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    def work(trace):
        for _ in range(2):
            optimizer.step(closure)

    recorded = record(model, work)
    assert sorted(set(recorded.tensors["step"])) == [0, 1]
    assert max(micro for step, micro in passes(recorded) if step == 0) >= 2
    assert len(recorded.rows(phase="gradient", step=1)) == 2


def test_root_never_called(record) -> None:
    """Where only methods or submodules of the root are called, the first module's pass counts."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2)

        def encode(self, x):
            return self.b(self.a(x).relu())

    model = Encoder()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def work(trace):
        for _ in range(2):
            for _ in range(2):
                model.encode(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model.encode(torch.ones(2, 3))
                model.encode(torch.ones(2, 3))

    recorded = record(model, work)
    rows = recorded.rows(phase="forward", module="a")
    assert list(zip(rows["step"], rows["micro"], strict=True)) == [
        (step, micro) for step in (0, 1) for micro in range(4)
    ]
    assert len(recorded.values("loss")) == 4


def test_step_scope(record) -> None:
    """A loop without an optimizer says itself where its steps are; parameters are read at the end of each."""
    model = nn.Linear(3, 2)

    def work(trace):
        for expected in range(3):
            with trace.step_scope():
                assert trace.step == expected
                model(torch.ones(2, 3))
                with torch.no_grad():
                    model(torch.ones(2, 3))

    recorded = record(model, work)
    assert passes(recorded) == [(s, m) for s in range(3) for m in range(2)]
    assert len(recorded.rows(phase="parameter")) == 6


def test_every(record) -> None:
    """every=2 records the tensors of every second step and the scalars of all."""
    model = nn.Linear(3, 2)
    work = loop(model, torch.optim.SGD(model.parameters(), 0.1), 4)
    recorded = record(model, work, every=2)
    assert sorted(set(recorded.tensors["step"])) == [0, 2]
    assert [step for step, _ in recorded.values("loss")] == [0, 1, 2, 3]
    assert [step for step, _ in recorded.values("lr/0")] == [0, 1, 2, 3]
    recorded = record(model, work, every=lambda step: step == 3)
    assert sorted(set(recorded.tensors["step"])) == [3]


def test_failure_in_the_loop_does_not_lose_count(record) -> None:
    """An exception in forward, backward or the optimizer leaves the counting right for what follows."""

    class Sometimes(nn.Linear):
        def forward(self, x):
            if len(x) == 1:
                raise ValueError("no")
            return super().forward(x)

    model = Sometimes(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def work(trace):
        for i in range(3):
            with pytest.raises(ValueError, match="no"):
                model(torch.ones(1, 3))
            out = model(torch.ones(2, 3))
            with pytest.raises(RuntimeError, match="grad can be implicitly created"):
                out.backward()
            out.sum().backward()
            optimizer.param_groups[0]["lr"] = "high"
            with pytest.raises(TypeError):
                optimizer.step()
            optimizer.param_groups[0]["lr"] = 0.1
            optimizer.step()
            optimizer.zero_grad()
            assert trace.step == i

    recorded = record(model, work)
    assert passes(recorded) == [(0, 1), (1, 1), (2, 1)]
    assert recorded.run.info["status"] == "closed"


def test_the_watch_runs_on_every_step(record) -> None:
    """Whatever every says, a NaN is found in its own step, located, and the gradient norm is there for all steps."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def work(trace):
        for i in range(5):
            x = torch.full((2, 3), -1.0 if i == 3 else 1.0)
            model(x.sqrt()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    recorded = record(model, work, every=10)
    first = recorded.run.first_nonfinite
    assert (first.step, first.phase, first.cause) == (3, "data", "nonfinite_input")
    assert sorted(set(recorded.tensors["step"])) == [0]
    norms = recorded.values("grad_norm")
    assert [step for step, _ in norms] == [0, 1, 2, 3, 4]
    assert norms[0][1] == pytest.approx(norms[1][1], rel=0.5)


def test_a_sum_that_overflows_is_no_finding(record) -> None:
    """The watch sums; where only the sum is infinite, not an element, nothing is reported."""

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            return self.layer(x) * 0 + 3e38

    model = Large()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def work(trace):
        for _ in range(3):
            (model(torch.ones(20, 3)) * 1e-30).sum().backward()
            optimizer.step()

    assert record(model, work, every=10).run.first_nonfinite is None


def test_another_threads_backward_is_another_models(record, monkeypatch) -> None:
    """What trains in a thread that never called this model says nothing of it, and its gradients are not read there."""
    told, begins = [], Losses.backward_begins
    monkeypatch.setattr(
        Losses, "backward_begins", lambda self, tensors: told.append(get_ident()) or begins(self, tensors)
    )
    model, other = nn.Linear(3, 1), nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def work(trace):
        for _ in range(3):
            loss = model(torch.ones(2, 3)).sum()
            thread = Thread(target=lambda: other(torch.ones(2, 3)).sum().backward())
            thread.start()
            thread.join()
            loss.backward()
            optimizer.step()

    assert len(record(model, work).values("loss")) == 3
    assert told == [get_ident()] * 3
