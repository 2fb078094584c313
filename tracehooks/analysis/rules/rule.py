"""A rule: what it sees, from when on it speaks, where that threshold comes from, and what to check next.

A rule answers in one of three ways. It yields `Found` for each thing that is wrong; or `Clear`, with the number that rules
it out; or nothing, where the trace does not hold what it needs. So a checklist can say of every cause whether it was found,
ruled out, or cannot be known from this trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tracehooks.analysis.rules.facts import Facts
from tracehooks.core.records import Finding, Severity

Status = Literal["found", "ruled out", "not known"]


@dataclass(frozen=True)
class Found:
    """Something that is wrong."""

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


@dataclass(frozen=True)
class Clear:
    """Nothing is wrong, as far as the rule sees."""

    because: str
    """The number that says so, in a sentence."""


Answers = Iterator[Found | Clear]

Look = Callable[[Facts], Answers]


@dataclass(frozen=True)
class Judgement:
    """What one rule answered of one run."""

    rule: Rule
    findings: tuple[Finding, ...] = ()
    because: str = ""
    """What rules it out; empty where it was found or cannot be known."""

    @property
    def status(self) -> Status:
        """found, ruled out or not known."""
        return "found" if self.findings else "ruled out" if self.because else "not known"


@dataclass(frozen=True)
class Rule:
    """One rule of the catalogue."""

    name: str
    sees: str
    threshold: str
    source: str
    needs: str
    """What the trace must hold, without which it cannot be known: what to record, or which experiment to run."""
    next_check: str
    evidence: tuple[str, ...]
    """Keys that the evidence of its findings may have."""
    causes: tuple[str, ...]
    """Values that the key ``cause`` may have; empty where they are those of another page."""
    look: Look

    def judge(self, facts: Facts) -> Judgement:
        """What it says of a run."""
        answers = list(self.look(facts))
        findings = tuple(self._finding(answer) for answer in answers if isinstance(answer, Found))
        because = "; ".join(answer.because for answer in answers if isinstance(answer, Clear))
        return Judgement(self, findings, "" if findings else because)

    def _finding(self, found: Found) -> Finding:
        evidence = {name: value for name, value in found.evidence.items() if value is not None}
        next_check = found.next_check or self.next_check
        return Finding(self.name, found.severity, found.step, found.site, found.message, evidence, next_check)


def rule(
    *,
    sees: str,
    threshold: str,
    source: str,
    needs: str,
    next_check: str,
    evidence: tuple[str, ...],
    causes: tuple[str, ...] = (),
) -> Callable[[Look], Rule]:
    """Make a rule of a function over `Facts`; the rule has the function's name."""

    def made(look: Look) -> Rule:
        return Rule(look.__name__, sees, threshold, source, needs, next_check, evidence, causes, look)

    return made


def listed(names: Iterable[str], limit: int = 4) -> str:
    """Names for a sentence: the first few, the rest counted."""
    known = [name or "(root)" for name in names]
    more = f" and {len(known) - limit} more" if len(known) > limit else ""
    return ", ".join(known[:limit]) + more
