"""What the rows of one flush say at once: the first non-finite value, the gradient norm."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracehooks.capture.places import Place
from tracehooks.capture.recorder import Drained, Row
from tracehooks.capture.watch import Seen
from tracehooks.core.records import FirstNonFinite

GRADIENTS = ("gradient", "gradient_local")
MAY_BE_MASKED = ("input", "forward", "buffer", "probe", "optimizer")
"""Phases in which -inf alone is no finding: masks and log-space states are full of it."""


Site = tuple[str, str, str, bool]
"""A site by phase, module and slot, and whether the pass computed gradients."""


def nonfinite(drained: Drained, scaled: bool) -> Iterator[tuple[Site, FirstNonFinite]]:
    """Rows that hold a NaN or an infinity that is not a mask's, and losses, in execution order; parameters that were so
    before the first step come first.

    Args:
        scaled: a GradScaler is at work: gradients that overflow are its business, not a finding.
    """
    found: list[tuple[tuple[int, ...], Site, FirstNonFinite]] = []
    for i, (row, bad) in enumerate(zip(drained.rows, _bad(drained, scaled), strict=True)):
        if bad:
            place = row.place
            late = not (row.step == 0 and place.phase == "parameter")
            seen = place.phase, place.module, place.slot, row.training
            found.append(((late, row.step, row.seq), seen, _of_row(row, _statistics(i, drained))))
    for sum_ in drained.watched:
        if _watched_bad(sum_, scaled):
            site = sum_.place.phase, sum_.place.module, sum_.place.slot, sum_.training
            found.append(((True, sum_.step, sum_.seq), site, _of_watched(sum_)))
    for seq, step, name, value in drained.scalars:
        if name == "loss" and not math.isfinite(value):
            found.append(((True, step, seq), ("loss", "", "", True), _of_loss(step, value)))
    yield from ((seen, first) for _, seen, first in sorted(found, key=lambda entry: entry[0]))


def root_outputs(drained: Drained, step: int) -> dict[tuple[int, str], bool]:
    """Of each recorded output of the root in a step, by (micro, slot), whether it is not finite."""
    columns = drained.columns
    bad = columns["nan"] + columns["posinf"] + columns["neginf"]
    return {
        (row.place.micro, row.place.slot): bool(bad[i])
        for i, row in enumerate(drained.rows)
        if row.place.phase == "forward" and row.place.module == "" and row.step == step and not row.place.recompute
    }


def skipped_steps(drained: Drained) -> list[int]:
    """Steps that a fused optimizer skipped because a GradScaler told it of non-finite gradients."""
    return [step for _, step, name, value in drained.scalars if name == "found_inf" and value > 0]


def gradient_norm(drained: Drained) -> float | None:
    """L2 norm over all parameter gradients of a flush; NaN or inf when one holds such; None when there is none."""
    chosen = np.array([row.place.phase in GRADIENTS for row in drained.rows], dtype=np.bool_)
    if not chosen.any():
        return None
    columns = {name: drained.columns[name][chosen] for name in ("count", "nan", "posinf", "neginf", "rms")}
    if columns["nan"].any():
        return math.nan
    infinite = columns["posinf"] + columns["neginf"]
    if infinite.any():
        return math.inf
    squares = np.nan_to_num(columns["rms"].astype(np.float64)) ** 2 * columns["count"]
    return float(np.sqrt(squares.sum()))


def _watched_bad(seen: Seen, scaled: bool) -> bool:
    if scaled and seen.place.phase in ("backward", *GRADIENTS):
        return False
    return not (seen.value == -math.inf and seen.place.phase in MAY_BE_MASKED)


def _of_watched(seen: Seen) -> FirstNonFinite:
    value = "nan" if math.isnan(seen.value) else "inf" if seen.value > 0 else "-inf"
    return _of(seen.step, seen.place, seen.training, value, None)


def _bad(drained: Drained, scaled: bool) -> NDArray[np.bool_]:
    phases = [row.place.phase for row in drained.rows]
    alarming = (drained.columns["nan"] > 0) | (drained.columns["posinf"] > 0)
    strict = np.array([phase not in MAY_BE_MASKED for phase in phases], dtype=np.bool_)
    alarming |= (drained.columns["neginf"] > 0) & strict
    if scaled:
        alarming &= np.array([phase not in ("backward", *GRADIENTS) for phase in phases], dtype=np.bool_)
    return np.asarray(alarming, dtype=np.bool_)


def _statistics(i: int, drained: Drained) -> dict[str, Any]:
    row = drained.rows[i]
    names = ("count", "nan", "posinf", "neginf", "zeros", "min", "max", "mean", "std", "rms", "absmax")
    values = {name: drained.columns[name][i].item() for name in names}
    finite = {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in values.items()}
    return {"slot": row.place.slot, "dtype": row.dtype, "shape": list(row.shape), **finite}


def _of_row(row: Row, statistics: dict[str, Any]) -> FirstNonFinite:
    value = "nan" if statistics["nan"] else "inf" if statistics["posinf"] else "-inf"
    return _of(row.step, row.place, row.training, value, statistics)


def _of(step: int, place: Place, training: bool, value: str, statistics: dict[str, Any] | None) -> FirstNonFinite:
    phase = _phase(step, place.phase, training)
    name = f"{place.module}.{place.slot}".lstrip(".")
    held = place.phase in ("parameter", "update", "optimizer", *GRADIENTS)
    where = (
        f"module {place.module or '(root)'} ({place.type}), {place.slot}" if not held else f"{place.phase} of {name}"
    )
    many = ""
    if statistics is not None:
        count = sum(statistics[kind] for kind in ("nan", "posinf", "neginf"))
        many = f", {count:,} of {statistics['count']:,} elements not finite"
    return FirstNonFinite(
        step=step,
        phase=phase,
        module=place.module,
        value=value,
        message=f"first non-finite value, step {step}, {phase}, {where}: {value}{many}",
        params=(name,) if held else (),
        buffer=name if place.phase == "buffer" else None,
        output=statistics,
    )


def _phase(step: int, phase: str, training: bool) -> str:
    if phase == "input":
        return "data"
    if phase == "parameter":
        return "param" if step == 0 else "update"
    if phase in ("backward", *GRADIENTS):
        return "backward"
    if phase == "forward" or phase == "probe":
        return "forward" if training else "eval"
    return "buffer" if phase == "buffer" else "update"


def _of_loss(step: int, value: float) -> FirstNonFinite:
    kind = "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    message = f"first non-finite value, step {step}, loss: {kind}; every recorded tensor of the forward pass is finite"
    return FirstNonFinite(step=step, phase="loss", module=None, value=kind, message=message)


def any_nonfinite_gradient(drained: Drained) -> bool:
    """Whether a parameter gradient of this flush holds a NaN or an infinity."""
    return _any(drained, GRADIENTS)


def _any(drained: Drained, phases: Iterable[str]) -> bool:
    chosen = np.array([row.place.phase in phases for row in drained.rows], dtype=np.bool_)
    bad = drained.columns["nan"] + drained.columns["posinf"] + drained.columns["neginf"]
    return bool((np.asarray(bad)[chosen] > 0).any())
