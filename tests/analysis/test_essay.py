"""A diff in words: where two runs part, why, and how far it reaches."""

from __future__ import annotations

from typing import Any

from tests.analysis.test_diff import training
from tracehooks.analysis.diff import diff
from tracehooks.testing import TraceBuilder


def test_nothing_recorded() -> None:
    """Two empty runs are identical, and the words say that there was nothing to compare."""
    found = diff(TraceBuilder().run(), TraceBuilder().run())
    assert found.identical
    assert str(found) == "a and b: nothing to compare, neither run has rows"


def test_essay() -> None:
    """The words name the first divergence with both numbers, the culprit, and how far the difference reached."""

    def change(step: int, site: str, columns: dict[str, Any]) -> None:
        if step == 1 and site in ("forward blocks.2.fc.output", "forward .output"):
            columns.update(hash=1, mean=2.5)

    told = str(diff(training().run(), training(change=change).run()))
    assert told.splitlines() == [
        "a and b differ",
        told.splitlines()[1],
        told.splitlines()[2],
        "2 of 11 sites differ, in 1 step; rows: 37 equal, 2 differs",
    ]
    assert told.splitlines()[1].startswith("first divergence: step 1: blocks.2.fc output (forward): float32[4]: ")
    assert "→ 2.5" in told.splitlines()[1]
    assert told.splitlines()[2].startswith("cause: module: step 1: blocks.2.fc output (forward)")


def test_scalars_are_no_sites() -> None:
    """They are counted by themselves, and where they alone differ no site is counted."""

    def run(loss: float, mean: float) -> TraceBuilder:
        return TraceBuilder().tensor("a", mean=mean).tensor("b", mean=1.0).scalar("loss", loss).scalar("lr/0", 0.1)

    both, alone = (diff(run(1.0, 1.0).run(), run(2.0, mean).run()) for mean in (3.0, 1.0))
    assert str(both).splitlines()[-1].startswith("1 of 2 sites and 1 of 2 scalars differ, in 1 step; ")
    assert str(alone).splitlines()[-1].startswith("1 of 2 scalars differ, in 1 step; ")
