"""Training a few lines of code under attach() and asking what is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tracehooks
from tracehooks.analysis.rules import Judgement, judge, ranked
from tracehooks.core.records import Finding

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
    """diagnosed(case): record the case and diagnose the run. No recorder error may have happened, and what every rule
    answers is whole."""

    def run(case: Any) -> list[Finding]:
        path = tmp_path / "run"
        case.record(path)
        recorded = tracehooks.open(path)
        events = recorded.events(["kind", "message"]).to_pylist()
        assert [event["message"] for event in events if event["kind"] == "recorder_error"] == []
        judgements = judge(recorded)
        _answers_are_whole(judgements)
        return ranked(judgements)

    return run


def _answers_are_whole(judgements: list[Judgement]) -> None:
    """What rules a rule out is a number, and evidence has the keys that the rule declares."""
    for judgement in judgements:
        if judgement.status == "ruled out":
            assert re.search(r"\d", judgement.because), judgement
        for finding in judgement.findings:
            assert set(finding.evidence) <= set(judgement.rule.evidence), finding
