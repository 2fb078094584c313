"""Noise of repeats: what it is at least, and that a version never differs from itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

import tracehooks
from tracehooks.analysis.noise import of_scalars, pooled

REPEATS = 6


def recorded(path: Path, seed: int, factor: float = 1.0) -> Path:
    """Two steps of training under dropout whose seed is another each time."""
    torch.manual_seed(0)
    layers = [module for _ in range(4) for module in (nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1))]
    model = nn.Sequential(*layers, nn.Linear(16, 3))
    data = torch.randn(2, 8, 16), torch.randint(3, (2, 8))
    with torch.no_grad():
        model[6].weight.mul_(factor)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tracehooks.attach(model, path, quiet=True, sketch=True):
        torch.manual_seed(seed)
        for x, y in zip(*data, strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return path


def test_a_version_never_differs_from_itself(tmp_path: Path) -> None:
    """Runs that differ in nothing but the seed of dropout are equal by the measure of any third of them; a changed weight,
    which no seed explains, is found."""
    runs = [recorded(tmp_path / str(seed), seed) for seed in range(REPEATS)]
    for number in range(REPEATS):
        a, b, repeat = (runs[(number + offset) % REPEATS] for offset in range(3))
        assert not tracehooks.diff(a, b).within_tolerance
        found = tracehooks.diff(a, b, noise=[repeat])
        assert found.within_tolerance, str(found)
        assert found.noise is not None
        assert found.noise.sites > 10
    changed = tracehooks.diff(runs[0], recorded(tmp_path / "changed", 99, 1.01), noise=[runs[1]])
    assert [(item.cause, item.module, item.slot) for item in changed.culprits] == [("parameter", "6", "weight")]


def test_few_repeats_that_agree_by_chance_are_not_believed() -> None:
    """A row that has noise has at least the median of the noisy rows of its group; one without has none."""
    own = np.array([0.0, 0.2, 1e-9, 0.3, 0.0, 5.0, 1e-9])
    assert pooled(own, np.array([0, 0, 0, 0, 0, 1, 1])).tolist() == [0.0, 0.2, 0.2, 0.3, 0.0, 5.0, 5.0]
    assert pooled(np.zeros(3), np.zeros(3, np.int64)).tolist() == [0.0, 0.0, 0.0]
    scalars = of_scalars(np.array([1e-9, 0.0, 0.4, 0.1]), np.array([0, 0, 1, 2]), own, np.array([0, 0, 0, 1, 1, 1, 1]))
    assert scalars.tolist() == [0.1000000005, 0.0, 0.4, 0.1]
