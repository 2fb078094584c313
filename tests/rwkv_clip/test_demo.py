"""The demonstration run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from rwkv_clip import demo


@pytest.fixture
def calls(monkeypatch):
    """What the demonstration started: training flags and commands; both end with the status set here."""
    calls = {"train": [], "commands": [], "train status": 0, "show status": 0}

    def train(flags):
        calls["train"].append(list(flags))
        return calls["train status"]

    def run(command, **_):
        calls["commands"].append(command[1:])
        return subprocess.CompletedProcess(command, calls["show status"])

    monkeypatch.setattr("rwkv_clip.train.main", train)
    monkeypatch.setattr("subprocess.run", run)
    return calls


def test_it_trains_traced_and_shows_the_trace(calls, tmp_path, capsys):
    """It trains on the digits with a trace inside the output, passes other flags on, shows the trace, says what next."""
    assert demo.main(["--output", str(tmp_path / "new" / "run"), "--epochs", "1"]) == 0
    (flags,) = calls["train"]
    trace = tmp_path / "new" / "run" / "trace"
    assert flags[-6:] == ["--output", str(trace.parent), "--trace", str(trace), "--epochs", "1"]
    assert calls["commands"] == [["-m", "tracehooks", "show", str(trace)]]
    said = capsys.readouterr().out
    for verb in ("show", "first", "query"):  # the next commands are ones that exist
        assert f"tracehooks {verb} {trace}" in said
    assert (tmp_path / "new").is_dir()


def test_each_run_has_a_directory_of_its_own(calls, tmp_path, monkeypatch, capsys):
    """Without --output it makes a new directory under runs/, named after the time."""
    monkeypatch.chdir(tmp_path)
    assert demo.main([]) == 0
    output = Path(calls["train"][0][calls["train"][0].index("--output") + 1])
    assert output.parent == Path("runs")
    assert output.name.startswith("demo-2")
    assert Path("runs").is_dir()


@pytest.mark.parametrize(("train", "show", "status"), [(2, 0, 2), (0, 1, 0), (0, 2, 2)])
def test_it_ends_with_the_status_of_what_failed(calls, tmp_path, capsys, train, show, status):
    """A failed training or showing is the status; a trace with findings is none."""
    calls["train status"], calls["show status"] = train, show
    assert demo.main(["--output", str(tmp_path / "run")]) == status
    assert len(calls["commands"]) == (0 if train else 1)
