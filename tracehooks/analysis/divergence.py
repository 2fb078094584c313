"""Where two traces part, and what made them: sites picked from compared rows and put into words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tracehooks.analysis.align import Alignment
from tracehooks.analysis.compare import (
    DIFFERS,
    DTYPE,
    EQUAL,
    ONLY_A,
    ONLY_B,
    SHAPE,
    STATUSES,
    WITHIN,
    Comparison,
    difference,
)
from tracehooks.analysis.scalars import Scalars
from tracehooks.analysis.window import NONFINITE, STATISTICS, Bools, Ints, Vocabulary, Window
from tracehooks.core.records import Site


@dataclass(frozen=True)
class Divergence:
    """A site at which two traces differ. ``module`` is None for a scalar, whose name is the slot."""

    step: int
    micro: int
    phase: str
    module: str | None
    slot: str
    call: int
    kind: str
    """differs, within (bits only), only_a, only_b, shape or dtype."""
    detail: str
    """The numbers of both sides."""

    def __str__(self) -> str:
        name = self.slot if self.module is None else str(Site(self.module, self.slot, self.phase, self.call))
        micro = f" micro {self.micro}" if self.micro else ""
        return f"step {self.step}{micro}: {name}: {self.detail}"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Compared:
    """The rows of one window of both runs, paired and judged; tensors and scalars apart."""

    a: Window
    b: Window
    pairs: Alignment
    tensors: Comparison
    scalars_a: Scalars
    scalars_b: Scalars
    scalar_pairs: Alignment
    scalars: Comparison
    vocabulary: Vocabulary

    def column(self, name: str) -> Ints:
        """A key column of the paired tensors, from whichever side has the row."""
        return merged(self.a, self.b, self.pairs, name)

    def scalar_column(self, name: str) -> Ints:
        """A key column of the paired scalars."""
        return merged(self.scalars_a.window, self.scalars_b.window, self.scalar_pairs, name)


def merged(a: Window, b: Window, pairs: Alignment, name: str) -> Ints:
    """A column of paired rows: a's value, b's where only b has the row."""
    if len(pairs.a) == len(a):
        return a.columns[name]
    if not len(a):
        return b.columns[name][pairs.b]
    return np.where(pairs.a >= 0, a.columns[name][pairs.a], b.columns[name][pairs.b])


def first_and_culprits(compared: Compared) -> tuple[Divergence | None, tuple[Divergence, ...]]:
    """The first site of the window that differs, in execution order, and the sites that made the difference."""
    tensors = np.flatnonzero(compared.tensors.status >= DIFFERS)
    scalars = np.flatnonzero(compared.scalars.status >= DIFFERS)
    step = compared.column("step")
    scalar_step = compared.scalar_column("step")
    if not len(tensors) and not len(scalars):
        return None, ()
    if not len(tensors) or (len(scalars) and scalar_step[scalars[0]] < step[tensors[0]]):
        first = _scalar(compared, int(scalars[0]))
        return first, _distinct(_scalar(compared, int(row)) for row in scalars if scalar_step[row] == first.step)
    first_step = step[tensors[0]]
    causes = _causes(compared, np.flatnonzero(step == first_step))
    here = scalars[(scalar_step[scalars] == first_step) & (compared.scalars.status[scalars] == DIFFERS)]
    settings = [int(row) for row in here if _is_setting(compared, int(row))]
    words = [_tensor(compared, row) for row in causes]
    if words[0].phase in ("update", "optimizer") and settings:
        words = []
    words += [_scalar(compared, row) for row in settings]
    return _tensor(compared, int(tensors[0])), _distinct(words)


def first_other_bits(compared: Compared) -> Divergence | None:
    """The first site of the window that is not bit for bit equal, within tolerance or not."""
    unequal = np.flatnonzero(compared.tensors.status != EQUAL)
    return _tensor(compared, int(unequal[0])) if len(unequal) else None


def _causes(compared: Compared, rows: Ints) -> list[int]:
    """Of the rows of the first step that differs: see docs/diff.md, "Culprits"."""
    phase, module = compared.column("phase")[rows], compared.column("module")[rows]
    beyond = compared.tensors.status[rows] >= DIFFERS
    both = (compared.pairs.a[rows] >= 0) & (compared.pairs.b[rows] >= 0)
    flow = beyond & _phase_in(compared, phase, "forward", "input", "probe") & (compared.column("recompute")[rows] == 0)
    causes = set(_first_of_each(compared, rows, flow).tolist())
    causes |= set(np.flatnonzero(flow & _phase_in(compared, phase, "input") & _is_root(compared, module)).tolist())
    causes |= set(np.flatnonzero(beyond & both & _phase_in(compared, phase, "parameter")).tolist())
    source = int(np.flatnonzero(flow)[0]) if flow.any() else len(rows)
    for buffer in np.flatnonzero(beyond & both & _phase_in(compared, phase, "buffer")).tolist():
        if source > buffer or module[source] == module[buffer]:
            causes.add(buffer)
    if not causes:
        causes.add(int(np.flatnonzero(beyond)[0]))
    return [int(rows[position]) for position in sorted(causes)]


def _first_of_each(compared: Compared, rows: Ints, flow: Bools) -> Ints:
    """The first row of the flow in each forward pass of each rank."""
    passes = np.stack((compared.column("micro")[rows][flow], compared.column("rank")[rows][flow]))
    return np.flatnonzero(flow)[np.unique(passes, axis=1, return_index=True)[1]]


def _phase_in(compared: Compared, phase: Ints, *names: str) -> Bools:
    return np.isin(phase, [compared.vocabulary.code(name) for name in names])


def _is_root(compared: Compared, module: Ints) -> Bools:
    return np.asarray(module == compared.vocabulary.code(""))


def _is_setting(compared: Compared, row: int) -> bool:
    return bool(compared.scalars_a.setting[compared.scalar_pairs.a[row]])


def _distinct(found: Iterable[Divergence]) -> tuple[Divergence, ...]:
    """One of each site, the earliest: the same site in later micro-steps and on other ranks is the same answer."""
    sites: dict[tuple[object, ...], Divergence] = {}
    for item in found:
        sites.setdefault((item.phase, item.module, item.slot, item.call), item)
    return tuple(sites.values())


def _tensor(compared: Compared, row: int) -> Divergence:
    names = compared.vocabulary.names
    status = int(compared.tensors.status[row])
    return Divergence(
        step=int(compared.column("step")[row]),
        micro=int(compared.column("micro")[row]),
        phase=names[compared.column("phase")[row]],
        module=names[compared.column("module")[row]],
        slot=names[compared.column("slot")[row]],
        call=int(compared.column("call")[row]),
        kind=STATUSES[status],
        detail=_detail(compared, row, status),
    )


def _scalar(compared: Compared, row: int) -> Divergence:
    status = int(compared.scalars.status[row])
    row_a, row_b = int(compared.scalar_pairs.a[row]), int(compared.scalar_pairs.b[row])
    if status == ONLY_A:
        detail = f"only in a: {compared.scalars_a.values[row_a]:.9g}"
    elif status == ONLY_B:
        detail = f"only in b: {compared.scalars_b.values[row_b]:.9g}"
    else:
        detail = _numbers("", float(compared.scalars_a.values[row_a]), float(compared.scalars_b.values[row_b])).strip()
        detail += _apart(compared.scalars, row)
    return Divergence(
        step=int(compared.scalar_column("step")[row]),
        micro=int(compared.scalar_column("micro")[row]),
        phase="scalar",
        module=None,
        slot=compared.vocabulary.names[compared.scalar_column("slot")[row]],
        call=0,
        kind=STATUSES[status],
        detail=detail,
    )


def _detail(compared: Compared, row: int, status: int) -> str:
    if status == ONLY_A:
        return f"only in a: {_look(compared, compared.a, int(compared.pairs.a[row]))}"
    if status == ONLY_B:
        return f"only in b: {_look(compared, compared.b, int(compared.pairs.b[row]))}"
    row_a, row_b = int(compared.pairs.a[row]), int(compared.pairs.b[row])
    look_a, look_b = _look(compared, compared.a, row_a), _look(compared, compared.b, row_b)
    changed = f"{look_a} → {look_b}" if status in (SHAPE, DTYPE) or look_a != look_b else look_a
    return f"{changed}: {_statistics(compared, row_a, row_b)}{_apart(compared.tensors, row)}"


def _look(compared: Compared, window: Window, row: int) -> str:
    return f"{compared.vocabulary.names[window.columns['dtype'][row]]}{list(window.shape(row))}"


def _statistics(compared: Compared, row_a: int, row_b: int) -> str:
    """The numbers that differ, the most telling first."""
    wide_a, wide_b = compared.a.wide(np.array([row_a])), compared.b.wide(np.array([row_b]))
    counts = [_numbers(name, wide_a[name][0], wide_b[name][0]) for name in NONFINITE if wide_a[name] != wide_b[name]]
    moved = []
    for name in STATISTICS:
        x, y = float(wide_a[name][0]), float(wide_b[name][0])
        if x != y and not (np.isnan(x) and np.isnan(y)):
            scale = max(abs(x), abs(y), np.finfo(float).tiny)
            moved.append((-abs(x - y) / scale, _numbers(name, x, y)))
    told = counts + [words for _, words in sorted(moved)][:3]
    if told:
        return ", ".join(told)
    apart = float(difference(wide_a, wide_b)[0])
    return "equal statistics, other elements" if apart else "equal statistics, other bits"


def _numbers(name: str, x: Any, y: Any) -> str:
    """Both numbers with as many digits as it takes to tell them apart."""
    for digits in (4, 6, 9, 17):
        left, right = f"{x:.{digits}g}", f"{y:.{digits}g}"
        if left != right:
            break
    return f"{name} {_null(left)} → {_null(right)}"


def _null(text: str) -> str:
    return "none finite" if text == "nan" else text


def _apart(comparison: Comparison, row: int) -> str:
    distance, allowed = float(comparison.distance[row]), float(comparison.allowed[row])
    if not np.isfinite(distance):
        return ""
    judged = "within" if comparison.status[row] == WITHIN else "tolerance"
    return f" (relative difference {distance:.2g}, {judged} {allowed:.2g})"
