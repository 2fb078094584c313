"""Training that fails by its precision: dtypes, loss scales. Each builder's docstring says what is wrong."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.rules.cases import Broken, Case, batches, trained
from tests.rules.parts import Composed, mlp, regression


def low_precision_weights() -> Case:
    """Weights near one in bfloat16 with a small rate."""
    model = nn.Linear(6, 6, bias=False)
    nn.init.constant_(model.weight, 1.0)
    model.bfloat16()
    return trained(model, lambda m, i: m(batches(16, 6)[i].bfloat16()).float().square().mean(), lr=1e-4)


def clipped_before_unscaling() -> Case:
    """Gradients are clipped while they are multiplied by the scale."""
    model = mlp(6, 8, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(number: int) -> None:
        optimizer.zero_grad()
        scaler.scale(regression(model, number)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return Case(model, step)


def skipped_for_ever() -> Case:
    """A gradient that is infinite whatever the scale."""
    model = Composed(lambda h: (h * 0).sqrt() + h)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu")

    def step(number: int) -> None:
        optimizer.zero_grad()
        scaler.scale(regression(model, number)).backward()
        scaler.step(optimizer)
        scaler.update()

    return Case(model, step)


def scale_at_the_floor() -> Case:
    """Gradients that are infinite at every scale: it is halved below one."""
    model = mlp(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def step(number: int) -> None:
        optimizer.zero_grad()
        scaler.scale(regression(model, number)).backward()
        model[0].weight.grad.fill_(math.inf)
        scaler.step(optimizer)
        scaler.update()

    return Case(model, step, options={"on_nonfinite": "record"})


def float16_without_a_scale() -> Case:
    """float16 and a loss so small that its gradients are no normal numbers."""
    model = mlp(6, 8, 1).half()
    return trained(
        model,
        lambda m, number: (m(batches(16, 6)[number % 8].half()) * 1e-2).float().square().mean(),
        optimizer=torch.optim.SGD(model.parameters(), 1e-2),
    )


def norm_in_half_precision() -> Case:
    """A layer normalisation whose input and parameters are cast to float16 by hand."""

    class HalfLayerNorm(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return functional.layer_norm(x.half(), self.normalized_shape, self.weight.half(), self.bias.half())

    class Model(Composed):
        def __init__(self) -> None:
            super().__init__(lambda h: self.norm(h).float())
            self.norm = HalfLayerNorm(8)

    return trained(Model(), regression)


class Shift(nn.Module):
    """Adds an array of float64."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.zeros(x.shape, dtype=torch.float64)


def numpy_made_it_double() -> Case:
    """A constant of NumPy's makes float64 of everything behind it."""

    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.front, self.shift = nn.Linear(6, 1), Shift()

        def forward(self, x: Tensor) -> Tensor:
            return self.shift(self.front(x))

    return trained(Doubled(), regression)


PRECISION = (
    Broken(low_precision_weights, "update_rounded_away", "bf16_resolution", {"params": ["weight"]}),
    Broken(clipped_before_unscaling, "clip_on_scaled_grads", "missing_unscale", {"count": 8}),
    Broken(skipped_for_ever, "amp_skipped_steps", "gradient_nonfinite_at_any_scale", {"count": 8}),
    Broken(scale_at_the_floor, "scale_collapsed", "overflow_at_every_scale", {"scale_start": 8.0}),
    Broken(float16_without_a_scale, "gradient_underflow", "no_loss_scale", {"share": 1.0}),
    Broken(norm_in_half_precision, "wrong_dtype", "norm_in_float16", {"modules": ["norm"]}),
    Broken(numpy_made_it_double, "wrong_dtype", "float64_by_accident", {"modules": ["shift", ""]}),
)
