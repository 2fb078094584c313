"""Every rule names the failure it is for, with its cause and evidence, from a real run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tracehooks
from tests.rules.broken_objective import collapsed_router
from tests.rules.cases import Broken, trained
from tests.rules.conftest import Diagnose
from tests.rules.measured import ALL_BROKEN
from tests.rules.parts import Composed, mlp, regression
from tracehooks.analysis.rules import RULES, judge
from tracehooks.analysis.rules.outputs import output_not_in_loss

EXEMPT = {"nonfinite", "similar_across_runs"}
"""Tested with the locator, whose verdict it repeats; and with two runs, below."""


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
@pytest.mark.filterwarnings("ignore:Using a target size:UserWarning")
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
@pytest.mark.parametrize("broken", ALL_BROKEN, ids=lambda broken: f"{broken.build.__name__}-{broken.rule}")
def test_a_failure_is_named(broken: Broken, diagnosed: Diagnose) -> None:
    """The finding has the rule, the cause and the evidence of what was broken, and says what to check next."""
    findings = diagnosed(broken.build())
    named = [finding for finding in findings if finding.rule == broken.rule]
    assert named, [(finding.rule, finding.message) for finding in findings]
    assert broken.cause in [finding.evidence.get("cause") for finding in named]
    found = next(finding for finding in named if finding.evidence.get("cause") == broken.cause)
    for key, value in broken.evidence.items():
        assert found.evidence[key] == value, (key, found.evidence)
    rule = next(rule for rule in RULES if rule.name == broken.rule)
    assert set(found.evidence) <= set(rule.evidence)
    assert found.next_check
    assert found.message


def test_gradients_that_end_for_one_reason_are_one_finding(diagnosed: Diagnose) -> None:
    """Two experts that get no tokens lose their gradients at an assignment each: they are told together,
    in the model's order."""
    (found,) = [finding for finding in diagnosed(collapsed_router()) if finding.rule == "zero_gradient"]
    assert found.evidence["params"] == [f"experts.{i}.0.{name}" for i in (1, 2) for name in ("bias", "weight")]


def test_probes_are_not_counted_as_outputs(tmp_path: Path) -> None:
    """A probe of the root with a gradient is none of the outputs that get one."""
    model = Composed(lambda h: tracehooks.probe(h, "hidden").tanh())
    trained(model, regression).record(tmp_path / "run")
    (answer,) = (answer for answer in judge(tracehooks.open(tmp_path / "run")) if answer.rule is output_not_in_loss)
    assert answer.because == "1 of 1 outputs of the model get a gradient from the loss"


def test_every_rule_has_a_failure() -> None:
    """No rule is without a run that it speaks about, and no cause without one that has it."""
    assert {broken.rule for broken in ALL_BROKEN} == {rule.name for rule in RULES} - EXEMPT


def test_a_change_without_effect_is_a_note(tmp_path: Path) -> None:
    """A run whose one change, a rate of decay that nothing reads, leaves every gradient as it was says so; another says by
    how much they agree."""
    for name, seed in (("control", 0), ("changed", 0), ("other", 1)):
        torch.manual_seed(seed)
        trained(mlp(6, 8, 1), regression).record(tmp_path / name)
    (found,) = tracehooks.diagnose(tmp_path / "changed", tmp_path / "control")
    assert (found.rule, found.severity, found.evidence["share"]) == ("similar_across_runs", "info", 1.0)
    assert tracehooks.diagnose(tmp_path / "other", tmp_path / "control") == []
