"""The tiny-batch test: each of its five questions is answered with no where that is what is broken, and only there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.experiments.training import classifier, cross_entropy, own_loss, samples, state_of, texts, translator
from tracehooks import experiments
from tracehooks.core.errors import InvalidOptionError
from tracehooks.core.records import Verdict


def answers(verdict: Verdict) -> list[bool | None]:
    return [check.passed for check in verdict.checks]


@pytest.mark.parametrize(
    ("build", "batch", "loss_fn"), [(classifier, samples, cross_entropy), (translator, texts, own_loss)]
)
def test_a_healthy_pipeline_passes(build: Callable[[], Any], batch: Callable[[], Any], loss_fn: Any) -> None:
    """A classifier whose loss is outside of it, and a model of transformers that computes its own, learn a batch."""
    verdict = experiments.overfit(build(), loss_fn, batch())
    assert verdict.passed, str(verdict)
    assert verdict.evidence["best_loss"] < 0.1 * verdict.evidence["first_loss"]
    assert verdict.evidence["prediction_gradient"] > 0
    assert verdict.evidence["relative_update"] > 0


def test_everything_is_left_as_it_was() -> None:
    """Parameters, their gradients, buffers, modes, hooks, the optimizer that was lent and generators are put back bit for
    bit, into the same tensors."""
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    cross_entropy(model, samples()).backward()
    optimizer.step()
    before = state_of(model, optimizer)
    verdict = experiments.overfit(model, cross_entropy, samples(), optimizer=optimizer, steps=3)
    assert verdict.evidence["optimizer"] == "AdamW"
    assert state_of(model, optimizer) == before


def test_an_optimizer_that_has_not_stepped_is_left_without_state() -> None:
    """State that the experiment made is gone after it."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    experiments.overfit(model, cross_entropy, samples(), optimizer=optimizer, steps=2)
    assert not optimizer.state


def silent(model: nn.Module, batch: Any) -> Tensor:
    """A loss on a copy that is cut off."""
    return nn.functional.cross_entropy(model(batch[0]).detach(), batch[1])


def deaf(model: nn.Module, batch: Any) -> Tensor:
    """A loss of the parameters alone: predictions are computed and not used."""
    model(batch[0])
    return torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()


def test_targets_that_hold_nothing() -> None:
    """All targets alike, or all left out, or contradicting each other for equal inputs."""
    x, y = samples()
    for targets, inputs in ((torch.full_like(y, 3), x), (torch.full_like(y, -100), x), (y, x[:1].repeat(8, 1))):
        verdict = experiments.overfit(classifier(), cross_entropy, (inputs, targets), steps=2)
        assert answers(verdict)[0] is False, str(verdict)
    (target,) = verdict.evidence["targets"]
    assert target["conflicts"] >= 4


def test_a_loss_that_does_not_look_at_the_predictions() -> None:
    """Other predictions leave it as it is."""
    verdict = experiments.overfit(classifier(), deaf, samples(), steps=2)
    assert answers(verdict)[:2] == [True, False]
    assert verdict.evidence["prediction_change"] == 0


def test_gradients_that_do_not_come_back() -> None:
    """The loss depends on predictions that are cut off: no parameter has a gradient, and nothing could be updated."""
    verdict = experiments.overfit(classifier(), silent, samples(), steps=2)
    assert answers(verdict) == [True, True, False, None, False]
    assert verdict.evidence["reached"] == []


def test_a_part_that_no_gradient_reaches() -> None:
    """A frozen part is not asked about; one behind a detach is, by name."""
    model = classifier()

    def half(model: Any, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model[4](model[:4](batch[0]).detach()), batch[1])

    verdict = experiments.overfit(model, half, samples(), steps=2)
    assert answers(verdict)[2] is False
    assert "0.weight" in verdict.checks[2].answer
    for parameter in model[:4].parameters():
        parameter.requires_grad_(False)
    assert answers(experiments.overfit(model, half, samples(), steps=2))[2] is True


@pytest.mark.parametrize(
    ("optimizer", "unchanged"),
    [
        (lambda model: torch.optim.SGD(model.parameters(), lr=0.0), "0.weight"),
        (lambda model: torch.optim.SGD(model[0].parameters(), lr=0.1), "4.weight"),
    ],
)
def test_an_optimizer_that_does_not_update(optimizer: Any, unchanged: str) -> None:
    """A rate of zero, or parameters that were never given to it."""
    model = classifier()
    verdict = experiments.overfit(model, cross_entropy, samples(), optimizer=optimizer(model), steps=3)
    assert answers(verdict)[3] is False
    assert unchanged in verdict.checks[3].answer


def test_a_model_that_cannot() -> None:
    """A linear model without inputs to tell samples apart does not learn them, though all else is in order."""
    model = nn.Linear(8, 5)
    x, y = samples()
    verdict = experiments.overfit(model, cross_entropy, (x.sign() * 0 + x.mean(), y), steps=50)
    assert answers(verdict)[2:] == [True, True, False]


def test_a_loss_that_is_not_finite() -> None:
    """The questions that cannot be answered are left open, and nothing is raised."""
    verdict = experiments.overfit(classifier(), lambda model, batch: cross_entropy(model, batch) * torch.inf, samples())
    assert verdict.checks[1].passed is None
    assert verdict.checks[4].passed is False


@pytest.mark.parametrize(
    ("loss_fn", "said"),
    [(lambda model, batch: model(batch[0]), "a tensor of shape (8, 5)"), (lambda model, batch: 3.0, "float")],
)
def test_what_is_no_loss(loss_fn: Any, said: str) -> None:
    """A clear error says what came back instead; so it is where there is nothing to train, or no step."""
    with pytest.raises(InvalidOptionError) as error:
        experiments.overfit(classifier(), loss_fn, samples())
    assert said in str(error.value)
    with pytest.raises(InvalidOptionError, match="without trainable parameters"):
        experiments.overfit(nn.ReLU(), cross_entropy, samples())
    for steps in (0, -1):
        with pytest.raises(InvalidOptionError, match=f"steps: got {steps}, expected at least 1 step"):
            experiments.overfit(classifier(), cross_entropy, samples(), steps=steps)
