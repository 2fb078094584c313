"""Rows that only one of two traces has, each reason named once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracehooks.analysis.window import Ints


@dataclass(frozen=True)
class Missing:
    """Rows of one side without counterpart: whole steps, a module with all that is in it, or a site."""

    what: str
    """steps, module or site."""
    module: str | None
    """The topmost module that the other side does not have, or the site's; None for steps and scalars."""
    site: str
    """What is missing, in words."""
    first_step: int
    last_step: int
    rows: int

    def __str__(self) -> str:
        span = f"step {self.first_step}"
        if self.last_step != self.first_step:
            span = f"steps {self.first_step} to {self.last_step}"
        rows = "1 row" if self.rows == 1 else f"{self.rows} rows"
        return f"{span} ({rows})" if self.what == "steps" else f"{self.site} ({rows}, {span})"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def missing(
    rows: pa.Table, status: str, other_steps: Set[int], other_modules: Callable[[], Sequence[str]]
) -> tuple[Missing, ...]:
    """Group the rows of a diff with this status (only_a, only_b), given what the other side has."""
    lonely = rows.filter(pc.equal(rows["status"].cast(pa.string()), status))
    if not len(lonely):
        return ()
    other = pa.array(sorted(other_steps), pa.int64())
    in_common = pc.is_in(lonely["step"], value_set=other)
    whole = lonely.filter(pc.invert(in_common))
    return (*_steps(whole), *_sites(lonely.filter(in_common), set(other_modules())))


def _steps(rows: pa.Table) -> Iterable[Missing]:
    steps, counts = np.unique(rows["step"].to_numpy(), return_counts=True)
    for first, last in _runs(steps):
        count = int(counts[first : last + 1].sum())
        yield Missing("steps", None, "steps", int(steps[first]), int(steps[last]), count)


def _runs(steps: Ints) -> Iterable[tuple[int, int]]:
    """First and last position of each run of consecutive numbers."""
    breaks = np.flatnonzero(np.diff(steps) != 1) + 1
    edges = [0, *breaks.tolist(), len(steps)]
    return [(start, end - 1) for start, end in pairwise(edges) if end > start]


def _sites(rows: pa.Table, other_modules: Set[str]) -> Iterable[Missing]:
    plain = rows.select(["step", "phase", "module", "slot"])
    for name in ("phase", "module", "slot"):
        plain = plain.set_column(plain.schema.get_field_index(name), name, plain[name].cast(pa.string()))
    groups = plain.group_by(["phase", "module", "slot"]).aggregate(
        [("step", "min"), ("step", "max"), ("step", "count")]
    )
    named = sorted(((_name(row, other_modules), row) for row in groups.to_pylist()), key=lambda pair: pair[0][:3])
    for (what, module, site), members in groupby(named, key=lambda pair: pair[0]):
        found = [row for _, row in members]
        yield Missing(
            what,
            None if site.startswith("scalar ") and not module else module,
            site,
            min(row["step_min"] for row in found),
            max(row["step_max"] for row in found),
            sum(row["step_count"] for row in found),
        )


def _name(row: dict[str, Any], other_modules: Set[str]) -> tuple[str, str, str]:
    module = row["module"]
    if module is None:
        return "site", "", f"scalar {row['slot']}"
    if module not in other_modules:
        top = _topmost(module, other_modules)
        return "module", top, f"module {top or '(root)'}"
    return "site", module, f"{module or '(root)'} {row['slot']} ({row['phase']})"


def _topmost(module: str, other_modules: Set[str]) -> str:
    """The shortest leading path of a module that nothing on the other side is or lies in."""
    parts = module.split(".")
    for length in range(1, len(parts)):
        path = ".".join(parts[:length])
        if not any(name == path or name.startswith(path + ".") for name in other_modules):
            return path
    return module
