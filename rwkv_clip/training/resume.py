"""Stopping and going on: what is kept beside the weights, so that a resumed run is the one that was never stopped.

A checkpoint is two files, ``RWKV_CLIP_model_<epoch>.pt`` and ``training_state_<epoch>.pt``; the second names the first
by its content. The file ``latest`` names the last one that is whole. All are written beside their place and renamed, in
this order, so that whenever the process dies ``latest`` leads to a whole checkpoint.
"""

from __future__ import annotations

import argparse
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rwkv_clip.checkpoint import checkpoint_path, read_file, save_atomically, write_atomically
from rwkv_clip.errors import InputError
from rwkv_clip.training.distributed import every_rank, full_model_state, full_optimizer_state, load_optimizer_state
from rwkv_clip.training.randomness import generator_states, restore_generators

if TYPE_CHECKING:
    from rwkv_clip.training.run import Run

__all__ = [
    "Checkpoint", "Position", "clear_half_written", "find_checkpoint", "holds_checkpoints", "restore", "save",
    "saved_settings",
]  # fmt: skip

FORMAT = 1
LATEST = "latest"
NAMES = re.compile(r"(?:RWKV_CLIP_model|training_state)_(\w+)\.pt")
# Flags that bear neither on the numbers nor on what they are computed from.
WITHOUT_EFFECT = frozenset(
    {
        "output", "model_weight_path", "frequent", "trace", "trace_every", "vocabulary", "workers", "on_broken",
        "val_data", "stall_timeout", "resume", "save_every", "keep_last",
    }
)  # fmt: skip
SCALER_FLAGS = ("precision", "init_scale", "growth_interval")


@dataclass(frozen=True, slots=True)
class Position:
    """How far a run has come."""

    epoch: int = 0  # the epoch to go on in
    step: int = 0  # optimiser steps done in it
    skipped: int = 0  # steps of the whole run that the scaler skipped


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was read: its model's file, verified, and the rest of its state."""

    model: Path
    state: dict[str, Any]

    def position(self, pairs_a_step: int) -> Position:
        """Where to go on, when a step now takes ``pairs_a_step`` pairs."""
        done = self.state["step"] * self.state["pairs_a_step"] // pairs_a_step
        return Position(self.state["epoch"], done, self.state["skipped"])


def settings(args: argparse.Namespace, world: int) -> dict[str, Any]:
    """Everything that bears on the numbers of a run, as plain values."""
    chosen = {name: value for name, value in vars(args).items() if name not in WITHOUT_EFFECT}
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in chosen.items()}
    return {**plain, "processes": world}


def _state_path(output: Path, label: int | str) -> Path:
    return output / f"training_state_{label}.pt"


def holds_checkpoints(output: Path) -> bool:
    """Whether an earlier run left a whole checkpoint in this directory."""
    return (output / LATEST).is_file()


def clear_half_written(output: Path) -> None:
    """Remove what a killed process left of files it was writing."""
    for part in output.glob(".*.part"):
        part.unlink()


def save(run: Run, position: Position) -> Path | None:
    """Write a checkpoint; every rank must call it. Return the model's path on the first rank, None on the others.

    At the end of an epoch it bears the epoch's number, and older epochs beyond ``--keep-last`` go. Within an epoch it
    bears the step's, and the one before it goes.
    """
    output = run.args.output
    weights = full_model_state(run.model)
    state = {
        "format": FORMAT,
        "optimizer": full_optimizer_state(run.model, run.updater.optimizer),
        "scaler": run.updater.scaler.state_dict(),
        "epoch": position.epoch,
        "step": position.step,
        "skipped": position.skipped,
        "pairs_a_step": run.plan.pairs_a_step,
        "random": every_rank(generator_states(), run.place),
        "settings": settings(run.args, run.place.world),
    }
    if not run.place.leads:
        return None
    label = f"step{position.epoch * run.plan.steps + position.step}" if position.step else position.epoch - 1
    model_path, state_path = checkpoint_path(output, label), _state_path(output, label)
    save_atomically(weights, model_path)
    save_atomically(state | {"model": _digest(model_path)}, state_path)
    write_atomically(output / LATEST, lambda file: file.write(f"{state_path.name}\n".encode()))
    _prune(output, label, run.args.keep_last)
    return model_path


