"""Checkpoints of every format with changed bytes: read or refused, never an error of our own."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from tracehooks.checkpoint import diff, inspect, verify
from tracehooks.core.errors import CheckpointError

MUTATIONS = 60

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def saved(folder: Path, kind: str) -> tuple[Path, list[Path]]:
    """A checkpoint of a model and its optimizer, and the files to damage."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 1}
    path = folder / kind
    if kind == "distributed":
        dcp.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=str(path), no_dist=True
        )
        return path, [path / ".metadata", *path.glob("*.distcp")]
    if kind == "safetensors":
        save_file(model.state_dict(), path)
    else:
        torch.save(whole, path, _use_new_zipfile_serialization=kind == "archive")
    return path, [path]


def damaged(clean: bytes, chance: random.Random) -> bytes:
    """Cut, with flipped bits, or with a stretch of other bytes."""
    data, place = bytearray(clean), chance.randrange(len(clean))
    kind = chance.randrange(4)
    if kind == 0:
        return bytes(data[:place])
    if kind == 1:
        for _ in range(chance.randrange(1, 6)):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    elif kind == 2:
        data[place : place + chance.randrange(1, 64)] = chance.randbytes(chance.randrange(1, 64))
    else:
        data[chance.randrange(min(len(data), 600))] = chance.randrange(256)
    return bytes(data)


@pytest.mark.parametrize("kind", ["archive", "legacy", "safetensors", "distributed"])
def test_damage_is_an_answer_or_one_error(tmp_path: Path, kind: str) -> None:
    """inspect and diff refuse with a CheckpointError what they cannot read; verify always answers."""
    path, files = saved(tmp_path, kind)
    assert verify(path).fine
    chance, answers = random.Random(0), 0
    for file in files:
        clean = file.read_bytes()
        for _ in range(MUTATIONS):
            file.write_bytes(damaged(clean, chance))
            assert str(verify(path))
            for look in (lambda: inspect(path), lambda: diff(path, path)):
                try:
                    answers += bool(str(look()))
                except CheckpointError as error:
                    assert str(path) in str(error)  # noqa: PT017 - some mutations are harmless, and are answered
        file.write_bytes(clean)
    assert 0 < answers < 2 * MUTATIONS * len(files)


def test_a_shard_that_is_cut_is_damage(tmp_path: Path) -> None:
    """verify names the file of a distributed checkpoint that ends too early."""
    path, files = saved(tmp_path, "distributed")
    files[1].write_bytes(files[1].read_bytes()[:700])
    found = verify(path)
    assert not found.fine
    assert files[1].name in found.damage[0]


def test_names_meet_whatever_stands_before_them(tmp_path: Path) -> None:
    """A prefix inside a prefix, and an optimizer whose names meet anyway: each side's own is told."""
    path, _ = saved(tmp_path, "distributed")
    whole = torch.load(saved(tmp_path, "archive")[0], weights_only=True)
    whole["model"] = {f"module.{name}": tensor for name, tensor in whole["model"].items()}
    torch.save(whole, tmp_path / "wrapped.pt")
    found = diff(tmp_path / "wrapped.pt", path)
    assert found.prefixes == ("model.module.", "model.")
    assert (found.missing, found.unexpected, found.identical) == ((), (), True)
