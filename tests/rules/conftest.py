"""Training a few lines of code under attach() and asking what is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tracehooks
from tracehooks.analysis.rules import judge
from tracehooks.core.records import Finding, RunSource

Diagnose = Callable[..., list[Finding]]


@pytest.fixture(autouse=True)
def _one_thread_and_seed() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def diagnosed(tmp_path: Path) -> Diagnose:
    """diagnosed(case): record the case and diagnose the run. No recorder error may have happened."""

    def run(case: Any) -> list[Finding]:
        path = tmp_path / "run"
        case.record(path)
        events = tracehooks.open(path).events(["message"], where="kind = 'recorder_error'")
        assert events["message"].to_pylist() == []
        _answers_are_whole(tracehooks.open(path))
        return tracehooks.diagnose(path)

    return run


def _answers_are_whole(run: RunSource) -> None:
    """What rules a rule out is a number, and evidence has the keys that the rule declares."""
    for judgement in judge(run):
        if judgement.status == "ruled out":
            assert re.search(r"\d", judgement.because), judgement
        for finding in judgement.findings:
            assert set(finding.evidence) <= set(judgement.rule.evidence), finding
