"""The loss over time: flat, or falling in training while validation does not follow."""

from __future__ import annotations

import numpy as np

from tracehooks.analysis.rules.facts import LASTING, Facts, Series
from tracehooks.analysis.rules.rule import Answers, Clear, Found, rule
from tracehooks.analysis.rules.series import notch, trend

LOSSES = 50
FALL = 0.01
EVALUATIONS = 4
RISE = 0.1
PATIENCE = 10


@rule(
    sees="a training loss that has not fallen since the run began",
    threshold=f"over {LOSSES} or more losses the median of the last quarter is not {FALL:.0%} below that of the first "
    "quarter and of the first losses, nor further below than medians waver, and no quarter in between is; runs of "
    "several optimizers, whose losses work against each other, are not judged",
    source="McGill, Tukey and Larsen, 1978: two medians differ where their notches, 1.57 IQR/√n, do not overlap",
    needs=f"{LOSSES} or more losses of a model that one optimizer trains",
    next_check="tracehooks diagnose RUN --symptom flat-loss goes through the causes; experiments.overfit on one batch "
    "tells whether anything can be learned at all",
    evidence=("first", "last", "count", "cause"),
    causes=("flat",),
)
def loss_not_decreasing(facts: Facts) -> Answers:
    loss = facts.scalar("loss")
    if len(loss.values) < LOSSES or len(facts.optimizers) > 1:
        return
    quarters = np.array_split(loss.values, 4)
    medians = [float(np.median(quarter)) for quarter in quarters]
    start = max(medians[0], float(np.median(loss.values[:3])))
    noise = float(np.hypot(notch(quarters[0]), notch(quarters[-1])))
    if min(medians[1:]) > start - max(FALL * abs(start), noise):
        text = (
            f"the loss is {medians[-1]:.4g} after {len(loss.values)} losses, it began at {start:.4g}: it does not fall"
        )
        evidence = {"first": start, "last": medians[-1], "count": len(loss.values), "cause": "flat"}
        yield Found("warning", text, int(loss.steps[0]), "loss", evidence)
    yield Clear(f"the loss fell from {start:.4g} to {min(medians[1:]):.4g} over {len(loss.values)} losses")


@rule(
    sees="a validation loss that rises while the training loss falls",
    threshold=f"over {EVALUATIONS} or more evaluations the last is {RISE:.0%} above the best, and by a {FALL * 5:.0%} "
    "of what was learned until then; those after the best, three or more, rise in rank order (Spearman 0.6), and the "
    "training loss is lower than it was",
    source="Prechelt, 1998, Early stopping: generalisation loss, the last validation error relative to the lowest",
    needs='a validation loss: trace.scalar("validation/loss", value), or a model that returns one named loss',
    next_check="keep the weights of the best evaluation; more data, augmentation, or a smaller model",
    evidence=("best", "last", "best_step", "count", "cause"),
    causes=("memorises",),
)
def overfitting(facts: Facts) -> Answers:
    validation = facts.validation_loss
    if len(validation.values) < EVALUATIONS:
        return
    best, rise = _best(validation)
    before, after = _training_around(facts, int(validation.steps[best]))
    values = validation.values
    learned = values[0] - values[best]
    rises = rise > RISE and values[-1] - values[best] > 5 * FALL * learned and trend(values[best:]) >= 0.6
    if rises and best < len(values) - LASTING and before is not None and after is not None and after < before:
        text = (
            f"validation loss rose from {validation.values[best]:.4g} to {validation.values[-1]:.4g} since step "
            f"{validation.steps[best]} while that of training fell from {before:.4g} to {after:.4g}"
        )
        evidence = _numbers(validation, best) | {"cause": "memorises"}
        yield Found("warning", text, int(validation.steps[best]), "validation", evidence)
    yield Clear(
        f"the last validation loss is {rise:+.1%} of the best away from it, over {len(validation.values)} evaluations"
    )


