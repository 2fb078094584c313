"""Born between backward and the optimizer, in a moving average, in a loss that nobody called backward on; and what is found
in steps that record nothing.
"""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import tracehooks
from tracehooks import stats
from tracehooks.capture import lane, watch
from tracehooks.surface import offline

from .test_locator import recorded

HERE = str(Path(__file__))


def clip_by_hand(parameters, limit: float) -> None:
    """Clipping as people write it: without an epsilon."""
    gradients = [p.grad for p in parameters]
    norm = torch.stack([g.norm() for g in gradients]).norm()
    for gradient in gradients:
        gradient.mul_(limit / norm)


@pytest.mark.parametrize("every", [1, 100])
def test_clipping_gradients_of_zero_by_their_norm(tmp_path, every: int) -> None:
    """Backward is fine, the clip makes NaN of it: phase clip, with the line that did."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(i):
        optimizer.zero_grad()
        (model(torch.ones(4, 3)).sum() * (i < 2)).backward()
        clip_by_hand(model.parameters(), 1.0)
        optimizer.step()

    first = recorded(tmp_path, model, step, steps=4, every=every).first_nonfinite
    assert (first.step, first.phase, first.module, first.op) == (2, "clip", None, "aten.mul_.Tensor"), first.message
    assert first.params == ("weight", "bias")
    assert first.cause == "division_by_zero"
    assert first.file == HERE
    assert "gradient.mul_(limit / norm)" in first.code


def test_clipping_that_changes_nothing_bad_is_silent(tmp_path) -> None:
    """torch's own clipping, by norm and by value, of healthy gradients."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(i):
        optimizer.zero_grad()
        (model(torch.ones(4, 3)).sum() * (i < 2)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
        optimizer.step()

    assert recorded(tmp_path, model, step, steps=4).first_nonfinite is None


def test_a_hook_that_damages_a_gradient_is_named_as_such(tmp_path) -> None:
    """Not the op whose gradient it was."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.weight.register_hook(lambda gradient: gradient / 0)

    def step(i):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()

    first = recorded(tmp_path, model, step, steps=2).first_nonfinite
    assert (first.step, first.phase, first.cause) == (0, "backward", "gradient_hook"), first.message
    assert first.params == ("weight",)


def test_an_average_that_is_poisoned_alone(tmp_path) -> None:
    """A bias correction by zero makes NaN of the average's weights while the model is fine."""
    model = nn.Linear(3, 2)
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(i):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).square().sum().backward()
        optimizer.step()
        with torch.no_grad():
            correction = 1 - 0.9 ** (i - 1)
            average.weight.copy_(average.weight.lerp(model.weight, 0.1) / correction)

    first = recorded(tmp_path, model, step, steps=4, ema=average).first_nonfinite
    assert (first.step, first.phase, first.module, first.cause) == (1, "update", None, "poisoned_average"), (
        first.message
    )
    assert first.params == ("weight",)


@pytest.mark.parametrize("last", [False, True])
def test_a_loss_that_the_user_skips_is_found(tmp_path, last: bool) -> None:
    """log(0) in a loss: the user sees that it is infinite and calls no backward, in the last step too."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(i):
        optimizer.zero_grad()
        kept = (model(torch.ones(4, 3)).square() * (i != 2)).mean()
        loss = -torch.log(kept)
        if torch.isfinite(loss):
            loss.backward()
            optimizer.step()

    first = recorded(tmp_path, model, step, steps=3 if last else 5).first_nonfinite
    assert (first.step, first.phase, first.op, first.value) == (2, "loss", "aten.log.default", "-inf"), first.message
    assert first.cause == "log_of_zero"
    assert "torch.log(kept)" in first.code


def test_logging_numbers_that_are_not_finite_is_no_loss(tmp_path) -> None:
    """A statistic of the outputs that is infinite, looked at after backward or in evaluation, is nobody's loss."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(i):
        optimizer.zero_grad()
        output = model(torch.ones(4, 3))
        output.square().mean().backward()
        (output.detach().sum() * 0).log()
        optimizer.step()

    assert recorded(tmp_path, model, step, steps=3).first_nonfinite is None


