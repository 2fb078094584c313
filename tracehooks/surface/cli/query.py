"""``tracehooks query RUN SQL``."""

from __future__ import annotations

import click

from tracehooks.surface import offline, terminal
from tracehooks.surface.cli.options import engine_option
from tracehooks.surface.plain import json_text


@click.command("query", short_help="SQL over a run's tables.")
@click.argument("run")
@click.argument("sql")
@engine_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list with one object for each row.")
def command(run: str, sql: str, engine: str, as_json: bool) -> int:
    """Run one SELECT over the tables of RUN: tensors, scalars, masks, samples, events.

    The dialect is the engine's. Queries read: nothing is written and no file is touched.
    """
    source = offline.open(run)
    found = offline.query(source, sql, engine=engine)
    if as_json:
        click.echo(json_text(found.to_pylist()))
    else:
        terminal.table("", found.column_names, found.to_pylist())
    for problem in source.problems:
        click.echo(f"could not be read: {problem}", err=True)
    return 0
