"""``tracehooks diagnose RUN``."""

from __future__ import annotations

from dataclasses import asdict

import click

from tracehooks.analysis.symptoms import SYMPTOMS
from tracehooks.analysis.told import findings
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
        told = "\n".join(findings(found)) if checklist is None else str(checklist)
        terminal.line(told or f"{run}: nothing was found")
    for problem in source.problems:
        click.echo(f"could not be read: {problem}", err=True)
    if any(finding.severity != "info" for finding in found):
        return 1
    return 2 if source.problems else 0
