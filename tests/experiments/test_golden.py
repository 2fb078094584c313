"""Golden batches: saved whole, recorded and checked without touching the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tracehooks
from tests.surface.test_versions import Net
from tracehooks import golden
from tracehooks.core.errors import GoldenError, InvalidOptionError, RunExistsError


def built(seed: int = 0) -> Net:
    """A model with dropout and, beside its blocks, running statistics."""
    torch.manual_seed(seed)
    net = Net(depth=2)
    net.drop = nn.Dropout(0.3)
    net.add_module("bn", nn.BatchNorm1d(4))
    return net


def loss_fn(model: Any, batch: Any) -> Tensor:
    """A loss that uses every part of the batch."""
    out: Tensor = model.bn(model(batch["ids"]).flatten(0, 1))
    return (out - batch["target"]).square().mean()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A golden batch of token ids and targets."""
    torch.manual_seed(1)
    batch = {"ids": torch.randint(32, (4, 8)), "target": torch.randn(32, 4)}
    return golden.save(tmp_path / "golden", batch, metadata={"crop": [0, 48000], "caption": "a cat"})


def test_a_batch_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    """Tensors of any dtype and layout, arrays, numbers, texts, nested containers: load is the inverse of save."""
    wave = torch.randn(2, 10)
    batch = {
        "wave": wave, "transposed": wave.t(), "same": wave, "tokens": torch.arange(4), "mask": torch.tensor([True, False]),
        "half": torch.randn(3).bfloat16(), "array": np.arange(3.0), "rate": 44100, "name": "x", "nothing": None,
        "nan": float("nan"), "pair": (1, [wave[0], {"deep": 2.5}]), "empty": {},
    }  # fmt: skip
    golden.save(tmp_path / "g", batch, metadata={"bounds": [3, 7]})
    found = golden.load(tmp_path / "g")
    assert found.metadata == {"bounds": [3, 7]}
    assert found.expected is None
    assert found.batch.keys() == batch.keys()
    for name in ("wave", "transposed", "same", "tokens", "mask", "half"):
        assert torch.equal(found.batch[name], batch[name])
        assert found.batch[name].dtype == batch[name].dtype
    assert isinstance(found.batch["array"], np.ndarray)
    assert np.isnan(found.batch["nan"])
    assert (found.batch["rate"], found.batch["nothing"], found.batch["empty"]) == (44100, None, {})
    assert found.batch["pair"][0] == 1
    assert found.batch["pair"][1][1] == {"deep": 2.5}
    assert sorted(path.name for path in (tmp_path / "g").iterdir()) == ["batch.safetensors", "golden.json"]


def test_what_cannot_be_saved_is_refused(saved: Path, tmp_path: Path) -> None:
    """Objects are refused with where they are; a second batch in one directory and a missing one are errors."""
    with pytest.raises(InvalidOptionError, match=r"batch\.x\.1: got 'object'"):
        golden.save(tmp_path / "other", {"x": [1, object()]})
    assert not (tmp_path / "other").exists()
    with pytest.raises(GoldenError, match="holds a golden batch already"):
        golden.save(saved, {})
    with pytest.raises(GoldenError, match="cannot be read"):
        golden.load(tmp_path / "none")
    with pytest.raises(GoldenError, match="nothing was recorded"):
        golden.check(saved, built(), loss_fn)
    (saved / "golden.json").write_text(json.dumps({"version": 99}))
    with pytest.raises(GoldenError, match="format version 99"):
        golden.load(saved)


def test_the_same_version_passes_and_another_is_named(saved: Path) -> None:
    """Recorded once, checked: dropout is the same each time, and a changed weight is named."""
    golden.record(saved, None, built(), loss_fn)
    with pytest.raises(RunExistsError):
        golden.record(saved, None, built(), loss_fn)
    assert golden.check(saved, built(), loss_fn).identical
    other = built()
    with torch.no_grad():
        other.blocks[1].up.weight.mul_(1.5)
    found = golden.check(saved, other, loss_fn)
    assert not found.within_tolerance
    assert [(item.cause, item.module, item.slot) for item in found.culprits] == [("parameter", "blocks.1.up", "weight")]
    assert not golden.check(saved, built(), loss_fn, seed=1).within_tolerance
    changed = built()
    changed.shift = 2
    assert [item.cause for item in golden.check(saved, changed, loss_fn).culprits] == ["between"]


def test_recording_leaves_the_model_as_it_was(saved: Path, tmp_path: Path) -> None:
    """Parameters, gradients, buffers, modes, hooks and generators are the same afterwards."""
    model = built()
    model.eval()
    model.drop.train()
    model(torch.zeros(1, 3, dtype=torch.long)).sum().backward()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    copies = {name: None if grad is None else grad.clone() for name, grad in gradients.items()}
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    golden.record(saved, tmp_path / "run", model, loss_fn)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    for name, parameter in model.named_parameters():
        assert parameter.grad is gradients[name]
        assert parameter.grad is None or torch.equal(parameter.grad, copies[name])
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_expected_can_be_an_existing_run(saved: Path, tmp_path: Path) -> None:
    """A run recorded elsewhere is copied as what is expected."""
    run = golden.record(saved, tmp_path / "run", built(), loss_fn)
    batch = golden.load(saved).batch
    again = golden.save(tmp_path / "again", batch, run)
    assert golden.check(again, built(), loss_fn).identical
    info = tracehooks.open(again / "expected").info
    assert info["notes"] == ["golden batch golden, seed 0"]


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    """What an array's shape or a crop's bounds are made of is kept by value, also where it is not finite."""
    batch = {
        "crop": (np.int64(3), np.int32(480)),
        "gain": np.float32(0.5),
        "peak": np.float64("-inf"),
        "mono": np.bool_(True),
    }
    golden.save(tmp_path / "one", batch)
    assert golden.load(tmp_path / "one").batch == {"crop": (3, 480), "gain": 0.5, "peak": float("-inf"), "mono": True}
