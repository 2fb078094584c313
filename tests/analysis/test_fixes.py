"""A fix is judged by what failed, what did not, and how often."""

from __future__ import annotations

from pathlib import Path

import pytest

import tracehooks
from tracehooks.core.errors import InvalidOptionError
from tracehooks.core.records import Verdict
from tracehooks.testing import TraceBuilder

NAN = "step 3: nan in m output (forward): 1 nan of 4 elements, float32[4]"


def run(path: Path, *, steps: int = 4, fails: bool = False, mean: float = 1.0, commit: str = "a") -> Path:
    """A run whose last step may hold a NaN."""
    builder = TraceBuilder({"git": {"commit": commit}})
    for step in range(steps):
        builder.step(step).tensor("m", mean=mean, nan=int(fails and step == steps - 1))
    return builder.write(path)


def test_a_fix_that_holds(tmp_path: Path) -> None:
    """The failure is gone in every pair, the control is the same: passed, with both identities on record."""
    before = [run(tmp_path / f"before{n}", fails=True) for n in range(2)]
    after = [run(tmp_path / f"after{n}", mean=2.0, commit="b") for n in range(2)]
    control = (run(tmp_path / "control0"), run(tmp_path / "control1", commit="b"))
    found = tracehooks.verify_fix(before, after, control)
    assert found.passed
    assert str(found).splitlines()[:3] == [
        "fix: passed",
        f"yes: Did it fail without the fix? 2 of 2 runs; nonfinite: {NAN}",
        "yes: Is the failure gone with it? 2 of 2 runs are healthy",
    ]
    assert found.to_json()["evidence"]["pairs"][1]["after"]["git"] == {"commit": "b"}
    assert found.to_json()["evidence"]["pairs"][0]["before"]["failures"] == [f"nonfinite: {NAN}"]
    assert found.to_json()["passed"] is True
    identity = "01900000-0000-7000-8000-000000000000, 2026-01-01T00:00:00Z, commit"
    assert str(found).splitlines()[6:8] == [
        f"pair 1, before: {before[0]}, {identity} a, nonfinite: {NAN}",
        f"pair 1, after: {after[0]}, {identity} b",
    ]
    assert str(found).splitlines()[-1] == f"control 1, after: {control[1]}, {identity} b"


def test_a_fixed_run_that_cannot_be_read_whole(tmp_path: Path) -> None:
    """What cannot be read may hold the failure: whether it is gone is not shown."""
    failing, fine = run(tmp_path / "failing", fails=True), run(tmp_path / "fine")
    part = next((fine / "tensors").rglob("*.parquet"))
    part.write_bytes(part.read_bytes()[:-20])
    found = tracehooks.verify_fix(failing, fine)
    assert answers(found)[1] is None
    assert "part of it cannot be read: tensors" in str(found)


def answers(found: Verdict) -> list[bool | None]:
    """The answers, in the order of the questions."""
    return [check.passed for check in found.checks]


def test_what_a_fix_does_not_show(tmp_path: Path) -> None:
    """Still failing, never failing, a run that is too short, a changed control, one pair: each is told apart."""
    failing, fine = run(tmp_path / "failing", fails=True), run(tmp_path / "fine")
    short, other = run(tmp_path / "short", steps=2), run(tmp_path / "other", mean=3.0)
    again = run(tmp_path / "again", fails=True)
    assert answers(tracehooks.verify_fix(failing, fine)) == [True, True, True, None, None]
    assert answers(tracehooks.verify_fix(failing, again)) == [True, False, True, None, None]
    assert answers(tracehooks.verify_fix(fine, other)) == [False, True, True, None, None]
    assert answers(tracehooks.verify_fix(failing, short)) == [True, True, False, None, None]
    changed = tracehooks.verify_fix(failing, fine, [(fine, fine), (fine, other)])
    assert answers(changed) == [True, True, True, False, None]
    assert "1 of 2 differ: module: step 0: m output (forward)" in str(changed)
    assert answers(tracehooks.verify_fix([failing, again], [fine, again]))[-1] is False
    with pytest.raises(InvalidOptionError, match="as many as without the fix"):
        tracehooks.verify_fix([failing, failing], fine)
    with pytest.raises(InvalidOptionError, match="option control"):
        tracehooks.verify_fix(failing, fine, [fine])
