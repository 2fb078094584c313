"""Every rule names the failure it is for, with its cause and evidence, from a real run."""

from __future__ import annotations

import pytest

from tests.rules.broken import BROKEN, Broken
from tests.rules.conftest import Diagnose
from tracehooks.analysis.rules import RULES

EXEMPT = {"nonfinite"}
"""Tested with the locator, whose verdict it repeats."""


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
@pytest.mark.filterwarnings("ignore:Using a target size:UserWarning")
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: f"{broken.build.__name__}-{broken.rule}")
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


def test_every_rule_has_a_failure() -> None:
    """No rule is without a run that it speaks about, and no cause without one that has it."""
    assert {broken.rule for broken in BROKEN} == {rule.name for rule in RULES} - EXEMPT
