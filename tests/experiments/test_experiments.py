"""Experiments name what was changed: local errors in the shadow of another model, overflows in lower precision."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.surface.test_versions import Net
from tracehooks import experiments
from tracehooks.core.errors import InvalidOptionError
from tracehooks.experiments.rounding import lossy_ops


def net(change: Callable[[Net], object] = lambda net: None) -> Net:
    """A version of the model."""
    torch.manual_seed(0)
    model = Net(depth=4)
    with torch.no_grad():
        change(model)
    return model


def batch() -> Tensor:
    """Token ids."""
    return torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(1))


def test_equal_models_cast_no_shadow() -> None:
    """The same model twice: nothing differs, also with dropout."""
    a, b = net(), net()
    a.drop.p = b.drop.p = 0.5
    assert experiments.shadow(a, b, batch()).identical


def test_every_local_change_is_found_whatever_came_before() -> None:
    """A small change behind a large one is found: errors do not propagate."""

    def change(model: Net) -> None:
        model.blocks[0].up.weight.mul_(2)
        model.blocks[2].down.weight.mul_(1.001)
        model.blocks[3].act = nn.GELU(approximate="tanh")
        model.blocks[1].scale = 0.5

    found = experiments.shadow(net(), net(change), batch())
    assert {(item.module, item.cause) for item in found.culprits} == {
        ("blocks.0.up", "parameter"),
        ("blocks.1", "module"),
        ("blocks.2.down", "parameter"),
        ("blocks.3.act", "module"),
    }
    why = {item.module: item.why for item in found.culprits}
    assert why["blocks.0.up"] == "its parameter weight differs"
    assert all(
        re.fullmatch(r"differs, relative difference [\d.e-]{1,7}, relative L2 [\d.e-]{1,7} ± [\d.e-]{1,5}", item.detail)
        for item in found.culprits
    )
    assert why["blocks.3.act"] == "its code differs: inputs and parameters are equal"


def test_shadow_leaves_both_models_alone() -> None:
    """Running statistics, generators and hooks are as they were."""
    a, b = (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))
    before = [tensor.clone() for model in (a, b) for tensor in model.state_dict().values()]
    state = torch.get_rng_state()
    experiments.shadow(a, b, torch.randn(8, 4, generator=torch.Generator().manual_seed(0)))
    after = [tensor for model in (a, b) for tensor in model.state_dict().values()]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks for model in (a, b) for module in model.modules())
    with pytest.raises(InvalidOptionError, match="modules of the same paths"):
        experiments.shadow(a, nn.Linear(4, 4), torch.zeros(1, 4))


class Overflowing(nn.Module):
    """Its middle overflows in float16; its loss is so small that gradients vanish there without scaling."""

    def __init__(self, large: float, small: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.large, self.small = large, small

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.middle(self.first(x) * self.large)))
        return out * self.small


def loss_fn(model: Any, x: Any) -> Tensor:
    """A loss."""
    loss: Tensor = model(x).float().mean()
    return loss


def test_precision_names_the_overflow() -> None:
    """The first value that overflows in float16 is named with its module, and that module should stay in float32."""
    model = Overflowing(1e4, 1.0)
    with torch.no_grad():
        model.first.weight.fill_(0.1)
        model.middle.weight.fill_(1.0)
    found = experiments.precision(model, loss_fn, torch.ones(16, 8) * 4)
    assert found.overflow is not None
    assert found.overflow.module == "middle"
    assert "middle" in found.keep_float32
    assert [(op.op, op.module, op.phase, op.kind) for op in found.ops[:1]] == [
        ("aten.addmm.default", "middle", "forward", "overflow")
    ]
    assert found.ops[0].code == "out: Tensor = self.last(torch.tanh(self.middle(self.first(x) * self.large)))"
    assert "first op to lose: aten.addmm.default in middle (forward), float16, " in str(found)
    assert found.to_json()["ops"][0]["line"] == found.ops[0].line
    assert "overflow: step 0: " in str(found)
    assert re.search(
        r"tensors and scalars are more than 10 roundings of float16 apart, the first of them \S+ \S+", str(found)
    )
    assert found.to_json()["overflow"]["module"] == "middle"


def test_precision_names_gradients_that_vanish_without_scaling() -> None:
    """Gradients below float16's smallest number are lost, and scaling the loss keeps them."""
    found = experiments.precision(Overflowing(1.0, 1e-6), loss_fn, torch.randn(16, 8))
    lost, scaled = found.underflow["first.weight"]
    assert lost > 32
    assert scaled < lost
    backward = [(op.op, op.module, op.kind) for op in found.ops if op.phase == "backward"]
    assert backward[0] == ("aten.mul.Tensor", "", "underflow")
    assert ("aten.mm.default", "last", "underflow") in backward
    assert not [op for op in found.scaled_ops if op.phase == "backward"]
    assert found.overflow is None
    with pytest.raises(InvalidOptionError, match="float16 or bfloat16"):
        experiments.precision(Overflowing(1.0, 1.0), loss_fn, torch.randn(16, 8), dtype="int8")


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_precision_of_a_harmless_model(dtype: str | torch.dtype) -> None:
    """Where nothing overflows and all agrees within rounding, nothing is to be kept in float32. A dtype may be torch's."""
    found = experiments.precision(Overflowing(1.0, 1.0), loss_fn, torch.randn(16, 8), dtype=dtype)
    assert found.b == "bfloat16"
    assert (found.overflow, found.scaled_overflow, found.keep_float32) == (None, None, ())
    assert (found.ops, found.scaled_ops) == ((), ())
    lowered = found.counts["dtype"]
    assert lowered > 3
    assert str(found).splitlines()[-1] == (
        f"all {len(found.rows)} tensors and scalars agree within 10 roundings of bfloat16; {lowered} of them are kept in it"
    )


class Centred(nn.Module):
    """Takes the mean from numbers that are nearly equal, as a hand-written normalisation does, inside a larger model."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + 100
        return x - x.mean(-1, keepdim=True)


class Mixed(nn.Module):
    """Attention, norms, dropout and counters around it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.start, self.centre = nn.Linear(8, 8), Centred()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.batch, self.drop, self.end = (
            nn.LayerNorm(8),
            nn.BatchNorm1d(5),
            nn.Dropout(0.5),
            nn.Linear(8, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.centre(self.start(x))
        x = x + self.attention(x, x, x)[0]
        return self.end(self.drop(self.batch(self.norm(x))))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_precision_names_what_cancels(dtype: str) -> None:
    """A difference of rounded numbers is the op that loses; what inherits the error is not named."""
    model = Mixed()
    x = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(1))
    before = [tensor.clone() for tensor in model.state_dict().values()]
    state = torch.get_rng_state()
    found = experiments.precision(model, lambda model, x: model(x).float().square().mean(), x, dtype)
    assert [(op.op, op.module, op.kind) for op in found.ops if op.phase == "forward"] == [
        ("aten.sub.Tensor", "centre", "cancellation")
    ]
    assert "centre" in found.keep_float32
    assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_watched_ops_give_what_they_give_unwatched() -> None:
    """Beside their exact values, losses, gradients, buffers and counters are bit for bit the same."""
    x = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(1))

    def trained(watched: bool) -> list[Tensor]:
        model = Mixed()

        def run() -> None:
            torch.manual_seed(3)
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).float().square().mean()
            loss.backward()  # type: ignore[no-untyped-call]

        if watched:
            lossy_ops(model, run, 0.1)
        else:
            run()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        return [*gradients, *model.state_dict().values()]

    assert all(torch.equal(a, b) for a, b in zip(trained(True), trained(False), strict=True))
