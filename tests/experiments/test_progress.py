"""The bar shows on a terminal alone, and draws no random numbers from the run."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tracehooks.experiments.progress import progress


def drawn(capsys: pytest.CaptureFixture[str], quiet: bool = False) -> str:
    """What appears on the error stream."""
    with progress("sweep", 2, quiet) as done:
        done("half")
        done("whole")
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


def test_a_bar_on_a_terminal_alone(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Piped there is nothing, on a terminal the title, how many are done and what is said, unless nobody wants it."""
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert drawn(capsys) == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert drawn(capsys, quiet=True) == ""
    shown = drawn(capsys)
    assert "sweep" in shown
    assert "2/2" in shown
    assert "whole" in shown


def test_no_random_number_is_drawn() -> None:
    """Python's generator is where it was, also when the library that draws the bar is imported for it."""
    code = (
        "import random; from tracehooks.experiments.progress import progress\n"
        "before = random.getstate()\n"
        "with progress('sweep', 1) as done: done('')\n"
        "print(random.getstate() == before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
