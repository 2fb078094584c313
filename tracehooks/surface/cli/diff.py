"""``tracehooks diff A B``."""

from __future__ import annotations

from typing import Any

import click

from tracehooks.core.errors import InvalidOptionError
from tracehooks.surface import offline, terminal
from tracehooks.surface.cli.options import engine_option
from tracehooks.surface.plain import json_text

COLUMNS = (
    "step", "micro", "phase", "module", "slot", "call", "status", "difference", "tolerance", "relative_l2", "cosine",
)  # fmt: skip


@click.command("diff", short_help="Where two runs part, and what made them.")
@click.argument("a")
@click.argument("b")
@click.option("--steps", metavar="STEPS", help="Compare these steps alone: 3, 0:100 (0 to 99) or 1,5,9.")
@click.option("--rename", multiple=True, metavar="OLD=NEW", help="Regular expression on A's module paths (repeatable).")
@click.option("--tolerance", default="auto", show_default=True, metavar="T", help="auto, a relative difference, or 0.")
@click.option("--noise", multiple=True, metavar="RUN", help="A repeat of A, to measure its noise (repeatable).")
@engine_option
@click.option("--limit", type=click.IntRange(min=0), default=20, show_default=True, help="Rows to show; 0 for all.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    a: str,
    b: str,
    steps: str | None,
    rename: tuple[str, ...],
    tolerance: str,
    noise: tuple[str, ...],
    engine: str,
    limit: int,
    as_json: bool,
) -> int:
    """Compare run A with run B: the first divergence, its culprits, and a table of what differs.

    Exit status 0 when they are equal within tolerance, 1 when they differ, 2 on an error or when what can be read is equal
    but part of a run cannot be read.
    """
    chosen = parse_steps(steps)
    found = offline.diff(
        a, b, steps=chosen, rename=list(rename) or None, tolerance=tolerance, noise=noise, engine=engine
    )
    beyond = found.differing
    rows = (beyond.slice(0, limit) if limit else beyond).to_pylist()
    if as_json:
        click.echo(json_text({**found.to_json(), "rows": rows}))
    else:
        terminal.line(str(found))
        _table(rows, len(beyond))
    if found.problems and found.within_tolerance:
        click.echo("tracehooks: what can be read is equal, but part of a run cannot be read", err=True)
        return 2
    return 0 if found.within_tolerance else 1


def parse_steps(text: str | None) -> int | slice | list[int] | None:
    """``3`` → one step, ``0:100`` → from 0 up to but not including 100, ``1,5,9`` → those.

    Raises:
        InvalidOptionError: anything else.
    """
    if text is None:
        return None
    try:
        if ":" in text:
            return slice(*(int(part) if part.strip() else None for part in text.split(":")))
        numbers = [int(part) for part in text.split(",")]
        return numbers[0] if len(numbers) == 1 else numbers
    except (ValueError, TypeError) as error:
        raise InvalidOptionError("--steps", text, "a step, first:end, or several steps with commas between") from error


def _table(rows: list[dict[str, Any]], total: int) -> None:
    if not rows:
        return
    columns = [name for name in COLUMNS if any(row[name] is not None for row in rows)]
    named = [{**row, "module": "" if row["module"] is None else row["module"] or "(root)"} for row in rows]
    terminal.line()
    terminal.table("rows that differ", columns, named)
    if len(rows) < total:
        terminal.line(f"{len(rows)} of {total} rows; --limit 0 shows all")