@pytest.mark.parametrize("mode", ["raise", "skip"])
def test_what_is_only_watched_is_acted_on_all_the_same(tmp_path, mode: str) -> None:
    """In a step that records nothing NaN gradients are dropped, or raise before the parameters are touched."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train():
        with tracehooks.attach(model, tmp_path / "run", quiet=True, every=10, on_nonfinite=mode) as trace:
            for i in range(5):
                optimizer.zero_grad()
                (model(torch.ones(4, 3)).sum() * (torch.nan if i == 3 else 1.0)).backward()
                optimizer.step()
        return trace

    if mode == "raise":
        with pytest.raises(tracehooks.NonFiniteError):
            train()
    else:
        train()
    assert torch.isfinite(model.weight).all()
    assert tracehooks.open(tmp_path / "run").first_nonfinite.step == 3


def test_the_watch_reads_each_tensor_once_and_makes_no_rows(tmp_path, monkeypatch) -> None:
    """In a watched step: one call for the outputs of small modules, one for all parameters and one for all buffers;
    nothing is measured but gradients."""
    looks, measured = [], []
    ours = SimpleNamespace(**{name: getattr(stats, name) for name in stats.__all__})
    ours.nonfinite = lambda tensors: looks.append(len(tensors)) or stats.nonfinite(tensors)
    ours.nonfinite_at_hand = lambda tensors: looks.append(len(tensors)) or stats.nonfinite_at_hand(tensors)
    monkeypatch.setattr(watch, "stats", ours)
    monkeypatch.setattr(stats, "summarize", lambda *a, real=stats.summarize: measured.append(1) or real(*a))
    monkeypatch.setattr(lane, "native", lambda: None)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tracehooks.attach(model, tmp_path / "run", quiet=True, every=10):
        for _ in range(2):
            looks.clear(), measured.clear()
            model(torch.randn(8, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert looks == [4, 6, 3]  # the input and three layers, of which the root returns the last; parameters; buffers
        assert not measured
    assert set(tracehooks.open(tmp_path / "run").tensors().column("step").to_pylist()) == {0}


def test_evaluation_makes_room_for_training(tmp_path) -> None:
    """A NaN that only a validation batch held is said to be of evaluation, and does not hide a later one of training."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train(path, poisoned):
        with tracehooks.attach(model, path, quiet=True, optimizer=optimizer):
            for step in range(4):
                with torch.no_grad():
                    model(torch.full((2, 3), torch.nan if step == 1 else 1.0))
                model(torch.full((4, 3), torch.nan if step == poisoned else 1.0)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        run = tracehooks.open(path)
        assert offline.first(path) == run.first_nonfinite
        return run.first_nonfinite

    evaluated = train(tmp_path / "evaluation", None)
    assert (evaluated.step, evaluated.phase) == (0, "data")
    assert "data of evaluation" in evaluated.message
    trained = train(tmp_path / "training", 3)
    assert (trained.step, trained.phase) == (3, "data")
    assert "evaluation" not in trained.message


def test_memory_that_was_given_back_is_not_read(tmp_path: Path) -> None:
    """A module keeps a tensor whose storage holds nothing any more, as FSDP frees shards: reading it would crash."""

    class Keeps(nn.Module):
        def forward(self, x):
            self.kept = x.detach().clone()
            self.kept.untyped_storage().resize_(0)
            return x

    model = nn.Sequential(nn.Linear(3, 3), Keeps())
    with tracehooks.attach(model, tmp_path / "run", quiet=True):
        for _ in range(3):
            model(torch.ones(2, 3)).sum().backward()
    assert "recorder_error" not in {event["kind"] for event in offline.open(tmp_path / "run").events().to_pylist()}
