"""``tracehooks diagnose RUN``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import click

from tracehooks.core.records import Finding
from tracehooks.surface import offline, terminal
from tracehooks.surface.plain import json_text


@click.command("diagnose", short_help="What is wrong with a run, and what to check next.")
@click.argument("run")
@click.option("--control", metavar="RUN", help="A run that is known to be fine: what is found there too is left out.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list of findings.")
def command(run: str, control: str | None, as_json: bool) -> int:
    """What is wrong with RUN, the likeliest explanation first: what was found, where, the numbers behind it, and what to
    check next.

    Exit status 1 when an error or a warning was found, 0 when nothing was or only notes, 2 on an error or when nothing was
    found but part of the run cannot be read.
    """
    source = offline.open(run)
    found = offline.diagnose(source, control)
    if as_json:
        click.echo(json_text([asdict(finding) for finding in found]))
    else:
        for text in _told(found) if found else [f"{run}: nothing was found"]:
            terminal.line(text)
    for problem in source.problems:
        click.echo(f"could not be read: {problem}", err=True)
    if any(finding.severity != "info" for finding in found):
        return 1
    return 2 if source.problems else 0


def _told(found: list[Finding]) -> Iterator[str]:
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


def _short(value: Any) -> str:
    if isinstance(value, list | tuple):
        shown = ", ".join(_short(item) for item in value[:4])
        return f"[{shown}{f', and {len(value) - 4} more' if len(value) > 4 else ''}]"
    return "(root)" if value == "" else terminal.number(value)
