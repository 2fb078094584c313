"""Two versions of a model, recorded and compared: what is named as the cause is what was changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tracehooks
from tracehooks import Diff

WIDTH = 16


class Block(nn.Module):
    """A residual block that scales its branch in its own code."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = (
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width),
        )  # fmt: skip
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        branch: Tensor = self.down(self.act(self.up(self.norm(x))))
        return x + self.scale * branch


class Net(nn.Module):
    """Positions made in the root's own code, blocks, a head that is used by hand."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(32, WIDTH), nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.drop = nn.Dropout(0.0)
        self.head = nn.Parameter(torch.randn(WIDTH, 4))
        self.shift = 0

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.positions(torch.arange(ids.shape[1]) + self.shift)
        for block in self.blocks:
            x = block(x)
        return self.drop(x) @ self.head


def recorded(
    path: Path, change: Callable[[Net], object] | None = None, *, ids: Tensor | None = None, **options: Any
) -> Path:
    """One step of a version of the model; ``change`` makes the version."""
    torch.manual_seed(0)
    model = Net()
    if ids is None:
        ids = torch.randint(32, (4, 8))
    with torch.no_grad():
        if change is not None:
            change(model)
    with tracehooks.attach(model, path, quiet=True, **{"sketch": True, **options}) as trace, trace.step_scope():
        model(ids).square().mean().backward()
    return path


@pytest.fixture
def compared(tmp_path: Path) -> Callable[..., Diff]:
    """The diff between the model as it is and a version of it."""

    def compare(change: Callable[[Net], object] | None = None, *, ids: Tensor | None = None, **options: Any) -> Diff:
        before = recorded(tmp_path / "before", **options)
        return tracehooks.diff(before, recorded(tmp_path / "after", change, ids=ids, **options))

    return compare


def test_the_same_version_is_identical(compared: Callable[..., Diff]) -> None:
    """A version that was recorded twice has no difference."""
    assert compared().identical


def test_changed_parameter_is_the_cause(compared: Callable[..., Diff]) -> None:
    """One weight times 1.5: the parameter is named with its distance, and everything downstream is explained by it."""
    found = compared(lambda net: net.blocks[4].up.weight.mul_(1.5))
    assert found.first is not None
    assert found.first.module == "blocks.4.up"
    assert [(item.cause, item.module, item.slot) for item in found.culprits] == [("parameter", "blocks.4.up", "weight")]
    culprit = found.culprits[0]
    assert culprit.relative_l2 == pytest.approx(0.5, abs=1e-5)
    assert "relative L2 0.5 ± 5e-07, cosine 1 ± 0: scaled by 1.5" in str(culprit)
    differing = {(row["phase"], row["module"], row["slot"]) for row in found.differing.to_pylist()}
    tensors = {site for site in differing if site[0] != "scalar"}
    assert culprit.explained == len(tensors - {("parameter", "blocks.4.up", "weight")})


def test_every_changed_parameter_is_named(compared: Callable[..., Diff]) -> None:
    """Two weights were changed: both are causes, and no module beside them."""

    def change(net: Net) -> None:
        net.blocks[1].down.weight.copy_(net.blocks[1].down.weight.flip(0))
        net.blocks[3].norm.bias.add_(0.5)

    found = compared(change)
    assert [(item.cause, item.module, item.slot) for item in found.culprits] == [
        ("parameter", "blocks.1.down", "weight"),
        ("parameter", "blocks.3.norm", "bias"),
    ]
    assert "the same values in another order" in found.culprits[0].detail


def test_parameter_that_is_used_by_hand(compared: Callable[..., Diff]) -> None:
    """A parameter of the root that its own code uses explains the root's output."""
    found = compared(lambda net: net.head.add_(0.1))
    assert [(item.cause, item.module, item.slot) for item in found.culprits] == [("parameter", "", "head")]


def test_code_between_modules_is_the_parents(compared: Callable[..., Diff]) -> None:
    """A block that scales its branch otherwise is named, not the modules in it and not those after it."""
    found = compared(lambda net: setattr(net.blocks[2], "scale", 0.5))
    assert [(item.cause, item.module) for item in found.culprits] == [("module", "blocks.2")]
    assert found.culprits[0].why == "made in the forward of blocks.2, outside the modules that it calls"


def test_input_made_between_modules(compared: Callable[..., Diff]) -> None:
    """Where inputs are recorded, a value that the root hands to a module is the root's; where not, both are named."""
    found = compared(lambda net: setattr(net, "shift", 1), record=("outputs", "inputs", "parameters"))
    assert found.first is not None
    assert (found.first.module, found.first.phase, found.first.slot) == ("positions", "input", "input.input")
    assert [(item.cause, item.module, item.slot) for item in found.culprits] == [
        ("between", "", "input.input of positions")
    ]
    assert found.culprits[0].why == "made in the forward of (root), outside the modules that it calls"


