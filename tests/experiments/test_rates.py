"""The range test of learning rates, on a problem whose largest stable rate is known."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.experiments.training import classifier, cross_entropy, own_loss, samples, state_of, texts, translator
from tracehooks import experiments
from tracehooks.core.errors import InvalidOptionError


class Bowl(nn.Module):
    """A quadratic of curvature ``steep``: gradient descent on it is stable below a rate of 2/steep."""

    def __init__(self, steep: float) -> None:
        super().__init__()
        self.at, self.steep = nn.Parameter(torch.ones(4)), steep

    def forward(self) -> Tensor:
        return self.steep / 2 * self.at.square().sum()


@pytest.mark.parametrize("steep", [1.0, 100.0])
def test_the_edge_of_stability_is_found(steep: float) -> None:
    """The largest stable rate is the last of those tried below 2/curvature; at the next one the loss rises."""
    verdict = experiments.learning_rate_range(Bowl(steep), lambda model, batch: model(), None)
    assert verdict.passed, str(verdict)
    edge, factor = 2 / steep, (10 / 1e-6) ** (1 / 28)
    assert edge / factor < verdict.evidence["largest_stable"] < edge < verdict.evidence["diverges"] < edge * factor
    assert verdict.evidence["best"] == pytest.approx(1 / steep, rel=0.8)
    assert len(verdict.evidence["rates"]) == len(verdict.evidence["losses"]) == len(verdict.evidence["gradient_norms"])
    assert verdict.evidence["gradient_norms"][0] == pytest.approx(2 * steep, rel=1e-2)
    assert verdict.evidence["first_loss"] == 2 * steep


def test_batches_of_an_iterator_that_never_ends() -> None:
    """As many as there are steps are taken from it, for every rate the same."""
    seen = []

    def loss_fn(model: nn.Module, batch: int) -> Tensor:
        seen.append(batch)
        return model().square()

    experiments.learning_rate_range(Bowl(1.0), loss_fn, itertools.count(), rates=2, steps=3)
    assert seen == [0, 1, 2] * 6
    with pytest.raises(InvalidOptionError, match="batches: got 'none', expected at least one batch"):
        experiments.learning_rate_range(Bowl(1.0), loss_fn, iter(()))


def test_the_runs_own_rate() -> None:
    """With the run's optimizer its own rate is compared, and each group keeps its share of it."""
    model = classifier()
    groups = [{"params": model[0].parameters(), "lr": 1e-3}, {"params": model[4].parameters(), "lr": 1e-2}]
    seen = []

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        seen.append([group["lr"] for group in optimizer.param_groups])
        return cross_entropy(model, batch)

    optimizer = torch.optim.AdamW(groups)
    before = state_of(model, optimizer)
    verdict = experiments.learning_rate_range(
        model, loss_fn, [samples(), samples()], optimizer=optimizer, rates=8, steps=3
    )
    assert state_of(model, optimizer) == before
    assert verdict.checks[2].passed
    assert all(small == pytest.approx(large / 10) for small, large in seen)
    assert seen[-1][1] == pytest.approx(verdict.evidence["rates"][-1])
    for group in optimizer.param_groups:
        group["lr"] = 100.0
    verdict = experiments.learning_rate_range(model, cross_entropy, samples(), optimizer=optimizer, rates=8, steps=3)
    assert verdict.checks[2].passed is False


def test_a_model_of_transformers() -> None:
    """On a T5 the loss falls at some rates and rises at a higher one."""
    verdict = experiments.learning_rate_range(
        translator(), own_loss, texts(), lowest=1e-3, highest=1e3, rates=13, steps=3
    )
    assert verdict.passed, str(verdict)
    assert verdict.evidence["best"] <= verdict.evidence["largest_stable"] < verdict.evidence["diverges"]


def test_rates_that_are_all_too_small() -> None:
    """Where nothing runs away up to the highest rate that is said, not guessed."""
    verdict = experiments.learning_rate_range(Bowl(1.0), lambda model, batch: model(), None, lowest=1e-6, highest=1e-3)
    assert [check.passed for check in verdict.checks] == [True, None]
    assert verdict.evidence["diverges"] is None


def test_a_loss_that_is_not_finite_from_the_start() -> None:
    """No rate is called stable."""
    verdict = experiments.learning_rate_range(Bowl(math.nan), lambda model, batch: model(), None)
    assert verdict.checks[0].passed is False
    assert verdict.evidence["largest_stable"] is None


@pytest.mark.parametrize("asked", [{"lowest": 1.0, "highest": 0.1}, {"lowest": 0.0}, {"rates": 1}, {"steps": 0}])
def test_bad_ranges(asked: dict[str, Any]) -> None:
    """A range that is none is refused."""
    with pytest.raises(InvalidOptionError):
        experiments.learning_rate_range(Bowl(1.0), lambda model, batch: model(), None, **asked)
    with pytest.raises(InvalidOptionError, match="at least one batch"):
        experiments.learning_rate_range(Bowl(1.0), lambda model, batch: model(), [])
