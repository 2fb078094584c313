"""``tracehooks repair RUN``."""

from __future__ import annotations

import click

from tracehooks.surface import offline, terminal
from tracehooks.surface.plain import json_text


@click.command("repair", short_help="Seal what a crash left.")
@click.argument("run")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list with one line of text for each thing done.")
def command(run: str, as_json: bool) -> int:
    """Seal what a dead process left of RUN, so that every row is in a Parquet part. A second call does nothing."""
    done = list(offline.repair(run))
    if as_json:
        click.echo(json_text(done))
    else:
        for text in done or [f"{run}: nothing to repair"]:
            terminal.line(text)
    return 0
