"""docs/diff.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from tracehooks.analysis.beside import EVENTS
from tracehooks.analysis.compare import ESTIMATES, STATUSES
from tracehooks.analysis.culprits import CAUSES
from tracehooks.analysis.tolerance import DEPTH, EPSILON, SAFETY

TEXT = (Path(__file__).parents[2] / "docs" / "diff.md").read_text()


def test_every_status_is_documented() -> None:
    """The table of statuses names exactly those that rows have."""
    table = TEXT.split("## Status of a row")[1].split("\n## ")[0]
    named = [
        name for line in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", line)
    ]
    assert sorted(named) == sorted(STATUSES)


def test_constants_are_documented() -> None:
    """The formula of the tolerance has the code's numbers."""
    assert f"ε(dtype) · {SAFETY:.0f} · √(1 + depth / {DEPTH:.0f})" in TEXT
    for dtype in ("float64", "float32", "float16", "bfloat16"):
        assert f"{EPSILON[dtype]:.1e}".replace("e-0", "e-") in TEXT


def test_every_cause_column_and_event_is_documented() -> None:
    """Causes of culprits, columns from sketches and the events that are compared stand on the page."""
    causes = TEXT.split("## Culprits")[1].split("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", causes, re.MULTILINE)) == sorted(CAUSES)
    for name in (*ESTIMATES, *EVENTS):
        assert f"`{name}`" in TEXT
