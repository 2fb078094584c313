"""Training that fails over its steps: rates, clipping, steps, outputs, scales, memory, ranks. Each builder's docstring
says what is wrong."""

from __future__ import annotations

import functools
import math
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.rules.cases import Broken, Case, Ranks, batches, trained
from tests.rules.parts import Composed, classes, mlp, regression

LONG = 60


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    """Handwritten digits as scikit-learn has them, and which they are."""
    from sklearn.datasets import load_digits

    known = load_digits()
    return torch.tensor(known.images).float().unsqueeze(1), torch.tensor(known.target)


def pictures(number: int, count: int = 16) -> tuple[Tensor, Tensor]:
    """One batch of them."""
    images, targets = digits()
    chosen = torch.arange(number * count, (number + 1) * count) % len(images)
    return images[chosen], targets[chosen]


def labels_without_a_pattern() -> Case:
    """Targets are drawn at random in every step: there is nothing to learn."""
    generator = torch.Generator().manual_seed(5)

    def loss(model: nn.Module, number: int) -> Tensor:
        x = torch.randn(32, 6, generator=generator)
        return functional.cross_entropy(model(x), torch.randint(0, 4, (32,), generator=generator))

    return trained(mlp(6, 4), loss, optimizer=None, lr=1e-4, steps=LONG)


def memorised() -> Case:
    """A large model on few samples: validation gets worse while training gets better."""
    model = mlp(6, 64, 64, 1)
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(8, 6, generator=generator), torch.randn(8, 1, generator=generator)
    held_x, held_y = torch.randn(64, 6, generator=generator), torch.randn(64, 1, generator=generator)
    case = trained(model, lambda m, number: (m(x) - y).square().mean(), lr=1e-2, steps=LONG)

    def validate(number: int, trace: Any) -> None:
        if number % 6 == 0:
            with torch.no_grad():
                trace.scalar("validation/loss", (model(held_x) - held_y).square().mean())

    case.after = validate
    return case


def trained_far_too_long() -> Case:
    """What can be learned is learned early; what is left of the validation loss is noise in its targets."""
    model = mlp(6, 1)
    case = trained(model, regression, optimizer=torch.optim.SGD(model.parameters(), 0.2), steps=LONG)
    x = batches(64, 6, seed=9)[0]
    y = x.sum(-1, keepdim=True) + batches(64, 1, seed=10)[0]

    def validate(number: int, trace: Any) -> None:
        with torch.no_grad():
            trace.scalar("validation/loss", (model(x) - y).square().mean())

    case.after = validate
    return case


def rate_far_too_small() -> Case:
    """A rate a million times smaller than the weights need."""
    return trained(mlp(6, 8, 1), regression, lr=1e-7)


def rate_far_too_large() -> Case:
    """Every step is larger than the weights themselves."""
    return trained(mlp(6, 8, 1), regression, lr=30.0)


def clipped_to_next_to_nothing() -> Case:
    """Gradients are clipped to a norm of a ten-thousandth."""
    model = mlp(6, 8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)

    def step(number: int) -> None:
        optimizer.zero_grad()
        regression(model, number).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-4)
        optimizer.step()

    return Case(model, step)


def step_forgotten() -> Case:
    """backward() is called, step() is not."""
    model = mlp(6, 8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)

    def step(number: int) -> None:
        optimizer.zero_grad()
        regression(model, number).backward()

    return Case(model, step, steps=24)


def step_that_does_nothing() -> Case:
    """An optimizer of one's own that forgets to write its result back."""

    class Forgetful(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.detach() - group["lr"] * parameter.grad

    model = mlp(6, 8, 1)
    return trained(model, regression, optimizer=Forgetful(model.parameters(), 1e-2))


def first_prediction_kept() -> Case:
    """The model keeps its first result, a hidden state, and adds nothing of the input."""

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.kept = nn.Linear(6, 1), None

        def forward(self, x: Tensor) -> Tensor:
            if self.kept is None:
                self.kept = x[:1].repeat(len(x), 1)
            with torch.no_grad():
                return self.kept @ torch.ones(6, 1)

    model = Cached()
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*model.parameters(), weight], 1e-2)

    def step(number: int) -> None:
        optimizer.zero_grad()
        x = batches(16, 6)[number % 8]
        (model(x) * weight - x.sum(-1, keepdim=True)).square().mean().backward()
        model.body.weight.grad = torch.ones_like(model.body.weight)
        optimizer.step()

    return Case(model, step)


