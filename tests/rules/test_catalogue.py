"""The registry, and docs/rules.md, which says what is in it."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

from tests.rules.measured import ALL_BROKEN, cases, kept
from tests.rules.page import PAGE, rewritten
from tracehooks.analysis import rules
from tracehooks.analysis.rules import RULES, Rule


def test_every_rule_is_registered_once() -> None:
    """A rule that a family file defines is in the registry, and no name is there twice."""
    defined = []
    for info in pkgutil.iter_modules(rules.__path__):
        family = importlib.import_module(f"tracehooks.analysis.rules.{info.name}")
        defined += [value.name for value in vars(family).values() if isinstance(value, Rule)]
    assert sorted(defined) == sorted(rule.name for rule in RULES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_says_what_it_is(rule: Rule) -> None:
    """What it sees, its threshold and source, what it needs, its evidence and the next check: none is empty."""
    for text in (rule.sees, rule.threshold, rule.source, rule.needs, rule.next_check):
        assert len(text) > 10
    assert "cause" in rule.evidence


def test_what_was_measured_is_of_these_runs() -> None:
    """The kept measurement is of exactly the runs that the tests train now, and says what the tests hold them to: every
    failure found with its cause, no healthy run alarmed."""
    assert {row["case"]: row["kind"] for row in kept()} == {name: kind for name, (_, kind) in cases().items()}
    found = {row["case"]: [(rule, cause) for rule, _, cause in row["found"]] for row in kept()}
    for broken in ALL_BROKEN:
        assert (broken.rule, broken.cause) in found[broken.build.__name__], broken.build.__name__
    assert [row["case"] for row in kept() if row["kind"] == "healthy" and row["found"]] == []


def test_the_page_is_the_catalogue() -> None:
    """docs/rules.md holds every rule as the registry has it, in the order in which findings of equal weight are given."""
    assert PAGE.read_text() == rewritten()
