"""tracehooks verify-fix: the record, its files, and the exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.analysis.test_fixes import run
from tracehooks.surface.cli import main


def said(*arguments: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(main, ["verify-fix", *map(str, arguments)])
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Two failing runs, the same two with the fix, a healthy one without and with it."""
    failing = [run(tmp_path / f"failing{number}", fails=True) for number in range(2)]
    fixed = [run(tmp_path / f"fixed{number}", commit="b") for number in range(2)]
    return [*failing, *fixed, run(tmp_path / "control"), run(tmp_path / "control-fixed", commit="b")]


def test_a_fix_over_two_seeds(runs: list[Path], tmp_path: Path) -> None:
    """With another pair and a control every question is answered: status 0, the record printed and written."""
    pairs = (runs[0], runs[2], "--also", runs[1], runs[3], "--control", runs[4], runs[5])
    status, text, errors = said(*pairs, "--record", tmp_path / "record.txt")
    assert (status, errors) == (0, "")
    assert text.startswith("fix: passed\nyes: Did it fail without the fix? 2 of 2 runs; nonfinite: ")
    assert "\npair 2, after: " in text
    assert (tmp_path / "record.txt").read_text() == text
    status, text, _ = said(*pairs, "--record", tmp_path / "record.json", "--json")
    record = json.loads((tmp_path / "record.json").read_text())
    assert json.loads(text) == record
    assert record["passed"] is True
    assert [check["passed"] for check in record["checks"]] == [True] * 5
    assert record["evidence"]["control"][0]["after"]["git"] == {"commit": "b"}


def test_what_is_not_shown_is_status_1(runs: list[Path]) -> None:
    """One pair shows nothing about other seeds; a run that still fails is answered with NO."""
    status, text, _ = said(runs[0], runs[2])
    assert status == 1
    assert "not shown: Is the control unchanged? no control was given" in text
    status, text, _ = said(runs[0], runs[1])
    assert status == 1
    assert "NO: Is the failure gone with it? 1 of 1 runs fail: nonfinite: " in text


def test_errors_are_status_2(runs: list[Path], tmp_path: Path) -> None:
    """No run, or a record that cannot be written: one line on standard error."""
    status, text, errors = said(runs[0], tmp_path / "nothing")
    assert (status, text, errors.count("\n")) == (2, "", 1)
    status, text, errors = said(runs[0], runs[2], "--record", tmp_path / "no" / "record.txt")
    assert (status, text, errors.count("\n")) == (2, "", 1)
    assert "cannot be written" in errors
