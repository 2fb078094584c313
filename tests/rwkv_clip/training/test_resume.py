"""Stopping at any moment and going on: the resumed run is the one that was never stopped, bit for bit."""

from __future__ import annotations

import argparse
import os
import random
import re
import shlex
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from rwkv_clip import train
from rwkv_clip.checkpoint import checkpoint_path, write_atomically
from rwkv_clip.training import resume
from rwkv_clip.training.distributed import Place
from rwkv_clip.training.randomness import generator_states, restore_generators, seed_everything
from rwkv_clip.training.resume import find_checkpoint
from tests import launching

# Dropout and DropPath draw from the generators, fp16 skips steps and scales, so that all of the state matters.
WHOLE_STATE = shlex.split(
    "--epochs 2 --batch-size 6 --image-depth 2 --dropout 0.2 --drop-path-rate 0.3 --precision fp16 --init-scale 131072 "
    "--growth-interval 2 --save-every 3 --frequent 1 --stall-timeout 60"
)
LAST = ("RWKV_CLIP_model_1.pt", "training_state_1.pt")


@pytest.fixture
def flags(small_flags):
    return [*small_flags, *WHOLE_STATE]


def same_file_contents(a: Path, b: Path) -> bool:
    """Whether two checkpoint files hold the same values bit for bit."""
    return identical(torch.load(a, weights_only=True), torch.load(b, weights_only=True))


