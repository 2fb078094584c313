"""What experiments say of arguments that are none: one line, before anything is run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tracehooks
from tracehooks import experiments, golden
from tracehooks.core.errors import InvalidOptionError

X = torch.arange(24.0).view(8, 3)
MODEL = nn.Sequential(nn.Linear(3, 2))
LOADER = DataLoader(TensorDataset(X), batch_size=2, shuffle=True)


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).square().mean()


def step_fn(model: nn.Module) -> None:
    loss_fn(model, X).backward()


GIVEN: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "overfit": (experiments.overfit, {"model": MODEL, "loss_fn": loss_fn, "batch": X, "steps": 1}),
    "precision": (experiments.precision, {"model": MODEL, "loss_fn": loss_fn, "batch": X}),
    "learning_rate_range": (
        experiments.learning_rate_range,
        {"model": MODEL, "loss_fn": loss_fn, "batches": X, "rates": 2, "steps": 1},
    ),
    "influence": (experiments.influence, {"model": MODEL, "batch": X}),
    "shadow": (experiments.shadow, {"model_a": MODEL, "model_b": MODEL, "batch": X}),
    "neutrality": (tracehooks.neutrality, {"model": MODEL, "step_fn": step_fn, "steps": 2, "rounds": 1}),
}
"""Each experiment with arguments that it takes."""

WRONG: list[tuple[str, str, Any, str]] = [
    *((name, "model", None, "got None, expected a torch.nn.Module") for name in GIVEN if name != "shadow"),
    *((name, "loss_fn", 5, "got 5, expected a function: (model") for name in GIVEN if name != "neutrality"),
    *((name, "loss_fn", None, "got None, expected a function") for name in ("overfit", "precision", "learning_rate_range")),
    *(
        (name, "batch", LOADER, "got 'DataLoader', expected one batch, such as next(iter(loader))")
        for name in ("overfit", "precision", "influence", "shadow")
    ),
    *(
        (name, "seed", seed, f"got {seed!r}, expected a whole number from 0 to 2**32 - 1")
        for name in GIVEN if name != "neutrality" for seed in ("a", -1, True)
    ),
    ("shadow", "model_a", None, "expected a torch.nn.Module"),
    ("shadow", "model_b", "m", "got 'm', expected a torch.nn.Module"),
    ("influence", "inputs", 5, "got 5, expected names of inputs"),
    ("overfit", "optimizer", 5, "got 5, expected an optimizer"),
    ("overfit", "enough", "x", "got 'x', expected a share of the first loss"),
    ("overfit", "steps", "3", "got '3', expected at least 1 step"),
    ("precision", "scale", None, "got None, expected a number above 0"),
    ("precision", "dtype", None, "got 'None', expected float16 or bfloat16"),
    ("learning_rate_range", "optimizer", 5, "got 5, expected an optimizer"),
    ("learning_rate_range", "highest", None, "got None, expected a learning rate"),
    ("learning_rate_range", "rates", 2.5, "got 2.5, expected a whole number"),
    ("neutrality", "step_fn", None, "got None, expected a function"),
    ("neutrality", "steps", 1, "got 1, expected at least 2 steps"),
    ("neutrality", "rounds", "1", "got '1', expected at least 1 round"),
    ("neutrality", "keep", 5, r"got 5, expected what has state_dict() and load_state_dict()"),
    ("neutrality", "keep", [X], r"got 'Tensor', expected what has state_dict() and load_state_dict()"),
]  # fmt: skip


@pytest.mark.parametrize(("experiment", "name", "value", "message"), WRONG, ids=lambda value: str(value)[:24])
def test_what_is_wrong_is_said(experiment: str, name: str, value: Any, message: str) -> None:
    """The argument, what it is and what it should be, in one line; model and generators are as they were."""
    call, given = GIVEN[experiment]
    before, weight = torch.get_rng_state(), MODEL[0].weight.detach().clone()
    options = {} if experiment == "shadow" else {"quiet": True}
    with pytest.raises(InvalidOptionError) as error:
        call(**{**given, **options, name: value})
    assert str(error.value).startswith(f"option {name}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(MODEL[0].weight, weight)
    assert not MODEL[0]._forward_hooks


def test_a_loader_gives_the_batches_of_a_range() -> None:
    """A DataLoader is asked for as many batches as there are steps, and what it draws to shuffle them is put back."""
    seen = []

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        seen.append(batch[0])
        return model(batch[0]).square().mean()

    before = torch.get_rng_state()
    experiments.learning_rate_range(MODEL, loss, LOADER, rates=2, steps=3, highest=1e-5, quiet=True)
    assert {tuple(x.shape) for x in seen} == {(2, 3)}
    assert len({id(x) for x in seen}) == 3
    assert torch.equal(torch.get_rng_state(), before)


def test_one_thing_to_keep_needs_no_list() -> None:
    """A scheduler that a step changes may be given by itself, and is as it was afterwards."""
    optimizer = torch.optim.SGD(MODEL.parameters(), 0.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def step(model: nn.Module) -> torch.Tensor:
        loss = loss_fn(model, X)
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss

    tracehooks.neutrality(MODEL, step, steps=2, rounds=1, keep=scheduler, quiet=True)
    assert scheduler.last_epoch == 0


def test_golden_batches_have_paths_models_and_losses(tmp_path) -> None:
    """What of a golden batch is no path, no model or no function is said."""
    saved = golden.save(tmp_path / "golden", X)
    for name, call in {
        "path": lambda: golden.load(None),
        "out": lambda: golden.record(saved, 5, MODEL, loss_fn),
        "against": lambda: golden.check(saved, MODEL, loss_fn, 5),
        "model": lambda: golden.record(saved, None, None, loss_fn),
        "seed": lambda: golden.record(saved, None, MODEL, loss_fn, seed=None),
        "loss_fn": lambda: golden.record(saved, None, MODEL, None),
    }.items():
        with pytest.raises(InvalidOptionError, match=f"option {name}: got (None|5), expected"):
            call()
    assert not (saved / "expected").exists()
