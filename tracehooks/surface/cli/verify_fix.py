"""``tracehooks verify-fix BEFORE AFTER``."""

from __future__ import annotations

from pathlib import Path

import click

from tracehooks.core.errors import UnwritableError
from tracehooks.surface import offline, terminal
from tracehooks.surface.plain import json_text

Pairs = tuple[tuple[str, str], ...]


@click.command("verify-fix", short_help="Whether a fix solved the right problem.")
@click.argument("before")
@click.argument("after")
@click.option("--also", nargs=2, multiple=True, metavar="BEFORE AFTER", help="Of another batch or seed (repeatable).")
@click.option("--control", nargs=2, multiple=True, metavar="BEFORE AFTER", help="A healthy case (repeatable).")
@click.option("--tolerance", default="auto", show_default=True, metavar="T", help="Of the control: as in diff.")
@click.option("--record", metavar="FILE", help="Write the record there too: JSON where it ends with .json, else text.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    before: str, after: str, also: Pairs, control: Pairs, tolerance: str, record: str | None, as_json: bool
) -> int:
    """Compare runs BEFORE and AFTER a fix: is the failure gone, is the control unchanged, does it hold more than once?

    Exit status 0 when every question is answered with yes, 1 when one is answered with no or is not shown, 2 on an error.
    """
    pairs = [(before, after), *also]
    found = offline.verify_fix([pair[0] for pair in pairs], [pair[1] for pair in pairs], control, tolerance=tolerance)
    text, plain = str(found), json_text(found.to_json())
    if record is not None:
        try:
            Path(record).write_text((plain if record.endswith(".json") else text) + "\n")
        except OSError as error:
            raise UnwritableError(record, error.strerror) from error
    terminal.line(plain if as_json else text)
    return 0 if found.passed else 1
