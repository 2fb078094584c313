"""The first non-finite value of a run: as it was located live, or as the recorded rows show it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pa_dataset

from tracehooks.core.records import FirstNonFinite, RunSource, Site

PHASE_OF: dict[str, str] = {
    "input": "data",
    "forward": "forward",
    "probe": "forward",
    "op": "forward",
    "backward": "backward",
    "gradient": "backward",
    "gradient_local": "backward",
    "update": "update",
    "optimizer": "update",
    "buffer": "buffer",
}
"""What the phase of a row says about the phase of a `FirstNonFinite`; a parameter's depends on the step."""

MINUS_INFINITY_MATTERS = ("backward", "gradient", "gradient_local", "parameter", "update", "optimizer")
"""Elsewhere −inf alone is usually a mask, log(0) of a log-probability or a pad value, and harmless."""

_SITE = ("step", "seq", "rank", "phase", "module", "slot", "call")
_SEEN = ("slot", "dtype", "shape", "count", "nan", "posinf", "neginf", "min", "max")


def first(run: RunSource) -> FirstNonFinite | None:
    """The run's ``nonfinite`` event where there is one, that of training before that of evaluation, else the first row, in
    execution order, that holds NaN or +inf (or −inf where it matters); None when all is finite. A parameter counts as of the
    beginning of its step: it was so before the forward pass used it.

    A recorder judges every step before it writes it, and knows more than the rows say (what damaged nothing, what a
    GradScaler did on purpose): rows are asked only where no recorder did, or where part of the run cannot be read."""
    found = _from_events(run)
    run.dataset("tensors")  # looks at the footers of its parts: what cannot be read is known from here on
    if found is None and (run.problems or not run.info.get("config", {}).get("on_nonfinite")):
        found = first_in_rows(run)
    return found


def _from_events(run: RunSource) -> FirstNonFinite | None:
    events = _scan(run, "events", ["step", "seq", "kind", "details"], pa_dataset.field("kind") == "nonfinite")
    of_evaluation = None
    for event in sorted(events.to_pylist(), key=lambda row: (row["step"], row["seq"])):
        details = _details(event["details"])
        if details is not None and not details.get("evaluation"):
            return FirstNonFinite.from_details(details)
        if details is not None and of_evaluation is None:
            of_evaluation = FirstNonFinite.from_details(details)
    return of_evaluation


def _details(text: str) -> Mapping[str, Any] | None:
    try:
        details = json.loads(text)
        FirstNonFinite.from_details(details)
    except (ValueError, TypeError, AttributeError):
        return None
    return dict(details)


def first_in_rows(run: RunSource) -> FirstNonFinite | None:
    """The first row that holds NaN or +inf (or −inf where it matters), whether or not it damaged anything."""
    nonfinite = (pa_dataset.field("nan") > 0) | (pa_dataset.field("posinf") > 0) | (pa_dataset.field("neginf") > 0)
    rows = _scan(run, "tensors", sorted({*_SITE, *_SEEN}), nonfinite)
    phase = rows["phase"].cast(pa.string())
    seen = (rows["nan"].to_numpy() > 0) | (rows["posinf"].to_numpy() > 0)
    seen |= pc.is_in(phase, value_set=pa.array(MINUS_INFINITY_MATTERS)).to_numpy()
    positions = np.flatnonzero(seen)
    if not len(positions):
        return None
    parameter = pc.equal(phase, "parameter").to_numpy()
    seq = np.where(parameter, -1, rows["seq"].to_numpy())
    order = np.lexsort((rows["rank"].to_numpy()[seen], seq[seen], rows["step"].to_numpy()[seen]))
    return _described(rows.slice(int(positions[order[0]]), 1).to_pylist()[0])


def _described(row: Mapping[str, Any]) -> FirstNonFinite:
    site = Site(row["module"], row["slot"], row["phase"], row["call"])
    phase, step, since = PHASE_OF.get(row["phase"], "forward"), row["step"], ""
    params: tuple[str, ...] = ()
    if row["phase"] in ("parameter", "gradient", "gradient_local", "update", "optimizer"):
        params = (f"{row['module']}.{row['slot']}".lstrip("."),)
    if row["phase"] == "parameter":
        phase = "update" if step else "param"
        since = " before the first step" if not step else " when the step began"
    value = "nan" if row["nan"] else "inf" if row["posinf"] else "-inf"
    counts = ", ".join(f"{row[name]} {name}" for name in ("nan", "posinf", "neginf") if row[name])
    message = (
        f"step {step}: {value} in {site}{since}: {counts} of {row['count']} elements, {row['dtype']}{row['shape']}"
    )
    return FirstNonFinite(
        step=step,
        phase=phase,
        module=row["module"],
        value=value,
        message=message,
        params=params,
        buffer=row["slot"] if row["phase"] == "buffer" else None,
        output={name: row[name] for name in _SEEN},
    )


def _scan(run: RunSource, table: str, columns: list[str], condition: pa_dataset.Expression) -> pa.Table:
    try:
        return run.dataset(table).to_table(columns=columns, filter=condition)
    except (OSError, pa.ArrowInvalid):
        run.verify(table)
        return run.dataset(table).to_table(columns=columns, filter=condition)
