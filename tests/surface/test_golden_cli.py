"""Golden batches from the shell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from tracehooks import golden
from tracehooks.surface.cli import main

CODE = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    {change}
    return model, lambda model, batch: model(batch["x"]).square().mean()
"""


def call(*arguments: object) -> Result:
    """The command line, in this process."""
    return CliRunner().invoke(main, ["golden", *map(str, arguments)], prog_name="tracehooks")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A golden batch and the code of a model."""
    golden.save(tmp_path / "g", {"x": torch.ones(3, 4)})
    (tmp_path / "model.py").write_text(CODE.format(change=""))
    return tmp_path


def test_record_and_check(folder: Path) -> None:
    """Status 0 where the code does the same, 1 where it differs, with the culprit, 125 where it does not run."""
    target = f"{folder / 'model.py'}:build"
    assert call("record", folder / "g", target).exit_code == 0
    assert call("check", folder / "g", target).exit_code == 0
    (folder / "model.py").write_text(CODE.format(change="model[0].bias.data.add_(1)"))
    changed = call("check", folder / "g", target)
    assert changed.exit_code == 1
    assert "cause: parameter: step 0: 0 bias (parameter)" in changed.stdout
    assert json.loads(call("check", folder / "g", target, "--json").stdout)["culprits"][0]["module"] == "0"
    (folder / "model.py").write_text("import nowhere")
    assert call("check", folder / "g", target).exit_code == 125
    assert call("record", folder / "g", target, "--out", folder / "r").exit_code == 125


def test_check_a_checkpoint(folder: Path) -> None:
    """--checkpoint loads weights of any format into the model first; --against names another run."""
    target = f"{folder / 'model.py'}:build"
    torch.manual_seed(5)
    weights = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).state_dict()
    torch.save({"model": weights}, folder / "w.pt")
    recorded = call("record", folder / "g", target, "--checkpoint", folder / "w.pt", "--out", folder / "r", "--json")
    assert json.loads(recorded.stdout) == {"run": str(folder / "r")}
    against = ("check", folder / "g", target, "--against", folder / "r")
    assert call(*against, "--checkpoint", folder / "w.pt").exit_code == 0
    assert call(*against).exit_code == 1


def test_errors(folder: Path) -> None:
    """A target that is none, a batch that is none, a checkpoint without the weights: status 2, one line. A target that is
    not there: the same with status 125, as a commit without it must not be called a bad one."""
    target = f"{folder / 'model.py'}:build"
    torch.save({"other": torch.ones(2)}, folder / "w.pt")
    for arguments in (
        ("check", folder / "g", "model"),
        ("check", folder / "none", target),
        ("check", folder / "g", target),
        ("record", folder / "g", target, "--checkpoint", folder / "w.pt"),
        ("check", folder / "g", f"{folder / 'none.py'}:build"),
        ("check", folder / "g", f"{folder / 'model.py'}:nope"),
        ("record", folder / "g", f"{folder / 'model.py'}:torch"),
    ):
        done = call(*arguments)
        not_there = arguments[2] not in (target, "model")
        assert (done.exit_code, done.stdout) == (125 if not_there else 2, "")
        assert done.stderr.startswith("tracehooks: ")
        assert done.stderr.count("\n") == 1
