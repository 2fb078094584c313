"""A rule: what it sees, from when on it speaks, where that threshold comes from, and what to check next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tracehooks.analysis.rules.facts import Facts
from tracehooks.core.records import Finding, Severity


@dataclass(frozen=True)
class Found:
    """What the function of a rule found."""

    severity: Severity
    message: str
    """One plain sentence."""
    step: int | None = None
    """Since when; None where it holds for the whole run."""
    site: str = ""
    """Path of the module, or name of the parameter or input."""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    next_check: str | None = None
    """Where it is not the rule's own."""


Look = Callable[[Facts], Iterable[Found]]


@dataclass(frozen=True)
class Rule:
    """One rule of the catalogue."""

    name: str
    sees: str
    threshold: str
    source: str
    next_check: str
    symptoms: tuple[str, ...]
    evidence: tuple[str, ...]
    """Keys that the evidence of its findings may have."""
    causes: tuple[str, ...]
    """Values that the key ``cause`` may have; empty where they are those of another page."""
    look: Look

    def findings(self, facts: Facts) -> Iterator[Finding]:
        """What it finds in a run."""
        for found in self.look(facts):
            evidence = {name: value for name, value in found.evidence.items() if value is not None}
            next_check = found.next_check or self.next_check
            yield Finding(self.name, found.severity, found.step, found.site, found.message, evidence, next_check)


def rule(
    *,
    sees: str,
    threshold: str,
    source: str,
    next_check: str,
    symptoms: tuple[str, ...],
    evidence: tuple[str, ...],
    causes: tuple[str, ...] = (),
) -> Callable[[Look], Rule]:
    """Make a rule of a function over `Facts`; the rule has the function's name."""

    def made(look: Look) -> Rule:
        return Rule(look.__name__, sees, threshold, source, next_check, symptoms, evidence, causes, look)

    return made


def listed(names: Iterable[str], limit: int = 4) -> str:
    """Names for a sentence: the first few, the rest counted."""
    known = [name or "(root)" for name in names]
    more = f" and {len(known) - limit} more" if len(known) > limit else ""
    return ", ".join(known[:limit]) + more