def identical(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(identical(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return isinstance(b, list | tuple) and len(a) == len(b) and all(map(identical, a, b))
    return a == b


def assert_same_end(seen: Path, expected: Path) -> None:
    """Weights, optimiser, scaler, generators of all ranks, position: everything the last checkpoint holds is equal."""
    assert (seen / "latest").read_text() == (expected / "latest").read_text() == "training_state_1.pt\n"
    for name in LAST:
        assert same_file_contents(seen / name, expected / name), name
    state = torch.load(expected / LAST[1], weights_only=True)
    assert 0 < state["skipped"] < 8, "the run shows nothing of the scaler's state"
    assert state["optimizer"]


def steps_shown(output: Path) -> int:
    """How many steps the log tells of, all attempts together."""
    log = output / "training.log"
    return log.read_text().count(" step:") if log.exists() else 0


def kill_once(flags: list[str], output: Path, ranks: int, rng: random.Random, *, within: int) -> None:
    """Start the run, resuming, and kill all its processes at a random moment, ``within`` so many of its steps."""
    steps, delay = rng.randint(1, within), rng.uniform(0, 0.1)
    aim = steps_shown(output) + steps
    with launching.running(
        train.main, [*flags, "--resume", "latest"], ranks=ranks, log=output.with_suffix(".killed")
    ) as all_:
        while steps_shown(output) < aim and all(process.is_alive() for process in all_):
            time.sleep(0.005)
        time.sleep(delay)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_run_goes_on_as_if_nothing_had_been(tmp_path, flags, ranks):
    """Killed by SIGKILL at a random moment and resumed, one process or two end bit for bit as a run left alone."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    launching.run(train.main, [*flags, "--output", str(whole)], ranks=ranks, log=tmp_path / "whole.log")
    flags = [*flags, "--output", str(killed)]
    kill_once(flags, killed, ranks, random.Random(), within=6)
    assert not (killed / LAST[1]).exists(), "the kill came too late to test anything"
    launching.run(train.main, [*flags, "--resume", "latest"], ranks=ranks, log=tmp_path / "end.log")
    assert_same_end(killed, whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "more"), [(1, ""), (2, ""), (2, "--fsdp"), (2, "--gradient-acc 2 --batch-size 3 --workers 1")]
)
def test_killed_at_many_moments(tmp_path, flags, ranks, more):
    """Six kills in one run, in each of four runs, change no bit; sharded, in micro-batches and with workers too."""
    flags = [*flags, *more.split()]
    whole = tmp_path / "whole"
    launching.run(train.main, [*flags, "--output", str(whole)], ranks=ranks, log=tmp_path / "whole.log", timeout=300)
    for number in range(4):
        killed = tmp_path / f"killed-{number}"
        command = [*flags, "--output", str(killed)]
        for attempt in range(6):
            kill_once(command, killed, ranks, random.Random(f"{ranks} {more} {number} {attempt}"), within=5)
        launching.run(train.main, [*command, "--resume", "latest"], ranks=ranks, log=tmp_path / "end.log", timeout=300)
        assert_same_end(killed, whole)


def killed_writing(folder: str, at: str) -> None:
    """Write a file over an older one and die by SIGKILL at a certain call."""
    owner, name = {"writing": (os, "fsync"), "renaming": (Path, "replace")}[at]
    setattr(owner, name, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    write_atomically(Path(folder) / "file", lambda file: file.write(b"new"))


@pytest.mark.parametrize("at", ["writing", "renaming"])
def test_a_write_that_is_killed_leaves_the_old_file(tmp_path, at):
    """Killed while it writes or before it renames, the file is the old one; what is left over is cleared away."""
    (tmp_path / "file").write_bytes(b"old")
    with launching.running(killed_writing, str(tmp_path), at, log=tmp_path / "log") as (process,):
        process.join(60)
        assert process.exitcode == -9
    assert (tmp_path / "file").read_bytes() == b"old"
    assert len(list(tmp_path.glob(".*.part"))) == 1
    resume.clear_half_written(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "log.0"]


class PowerCutError(Exception):
    """The process dies here."""


@pytest.mark.parametrize("last", range(6))
def test_latest_is_whole_after_a_death_between_any_two_writes(tmp_path, small_flags, monkeypatch, last):
    """Whichever of a checkpoint's writes is the last, ``latest`` leads to a checkpoint whose two files fit."""
    written = []

    def counted(path, write):
        if len(written) == last:
            raise PowerCutError
        written.append(path)
        write_atomically(path, write)

    monkeypatch.setattr("rwkv_clip.checkpoint.write_atomically", counted)
    monkeypatch.setattr(resume, "write_atomically", counted)
    with pytest.raises(PowerCutError):
        train.main([*small_flags, "--save-every", "2", "--output", str(tmp_path / "run")])
    found = find_checkpoint("latest", tmp_path / "run")
    expected = [None, "RWKV_CLIP_model_step2.pt"][last // 3]
    assert (found and found.model.name) == expected


def test_all_generators_are_restored():
    """Python's, NumPy's and torch's numbers after a restore are those after the states were taken."""

    def numbers():
        return random.random(), np.random.normal(), float(torch.rand(())), float(torch.randn(()))

    seed_everything(3)
    np.random.normal()  # the second of a pair is kept for the next call: part of the state
    states = generator_states()
    expected = numbers()
    assert numbers() != expected
    restore_generators(states)
    assert numbers() == expected


def test_ranks_draw_other_numbers():
    """The same seed gives every rank numbers of its own, the same each time."""

    def numbers(rank):
        seed_everything(3, rank)
        return random.random(), np.random.normal(), float(torch.rand(()))

    assert len({numbers(rank) for rank in range(4)}) == 4
    assert numbers(1) == numbers(1)


@pytest.fixture
def finished(tmp_path, small_flags, capsys):
    """A run of two epochs of three steps; returns its flags and directory."""
    output = tmp_path / "run"
    assert train.main([*small_flags, "--output", str(output)]) == 0
    capsys.readouterr()
    return small_flags, output


def test_a_run_is_not_written_over(finished, capsys):
    """Without --resume a directory with checkpoints is refused, and nothing in it changes."""
    flags, output = finished
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*.pt")}
    assert train.main([*flags, "--output", str(output)]) == 2
    assert f"--output {output} holds the checkpoints of a run: --resume latest goes on" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*.pt")} == before


@pytest.mark.parametrize("which", ["0", "RWKV_CLIP_model_0.pt", "training_state_0.pt"])
def test_a_checkpoint_is_named_by_epoch_or_path(finished, which, capsys, tmp_path):
    """--resume takes an epoch, or the path of either file; epoch 1 comes out as it did in the whole run."""
    flags, output = finished
    expected = torch.load(output / "RWKV_CLIP_model_1.pt")
    target = which if which.isdigit() else str(output / which)
    where = output if which.isdigit() else tmp_path / "other"
    assert train.main([*flags, "--output", str(where), "--resume", target]) == 0
    assert "epoch 1, step 3" in capsys.readouterr().out
    assert identical(torch.load(where / "RWKV_CLIP_model_1.pt"), expected)


def test_another_runs_directory_stands_for_its_latest(finished, tmp_path, capsys):
    """--resume DIR goes on from the latest checkpoint of that run, in a directory of its own."""
    flags, output = finished
    assert train.main([*flags, "--epochs", "3", "--output", str(tmp_path / "on"), "--resume", str(output)]) == 0
    assert "epoch 2, step 6" in capsys.readouterr().out


def test_after_going_back_latest_is_the_new_runs(finished, capsys):
    """Resumed from an earlier epoch, the directory's latest is the new run's, not a later one of the run given up."""
    flags, output = finished
    assert train.main([*flags, "--output", str(output), "--epochs", "1", "--resume", "0"]) == 0
    assert train.main([*flags, "--output", str(output), "--epochs", "2", "--resume", "0", "--lr", "1e-4"]) == 0
    assert (output / "latest").read_text() == "training_state_1.pt\n"
    assert find_checkpoint("latest", output).state["settings"]["lr"] == 1e-4


def test_changed_flags_win_and_are_said(finished, capsys, monkeypatch):
    """A rate, a decay and a precision given with --resume hold from there on, and the differences are listed."""
    flags, output = finished
    groups = []
    step = train.train_step
    monkeypatch.setattr(
        train,
        "train_step",
        lambda run, batches: (step(run, batches), groups.append(run.updater.optimizer.param_groups))[0],
    )
    changed = ["--lr", "0.5", "--weight-decay", "0.3", "--beta2", "0.9", "--precision", "fp16", "--epochs", "3"]
    assert train.main([*flags, "--output", str(output), "--resume", "1", *changed]) == 0
    assert "settings differ: " in (said := capsys.readouterr().out)
    for difference in ("lr 0.002 -> 0.5", "weight_decay 0.05 -> 0.3", "precision fp32 -> fp16", "epochs 2 -> 3"):
        assert difference in said
    last = groups[-1]
    assert [group["weight_decay"] for group in last] == [0.3, 0.0]
    assert {group["betas"] for group in last} == {(0.9, 0.9)}
    assert last[0]["lr"] == pytest.approx(0.5 / 25e4)


def test_a_run_that_is_done_says_so(finished, capsys):
    """Resumed at its end, a run trains nothing, says so, and tells of no loss; gone on with, it counts its own steps."""
    flags, output = finished
    assert train.main([*flags, "--output", str(output), "--resume", "latest"]) == 0
    said = capsys.readouterr().out
    assert "all 2 epochs were done before" in said
    assert "nats" not in said
    assert train.main([*flags, "--output", str(output), "--resume", "latest", "--epochs", "3"]) == 0
    assert "trained 3 steps in " in capsys.readouterr().out


def test_another_batch_size_goes_on_at_the_same_place():
    """The place in an epoch is kept in pairs: 6 steps of 8 are 3 of 16."""
    state = {"epoch": 2, "step": 6, "pairs_a_step": 8, "skipped": 1}
    position = resume.Checkpoint(Path("x"), state).position(16)
    assert (position.epoch, position.step, position.skipped) == (2, 3, 1)


def test_nothing_to_resume_starts_anew(tmp_path, small_flags, capsys):
    """--resume latest without a checkpoint starts anew and says so, so that one command can always be repeated."""
    assert train.main([*small_flags, "--epochs", "1", "--output", str(tmp_path / "run"), "--resume", "latest"]) == 0
    assert "no checkpoint in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("which", "damage", "message"),
    [
        ("7", None, r"no training state .*training_state_7\.pt; there are: 0, 1"),
        ("best.pt", None, "--resume best.pt: expected latest, an epoch, a run's directory, or a file RWKV_CLIP_model_"),
        (".", None, "--resume .: the directory holds no checkpoint"),
        ("1", "cut", r"RWKV_CLIP_model_1\.pt is not what training_state_1\.pt was saved with"),
        ("1", "cut state", r"training_state_1\.pt cannot be read, it may be cut short"),
        ("1", "no model", r"training_state_1\.pt belongs to RWKV_CLIP_model_1\.pt, which is not beside it"),
        ("1", "no state", r"RWKV_CLIP_model_1\.pt alone is not enough to go on; --model-weight-path starts anew"),
        ("1", "other depth", r"depth: the checkpoint has 1 image_model\.layers, the model 2 \(--image-depth\)"),
    ],
)
def test_what_cannot_be_resumed_is_explained(finished, capsys, monkeypatch, tmp_path, which, damage, message):
    """A checkpoint that is missing, damaged, incomplete or of another model ends with status 2 and says which and why."""
    flags, output = finished
    monkeypatch.chdir(tmp_path)
    model, state = checkpoint_path(output, 1), output / "training_state_1.pt"
    match damage:
        case "cut":
            model.write_bytes(model.read_bytes()[:-100])
        case "cut state":
            state.write_bytes(state.read_bytes()[:-100])
        case "no model":
            model.unlink()
        case "no state":
            state.unlink()
        case "other depth":
            flags = [*flags, "--image-depth", "2"]
    assert train.main([*flags, "--output", str(output), "--resume", which]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_old_checkpoints_go(tmp_path, small_flags, capsys):
    """--keep-last keeps that many epochs; of checkpoints within epochs only the newest is kept, until the epoch's end."""
    output = tmp_path / "run"
    seen = []
    save = resume.save

    def watched(run, position):
        path = save(run, position)
        seen.append(sorted(p.stem.removeprefix("training_state_") for p in output.glob("training_state_*.pt")))
        return path

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "save", watched)
        flags = ["--epochs", "3", "--save-every", "1", "--keep-last", "1"]
        assert train.main([*small_flags, "--output", str(output), *flags]) == 0
    assert seen == [
        ["step1"],
        ["step2"],
        ["0"],
        ["0", "step4"],
        ["0", "step5"],
        ["1"],
        ["1", "step7"],
        ["1", "step8"],
        ["2"],
    ]


def test_a_state_before_the_first_update_is_kept_as_it_is(tmp_path, small_flags, capsys):
    """When every step so far was skipped the optimiser has no state; saving must not make it step."""
    flags = [*small_flags, "--precision", "fp16", "--init-scale", "1e30", "--epochs", "1"]
    assert train.main([*flags, "--output", str(tmp_path / "run")]) == 0
    checkpoint = find_checkpoint("0", tmp_path / "run")
    assert checkpoint.state["optimizer"] == {}
    assert checkpoint.state["skipped"] == 3
    assert checkpoint.state["scaler"]["scale"] == pytest.approx(1e30 / 8)
    more = [*flags, "--epochs", "2", "--output", str(tmp_path / "run"), "--resume", "latest"]
    assert train.main(more) == 0


def test_settings_are_plain_values():
    """What a checkpoint keeps of the flags can be read without running code, and leaves out what has no effect."""
    args = argparse.Namespace(lr=0.1, caption_columns=("a",), output=Path("x"), workers=3)
    assert resume.settings(args, 2) == {"lr": 0.1, "caption_columns": ["a"], "processes": 2}
    assert Place(torch.device("cpu")).leads
