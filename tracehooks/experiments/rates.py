"""Which learning rates are stable: a few steps from here at each of a range of them, and what became of the loss. (After
the range test of Smith, Cyclical Learning Rates for Training Neural Networks, 2017, which raises the rate within one run;
from one starting point for all there is no lag between a rate and what it does.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from tracehooks.core.arguments import number, whole
from tracehooks.core.errors import InvalidOptionError
from tracehooks.core.records import Check, Verdict
from tracehooks.experiments.given import a_loss, an_optimizer, gives_batches
from tracehooks.experiments.progress import progress
from tracehooks.experiments.recording import LossFn, seed_all
from tracehooks.experiments.training import as_it_was, loss_of, norm, step, trainable
from tracehooks.locate.replay import Randomness

RISE = 0.01
"""A rate is stable when its steps raise the loss by no more than this share of it."""

BEYOND = 3
"""Rates that are tried after the first unstable one, before the rest is left out."""


def learning_rate_range(
    model: nn.Module,
    loss_fn: LossFn,
    batches: Any,
    *,
    lowest: float = 1e-6,
    highest: float = 10.0,
    rates: int = 29,
    steps: int = 10,
    optimizer: Optimizer | None = None,
    seed: int = 0,
    quiet: bool = False,
) -> Verdict:
    """Take a few steps at each of a range of rates, each time from the model as it is, and compare the loss before and
    after.

    Afterwards model, optimizer and generators are as they were. ``evidence`` holds, a number for each rate that was tried,
    ``rates``, ``losses`` (after its steps) and ``gradient_norms`` (of its last step), and ``first_loss``,
    ``largest_stable``, ``best`` (where the loss fell furthest) and ``diverges`` (the first rate that is not stable). None
    stands for what there is not.

    Args:
        loss_fn: (model, batch) → the loss, a tensor of one element.
        batches: a list of batches, an iterator or a DataLoader, of which as many are taken as there are steps, in turn;
            anything else is one batch for all steps.
        lowest, highest: the rates between which to look.
        rates: how many to try, each a factor above the last.
        steps: how many steps at each.
        optimizer: the run's own, with its state; its groups keep the proportions of their rates. Without one SGD.
        seed: of every generator.
        quiet: draw no bar.

    Raises:
        InvalidOptionError: rates in the wrong order, too few rates or steps, no batches, a loss that is none, nothing to
            train, or an argument of another kind.
    """
    a_loss(model, loss_fn)
    an_optimizer(optimizer)
    for name, value in (("lowest", lowest), ("highest", highest)):
        number(name, value, "a learning rate")
    for name, value in (("rates", rates), ("steps", steps)):
        whole(name, value, "a whole number", 0)
    if not 0 < lowest < highest or rates < 2 or steps < 1:
        asked = (lowest, highest, rates, steps)
        raise InvalidOptionError(
            "lowest, highest, rates, steps",
            asked,
            "two rates above 0, the lower one first; at least 2 rates and 1 step",
        )
    turns = _in_turn(batches, steps)
    if not turns:
        raise InvalidOptionError("batches", "none", "at least one batch")
    trainable(model)
    tried: list[_Tried] = []
    with progress("learning rate range", rates, quiet) as done:
        for i in range(rates):
            rate = lowest * (highest / lowest) ** (i / (rates - 1))
            with as_it_was(model, optimizer), torch.enable_grad():
                seed_all(seed)
                tried.append(_try(model, loss_fn, [turns[k % len(turns)] for k in range(steps)], optimizer, rate))
            done(f"rate {rate:.2g}, loss {tried[-1].after:.4g}")
            if len(tried) > BEYOND and not any(one.stable for one in tried[-BEYOND - 1 :]):
                break
    return _verdict(tried, None if optimizer is None else max(_rates(optimizer)))


def _in_turn(batches: Any, steps: int) -> list[Any]:
    """The batches as a list: of an iterator no more than are used, for it may never end."""
    if gives_batches(batches):
        randomness = Randomness()  # which a DataLoader uses
        try:
            return list(itertools.islice(batches, steps))
        finally:
            randomness.restore()
    return batches if isinstance(batches, list) else [batches]


@dataclass(frozen=True)
class _Tried:
    """What some steps at a rate did."""

    rate: float
    before: float
    after: float
    gradient: float

    @property
    def stable(self) -> bool:
        """Whether the loss did not rise."""
        return math.isfinite(self.after) and self.after <= self.before + RISE * abs(self.before)


def _try(model: nn.Module, loss_fn: LossFn, batches: list[Any], optimizer: Optimizer | None, rate: float) -> _Tried:
    used = torch.optim.SGD(trainable(model).values(), lr=rate) if optimizer is None else optimizer
    for group, share in zip(used.param_groups, _shares(used), strict=True):
        group["lr"] = torch.full_like(group["lr"], rate * share) if torch.is_tensor(group["lr"]) else rate * share
    distinct = list({id(batch): batch for batch in batches}.values())
    before = _mean_loss(model, loss_fn, distinct)
    for batch in batches:
        step(model, loss_fn, batch, used)
    gradients = [p.grad for p in model.parameters() if p.grad is not None and not p.grad.is_sparse]
    return _Tried(rate, before, _mean_loss(model, loss_fn, distinct), norm(gradients))


def _mean_loss(model: nn.Module, loss_fn: LossFn, batches: list[Any]) -> float:
    """Drawing the same random numbers each time it is asked."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        losses = [float(loss_of(model, loss_fn, batch)) for batch in batches]
    return sum(losses) / len(losses)


def _rates(optimizer: Optimizer) -> Iterator[float]:
    return (float(group["lr"]) for group in optimizer.param_groups)


def _shares(optimizer: Optimizer) -> list[float]:
    """Each group's rate as a share of the largest; all alike where they are 0."""
    rates = list(_rates(optimizer))
    return [rate / max(rates) if max(rates) > 0 else 1.0 for rate in rates]


def _verdict(tried: list[_Tried], own: float | None) -> Verdict:
    first = tried[0].before
    end = next((i for i, one in enumerate(tried) if not one.stable), None)
    stable = tried[:end]
    largest = stable[-1].rate if stable else None
    best = min(stable, key=lambda one: one.after, default=None)
    falls = best is not None and best.after < first
    checks = [
        Check(
            "Does the loss fall at any rate?",
            falls,
            f"from {first:.4g} to {best.after:.4g} at {best.rate:.3g}" if best is not None else f"it is {first:.4g}",
        ),
        Check(
            "Is there a rate at which it rises?",
            None if end is None else True,
            f"not up to {tried[-1].rate:.3g}" if end is None else f"to {tried[end].after:.4g} at {tried[end].rate:.3g}",
        ),
    ]
    if own is not None:
        answer = f"it is {own:.3g}, the largest stable one {'none' if largest is None else format(largest, '.3g')}"
        checks.append(
            Check("Is the optimizer's own rate a stable one?", largest is not None and own <= largest, answer)
        )
    evidence = {
        "rates": [one.rate for one in tried],
        "losses": [one.after for one in tried],
        "gradient_norms": [one.gradient for one in tried],
        "first_loss": first,
        "largest_stable": largest,
        "best": best.rate if falls and best is not None else None,
        "diverges": None if end is None else tried[end].rate,
    }
    return Verdict("Learning rate range", tuple(checks), evidence)
