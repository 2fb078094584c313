"""Training that fails by its loss, or by units that no longer answer. Each builder's docstring says what is wrong."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.rules.cases import Broken, Case, batches, trained
from tests.rules.parts import Words, classes, mlp, regression, tokens


def column_against_row() -> Case:
    """Predictions (N, 1) minus targets (N,)."""
    return trained(mlp(6, 8, 1), lambda m, i: (m(batches(16, 6)[i]) - batches(16, 6)[i].sum(-1)).square().mean())


def row_against_column() -> Case:
    """Predictions (N,) against targets (N, 1) in a loss function of torch's, inside the model."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(6, 8, 1)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return functional.smooth_l1_loss(self.net(x).squeeze(-1), y)

    return trained(Model(), lambda m, i: m(batches(16, 6)[i], batches(16, 6)[i].sum(-1, keepdim=True)))


def softmax_twice() -> Case:
    """Cross-entropy of probabilities."""
    model = nn.Sequential(nn.Linear(6, 3), nn.Softmax(-1))
    return trained(model, lambda m, i: functional.cross_entropy(m(batches(16, 6)[i]), classes(i)))


def sigmoid_twice() -> Case:
    """Binary cross-entropy with logits, of probabilities."""
    model = nn.Sequential(nn.Linear(6, 1), nn.Sigmoid())
    return trained(
        model,
        lambda m, i: functional.binary_cross_entropy_with_logits(m(batches(16, 6)[i]).squeeze(-1), classes(i).float()),
    )


def nothing_supervised() -> Case:
    """Every label is ignored; the sum is divided by at least one."""

    def loss(model: nn.Module, number: int) -> Tensor:
        ids = tokens(number)
        return (
            functional.cross_entropy(model(ids).flatten(0, 1), torch.full_like(ids, -100).flatten(), reduction="sum")
            / 1
        )

    return trained(Words(), loss)


def shifted_twice() -> Case:
    """The labels are shifted already, and the loss shifts them again."""

    def loss(model: nn.Module, number: int) -> Tensor:
        ids = tokens(number)
        logits, labels = model(ids[:, :-1]), ids[:, 1:]
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    return trained(Words(), loss)


def dead_by_a_step() -> Case:
    """One step so large that a layer of rectifiers is negative for everything."""
    return _killed(nn.ReLU())


def dead_functional() -> Case:
    """The same with the functional form, which has no hook."""
    return _killed(None)


def _killed(module: nn.Module | None) -> Case:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.front, self.head, self.act = nn.Linear(6, 8), nn.Linear(8, 1), module

        def forward(self, x: Tensor) -> Tensor:
            h = self.front(x)
            return self.head(self.act(h) if self.act is not None else h.relu())

    model = Model()
    case = trained(model, regression, optimizer=torch.optim.SGD(model.parameters(), 1e-3))

    def kill(number: int, trace: Any) -> None:
        if number == 1:
            with torch.no_grad():
                model.front.bias.fill_(-100.0)

    case.after = kill
    return case


def collapsed_router() -> Case:
    """One expert gets every token."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(6, 3)
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.ReLU()) for _ in range(3))
            self.head = nn.Linear(6, 1)
            with torch.no_grad():
                self.gate.bias[0] = 50.0

        def forward(self, x: Tensor) -> Tensor:
            weight, chosen = self.gate(x).softmax(-1).max(-1)
            out = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                out[chosen == number] = expert(x[chosen == number]) * weight[chosen == number, None]
            return self.head(x + out)

    return trained(Model(), regression)


OBJECTIVE = (
    Broken(column_against_row, "loss_broadcast", "shape_mismatch_broadcast", {"shapes": [[16, 1], [16]]}),
    Broken(row_against_column, "loss_broadcast", "shape_mismatch_broadcast", {"shapes": [[16], [16, 1]]}),
    Broken(softmax_twice, "double_softmax", "probabilities_used_as_logits", {"modules": ["1"], "op": "softmax"}),
    Broken(sigmoid_twice, "double_softmax", "probabilities_used_as_logits", {"modules": ["1"], "op": "sigmoid"}),
    Broken(nothing_supervised, "empty_mask", "no_supervised_token", {"count": 8}),
    Broken(shifted_twice, "misaligned_targets", "double_shift", {"shift": 2}),
    Broken(dead_by_a_step, "dead_activations", "dying_relu", {"modules": ["act"], "fraction": 1.0}),
    Broken(dead_functional, "dead_activations", "dying_relu", {"modules": ["front"]}),
    Broken(collapsed_router, "dead_modules", "router_collapse", {"modules": ["experts.1", "experts.2"]}),
)
