"""What the tests of training share: runs built from flags in this process, without a command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rwkv_clip.data.loading import load_steps
from rwkv_clip.train import train_step
from rwkv_clip.training.distributed import Place
from rwkv_clip.training.flags import parse_args
from rwkv_clip.training.run import Run, build

CPU = Place(torch.device("cpu"))

pytest.register_assert_rewrite(*(f"{__package__}.flags_of_{matter}" for matter in ("data", "models", "runs")))


@pytest.fixture
def build_run(tmp_path: Path, small_flags: list[str]) -> Callable[..., Run]:
    """Build a small run from further flags."""
    return lambda *flags: build(parse_args([*small_flags, "--output", str(tmp_path), *flags]), CPU)


@pytest.fixture
def train_steps() -> Callable[..., list[object]]:
    """Make a run's next steps, in its own order of pairs; returns their outcomes."""

    def train(run: Run, steps: int = 1) -> list[object]:
        run.model.train()
        batches = load_steps(run.pairs, run.plan, run.position.epoch, start=run.position.step)
        return [train_step(run, next(batches)) for _ in range(steps)]

    return train
