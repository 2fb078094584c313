"""Hypothesis strategies that several rooms' tests share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

from tracehooks.testing import MemoryRun, TraceBuilder

Row = dict[str, Any]

_FINITE = (
    st.none() | st.floats(-1e30, 1e30) | st.sampled_from([0.0, -0.0, 1.0, 1.0 + 2**-50, 1.0 + 1e-6, 1.5, math.inf])
)
_SKETCH = st.none() | st.lists(st.floats(-4, 4, width=32), min_size=16, max_size=16)

_TENSOR = st.fixed_dictionaries(
    {
        "module": st.sampled_from(["", "a", "a.b", "a.c", "d"]),
        "slot": st.sampled_from(["output", "weight"]),
        "phase": st.sampled_from(["input", "forward", "backward", "parameter", "buffer", "gradient", "update"]),
        "micro": st.integers(0, 1),
        "call": st.integers(0, 1),
        "recompute": st.booleans(),
        "dtype": st.sampled_from(["float32", "bfloat16", "int64"]),
        "shape": st.sampled_from([(), (4,), (2, 2), (4, 1), (1, 4)]),
        "nan": st.integers(0, 1),
        "neginf": st.integers(0, 1),
        "mean": _FINITE,
        "std": _FINITE,
        "min": _FINITE,
        "max": _FINITE,
        "rms": _FINITE,
        "absmax": _FINITE,
        "hash": st.none() | st.sampled_from([0, 1, 2**64 - 1]),
        "sketch": _SKETCH,
    }
)
_SCALAR = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["loss", "lr/0", "scale", "time/step"]),
        "value": st.floats() | st.sampled_from([0.1, 0.1 + 1e-9]),
    }
)
_STEP = st.fixed_dictionaries(
    {
        "tensors": st.lists(_TENSOR, max_size=6),
        "scalars": st.lists(_SCALAR, max_size=2, unique_by=lambda row: row["name"]),
        "rank": st.integers(0, 1),
    }
)

traces: st.SearchStrategy[dict[int, Row]] = st.dictionaries(st.integers(0, 4), _STEP, max_size=4)
"""What a run recorded, by step; `built` makes a run of it. Keys repeat now and then, which they should not."""


@st.composite
def edited(draw: st.DrawFn) -> tuple[dict[int, Row], dict[int, Row]]:
    """Two traces of which the second is the first with some rows changed, dropped or added."""
    before = draw(traces)
    after = {step: {**rows, "tensors": [dict(row) for row in rows["tensors"]]} for step, rows in before.items()}
    for rows in after.values():
        for row in rows["tensors"]:
            if draw(st.integers(0, 3)) == 0:
                other = draw(_TENSOR)
                name = draw(st.sampled_from(sorted(other)))
                row[name] = other[name]
        if rows["tensors"] and draw(st.integers(0, 4)) == 0:
            rows["tensors"].pop(draw(st.integers(0, len(rows["tensors"]) - 1)))
    if draw(st.booleans()):
        after |= draw(traces)
    return before, after


def built(trace: Mapping[int, Row], order: Sequence[int] | None = None) -> MemoryRun:
    """The trace as a run in memory; ``order`` permutes the order in which its rows are written."""
    rows: list[tuple[int, int, str, int, Row]] = []
    for step in sorted(trace):
        rows += [(trace[step]["rank"], step, "tensor", seq, row) for seq, row in enumerate(trace[step]["tensors"])]
        rows += [(trace[step]["rank"], step, "scalar", 0, row) for row in trace[step]["scalars"]]
    builder = TraceBuilder()
    for position in order if order is not None else range(len(rows)):
        rank, step, kind, seq, row = rows[position]
        builder.rank(rank).step(step)
        if kind == "tensor":
            builder.tensor(**{**row, "seq": seq})
        else:
            builder.scalar(**row)
    return builder.run()


def rows_in(trace: Mapping[int, Row]) -> int:
    """How many rows `built` writes."""
    return sum(len(rows["tensors"]) + len(rows["scalars"]) for rows in trace.values())
