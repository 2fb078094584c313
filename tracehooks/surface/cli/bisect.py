"""``tracehooks bisect --good REV --bad REV -- CMD``."""

from __future__ import annotations

import click

from tracehooks.surface.bisect import bisect
from tracehooks.surface.plain import json_text


@click.command(
    "bisect", short_help="The commit that changed the numbers.", context_settings={"ignore_unknown_options": True}
)
@click.argument("cmd", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--good", required=True, metavar="REV", help="A commit with the right numbers.")
@click.option("--bad", required=True, metavar="REV", help="A later one with others.")
@click.option("--tolerance", default="auto", show_default=True, metavar="T", help="auto, a relative difference, or 0.")
@click.option("--rename", multiple=True, metavar="OLD=NEW", help="Regular expression on module paths (repeatable).")
@click.option("--repeats", default=0, show_default=True, help="Further runs of the good commit, to measure its noise.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    cmd: tuple[str, ...], good: str, bad: str, tolerance: str, rename: tuple[str, ...], repeats: int, as_json: bool
) -> int:
    """Run CMD, which records a run, on commits between two in a worktree of its own, halving with git bisect.

    {} in CMD stands for the run directory that it is to write; without it the newest run in its working directory is
    taken. Commits on which CMD fails are skipped. Runs are kept for each commit in the repository. Exit status 0 when the
    commit was found, 2 otherwise.
    """
    say = (lambda line: None) if as_json else (lambda line: click.echo(line, err=True))
    found = bisect(good, bad, cmd, tolerance=tolerance, rename=rename, repeats=repeats, say=say)
    click.echo(json_text(found.to_json()) if as_json else str(found))
    return 0
