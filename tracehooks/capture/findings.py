"""What the rows of one flush say at once: the first non-finite value, the gradient norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracehooks.capture.places import Head, Place
from tracehooks.capture.recorder import Drained
from tracehooks.capture.rows import Resolved
from tracehooks.capture.watch import Seen, l2_norm
from tracehooks.core.records import FirstNonFinite
from tracehooks.stats import NAN, NEGINF, POSINF

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
    rows = drained.rows
    for i in map(int, np.flatnonzero(_bad(rows, scaled))) if len(rows) else ():
        head = rows.heads[i]
        place, step = head.place, int(rows.steps[i])
        late = not (step == 0 and place.phase == "parameter")
        site = place.phase, place.module, place.slot, head.training
        found.append(((late, step, int(rows.seqs[i])), site, _of_row(rows, i)))
    for seen in drained.watched:
        if _watched_bad(seen, scaled):
            site = seen.place.phase, seen.place.module, seen.place.slot, seen.training
            found.append(((True, seen.step, seen.seq), site, _of_watched(seen)))
    for one, value in drained.scalars:
        if one.name in _OF_SCALARS and not math.isfinite(value):
            site, of = _OF_SCALARS[one.name]
            found.append(((True, one.step, one.seq), site, of(one.step, value)))
    yield from ((site, first) for _, site, first in sorted(found, key=lambda entry: entry[0]))


def in_evaluation(first: FirstNonFinite) -> FirstNonFinite:
    """The same, said to have been seen in a pass without gradients, where its phase does not say so."""
    if first.phase == "eval":
        return first
    head, _, rest = first.message.partition(f", {first.phase},")
    return replace(first, message=f"{head}, {first.phase} of evaluation,{rest}" if rest else first.message)


def root_outputs(drained: Drained, step: int) -> dict[tuple[int, str], bool]:
    """Of each output of the root in a step, by (micro, slot), whether it is not finite."""
    rows = drained.rows
    chosen = rows.heads.that(_of_root_output) & (rows.steps == step)
    bad = rows.nonfinite
    places = ((rows.heads[i].place, bool(bad[i])) for i in map(int, np.flatnonzero(chosen)))
    return drained.watched_outputs | {(place.micro, place.slot): found for place, found in places}


def skipped_steps(drained: Drained) -> list[int]:
    """Steps that a fused optimizer skipped because a GradScaler told it of non-finite gradients."""
    return [one.step for one, value in drained.scalars if one.name == "found_inf" and value > 0]


def gradient_norm(drained: Drained) -> float | None:
    """L2 norm over all parameter gradients of a flush; NaN or inf when one holds such; None when there is none."""
    rows, chosen = drained.rows, drained.rows.heads.those(of_gradient)
    if not len(chosen):
        return None
    names = "count", "nan", "posinf", "neginf", "rms"
    return l2_norm({name: rows.columns[name][chosen] for name in names}, not rows.nonfinite[chosen].any())


def of_gradient(head: Head) -> bool:
    """Whether its rows are gradients of parameters."""
    return head.place.phase in GRADIENTS


def _of_backward(head: Head) -> bool:
    return head.place.phase in ("backward", *GRADIENTS)


def _may_be_masked(head: Head) -> bool:
    return head.place.phase in MAY_BE_MASKED


def _of_root_output(head: Head) -> bool:
    return head.place[:2] == ("forward", "") and not head.place.recompute


def _watched_bad(seen: Seen, scaled: bool) -> bool:
    if scaled and seen.place.phase in ("backward", *GRADIENTS):
        return False
    return not (seen.kinds == NEGINF and seen.place.phase in MAY_BE_MASKED)


def _of_watched(seen: Seen) -> FirstNonFinite:
    value = "nan" if seen.kinds & NAN else "inf" if seen.kinds & POSINF else "-inf"
    return _of(seen.step, seen.place, seen.training, value, None)


def _bad(rows: Resolved, scaled: bool) -> NDArray[np.bool_]:
    columns = rows.columns
    alarming = (columns["nan"] > 0) | (columns["posinf"] > 0) | (columns["neginf"] > 0)
    if alarming.any():
        masked = (columns["nan"] == 0) & (columns["posinf"] == 0)
        alarming &= ~(masked & rows.heads.that(_may_be_masked))
    if scaled:
        alarming &= ~rows.heads.that(_of_backward)
    return np.asarray(alarming, dtype=np.bool_)


def _of_row(rows: Resolved, i: int) -> FirstNonFinite:
    head = rows.heads[i]
    names = ("count", "nan", "posinf", "neginf", "zeros", "min", "max", "mean", "std", "rms", "absmax")
    values = {name: rows.columns[name][i].item() for name in names}
    finite = {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in values.items()}
    statistics = {"slot": head.place.slot, "dtype": head.dtype, "shape": list(head.shape), **finite}
    value = "nan" if statistics["nan"] else "inf" if statistics["posinf"] else "-inf"
    return _of(int(rows.steps[i]), head.place, head.training, value, statistics)


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


def _of_average(step: int, distance: float) -> FirstNonFinite:
    kind = "nan" if math.isnan(distance) else "inf"
    message = f"first non-finite value, step {step}, update, the moving average of the model: {kind}"
    return FirstNonFinite(step=step, phase="update", module=None, value=kind, message=message)


_OF_SCALARS: dict[str, tuple[Site, Callable[[int, float], FirstNonFinite]]] = {
    "loss": (("loss", "", "", True), _of_loss),
    "ema/distance": (("ema", "", "", True), _of_average),
}


def any_nonfinite_gradient(drained: Drained) -> bool:
    """Whether a parameter gradient of this flush holds a NaN or an infinity."""
    seen = any(seen.place.phase in GRADIENTS for seen in drained.watched)
    return seen or bool(drained.rows.nonfinite[drained.rows.heads.those(of_gradient)].any())
