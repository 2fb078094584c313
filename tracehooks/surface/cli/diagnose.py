"""``tracehooks diagnose RUN``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

import click

from tracehooks.analysis.symptoms import SYMPTOMS, Checklist, Item
from tracehooks.core.records import Finding
from tracehooks.surface import offline, terminal
from tracehooks.surface.plain import json_text


@click.command("diagnose", short_help="What is wrong with a run, and what to check next.")
@click.argument("run")
@click.option("--symptom", metavar="NAME", help=f"Go through the causes of one symptom: {', '.join(SYMPTOMS)}.")
@click.option("--control", metavar="RUN", help="A run that is known to be fine: what is found there too is left out.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON: a list of findings, or the checklist of the symptom."
)
def command(run: str, symptom: str | None, control: str | None, as_json: bool) -> int:
    """What is wrong with RUN, the likeliest explanation first: what was found, where, the numbers behind it, and what to
    check next. With a symptom, each of its causes: found, not known from this trace, or ruled out, and by which number.

    Exit status 1 when an error or a warning was found, 0 when nothing was or only notes, 2 on an error or when nothing was
    found but part of the run cannot be read.
    """
    source = offline.open(run)
    checklist = None if symptom is None else offline.checklist(source, symptom, control)
    found = list(offline.diagnose(source, control) if checklist is None else checklist.findings)
    if as_json:
        plain = [asdict(finding) for finding in found] if checklist is None else checklist.to_json()
        click.echo(json_text(plain))
    else:
        told = _findings(found) if checklist is None else _checklist(checklist)
        for text in told if found or checklist else [f"{run}: nothing was found"]:
            terminal.line(text)
    for problem in source.problems:
        click.echo(f"could not be read: {problem}", err=True)
    if any(finding.severity != "info" for finding in found):
        return 1
    return 2 if source.problems else 0


def _findings(found: Iterable[Finding]) -> Iterator[str]:
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


def _checklist(checklist: Checklist) -> Iterator[str]:
    counts = ", ".join(f"{len(checklist.of(status))} {status}" for status in ("found", "not known", "ruled out"))
    yield f"{checklist.symptom}: {checklist.meaning}; {len(checklist.items)} causes, {counts}"
    for item in checklist.items:
        yield f"{item.status}: {item.cause}"
        yield from (f"  {line}" for line in _answer(item))


def _answer(item: Item) -> Iterator[str]:
    yield from _findings(item.findings)
    yield from (f"{rule}: {because}" for rule, because in item.ruled_out.items())
    yield from (f"{rule} needs {missing}" for rule, missing in item.missing.items())
    if item.ask:
        yield f"ask: {item.ask}"


def _short(value: Any) -> str:
    if isinstance(value, list | tuple):
        shown = ", ".join(_short(item) for item in value[:4])
        return f"[{shown}{f', and {len(value) - 4} more' if len(value) > 4 else ''}]"
    return "(root)" if value == "" else terminal.number(value)
