"""A run at a glance, and its sites and rows as a table: what ``tracehooks show`` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from tracehooks.analysis.engine import EMBEDDED, Engine, Queries
from tracehooks.analysis.sql import quoted
from tracehooks.core.errors import InvalidOptionError, UnknownNameError
from tracehooks.core.names import select as select_names
from tracehooks.core.records import RunSource
from tracehooks.core.schema import TABLES

WORST = 5
"""Sites named under each heading of worst values."""

SORTS: dict[str, str] = {
    "order": "first_seen",
    "absmax": "absmax DESC NULLS LAST, first_seen",
    "rms": "rms DESC NULLS LAST, first_seen",
    "zeros": "zeros DESC NULLS LAST, first_seen",
    "nonfinite": "nonfinite DESC, first_seen",
}
"""Ways to order sites: by first appearance in execution order, or by a statistic, largest first."""


@dataclass(frozen=True)
class Summary:
    """What was recorded."""

    run: Mapping[str, Any]
    """Identity, from run.json: run_id, created, status, model, packages, git …"""
    steps: Mapping[str, int | None]
    """How many, the first and the last."""
    ranks: tuple[int, ...]
    rows: Mapping[str, int]
    """Rows by table."""
    sites: int
    events: tuple[Mapping[str, Any], ...]
    """How often each kind of event happened, with its first step and message."""
    scalars: tuple[Mapping[str, Any], ...]
    """First, last, smallest and largest value of each loss and setting."""
    largest: tuple[Mapping[str, Any], ...]
    """Sites with the largest magnitudes."""
    emptiest: tuple[Mapping[str, Any], ...]
    """Sites with the largest share of zeros, where it is above one half."""
    nonfinite: tuple[Mapping[str, Any], ...]
    """Sites that ever held a non-finite element."""
    problems: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


_IDENTITY = ("run_id", "created", "closed", "status", "command", "git", "packages", "host", "devices", "world_size",
             "model", "flags", "optimizers", "notes")  # fmt: skip

_SITES = """
SELECT phase, module, slot, call, min_by(type, step) AS type, min_by(dtype, step) AS dtype, count(*) AS rows,
       min(step) AS first_step, max(step) AS last_step, max(absmax) AS absmax,
       max_by(rms, CASE WHEN rms IS NOT NULL THEN step END) AS rms,
       max_by(mean, CASE WHEN mean IS NOT NULL THEN step END) AS mean, sum(zeros) / nullif(sum(count), 0) AS zeros,
       CAST(sum(nan + posinf + neginf) AS BIGINT) AS nonfinite, min(step * 1000000000 + seq) AS first_seen
FROM tensors WHERE {condition} GROUP BY phase, module, slot, call
"""

_SCALARS = """
SELECT name, min_by(value, step) AS first, max_by(value, step) AS last, min(value) AS min, max(value) AS max,
       count(*) AS rows
FROM scalars WHERE name NOT LIKE 'time/%' GROUP BY name ORDER BY name
"""

_EVENTS = """
SELECT kind, min(severity) AS severity, count(*) AS count, min(step) AS first_step,
       min_by(message, step) AS message
FROM events GROUP BY kind ORDER BY first_step, kind
"""


def summarize(run: RunSource, engine: Engine = EMBEDDED) -> Summary:
    """Everything `show` prints at a glance, in a handful of queries."""
    query = Queries(run, engine)
    steps = _one(query("SELECT count(DISTINCT step) AS count, min(step) AS first, max(step) AS last FROM "
                            "(SELECT step FROM tensors UNION ALL SELECT step FROM scalars)"))  # fmt: skip
    sites = query(f"SELECT * FROM ({_SITES.format(condition='true')}) ORDER BY first_seen")
    return Summary(
        run={name: run.info.get(name) for name in _IDENTITY if run.info.get(name) is not None},
        steps=steps,
        ranks=tuple(query("SELECT DISTINCT rank FROM tensors ORDER BY rank")["rank"].to_pylist()),
        rows={name: _one(query(f"SELECT count(*) AS count FROM {name}"))["count"] for name in TABLES},
        sites=len(sites),
        events=tuple(query(_EVENTS).to_pylist()),
        scalars=tuple(query(_SCALARS).to_pylist()),
        largest=_worst(sites, "absmax"),
        emptiest=tuple(site for site in _worst(sites, "zeros") if site["zeros"] > 0.5),
        nonfinite=_worst(sites, "nonfinite", len(sites)),
        problems=tuple(str(problem) for problem in run.problems),
    )


def sites(
    run: RunSource,
    *,
    step: int | None = None,
    module: str | Sequence[str] | None = None,
    phase: str | None = None,
    sort: str = "order",
    engine: Engine = EMBEDDED,
) -> pa.Table:
    """One row for each site: phase, module, slot, call, type, dtype, rows, first_step, last_step, absmax (the largest),
    rms and mean (of the last step), zeros (share), nonfinite (elements, all steps together).

    Args:
        step: of this step alone.
        module: glob pattern, or several, on module paths.
        phase: of this phase alone.
        sort: one of `SORTS`.
        engine: what runs the query; see `tracehooks.analysis.engine`.

    Raises:
        UnknownNameError: a pattern, phase or order that nothing answers to; the nearest are listed.
        InvalidOptionError: a step that has no tensors; which there are is said.
    """
    if sort not in SORTS:
        raise UnknownNameError("order", sort, SORTS, "option sort")
    query = Queries(run, engine)
    conditions = ["true"]
    if step is not None:
        recorded = _distinct(query, "step")
        if step not in recorded:
            there = f"they go from {recorded[0]} to {recorded[-1]}" if recorded else "there are none"
            raise InvalidOptionError("step", step, f"a step with tensors; {there}")
        conditions.append(f"step = {int(step)}")
    if phase is not None:
        phases = _distinct(query, "phase")
        if phase not in phases:
            raise UnknownNameError("phase", phase, phases, "option phase")
        conditions.append(f"phase = {quoted(phase)}")
    if module is not None:
        names = select_names(_distinct(query, "module"), module, where="option module")
        conditions.append(f"module IN ({', '.join(quoted(name) for name in names) or 'NULL'})")
    chosen = query(f"SELECT * FROM ({_SITES.format(condition=' AND '.join(conditions))}) ORDER BY {SORTS[sort]}")
    return chosen.drop_columns(["first_seen"])


def _worst(found: pa.Table, column: str, limit: int = WORST) -> tuple[Mapping[str, Any], ...]:
    order = [(column, "descending")]
    named = [row for row in found.sort_by(order).to_pylist() if row[column]]
    return tuple({name: row[name] for name in ("phase", "module", "slot", "call", column)} for row in named[:limit])


def _distinct(query: Queries, column: str) -> list[Any]:
    found: list[Any] = query(f"SELECT DISTINCT {column} FROM tensors ORDER BY {column}")[column].to_pylist()
    return found


def _one(table: pa.Table) -> dict[str, Any]:
    return dict(table.to_pylist()[0])