def test_input_made_between_modules_unrecorded(compared: Callable[..., Diff]) -> None:
    """Where inputs were not recorded, both who may have made it are named."""
    found = compared(lambda net: setattr(net, "shift", 1))
    assert [(item.cause, item.module) for item in found.culprits] == [("module", "positions")]
    assert found.culprits[0].why == (
        "made in the forward of positions, or in (root), which calls it: inputs were not recorded"
    )


def test_second_larger_change_is_found(compared: Callable[..., Diff]) -> None:
    """A large difference that is made after a small one is a culprit too: its error did not come in."""

    def change(net: Net) -> None:
        net.blocks[0].scale = 1.0001
        net.blocks[4].scale = 3.0

    assert [(item.cause, item.module) for item in compared(change).culprits] == [
        ("module", "blocks.0"),
        ("module", "blocks.4"),
    ]


def test_other_mode(compared: Callable[..., Diff]) -> None:
    """A module that is in training mode in one version alone is named with its mode."""

    def change(net: Net) -> None:
        net.drop.p = 0.5
        net.drop.eval()

    def before(net: Net) -> None:
        net.drop.p = 0.5

    found = compared(change)
    assert found.identical
    assert "model.modules.drop.training: True → False" in [str(item) for item in found.changes]


def test_permuted_batch(compared: Callable[..., Diff]) -> None:
    """The same samples in another order: the input is the cause, and that they are the same is told."""
    torch.manual_seed(0)
    Net()
    ids = torch.randint(32, (4, 8))
    found = compared(ids=ids[[1, 0, 3, 2]])
    assert [(item.cause, item.module, item.slot) for item in found.culprits] == [("input", "", "input.ids")]
    assert "the same values in another order" in found.culprits[0].detail
    assert [str(item) for item in found.beside] == ["samples: step 0: train ids: the same 4 samples in another order"]


def test_other_batch_size(compared: Callable[..., Diff]) -> None:
    """Batches of different sizes are not compared element by element, and the reason is given; parameters are."""
    found = compared(ids=torch.randint(32, (6, 8)))
    assert [(item.cause, item.slot, item.why) for item in found.culprits] == [
        ("input", "input.ids", "batches of 4 and 6: what is computed from them has other shapes and is not compared")
    ]
    parameters = [row["status"] for row in found.rows.to_pylist() if row["phase"] == "parameter"]
    assert set(parameters) == {"equal"}


def test_lower_precision(compared: Callable[..., Diff]) -> None:
    """Another dtype is a difference of structure where it begins; numbers beyond its rounding are told from it."""
    found = compared(lambda net: net.double())
    assert not found.within_tolerance
    assert found.counts["dtype"] > 20
    assert {item.cause for item in found.culprits} == {"structure"}


def test_moved_modules_are_matched(tmp_path: Path) -> None:
    """Modules under other names are taken for the same, told, and compared."""

    class Renamed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.layers = self.blocks
            del self.blocks

        def forward(self, ids: Tensor) -> Tensor:
            self.__dict__["blocks"] = self.layers
            return super().forward(ids)

    before = recorded(tmp_path / "before")
    torch.manual_seed(0)
    model = Renamed()
    ids = torch.randint(32, (4, 8))
    with tracehooks.attach(model, tmp_path / "after", quiet=True, sketch=True) as trace, trace.step_scope():
        model(ids).square().mean().backward()
    found = tracehooks.diff(before, tmp_path / "after")
    assert found.within_tolerance
    assert found.guessed["blocks.3.up"] == "layers.3.up"
    assert "  blocks.*.up → layers.*.up (6 modules)" in str(found).splitlines()


def test_added_module(compared: Callable[..., Diff]) -> None:
    """A module that one version alone has is the cause of what follows it."""

    def change(net: Net) -> None:
        net.blocks[3].act = nn.Sequential(nn.GELU(), nn.Hardshrink(0.4))

    found = compared(change)
    assert found.culprits[0].cause == "structure"
    assert (found.culprits[0].module, len(found.culprits)) == ("blocks.3.act.0", 1)
    assert [item.module for item in found.only_b] == ["blocks.3.act.0", "blocks.3.act.1"]


def test_noise_is_measured_and_told(tmp_path: Path) -> None:
    """With dropout two runs of one version differ; measured by a repeat, that counts no more, and another version does."""

    def noisy(net: Net) -> None:
        net.drop.p = 0.5
        torch.manual_seed(
            int.from_bytes(torch.randint(256, (4,)).numpy().tobytes()[:4]) + len(list(tmp_path.iterdir()))
        )

    a, b, c = (recorded(tmp_path / name, noisy) for name in "abc")
    other = recorded(tmp_path / "other", lambda net: (noisy(net), net.blocks[0].up.weight.mul_(1.01)))
    assert not tracehooks.diff(a, b).within_tolerance
    same = tracehooks.diff(a, b, noise=[c])
    assert same.within_tolerance
    assert same.noise is not None
    assert same.noise.first is not None
    assert same.noise.first.module == "drop"
    assert "noise: 1 repeat: " in str(same)
    differ = tracehooks.diff(a, other, noise=[b, c])
    assert [(item.cause, item.module) for item in differ.culprits] == [("parameter", "blocks.0.up")]
