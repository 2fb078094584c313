"""Where two traces part: sites picked from compared rows and put into words."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tracehooks.analysis.align import Alignment
from tracehooks.analysis.compare import (
    DTYPE,
    EQUAL,
    ONLY_A,
    ONLY_B,
    SHAPE,
    STATUSES,
    UNREAD,
    WITHIN,
    Comparison,
)
from tracehooks.analysis.distance import in_words
from tracehooks.analysis.scalars import Scalars
from tracehooks.analysis.window import NONFINITE, STATISTICS, Ints, Vocabulary, Window
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
    relative_l2: float | None = None
    """‖a − b‖ / ‖a‖, estimated; None without sketches."""
    cosine: float | None = None

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

    def steps_of_a(self) -> set[int]:
        """Steps of which a has rows."""
        return _steps(self.a, self.scalars_a)

    def steps_of_b(self) -> set[int]:
        """Steps of which b has rows."""
        return _steps(self.b, self.scalars_b)

    def scalar_column(self, name: str) -> Ints:
        """A key column of the paired scalars."""
        return merged(self.scalars_a.window, self.scalars_b.window, self.scalar_pairs, name)


def _steps(tensors: Window, scalars: Scalars) -> set[int]:
    steps = tensors.columns["step"]  # ascending
    changes = np.flatnonzero(np.diff(steps, prepend=steps[:1] - 1))
    return {*steps[changes].tolist(), *scalars.window.columns["step"].tolist()}


def merged(a: Window, b: Window, pairs: Alignment, name: str) -> Ints:
    """A column of paired rows: a's value, b's where only b has the row."""
    if len(pairs.a) == len(a):
        return a.columns[name]
    if not len(a):
        return b.columns[name][pairs.b]
    return np.where(pairs.a >= 0, a.columns[name][pairs.a], b.columns[name][pairs.b])


def first_other_bits(compared: Compared) -> Divergence | None:
    """The first site of the window that is not bit for bit equal, within tolerance or not."""
    unequal = np.flatnonzero(~np.isin(compared.tensors.status, (EQUAL, UNREAD)))
    return tensor_divergence(compared, int(unequal[0])) if len(unequal) else None


def tensor_divergence(compared: Compared, row: int) -> Divergence:
    """A row of the paired tensors in words."""
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
        relative_l2=_estimate(compared, "relative_l2", row),
        cosine=_estimate(compared, "cosine", row),
    )


def scalar_divergence(compared: Compared, row: int) -> Divergence:
    """A row of the paired scalars in words."""
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
    apart = in_words(wide_a, wide_b)
    if not told:
        return f"equal statistics, {apart or 'other bits'}"
    return ", ".join([*told, apart] if apart else told)


def _estimate(compared: Compared, name: str, row: int) -> float | None:
    value = float(compared.tensors.estimates[name][row])
    return None if np.isnan(value) else value


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
