"""Diagnosing a run while it trains."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tracehooks
from tests.rules.broken_gradients import never_cleared
from tests.rules.healthy_models import classified
from tracehooks.core.records import Batch
from tracehooks.surface import live, offline
from tracehooks.testing import MemorySink


def said_of(case: Any, path: Path, capsys: pytest.CaptureFixture[str], **options: Any) -> list[str]:
    """What is printed while a case trains. Each look is waited for between two steps, which is a stall by rights: that
    finding, two lines, is left out."""
    with tracehooks.attach(case.model, path, **options) as trace:
        for number in range(case.steps):
            case.step(number)
            case.after(number, trace)
            for thread in threading.enumerate():
                if thread.name == "tracehooks diagnosis":
                    thread.join()
    lines = [line for line in capsys.readouterr().err.splitlines() if "recording" not in line]
    return [line for line in lines if ": stall" not in line and "time the loader alone" not in line]


def test_a_finding_is_said_once_while_the_run_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is printed at the first look that sees it, with the next check, and at no later one nor at the end."""
    case = never_cleared()
    case.steps = 20
    lines = said_of(case, tmp_path / "run", capsys, diagnose_every=1, budget=0.999)
    assert len(lines) == 2
    assert lines[0].startswith("tracehooks: error: grads_not_zeroed, step 1: gradients are not cleared: in ")
    assert lines[1].startswith("tracehooks:   next: call optimizer.zero_grad()")
    assert "19 of 19" not in lines[0]


def test_a_healthy_run_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Looked at after every step, it gives no alarm on its way."""
    assert said_of(classified(), tmp_path / "run", capsys, diagnose_every=1, budget=0.9) == []


def test_looks_keep_to_their_share_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a look that took a second there is none before nineteen more have passed, then there is one every so many
    steps."""
    now, looks = [100.0], []

    def diagnose(path: Path) -> list[Any]:
        looks.append(now[0])
        now[0] += 1.0
        return []

    monkeypatch.setattr(live.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(offline, "diagnose", diagnose)
    monkeypatch.setattr(live.threading.Thread, "start", lambda thread: thread.run())
    monkeypatch.setattr(live.threading.Thread, "is_alive", lambda thread: False)
    monkeypatch.setattr(live.threading.Thread, "join", lambda thread: None)
    kept = MemorySink()
    kept.path = tmp_path
    diagnosing = live.DiagnosingSink(kept, 10, None, print)
    for step in range(200):
        now[0] += 0.5
        diagnosing.write([Batch("scalars", {"step": [step], "name": ["loss"], "value": [1.0]})])
    assert looks[0] == 100.0 + 0.5 * 11
    gaps = [after - before for before, after in itertools.pairwise(looks)]
    assert gaps
    assert min(gaps) >= 20.0


def test_an_error_of_the_diagnosis_is_said_once_and_training_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a look raises, the run is trained, recorded and closed."""

    def fails(path: Path) -> list[Any]:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(offline, "diagnose", fails)
    lines = said_of(never_cleared(), tmp_path / "run", capsys, diagnose_every=1, budget=0.9)
    text = "tracehooks: diagnosing the run failed (ZeroDivisionError: planted); training goes on, this is said once"
    assert lines == [text]
    run = tracehooks.open(tmp_path / "run")
    assert run.status == "closed"
    assert len(run.steps) == 8


def test_looking_changes_nothing(tmp_path: Path) -> None:
    """Weights and random state after training are bit for bit those of a run that is not diagnosed."""

    def trained(**options: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(model.parameters())
        with tracehooks.attach(model, tmp_path / str(len(options)), quiet=True, **options):
            for _ in range(12):
                optimizer.zero_grad()
                model(torch.randn(4, 6)).square().mean().backward()
                optimizer.step()
        return [p.detach().clone() for p in model.parameters()], torch.get_rng_state()

    (weights, state), (bare, untouched) = trained(diagnose_every=1, budget=0.9), trained()
    assert all(torch.equal(a, b) for a, b in zip(weights, bare, strict=True))
    assert torch.equal(state, untouched)


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "often"])
def test_a_number_of_steps_is_wanted(value: object, tmp_path: Path) -> None:
    """Anything but a whole number from 1 is refused before anything is created."""
    with pytest.raises(tracehooks.TracehooksError, match="diagnose_every"):
        tracehooks.attach(nn.Linear(2, 2), tmp_path / "run", diagnose_every=value)
    assert not (tmp_path / "run").exists()