def _prune(output: Path, newest: int | str, keep: int) -> None:
    """Remove the checkpoints that the newest one replaces; those of later epochs belong to a run given up."""
    for path in output.iterdir():
        found = NAMES.fullmatch(path.name)
        if found is None or found[1] == str(newest):
            continue
        old_epoch = isinstance(newest, int) and keep > 0 and found[1].isdigit() and int(found[1]) <= newest - keep
        if old_epoch or found[1].startswith("step"):
            path.unlink()


def find_checkpoint(which: str, output: Path) -> Checkpoint | None:
    """Read the checkpoint that ``--resume`` names; None for ``latest`` where there is none yet.

    Args:
        which: ``latest``, an epoch's number, or a path to either file of a checkpoint or to another run's directory,
            whose latest it is.
        output: the run's directory.

    Raises:
        InputError: when there is no such checkpoint, a file is damaged, or the two files are of different saves.
    """
    if which == LATEST:
        return _read(_latest(output)) if holds_checkpoints(output) else None
    if which.isdigit():
        return _read(_state_path(output, which))
    path = Path(which)
    if path.is_dir():
        if not holds_checkpoints(path):
            raise InputError(f"--resume {which}: the directory holds no checkpoint (no file {LATEST!r})")
        return _read(_latest(path))
    found = NAMES.fullmatch(path.name)
    if found is None:
        raise InputError(
            f"--resume {which}: expected latest, an epoch, a run's directory, or a file RWKV_CLIP_model_….pt or "
            "training_state_….pt"
        )
    return _read(_state_path(path.parent, found[1]))


def _latest(output: Path) -> Path:
    return output / (output / LATEST).read_text(encoding="utf-8").strip()


def _read(path: Path) -> Checkpoint:
    label = path.stem.removeprefix("training_state_")
    model = checkpoint_path(path.parent, label)
    if not path.is_file():
        others = sorted(p.stem.removeprefix("training_state_") for p in path.parent.glob("training_state_*.pt"))
        hint = f"there are: {', '.join(others)}" if others else "there is none"
        if model.is_file():
            hint = f"{model.name} alone is not enough to go on; --model-weight-path starts anew from its weights"
        raise InputError(f"no training state {path}; {hint}")
    state = read_file(path)
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise InputError(f"{path} is no training state of this version")
    if not model.is_file():
        raise InputError(f"{path} belongs to {model.name}, which is not beside it")
    if _digest(model) != state["model"]:
        raise InputError(f"{model} is not what {path.name} was saved with: it was changed, damaged or saved anew")
    return Checkpoint(model, state)


def saved_settings(model: Path) -> dict[str, Any] | None:
    """The settings that a model's file was saved with, from the training state beside it; None where there is none."""
    found = NAMES.fullmatch(model.name)
    path = None if found is None else _state_path(model.parent, found[1])
    if path is None or not path.is_file():
        return None
    settings: dict[str, Any] = read_file(path)["settings"]
    return settings


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def restore(checkpoint: Checkpoint, run: Run) -> list[str]:
    """Put optimiser, scaler and generators into the checkpoint's state; the weights are loaded before they are spread.

    Flags win over what was saved: a rate, a decay, a scale that was changed on the command line is the new one.
    Return how the settings differ from those it was saved with; each difference makes it another run from here on.
    """
    load_optimizer_state(run.model, run.updater.optimizer, checkpoint.state["optimizer"])
    now, then = settings(run.args, run.place.world), checkpoint.state["settings"]
    if checkpoint.state["scaler"] and all(now[name] == then[name] for name in SCALER_FLAGS):
        run.updater.scaler.load_state_dict(checkpoint.state["scaler"])
    generators = checkpoint.state["random"]
    if run.place.rank < len(generators):
        restore_generators(generators[run.place.rank])
    return [f"{name} {then.get(name)} -> {now[name]}" for name in now if now[name] != then.get(name)]
