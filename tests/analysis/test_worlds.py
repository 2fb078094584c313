"""Runs of other numbers of ranks: what is compared, what is merged, and what is refused with its reason."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed
from torch import nn

import tracehooks
from tests import launching
from tracehooks.analysis.diff import diff
from tracehooks.testing import MemoryRun, TraceBuilder


def train(path: Path, wrong: str) -> None:
    """One rank of a recorded training, with its share of every batch; of the first one alone where the data are wrong."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world > 1:
        torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))
    trained = nn.parallel.DistributedDataParallel(model) if world > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = torch.randn(2, 8, 6), torch.randint(3, (2, 8))
    share = slice(0, 8) if world == 1 else slice(0, 4) if wrong == "data" else slice(4 * rank, 4 * rank + 4)
    with tracehooks.attach(trained, path, optimizer=optimizer, quiet=True):
        for step in range(2):
            optimizer.zero_grad()
            nn.functional.cross_entropy(trained(x[step][share]), y[step][share]).backward()
            optimizer.step()


def trained(path: Path, world: int, wrong: str = "") -> Path:
    """A recorded training of as many processes, each with its share of the same batches."""
    launching.run(train, path, wrong, ranks=world, log=path.with_suffix(".log"))
    return path


def test_data_parallel_training_is_that_of_one_process(tmp_path: Path) -> None:
    """Two real ranks with half the batch each make the activations, gradients and parameters of one rank with all of it; a
    rank with the wrong data is found."""
    alone = trained(tmp_path / "alone", 1)
    found = tracehooks.diff(alone, trained(tmp_path / "two", 2), tolerance=1e-5)
    assert found.within_tolerance
    assert not found.refused
    assert {"input", "forward", "parameter", "gradient", "update"} <= set(found.rows["phase"].to_pylist())
    assert "1 rank against 2 ranks: inputs, outputs and probes were merged over ranks" in str(found)
    data = tracehooks.diff(alone, trained(tmp_path / "data", 2, "data"), tolerance=1e-5)
    assert [item.cause for item in data.culprits] == ["input"]


def shares(
    ranks: int, values: np.ndarray, weight: float = 1.0, buffers: bool = False, size: int | None = None
) -> MemoryRun:
    """A run whose batch of values is dealt to ranks."""
    builder = TraceBuilder({"world_size": size or ranks})
    for rank, part in enumerate(np.array_split(values, ranks)):
        known = part[np.isfinite(part)]
        numbers = {
            "count": len(part), "nan": int(np.isnan(part).sum()), "posinf": 0, "neginf": 0, "zeros": int((part == 0).sum()),
            "min": known.min(), "max": known.max(), "mean": known.mean(), "std": known.std(),
            "rms": np.sqrt((known**2).mean()), "absmax": np.abs(known).max(),
        }  # fmt: skip
        builder.rank(rank).tensor("", "input", "input", shape=(len(part),), hash=rank, **numbers)
        builder.tensor("m", shape=(len(part),), hash=rank + 7, **numbers)
        builder.tensor("m", phase="backward", shape=(len(part),), hash=rank + 9, **numbers)
        builder.tensor("m", "weight", "parameter", mean=weight, hash=int(weight))
        if buffers:
            builder.tensor("m", "running_mean", "buffer", mean=float(rank), hash=rank)
        builder.scalar("lr/0", 0.1).scalar("grad_norm", 2.0).scalar("loss", float(rank))
    return builder.run()


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_merged_statistics_are_those_of_the_whole(ranks: int) -> None:
    """However a batch is dealt, evenly or not, with NaN in it or not: merged statistics are the whole's, to rounding."""
    values = np.random.default_rng(0).normal(3, 2, 17)
    values[[2, 9]] = np.nan, 0.0
    found = diff(shares(1, values), shares(ranks, values), tolerance=1e-12)
    assert found.within_tolerance
    assert found.counts["equal"] + found.counts["within"] == len(found.rows) == 5
    values[11] += 1e-3
    moved = diff(shares(1, values), shares(ranks, np.where(np.arange(17) == 11, 3.0, values)), tolerance=1e-12)
    assert [item.cause for item in moved.culprits] == ["input"]


def test_a_parameter_is_compared_and_what_ranks_do_not_share_is_not() -> None:
    """The lowest rank's parameter counts; running statistics that differ from rank to rank are left out and counted."""
    values = np.arange(12.0)
    found = diff(shares(1, values), shares(2, values, weight=2.0))
    assert [item.cause for item in found.culprits] == ["parameter"]
    found = diff(shares(1, values, buffers=True), shares(2, values, buffers=True))
    assert found.within_tolerance
    assert "but for 1 site that ranks do not share" in str(found)


def test_replicas_that_fell_apart_are_not_left_out() -> None:
    """A parameter that ranks should share and do not is still that of the lowest rank; only what is cut into shards is left
    out."""

    def run(values: list[float], size: int) -> MemoryRun:
        builder = TraceBuilder({"world_size": len(values)})
        for rank, value in enumerate(values):
            builder.rank(rank).tensor("m", "weight", "parameter", mean=value, hash=int(value), shape=(size,))
        return builder.run()

    assert diff(run([1.0], 4), run([1.0, 2.0], 4)).within_tolerance
    apart = diff(run([1.0], 4), run([3.0, 2.0], 4))
    assert [item.cause for item in apart.culprits] == ["parameter"]
    shards = diff(run([1.0], 4), run([3.0, 2.0], 2))
    assert (len(shards.rows), shards.first) == (0, None)
    assert "but for 1 site that ranks do not share" in str(shards)


def test_another_batch_is_refused_with_its_reason() -> None:
    """Shares that do not make the same batch, and ranks that were not recorded, leave what all ranks share."""
    found = diff(shares(1, np.arange(8.0)), shares(2, np.arange(16.0)))
    assert not found.within_tolerance
    assert found.first is None
    assert (
        "not compared: inputs, outputs and probes: over all ranks the batches hold other numbers of elements (8 against 16"
        in str(found)
    )
    assert set(found.rows["phase"].to_pylist()) == {"parameter", "scalar"}
    found = diff(shares(1, np.arange(8.0)), shares(2, np.arange(8.0), size=4))
    assert "not compared: inputs, outputs and probes: 2 of 4 ranks recorded them" in str(found)
    assert not found.identical
