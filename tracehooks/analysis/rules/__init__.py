"""The catalogue of rules, one file a family, and what it says of a run.

A rule is a small pure function over `Facts`. Where it speaks, with what threshold and from which source, is data beside
it; docs/rules.md is tested against that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tracehooks.analysis.rules import (
    activations,
    conditions,
    data,
    gradients,
    learning,
    masks,
    nonfinite,
    objective,
    outputs,
    precision,
    probed,
    ranks,
    scales,
    speed,
    splits,
    state,
    targets,
    updates,
    zeros,
)
from tracehooks.analysis.rules.facts import Facts
from tracehooks.analysis.rules.rule import Judgement, Rule
from tracehooks.core.records import Finding, RunSource, Severity

RULES: tuple[Rule, ...] = (
    *nonfinite.RULES,
    *objective.RULES,
    *targets.RULES,
    *precision.RULES,
    *updates.RULES,
    *gradients.RULES,
    *zeros.RULES,
    *outputs.RULES,
    *activations.RULES,
    *scales.RULES,
    *masks.RULES,
    *data.RULES,
    *conditions.RULES,
    *probed.RULES,
    *splits.RULES,
    *state.RULES,
    *ranks.RULES,
    *speed.RULES,
    *learning.RULES,
)
"""Every rule, causes before what they bring about: findings of equal weight keep this order."""

WEIGHT: dict[Severity, int] = {"error": 0, "warning": 1, "info": 2}
"""Order of severities, the worst first."""


def diagnose(run: RunSource, control: RunSource | None = None) -> list[Finding]:
    """What is wrong with a run, the likeliest explanation first: by severity, then in the order of the catalogue.

    Args:
        control: a run that is known to be fine; what is found there as well, at the same site, is left out.
    """
    return ranked(judge(run, control))


def ranked(judgements: Iterable[Judgement]) -> list[Finding]:
    """The findings among the answers of all rules, in the order of `diagnose`."""
    found = [finding for judgement in judgements for finding in judgement.findings]
    return sorted(found, key=lambda finding: WEIGHT[finding.severity])


def judge(run: RunSource, control: RunSource | None = None) -> list[Judgement]:
    """What every rule answers, in the order of the catalogue; ``control`` as in `diagnose`."""
    judgements = _judged(run, control)
    if control is None:
        return judgements
    usual = {(finding.rule, finding.site) for judgement in _judged(control, None) for finding in judgement.findings}
    return [_without(judgement, usual) for judgement in judgements]


def _judged(run: RunSource, control: RunSource | None) -> list[Judgement]:
    facts = Facts(run, control)
    return [rule.judge(facts) for rule in RULES]


def _without(judgement: Judgement, usual: set[tuple[str, str]]) -> Judgement:
    kept = tuple(finding for finding in judgement.findings if (finding.rule, finding.site) not in usual)
    if len(kept) == len(judgement.findings):
        return judgement
    because = "" if kept else f"all {len(judgement.findings)} findings are those of the control"
    return replace(judgement, findings=kept, because=because)
