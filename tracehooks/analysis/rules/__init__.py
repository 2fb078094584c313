"""The catalogue of rules, one file a family, and what it says of a run.

A rule is a small pure function over `Facts`. Where it speaks, with what threshold and from which source, is data beside
it; docs/rules.md is tested against that.
"""

from __future__ import annotations

from tracehooks.analysis.rules import (
    activations,
    data,
    gradients,
    nonfinite,
    objective,
    precision,
    speed,
    state,
    updates,
)
from tracehooks.analysis.rules.facts import Facts
from tracehooks.analysis.rules.rule import Rule
from tracehooks.core.records import Finding, RunSource

RULES: tuple[Rule, ...] = (
    *nonfinite.RULES,
    *objective.RULES,
    *precision.RULES,
    *updates.RULES,
    *gradients.RULES,
    *activations.RULES,
    *data.RULES,
    *state.RULES,
    *speed.RULES,
)
"""Every rule, causes before what they bring about: findings of equal weight keep this order."""

_WEIGHT = {"error": 0, "warning": 1, "info": 2}


def diagnose(run: RunSource, control: RunSource | None = None) -> list[Finding]:
    """What is wrong with a run, the likeliest explanation first: by severity, then in the order of the catalogue.

    Args:
        control: a run that is known to be fine; what is found there as well, at the same site, is left out.
    """
    found = _all(run)
    if control is not None:
        usual = {(finding.rule, finding.site) for finding in _all(control)}
        found = [finding for finding in found if (finding.rule, finding.site) not in usual]
    return sorted(found, key=lambda finding: _WEIGHT[finding.severity])


def _all(run: RunSource) -> list[Finding]:
    facts = Facts(run)
    return [finding for rule in RULES for finding in rule.findings(facts)]