@rule(
    sees="training that goes on long after validation stopped improving",
    threshold=f"the best evaluation is in the first third, and {PATIENCE} or more evaluations after it are none of "
    f"them {FALL:.0%} better; a note",
    source="Prechelt, 1998, Early stopping: no improvement over a strip of evaluations",
    needs=f'{PATIENCE} or more validation losses: trace.scalar("validation/loss", value)',
    next_check="stop at the best evaluation, or lower the learning rate there",
    evidence=("best", "last", "best_step", "count", "cause"),
    causes=("no_improvement",),
)
def overtraining(facts: Facts) -> Answers:
    validation = facts.validation_loss
    if len(validation.values) < PATIENCE:
        return
    best, _ = _best(validation)
    first = int(np.argmax(validation.values <= validation.values[best] + FALL * abs(validation.values[best])))
    since = len(validation.values) - 1 - first
    if since >= PATIENCE and first <= len(validation.values) / 3:
        text = (
            f"no validation loss of {since} evaluations is better than {validation.values[first]:.4g} of step "
            f"{validation.steps[first]}"
        )
        yield Found(
            "info",
            text,
            int(validation.steps[first]),
            "validation",
            _numbers(validation, first) | {"cause": "no_improvement"},
        )
    yield Clear(f"the validation loss was last better {since} evaluations before the end, of {len(validation.values)}")


@rule(
    sees="a run that is the same as its control, so that what was changed between them has no effect",
    threshold=f"over {LASTING} or more common steps every gradient has the bits that it has in the control; a note, "
    "since a repeat is the same on purpose",
    source="SageMaker Debugger's SimilarAcrossRuns compares gradients of two trials; here by content hashes",
    needs="a control run with gradients: tracehooks diagnose RUN --control OTHER",
    next_check="tracehooks diff RUN OTHER says which settings differ: does one of them reach the training?",
    evidence=("count", "share", "cause"),
    causes=("change_without_effect",),
)
def similar_across_runs(facts: Facts) -> Answers:
    if facts.control is None:
        return
    ours, theirs = (_gradients_of_steps(run) for run in (facts, Facts(facts.control)))
    common = sorted(ours.keys() & theirs.keys())
    if len(common) < LASTING:
        return
    equal = sum(ours[step] == theirs[step] for step in common)
    if equal == len(common):
        text = (
            f"the gradients of all {equal} steps are those of the control, bit for bit: what was changed has no effect"
        )
        yield Found("info", text, common[0], "", {"count": equal, "share": 1.0, "cause": "change_without_effect"})
    yield Clear(f"the gradients of {equal} of {len(common)} steps have the bits of the control's")


def _gradients_of_steps(facts: Facts) -> dict[int, int]:
    """A digest of the hashes of all gradients of parameters, by step."""
    rows = facts.sql(
        "SELECT step, bit_xor(hash(module::VARCHAR, slot::VARCHAR, hash)) AS digest FROM tensors "
        "WHERE phase::VARCHAR IN ('gradient', 'gradient_local') AND hash IS NOT NULL GROUP BY step"
    )
    return dict(zip(rows["step"].to_pylist(), rows["digest"].to_pylist(), strict=True))


def _best(validation: Series) -> tuple[int, float]:
    """Which evaluation is the best, and by how much the last is above it."""
    best = int(np.argmin(validation.values))
    lowest = validation.values[best]
    return best, float((validation.values[-1] - lowest) / max(abs(lowest), 1e-12))


def _training_around(facts: Facts, step: int) -> tuple[float | None, float | None]:
    """Medians of the training loss in the tenth of the run up to a step, and in the last tenth."""
    loss = facts.scalar("loss")
    few = max(1, len(loss.values) // 10)
    before = loss.values[loss.steps <= step][-few:]
    return (float(np.median(before)), float(np.median(loss.values[-few:]))) if len(before) else (None, None)


def _numbers(validation: Series, best: int) -> dict[str, float | int]:
    return {
        "best": float(validation.values[best]),
        "last": float(validation.values[-1]),
        "best_step": int(validation.steps[best]),
        "count": len(validation.values),
    }


RULES = (loss_not_decreasing, overfitting, overtraining, similar_across_runs)
