"""Training that fails by what is kept from step to step: modes, buffers, copies, what is resumed. Each builder's
docstring says what is wrong."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.rules.cases import Broken, Case, Resumed, batches, trained
from tests.rules.parts import Words, mlp, regression, tokens


def left_in_evaluation() -> Case:
    """Evaluation after step 2, and no way back."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    case = trained(model, regression)
    case.after = lambda number, trace: model.eval() if number == 2 else None
    return case


def loaded_in_evaluation() -> Case:
    """Evaluation mode from the start."""
    case = left_in_evaluation()
    case.model.eval()
    return case


def frozen_but_counting() -> Case:
    """A frozen backbone whose batch normalisation goes on counting."""
    backbone = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, affine=False)).requires_grad_(False)
    model = nn.Sequential(backbone, nn.Linear(8, 1))
    return trained(model, regression, optimizer=torch.optim.Adam(model[1].parameters(), 1e-2))


def padding_overwritten() -> Case:
    """The weights are initialised after the embedding was made."""
    model = Words()
    model.embedding = nn.Embedding(20, 16, padding_idx=0)
    nn.init.normal_(model.embedding.weight)
    return trained(model, lambda m, i: functional.cross_entropy(m(tokens(i)).flatten(0, 1), tokens(i).flatten()))


def hidden_state_with_its_graph() -> Case:
    """A state carried from step to step with its graph."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(6, 6)
            self.register_buffer("state", torch.zeros(16, 6))

        def forward(self, x: Tensor) -> Tensor:
            self.state = self.cell(x) + 0.5 * self.state
            return self.state

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(batches(16, 6)[number]).square().mean().backward(retain_graph=True)
        optimizer.step()

    return Case(model, step)


def snapshot_without_copy() -> Case:
    """The best state is kept without a copy."""
    case = trained(mlp(6, 8, 1), regression)
    case.after = lambda number, trace: trace.checkpoint("best", case.model.state_dict()) if number == 3 else None
    return case


def average_of_parameters_only() -> Case:
    """The average follows the parameters and forgets the running statistics."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    average = copy.deepcopy(model)

    def follow(number: int, trace: Any) -> None:
        with torch.no_grad():
            for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)

    case = trained(model, regression, options={"ema": average})
    case.after = follow
    return case


def _resumed(lr: float, *, load: bool) -> Case:
    model = mlp(6, 8, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr)
    if load:
        regression(model, 0).backward()
        optimizer.step()
    return trained(model, regression, optimizer=optimizer)


def resumed_without_moments() -> Resumed:
    """The weights were loaded, Adam's moments were not."""
    return Resumed(_resumed(1e-2, load=True), _resumed(1e-2, load=False))


def resumed_with_the_first_rate() -> Resumed:
    """The schedule begins anew: a rate ten times that of the last step."""
    return Resumed(_resumed(1e-3, load=True), _resumed(1e-2, load=True))


STATE = (
    Broken(left_in_evaluation, "eval_mode_in_training", "missing_train_call", {"modules": ["", "1", "2"]}),
    Broken(loaded_in_evaluation, "eval_mode_in_training", "missing_train_call", {"modules": ["", "1", "2"]}),
    Broken(
        frozen_but_counting,
        "frozen_buffer_changed",
        "bn_train_mode_in_frozen_module",
        {"buffers": ["0.1.running_mean", "0.1.running_var"]},
    ),
    Broken(padding_overwritten, "padding_row_nonzero", "init_overwrites_padding", {"params": ["embedding.weight"]}),
    Broken(hidden_state_with_its_graph, "graph_growth", "buffer_not_detached", {"buffers": ["state"]}),
    Broken(snapshot_without_copy, "aliased_snapshot", "state_dict_without_copy", {"count": 4}),
    Broken(
        average_of_parameters_only,
        "ema_buffers_stale",
        "ema_skips_buffers",
        {"buffers": ["1.running_mean", "1.running_var"]},
    ),
    Broken(resumed_without_moments, "optimizer_state_missing", "state_not_loaded", {"optimizer": "Adam"}),
    Broken(resumed_with_the_first_rate, "lr_jump", "schedule_restarted", {"before": 1e-3, "after": 1e-2}),
)
