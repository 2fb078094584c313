"""neutrality(): it shows that recording changes nothing, and would show it if it did."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tracehooks
from tests.experiments.training import classifier, cross_entropy, own_loss, samples, state_of, texts, translator
from tracehooks.core.errors import InvalidOptionError


def training(model: nn.Module, loss_fn: Any, batch: Any) -> tuple[torch.optim.Optimizer, Callable[[nn.Module], Tensor]]:
    """An optimizer, and one step with it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(model: nn.Module) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        return loss

    return optimizer, step


@pytest.mark.parametrize(
    ("build", "batch", "loss_fn"), [(classifier, samples, cross_entropy), (translator, texts, own_loss)]
)
def test_recording_changes_nothing(build: Callable[[], Any], batch: Callable[[], Any], loss_fn: Any) -> None:
    """Losses, parameters, gradients, buffers, optimizer state and generators agree bit for bit, a ratio says what it costs,
    and all of them are put back."""
    model = build()
    optimizer, step = training(model, loss_fn, batch())
    step(model)
    before = state_of(model, optimizer)
    verdict = tracehooks.neutrality(model, step, steps=2, rounds=1)
    assert verdict.passed, str(verdict)
    assert len(verdict.checks) == 7
    assert verdict.evidence["ratio"] == verdict.evidence["seconds_recorded"] / verdict.evidence["seconds"] > 0
    assert state_of(model, optimizer) == before


def test_a_recording_that_changed_something_would_be_seen() -> None:
    """A step that behaves differently once somebody's hooks are on the model fails the test in what it changes."""
    model = classifier()
    _, step = training(model, cross_entropy, samples())

    def sensitive(model: nn.Module) -> Tensor:
        if model[0]._forward_hooks:
            with torch.no_grad():
                model[0].weight.add_(1e-7)
            random.random()
        return step(model)

    verdict = tracehooks.neutrality(model, sensitive, steps=2, rounds=1)
    failed = [check.question for check in verdict.checks if check.passed is False]
    assert "Are parameters the same with a trace?" in failed
    assert "Are generators the same with a trace?" in failed
    assert "Are buffers the same with a trace?" in failed
    assert verdict.checks[0].passed


def test_a_step_that_differs_from_itself_shows_nothing() -> None:
    """With another batch each time no answer is given but that."""
    model = classifier()
    batches = iter([(torch.randn(8, 8), samples()[1]) for _ in range(99)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: nn.Module) -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model, next(batches))
        loss.backward()
        optimizer.step()
        return loss

    verdict = tracehooks.neutrality(model, step, steps=2, rounds=1)
    assert verdict.checks[0].passed is False
    assert [check.passed for check in verdict.checks if "parameters" in check.question] == [None]
    assert "give it the same batch" in verdict.checks[0].answer


@pytest.mark.parametrize("step", [lambda model: None, lambda model: classifier()(samples()[0])])
def test_a_step_that_never_calls_the_model_shows_nothing(step: Callable[[nn.Module], Any]) -> None:
    """Where nothing was recorded, that recording changes nothing is not shown."""
    verdict = tracehooks.neutrality(classifier(), step, steps=2, rounds=1)
    assert not verdict.passed
    assert [check.passed for check in verdict.checks] == [True, *[None] * 6]
    assert all("does not call the model" in check.answer for check in verdict.checks[1:])


def test_schedulers_and_scalers_are_named() -> None:
    """What else a step changes is put back between runs when it is named."""
    model = classifier()
    optimizer, step = training(model, cross_entropy, samples())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def scheduled(model: nn.Module) -> Tensor:
        loss = step(model)
        scheduler.step()
        return loss

    verdict = tracehooks.neutrality(model, scheduled, steps=2, rounds=1, keep=[scheduler])
    assert verdict.passed, str(verdict)
    assert scheduler.last_epoch == 0
    with pytest.raises(InvalidOptionError, match="at least 2 steps"):
        tracehooks.neutrality(model, step, steps=1)


def test_a_verdict_is_kept_in_a_trace_that_sees_nothing_of_the_experiment(tmp_path: Path) -> None:
    """An experiment in the middle of a run leaves one event there, its verdict, and no row of what it ran."""
    model = classifier()
    _, step = training(model, cross_entropy, samples())
    with tracehooks.attach(model, tmp_path / "run", quiet=True) as trace:
        step(model)
        trace.verdict(tracehooks.experiments.overfit(model, cross_entropy, samples(), steps=3))
        trace.verdict(tracehooks.neutrality(model, step, steps=2, rounds=1))
        trace.verdict(tracehooks.experiments.influence(model, samples(), "input", loss_fn=cross_entropy))
        trace.verdict(tracehooks.experiments.precision(model, cross_entropy, samples()))
        step(model)
    run = tracehooks.open(tmp_path / "run")
    assert run.steps == [0, 1]
    assert set(run.tensors(["micro"])["micro"].to_pylist()) == {0}
    events = [event for event in run.events().to_pylist() if event["kind"] == "verdict"]
    titles = [event["message"].split()[0] for event in events]
    assert titles == ["Overfit", "Recording", "Influence", "float32"]
    assert {event["step"] for event in events} == {0}
    assert "recorder_error" not in run.events()["kind"].to_pylist()
