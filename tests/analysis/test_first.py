"""The first non-finite value of a recorded run."""

from __future__ import annotations

from typing import Any

import pytest

from tracehooks.analysis.first import first
from tracehooks.core.records import FirstNonFinite
from tracehooks.testing import TraceBuilder


def test_all_finite() -> None:
    """None where every row is finite, also where there are no rows."""
    assert first(TraceBuilder().tensor("m").run()) is None
    assert first(TraceBuilder().run()) is None


def test_event_wins_over_rows() -> None:
    """What was located live is the answer, with everything known about it."""
    located = FirstNonFinite(
        4, "loss", None, "inf", "loss is inf", op="aten.log.default", params=("a", "b"), inputs=({"nan": 1},)
    )
    run = TraceBuilder().tensor("m", nan=1).step(4).event("nonfinite", details=located.to_details()).run()
    assert first(run) == located


def test_unreadable_event_leaves_the_rows() -> None:
    """A nonfinite event whose details are damaged is passed over."""
    run = TraceBuilder().event("nonfinite", details={}).tensor("m", nan=1).run()
    found = first(run)
    assert found is not None
    assert found.module == "m"


def test_earliest_in_execution_order() -> None:
    """The lowest step, then the lowest seq, wherever the row stands in the file."""
    run = (
        TraceBuilder()
        .step(2)
        .tensor("late", nan=1)
        .step(1)
        .tensor("second", seq=9, nan=1)
        .tensor("first", seq=3, posinf=2)
        .run()
    )
    found = first(run)
    assert found is not None
    assert (found.step, found.module, found.value) == (1, "first", "inf")
    assert found.message == "step 1: inf in first output (forward): 2 posinf of 4 elements, float32[4]"


@pytest.mark.parametrize(
    ("row", "step", "expected"),
    [
        ({"phase": "input", "slot": "input.x", "nan": 1}, 0, ("data", ())),
        ({"phase": "probe", "nan": 1}, 0, ("forward", ())),
        ({"phase": "backward", "neginf": 1}, 0, ("backward", ())),
        ({"phase": "gradient", "slot": "weight", "posinf": 1}, 0, ("backward", ("m.weight",))),
        ({"phase": "update", "slot": "weight", "nan": 1}, 0, ("update", ("m.weight",))),
        ({"phase": "parameter", "slot": "weight", "neginf": 1}, 0, ("param", ("m.weight",))),
        ({"phase": "parameter", "slot": "weight", "nan": 1}, 2, ("update", ("m.weight",))),
        ({"phase": "buffer", "slot": "running_var", "nan": 1}, 0, ("buffer", ())),
    ],
)
def test_phases(row: dict[str, Any], step: int, expected: tuple[str, tuple[str, ...]]) -> None:
    """A row's phase says where in the step it happened; a parameter's says when it was so."""
    found = first(TraceBuilder().step(step).tensor("m", **row).run())
    assert found is not None
    assert (found.phase, found.params) == expected
    assert found.buffer == ("running_var" if row["phase"] == "buffer" else None)


@pytest.mark.parametrize("phase", ["forward", "input", "buffer", "probe"])
def test_minus_infinity_alone_is_a_mask(phase: str) -> None:
    """−inf without NaN in data, outputs and buffers is no finding."""
    assert first(TraceBuilder().tensor("m", phase=phase, neginf=3).run()) is None
    assert first(TraceBuilder().tensor("m", phase=phase, neginf=3, nan=1).run()) is not None


def test_bad_parameter_comes_before_what_it_made() -> None:
    """A parameter that was not finite when the step began is found before the outputs that it spoilt."""
    run = TraceBuilder().tensor("m", nan=4).tensor("m", "weight", "parameter", posinf=1).run()
    found = first(run)
    assert found is not None
    assert (found.phase, found.params) == ("param", ("m.weight",))
