"""Whether a model can learn one tiny batch by heart: if it cannot, something between the targets and the parameters is
broken. (Karpathy, A Recipe for Training Neural Networks, 2019: "overfit a single batch".)
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from tracehooks.core.arguments import number, whole
from tracehooks.core.records import Check, Verdict
from tracehooks.experiments.given import an_optimizer, one_batch
from tracehooks.experiments.objective import look_at
from tracehooks.experiments.progress import progress
from tracehooks.experiments.recording import LossFn, seed_all
from tracehooks.experiments.training import as_it_was, norm, step, trainable, without_dropout

RATES = (1e-3, 1e-2, 1e-4)
"""Learning rates of Adam that are tried in turn where no optimizer is given."""

ENOUGH = 0.1
"""The batch is learned when its loss is down to this share of what it was."""

NAMED = 5
"""Parameters that an answer names at most."""


def overfit(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    *,
    steps: int = 200,
    optimizer: Optimizer | None = None,
    enough: float = ENOUGH,
    seed: int = 0,
    quiet: bool = False,
) -> Verdict:
    """Train on one batch, over and over, and answer five questions with a number each: whether the targets hold something
    to learn, whether the loss depends on the predictions, whether gradients reach the trainable parameters, whether the
    optimizer updates them, and whether the model can represent the task.

    Modules that drop things at random are switched off. Afterwards model, optimizer and generators are as they were.

    Args:
        loss_fn: (model, batch) → the loss, a tensor of one element.
        batch: a few samples: tensors in anything.
        steps: how long to try.
        optimizer: the run's own, to ask whether it updates the parameters; without one Adam, at the first of three rates
            that suffices.
        enough: share of the first loss that counts as learned.
        seed: of every generator.
        quiet: draw no bar.

    Raises:
        InvalidOptionError: ``loss_fn`` returns no loss, the model has nothing to train, there is no step to try, or an
            argument of another kind.
    """
    one_batch(model, loss_fn, batch)
    an_optimizer(optimizer)
    whole("steps", steps, "at least 1 step", 1)
    number("enough", enough, "a share of the first loss, above 0", lambda share: share > 0)
    parameters = trainable(model)
    with as_it_was(model, optimizer), without_dropout(model), torch.enable_grad():
        seed_all(seed)
        objective = look_at(model, loss_fn, batch)
    course = None
    for rate in RATES if optimizer is None else (None,):
        with as_it_was(model, optimizer), without_dropout(model), torch.enable_grad():
            seed_all(seed)
            used = optimizer if rate is None else torch.optim.Adam(parameters.values(), lr=rate)
            tried = _train(model, loss_fn, batch, used, parameters, steps, quiet)  # type: ignore[arg-type]
        if course is None or tried.best < course.best:
            course = tried
        if course.learned(enough):
            break
    assert course is not None
    checks = (*objective.checks(), *_answers(course, parameters, enough))
    return Verdict("Overfit one batch", checks, {**objective.evidence(), **course.evidence(), "steps": steps})


@dataclass
class _Course:
    """What happened in the steps of one attempt."""

    optimizer: str
    rate: float
    losses: list[float] = field(default_factory=list)
    reached: set[str] = field(default_factory=set)
    """Parameters that had a gradient other than zero in any step."""
    updated: set[str] = field(default_factory=set)
    """Parameters that are not what they were."""
    relative_update: float | None = None
    """Median over parameters of the first step's ‖Δw‖/‖w‖."""

    @property
    def best(self) -> float:
        """The smallest loss; infinite where none is finite."""
        return min((loss for loss in self.losses if math.isfinite(loss)), default=math.inf)

    def learned(self, enough: float) -> bool:
        """Whether the loss fell enough: to that share of it where it began above 0, at all where it did not."""
        first = self.losses[0]
        return math.isfinite(self.best) and (self.best <= enough * first if first > 0 else self.best < first)

    def evidence(self) -> dict[str, Any]:
        """The numbers."""
        return {
            "optimizer": self.optimizer,
            "rate": self.rate,
            "first_loss": self.losses[0],
            "best_loss": self.best,
            "last_loss": self.losses[-1],
            "reached": sorted(self.reached),
            "updated": sorted(self.updated),
            "relative_update": self.relative_update,
        }


def _train(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    optimizer: Optimizer,
    parameters: dict[str, nn.Parameter],
    steps: int,
    quiet: bool,
) -> _Course:
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    course = _Course(type(optimizer).__name__, float(optimizer.param_groups[0]["lr"]))
    with progress(f"overfit, rate {course.rate:.2g}", steps, quiet) as done:
        for _ in range(steps):
            course.losses.append(step(model, loss_fn, batch, optimizer))
            course.reached |= {
                name for name, p in parameters.items() if name not in course.reached and _has_gradient(p)
            }
            if course.relative_update is None:
                course.relative_update = _relative_update(parameters, before)
            done(f"loss {course.losses[-1]:.4g}")
            if not math.isfinite(course.losses[-1]):
                break
    course.updated = {name for name, p in parameters.items() if not torch.equal(p.detach(), before[name])}
    return course


def _has_gradient(parameter: nn.Parameter) -> bool:
    return parameter.grad is not None and norm([_dense(parameter.grad)]) != 0


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _relative_update(parameters: dict[str, nn.Parameter], before: dict[str, torch.Tensor]) -> float:
    ratios = []
    for name, parameter in parameters.items():
        size = norm([before[name]])
        if size > 0:
            ratios.append(norm([parameter.detach() - before[name]]) / size)
    return statistics.median(ratios) if ratios else 0.0


def _answers(course: _Course, parameters: dict[str, nn.Parameter], enough: float) -> tuple[Check, ...]:
    unreached = [name for name in parameters if name not in course.reached]
    still = [name for name in course.reached if name not in course.updated]
    first, best = course.losses[0], course.best
    share = f"{best / first:.1%} of it" if first > 0 and math.isfinite(best) else "no share of it"
    return (
        Check(
            "Do gradients reach the trainable parameters?",
            not unreached,
            f"{len(course.reached)} of {len(parameters)} had one that is not zero" + _named("; none:", unreached),
        ),
        Check(
            "Does the optimizer update those parameters?",
            None if not course.reached else not still,
            f"{course.optimizer} at rate {course.rate:.3g} changed {len(course.reached) - len(still)} of "
            f"{len(course.reached)}, in its first step by {course.relative_update or 0:.2g} of their size (median)"
            + _named("; unchanged:", sorted(still)),
        ),
        Check(
            "Can the model represent the task?",
            course.learned(enough),
            f"loss {first:.4g} fell to {best:.4g}, {share}, in {len(course.losses)} steps; wanted: {enough:.0%}",
        ),
    )


def _named(before: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{before} {', '.join(names[:NAMED])}{more}"
