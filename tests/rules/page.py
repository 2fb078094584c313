"""The catalogue as docs/rules.md shows it, written from the registry: python -m tests.rules.page writes it anew."""

from __future__ import annotations

import importlib
import textwrap
from collections.abc import Iterable
from pathlib import Path

from tests.rules.measured import kept, numbers
from tracehooks.analysis.rules import RULES, Rule
from tracehooks.analysis.symptoms import symptoms_of

PAGE = Path(__file__).parents[2] / "docs" / "rules.md"
START = "<!-- from here on python -m tests.rules.page writes this page -->\n"


def catalogue() -> str:
    """Every family and every rule, in the order of the registry."""
    families = dict.fromkeys(rule.look.__module__ for rule in RULES)
    return "\n".join(part for family in families for part in _family(family))


def rewritten() -> str:
    """The whole page with the catalogue as it is now."""
    return PAGE.read_text().partition(START)[0] + START + "\n" + table() + "\n" + catalogue()


def table() -> str:
    """What each rule found and where it spoke beside, as `measured` kept it."""
    kinds = [row["kind"] for row in kept()]
    intro = (
        f"Measured on the {len(kinds)} runs that the tests train: {kinds.count('broken')} fail in one way, "
        f"{kinds.count('healthy')} are healthy though something looks like a failure, and in {kinds.count('meant')} a note "
        "is right. *Cases* are the failures that a rule is for, *false alarms* healthy runs in which it speaks, *beside* "
        "runs that fail in another way in which it speaks as well, mostly because one brings about the other."
    )
    head = "| rule | sees | cases found | false alarms | beside |\n|---|---|---|---|---|\n"
    return f"## What was measured\n\n{_wrapped(intro)}\n{head}" + "".join(_row(rule) for rule in RULES)


def _row(rule: Rule) -> str:
    cases, found, alarms, beside = numbers(rule.name)
    told = f"{found} of {cases}" if cases else "elsewhere"
    return f"| [`{rule.name}`](#{rule.name}) | {rule.sees} | {told} | {alarms} | {beside} |\n"


def _family(module: str) -> Iterable[str]:
    meaning = (importlib.import_module(module).__doc__ or "").partition("\n\n")[0]
    yield f"## {module.rpartition('.')[2]}\n\n{_wrapped(' '.join(meaning.split()))}"
    for rule in RULES:
        if rule.look.__module__ == module:
            yield _section(rule)


def _section(rule: Rule) -> str:
    causes = f"; causes {_names(rule.causes)}" if rule.causes else ""
    lines = {
        "Sees": rule.sees,
        "Speaks when": rule.threshold,
        "Source": rule.source,
        "Needs": rule.needs,
        "Evidence": _names(rule.evidence) + causes,
        "Next check": rule.next_check,
        "Symptoms": _names(symptoms_of(rule.name)) or "none of its own",
    }
    items = "".join(_wrapped(f"- **{name}:** {text}", "  ") for name, text in lines.items())
    return f"### `{rule.name}`\n\n{items}"


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _wrapped(text: str, indent: str = "") -> str:
    options = {"subsequent_indent": indent, "break_long_words": False, "break_on_hyphens": False}
    return "\n".join(textwrap.wrap(text, 120, **options)) + "\n"  # type: ignore[arg-type]


if __name__ == "__main__":
    PAGE.write_text(rewritten())
