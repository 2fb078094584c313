"""``tracehooks export RUN``."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import click

from tracehooks.core.errors import UnwritableError
from tracehooks.core.schema import TABLES
from tracehooks.surface import offline
from tracehooks.surface.plain import json_text, plain

FORMATS = {"csv": "csv", "json": "jsonl"}
"""Formats and the ending of their files: JSON is one object a line."""


@click.command("export", short_help="Write tables as CSV or JSON lines.")
@click.argument("run")
@click.option(
    "--table", "tables", multiple=True, type=click.Choice(list(TABLES)), help="Table to write (repeatable; all)."
)
@click.option("--format", "kind", type=click.Choice(list(FORMATS)), default="csv", show_default=True, help="Format.")
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Directory for TABLE.csv or TABLE.jsonl; without it one table goes to standard output.",
)
@click.option("--where", metavar="SQL", help="Rows for which this condition on the table's columns holds.")
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
def command(run: str, tables: tuple[str, ...], kind: str, output: Path | None, where: str | None, as_json: bool) -> int:
    """Write the tables of RUN as CSV or as JSON, one object a line.

    Lists (shape, sketch, histogram) are JSON in a CSV cell; null is an empty cell.
    """
    kind = "json" if as_json else kind
    chosen = tables or tuple(TABLES)
    if output is None and len(chosen) != 1:
        raise click.UsageError("several tables need --output DIR; give one --table to write to standard output")
    source = offline.open(run)
    for name in chosen:
        found = source.read(name, where=where)
        if output is None:
            _write(found, kind, sys.stdout)
        else:
            _write_file(found, kind, output / f"{name}.{FORMATS[kind]}")
    for problem in source.problems:
        click.echo(f"could not be read: {problem}", err=True)
    return 0


def _write_file(found: Any, kind: str, path: Path) -> None:
    with ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(path.open("w", newline="", encoding="utf-8"))
        except OSError as error:
            raise UnwritableError(path, error.strerror) from error
        _write(found, kind, file)
    click.echo(f"{path}: {len(found)} rows", err=True)


def _write(found: Any, kind: str, file: IO[str]) -> None:
    if kind == "json":
        file.writelines(json_text(row) + "\n" for row in _rows(found))
        return
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(found.column_names)
    writer.writerows([_cell(value) for value in row.values()] for row in _rows(found))


def _rows(found: Any) -> Iterator[dict[str, Any]]:
    """A batch at a time: a million rows as Python objects at once would be gigabytes."""
    for batch in found.to_batches(max_chunksize=10_000):
        yield from batch.to_pylist()


def _cell(value: Any) -> Any:
    return json.dumps(plain(value)) if isinstance(value, list) else value
