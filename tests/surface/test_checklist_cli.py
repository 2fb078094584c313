"""``tracehooks diagnose RUN --symptom NAME``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import tracehooks
from tests.rules.broken_gradients import one_module_forgotten
from tests.rules.healthy_models import classified
from tracehooks.surface.cli import main


@pytest.fixture(scope="module")
def forgotten(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose optimizer lacks a module."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("cli") / "run"
    one_module_forgotten().record(path)
    return path


def asked(*arguments: str) -> tuple[int, str]:
    """Exit status and what is printed."""
    done = CliRunner().invoke(main, ["diagnose", *arguments])
    return done.exit_code, done.output


def test_the_checklist_is_told_in_order(forgotten: Path) -> None:
    """Counts, then what was found with its evidence, then what is not known, then what is ruled out and why; status 1."""
    status, text = asked(str(forgotten), "--symptom", "flat-loss")
    lines = text.splitlines()
    assert status == 1
    assert lines[0].startswith("flat-loss: the loss does not decrease; 17 causes, 1 found, ")
    assert lines[1:3] == ["found: parameters are frozen, or no optimizer holds them",
                          "  error: param_not_in_optimizer at between.weight, step 0"]  # fmt: skip
    assert "  zero_lr: the learning rate goes up to 0.01 and is zero in 0 of 8 steps" in lines
    assert "not known: the model lacks the capacity" in lines
    assert str(tracehooks.checklist(forgotten, "flat-loss")) + "\n" == text


def test_json_is_one_object(forgotten: Path) -> None:
    """Symptom, meaning and the items."""
    status, text = asked(str(forgotten), "--symptom", "flat-loss", "--json")
    told = json.loads(text)
    assert (status, told["symptom"], told["items"][0]["status"]) == (1, "flat-loss", "found")


def test_a_healthy_run_is_status_0(tmp_path: Path) -> None:
    """Nothing is found, and the checklist is told all the same."""
    classified().record(tmp_path / "run")
    status, text = asked(str(tmp_path / "run"), "--symptom", "nan")
    assert status == 0
    assert " 0 found" in text


def test_an_unknown_symptom_is_status_2(forgotten: Path) -> None:
    """One line that says what was meant."""
    status, _ = asked(str(forgotten), "--symptom", "flatloss")
    assert status == 2
