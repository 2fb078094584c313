"""``tracehooks show RUN``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from tracehooks.analysis.summary import SORTS, Summary, sites, summarize
from tracehooks.surface import offline, terminal
from tracehooks.surface.cli.options import engine_option
from tracehooks.surface.plain import json_text

if TYPE_CHECKING:
    import pyarrow as pa

SITE_COLUMNS = (
    "module",
    "slot",
    "phase",
    "call",
    "type",
    "dtype",
    "rows",
    "absmax",
    "rms",
    "mean",
    "zeros",
    "nonfinite",
)


@click.command("show", short_help="What a run recorded, at a glance.")
@click.argument("run")
@click.option("--step", type=int, metavar="N", help="Show the sites of this step.")
@click.option("--module", multiple=True, metavar="PATTERN", help="Show the sites of these modules (glob; repeatable).")
@click.option("--phase", metavar="NAME", help="Show the sites of this phase: forward, backward, gradient …")
@click.option("--sort", type=click.Choice(list(SORTS)), default="order", show_default=True, help="Order of the sites.")
@click.option("--limit", type=click.IntRange(min=0), default=20, show_default=True, help="Sites to show; 0 for all.")
@engine_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    run: str,
    step: int | None,
    module: tuple[str, ...],
    phase: str | None,
    sort: str,
    limit: int,
    engine: str,
    as_json: bool,
) -> int:
    """What RUN recorded, at a glance: identity, steps, events, losses, worst values, sites.

    With --step, --module or --phase only the sites that these select are shown.
    """
    source = offline.open(run)
    narrowed = step is not None or bool(module) or phase is not None
    found = sites(source, step=step, module=module or None, phase=phase, sort=sort, engine=engine)
    rows = (found.slice(0, limit) if limit else found).to_pylist()
    summary = None if narrowed else summarize(source, engine)
    if as_json:
        glance = {} if summary is None else summary.to_json()
        click.echo(json_text({**glance, "site_count": len(found), "sites": rows, "problems": source.problems}))
        return 0
    if summary is not None:
        _glance(run, summary)
    _sites(found, rows)
    for problem in source.problems:
        click.echo(f"could not be read: {problem}", err=True)
    return 0


def _glance(path: str, summary: Summary) -> None:
    terminal.line(f"{path}: {_identity(summary.run)}")
    steps = summary.steps
    span = f"{steps['count']} steps ({steps['first']} to {steps['last']})" if steps["count"] else "no steps"
    ranks = f", {len(summary.ranks)} ranks" if len(summary.ranks) > 1 else ""
    told = ", ".join(f"{count} {name}" for name, count in summary.rows.items() if count)
    terminal.line(f"{span}{ranks}, {summary.sites} sites; rows: {told or 'none'}")
    _events(path, summary.events)
    _table("scalars", summary.scalars)
    _table("non-finite", summary.nonfinite)
    _table("largest magnitudes", summary.largest)
    _table("mostly zeros", summary.emptiest)


def _identity(run: Any) -> str:
    model = run.get("model") or {}
    git = run.get("git") or {}
    parts = [model.get("class"), f"run {run.get('run_id', 'unknown')}", run.get("created"), run.get("status")]
    parts.append(
        f"commit {str(git['commit'])[:12]}{' (dirty)' if git.get('dirty') else ''}" if git.get("commit") else None
    )
    return ", ".join(str(part) for part in parts if part)


def _events(path: str, events: Sequence[Mapping[str, Any]]) -> None:
    """Of a message of several lines the first; which command prints the rest is said."""
    longer = [event["kind"] for event in events if "\n" in event["message"]]
    _table(
        "events", [{**event, "message": event["message"].replace("\n", " …\n").partition("\n")[0]} for event in events]
    )
    if longer:
        rest = f"tracehooks first {path}" if longer == ["nonfinite"] else f"tracehooks show {path} --json"
        terminal.line(f"… the rest of {', '.join(longer)}: {rest}")


def _table(title: str, rows: Any) -> None:
    if rows:
        terminal.line()
        terminal.table(title, list(rows[0]), [_named(row) for row in rows])


def _sites(found: pa.Table, rows: list[dict[str, Any]]) -> None:
    terminal.line()
    terminal.table("sites", SITE_COLUMNS, [_named(row) for row in rows])
    if len(rows) < len(found):
        terminal.line(f"{len(rows)} of {len(found)} sites; --limit 0 shows all")


def _named(row: Any) -> dict[str, Any]:
    """The root's path is empty, which no reader of a table sees."""
    return {**row, "module": row["module"] or "(root)"} if "module" in row else dict(row)
