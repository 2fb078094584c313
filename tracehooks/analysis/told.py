"""Findings and checklists in words, for a person at a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from tracehooks.core.records import Finding

if TYPE_CHECKING:
    from tracehooks.analysis.symptoms import Checklist, Item


def number(value: Any) -> str:
    """A cell as text: six digits for floats, nothing for null."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def findings(found: Iterable[Finding]) -> Iterator[str]:
    """Lines that say of each what is wrong, where, the numbers behind it, and what to check next."""
    for finding in found:
        severity = {"info": "note"}.get(finding.severity, finding.severity)
        where = f" at {finding.site}" if finding.site else ""
        when = "" if finding.step is None else f", step {finding.step}"
        yield f"{severity}: {finding.rule}{where}{when}"
        yield f"  {finding.message}"
        numbers = ", ".join(f"{name} {_short(value)}" for name, value in finding.evidence.items())
        if numbers:
            yield f"  evidence: {numbers}"
        yield f"  next: {finding.next_check}"


def causes(checklist: Checklist) -> Iterator[str]:
    """Lines that count the causes of a symptom and answer each."""
    counts = ", ".join(f"{len(checklist.of(status))} {status}" for status in ("found", "not known", "ruled out"))
    yield f"{checklist.symptom}: {checklist.meaning}; {len(checklist.items)} causes, {counts}"
    for item in checklist.items:
        yield f"{item.status}: {item.cause}"
        yield from (f"  {line}" for line in _answer(item))


def _answer(item: Item) -> Iterator[str]:
    yield from findings(item.findings)
    yield from (f"{rule}: {because}" for rule, because in item.ruled_out.items())
    yield from (f"{rule} needs {missing}" for rule, missing in item.missing.items())
    if item.ask:
        yield f"ask: {item.ask}"


def _short(value: Any) -> str:
    if isinstance(value, list | tuple):
        shown = ", ".join(_short(item) for item in value[:4])
        return f"[{shown}{f', and {len(value) - 4} more' if len(value) > 4 else ''}]"
    return "(root)" if value == "" else number(value)