def features_of_the_first_step() -> Case:
    """The encoder runs once; its features are kept for all batches."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head, self.features = nn.Linear(6, 8), nn.Linear(8, 1), None

        def forward(self, x: Tensor) -> Tensor:
            if self.features is None:
                self.features = self.encoder(x).detach()
            return self.head(self.features)

    model = Model()
    return trained(model, regression, steps=16)


def loss_of_a_hidden_layer() -> Case:
    """The loss is computed from what a layer before the head returns."""
    model = Composed(torch.tanh, width=1)
    kept: list[Tensor] = []
    model.front.register_forward_hook(lambda module, args, output: kept.append(output))

    def loss(m: nn.Module, number: int) -> Tensor:
        kept.clear()
        x = batches(16, 6)[number % 8]
        m(x)
        return (kept[0] - x.sum(-1, keepdim=True)).square().mean()

    return trained(model, loss)


def logits_without_bound() -> Case:
    """Separable data, a huge rate and no decay: logits grow and grow."""
    model = mlp(6, 3)
    x = batches(64, 6)[0]
    y = x[:, :3].argmax(-1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(number: int) -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            model[0].weight *= 1.2

    return Case(model, step, steps=40)


def scale_clamped() -> Case:
    """A contrastive model whose scale was learned up to its clamp."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.logit_scale = nn.Linear(6, 4), nn.Parameter(torch.tensor(math.log(99.0)))

        def forward(self, x: Tensor) -> Tensor:
            return functional.normalize(self.body(x), dim=-1) * self.logit_scale.exp()

    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)

    def step(number: int) -> None:
        optimizer.zero_grad()
        (-0.02 * model.logit_scale + 0.0 * model(batches(16, 6)[number % 8]).sum()).backward()
        optimizer.step()
        with torch.no_grad():
            model.logit_scale.clamp_(max=math.log(100.0))

    return Case(model, step)


def half_of_the_units_dead() -> Case:
    """A bias far below zero in six of eight units of a layer."""
    model = mlp(6, 8, 1, activation=nn.ReLU)
    with torch.no_grad():
        model[0].bias[:6] = -100.0

    def loss(m: nn.Module, number: int) -> Tensor:
        x = batches(64, 6)[number % 8]
        return (m(x) - x.sum(-1, keepdim=True)).square().mean()

    return trained(model, loss, optimizer=torch.optim.SGD(model.parameters(), 1e-3), steps=12)


def saturated_tanh() -> Case:
    """Inputs of a thousand times the usual size in front of a tanh."""
    model = mlp(6, 8, 8, 1)
    with torch.no_grad():
        model[0].weight *= 1000.0
    return trained(model, regression)


def one_number_in_all_weights() -> Case:
    """Weights that begin as one number: all units stay equal."""
    model = mlp(6, 8, 1)
    nn.init.constant_(model[0].weight, 0.1)
    return trained(model, regression)


def _deep(gain: float) -> nn.Sequential:
    model = mlp(16, *[16] * 9, 1, activation=nn.Identity)
    with torch.no_grad():
        for module in model:
            if isinstance(module, nn.Linear):
                nn.init.orthogonal_(module.weight, gain)
                module.bias.zero_()
    return model


def _sixteen(model: nn.Module, number: int) -> Tensor:
    return model(batches(16, 16)[number % 8]).square().mean()


def weights_that_fade() -> Case:
    """Every layer makes its input ten times smaller."""
    return trained(_deep(0.1), _sixteen, lr=1e-5)


def weights_that_explode() -> Case:
    """Every layer makes its input ten times larger."""
    return trained(_deep(10.0), _sixteen, lr=1e-7)


def far_worse_than_chance() -> Case:
    """Logits begin a hundred times too large."""
    model = mlp(6, 8, 3)
    with torch.no_grad():
        model[2].weight *= 100.0

    def loss(m: nn.Module, number: int) -> Tensor:
        return functional.cross_entropy(m(batches(16, 6)[number % 8]), classes(number))

    return trained(model, loss, lr=1e-3)


def one_sibling_out_of_proportion() -> Case:
    """One of five equal blocks has weights a hundred thousand times smaller."""

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(5))
            self.head = nn.Linear(6, 1)
            with torch.no_grad():
                self.blocks[3].weight *= 1e-6

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x + sum(block(x) for block in self.blocks))

    return trained(Blocks(), regression, optimizer=None, lr=1e-9)


def recomputed_with_other_dropout() -> Case:
    """Activation checkpointing that does not put the random state back."""

    class Model(Composed):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.block, x, use_reentrant=False, preserve_rng_state=False))

        def block(self, x: Tensor) -> Tensor:
            return self.front(self.drop(x))

        def __init__(self) -> None:
            super().__init__(torch.tanh)
            self.drop = nn.Dropout(0.5)

    return trained(Model(), regression)


