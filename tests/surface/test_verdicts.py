"""What the command line concludes from real recordings: healthy, damaged, permuted."""

from __future__ import annotations

from pathlib import Path

import torch
from click.testing import CliRunner, Result
from torch import nn

import tracehooks
from tracehooks.surface.cli import main


def tracehooks_says(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="tracehooks")


def recorded(path: Path, order: list[int] | None = None) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(6, 3)
    with tracehooks.attach(model, path, quiet=True):
        for _ in range(3):
            model(x[order] if order else x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


def truncated(path: Path) -> Path:
    (part,) = (path / "tensors").rglob("*.parquet")
    part.write_bytes(part.read_bytes()[:-200])
    return path


def test_a_live_verdict_is_not_overruled(tmp_path: Path) -> None:
    """What the recorder looked into and found harmless (an infinite fill, an unused output) is no finding offline either."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.register_buffer("best", torch.tensor(torch.inf))

        def forward(self, x):
            y = self.layer(x)
            return y, (y.detach() * 0) / 0

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tracehooks.attach(model, tmp_path / "run", quiet=True) as trace:
        for _ in range(2):
            model(torch.ones(2, 3))[0].sum().backward()
            optimizer.step()
    assert trace.first_nonfinite is None
    said = tracehooks_says("first", tmp_path / "run")
    assert (said.exit_code, said.stderr) == (0, "")


def test_a_permuted_batch_differs_at_its_input(tmp_path: Path) -> None:
    """The same samples in another order have equal statistics; without sketches, too, the input is where they part."""
    a, b = recorded(tmp_path / "a"), recorded(tmp_path / "b", [3, 1, 2, 0, 5, 4])
    found = tracehooks.diff(a, b)
    assert not found.within_tolerance
    assert (found.first.phase, found.first.module) == ("input", "")
    assert tracehooks.diff(a, recorded(tmp_path / "c")).identical


def test_a_damaged_run_is_no_clean_bill(tmp_path: Path) -> None:
    """Where part of a run cannot be read, neither first nor diff ends with status 0; the part is named."""
    run = truncated(recorded(tmp_path / "run"))
    said = tracehooks_says("first", run)
    assert said.exit_code == 2
    assert "every value that can be read is finite" in said.stdout
    assert "part-00000.parquet" in said.stderr
    said = tracehooks_says("diff", run, run)
    assert said.exit_code == 2
    assert "part of a run cannot be read" in said.stderr
    assert "Traceback" not in said.stderr
