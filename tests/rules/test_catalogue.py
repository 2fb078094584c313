"""The registry, and docs/rules.md, which says what is in it."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import pytest

from tracehooks.analysis import rules
from tracehooks.analysis.rules import RULES, Rule

TEXT = (Path(__file__).parents[2] / "docs" / "rules.md").read_text()


def test_every_rule_is_registered_once() -> None:
    """A rule that a family file defines is in the registry, and no name is there twice."""
    defined = []
    for info in pkgutil.iter_modules(rules.__path__):
        family = importlib.import_module(f"tracehooks.analysis.rules.{info.name}")
        defined += [value.name for value in vars(family).values() if isinstance(value, Rule)]
    assert sorted(defined) == sorted(rule.name for rule in RULES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_is_documented(rule: Rule) -> None:
    """Its section says what it sees, its threshold and source, its evidence and causes, the next check, the symptoms."""
    found = re.search(rf"^### `{rule.name}`\n(.*?)(?=^##|\Z)", TEXT, re.DOTALL | re.MULTILINE)
    assert found, rule.name
    section = " ".join(found[1].split())
    for text in (rule.sees, rule.threshold, rule.source, rule.next_check):
        assert text in section
    for word in (*rule.evidence, *rule.causes, *rule.symptoms):
        assert f"`{word}`" in section


def test_the_page_has_the_order_of_the_catalogue() -> None:
    """Families and rules stand on the page in the order in which findings of equal weight are given."""
    assert re.findall(r"^### `(\w+)`", TEXT, re.MULTILINE) == [rule.name for rule in RULES]