def losses_kept() -> Case:
    """What every step made is kept in a list."""
    model = mlp(6, 8, 1)
    kept: list[Tensor] = []
    case = trained(model, regression, steps=130)
    case.after = lambda number, trace: kept.append(torch.ones(400_000))
    return case


def compiled_for_every_length() -> Case:
    """Every batch has another length, and each is compiled anew."""
    model = mlp(6, 8, 1)

    def loss(m: nn.Module, number: int) -> Tensor:
        function = torch.compile(lambda x: x * 2.0, backend="eager", dynamic=False)
        return m(function(batches(number + 2, 6, count=1)[0])).square().mean()

    case = trained(model, loss, steps=66)
    case.after = lambda number, trace: torch._dynamo.reset() if number % 4 == 3 else None
    return case


def slow_checkpoints() -> Case:
    """A checkpoint after every third step that takes over a second to write."""
    model = mlp(6, 8, 1)
    case = trained(model, regression, steps=10)

    def keep(number: int, trace: Any) -> None:
        if number % 3 == 1:
            trace.checkpoint(f"step-{number}", {name: x.clone() for name, x in model.state_dict().items()})
            time.sleep(1.1)

    case.after = keep
    return case


def one_rank_slow() -> Ranks:
    """The forward pass of rank 1 takes fifty milliseconds longer."""
    return Ranks("slow")


def one_rank_silent() -> Ranks:
    """Rank 1 ends after three of eight steps."""
    return Ranks("silent")


def one_rank_drifts() -> Ranks:
    """A bias of rank 1 is changed behind DistributedDataParallel's back."""
    return Ranks("drifts")


TRAINING = [
    Broken(one_rank_slow, "slow_rank", "slow_rank", {"rank": 1}),
    Broken(one_rank_silent, "silent_rank", "silent_rank", {"ranks": [1], "last_steps": [2]}),
    Broken(one_rank_drifts, "unequal_ranks", "ranks_drift", {"params": ["2.bias"], "count": 1}),
    Broken(labels_without_a_pattern, "loss_not_decreasing", "flat", {"count": LONG}),
    Broken(memorised, "overfitting", "memorises", {"count": 10}),
    Broken(trained_far_too_long, "overtraining", "no_improvement", {"count": LONG}),
    Broken(rate_far_too_small, "update_ratio", "learning_rate_too_small", {"learning_rate": 1e-7}),
    Broken(rate_far_too_large, "update_ratio", "learning_rate_too_large", {"count": 2}),
    Broken(clipped_to_next_to_nothing, "clipped_away", "max_norm_too_small", {"count": 8}),
    Broken(step_forgotten, "optimizer_step_skipped", "never_stepped", {"count": 24}),
    Broken(step_that_does_nothing, "optimizer_step_skipped", "step_without_effect", {"count": 4}),
    Broken(first_prediction_kept, "stale_output", "same_output", {"modules": [""], "count": 8}),
    Broken(features_of_the_first_step, "stale_output", "no_longer_called", {"modules": ["encoder"]}),
    Broken(loss_of_a_hidden_layer, "output_not_in_loss", "output_not_used", {"modules": [""]}),
    Broken(logits_without_bound, "exploding_logits", "logits_diverge", {"slot": "output"}),
    Broken(scale_clamped, "logit_scale_at_clamp", "at_its_clamp", {"params": ["logit_scale"]}),
    Broken(half_of_the_units_dead, "partly_dead_units", "dying_relu", {"params": ["0.bias"], "fraction": 0.75}),
    Broken(saturated_tanh, "saturation", "saturated", {"modules": ["1"]}),
    Broken(one_number_in_all_weights, "poor_initialisation", "constant_weights", {"params": ["0.weight"]}),
    Broken(weights_that_fade, "poor_initialisation", "outputs_fade", {"count": 10}),
    Broken(weights_that_explode, "poor_initialisation", "outputs_explode", {"count": 10}),
    Broken(far_worse_than_chance, "poor_initialisation", "loss_above_chance", {"count": 3}),
    Broken(one_sibling_out_of_proportion, "tensor_variance", "out_of_proportion", {"modules": ["blocks.3"]}),
    Broken(recomputed_with_other_dropout, "recomputation_differs", "not_repeatable", {"modules": ["drop"]}),
    Broken(losses_kept, "memory_growth", "kept_from_step_to_step", {}),
    Broken(compiled_for_every_length, "recompilation", "guards_fail", {}),
    Broken(slow_checkpoints, "checkpoint_pause", "checkpoint", {"count": 3}),
]
