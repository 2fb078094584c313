"""What the optimizer does: rates, what it holds, what it should not touch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tracehooks.analysis.rules import needs
from tracehooks.analysis.rules.facts import LASTING, Facts, Seen, quoted
from tracehooks.analysis.rules.rule import Answers, Clear, Found, listed, rule
from tracehooks.analysis.rules.series import longest

ZERO_RATE_STEPS = 2
CARRIED_SHARE = 0.4
TOO_SMALL, TOO_LARGE = 1e-6, 0.5
CLIPPED_TO_NOTHING = 1e-5
NEVER = 20
EPSILON = 1e-8
"""What Adam and its kind add to the size of a gradient before they divide by it, by default."""
RESOLUTION = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-9, "float16": 2.0**-12}
"""Half the spacing of numbers next to one."""


@rule(
    sees="a learning rate of exactly zero while there are gradients",
    threshold=f"every group at zero for {ZERO_RATE_STEPS} or more steps running (a warm-up may begin with one); of "
    "single groups, or for less than a tenth of the run at its end, it is a note",
    source="a schedule by integer division, or one that ends before training does",
    needs=needs.OPTIMIZER,
    next_check="print the schedule for the first and the last steps: which factor is zero, and how many steps was it "
    "made for",
    evidence=("count", "last_step", "cause"),
    causes=("scheduler_zero",),
)
def zero_lr(facts: Facts) -> Answers:
    groups = facts.scalars("lr/")
    if not groups:
        return
    steps = np.unique(np.concatenate([series.steps for series in groups.values()]))
    zero = {name: np.isin(steps, series.steps[series.values == 0]) for name, series in groups.items()}
    start, length = longest(np.logical_and.reduce(list(zero.values())))
    if length >= ZERO_RATE_STEPS:
        only_the_end = start + length == len(steps) and start > 0 and length < 0.1 * len(steps)
        yield Found(
            "info" if only_the_end else "error",
            f"the learning rate is exactly zero in {length} of {len(steps)} steps: nothing is learned in them",
            int(steps[start]),
            "",
            {"count": length, "cause": "scheduler_zero", "last_step": int(steps[start + length - 1])},
        )
        return
    for name, flags in zero.items():
        start, length = longest(flags)
        if length >= max(ZERO_RATE_STEPS, 0.5 * len(steps)):
            group = name.removeprefix("lr/")
            text = f"the learning rate of parameter group {group} is zero in {length} of {len(steps)} steps"
            yield Found("info", text, int(steps[start]), name, {"count": length, "cause": "scheduler_zero"})
    largest = max(float(series.values.max()) for series in groups.values())
    none = int(np.logical_and.reduce(list(zero.values())).sum())
    yield Clear(f"the learning rate goes up to {largest:.3g} and is zero in {none} of {len(steps)} steps")


@rule(
    sees="gradients that an optimizer has used and that the next backward pass adds to",
    threshold=f"two or more steps, and {CARRIED_SHARE:.0%} of those looked at, began with the old gradient still there "
    "at every backward pass since the step before",
    source="torch.optim: backward accumulates into .grad; only zero_grad empties it",
    needs=needs.OPTIMIZER + ", two or more times",
    next_check="call optimizer.zero_grad() once a step, before backward",
    evidence=("count", "cause"),
    causes=("missing_zero_grad",),
)
def grads_not_zeroed(facts: Facts) -> Answers:
    carried = facts.scalar("gradient/carried")
    positive = carried.values > 0
    if positive.sum() >= 2 and positive.mean() >= CARRIED_SHARE:
        yield Found(
            "error",
            f"gradients are not cleared: in {int(positive.sum())} of {len(positive)} steps backward added to those of the "
            "step before",
            int(carried.steps[positive][0]),
            "",
            {"count": int(positive.sum()), "cause": "missing_zero_grad"},
        )
    elif len(positive):
        yield Clear(f"{int(positive.sum())} of {len(positive)} steps began with the old gradients")


@rule(
    sees="trainable parameters that get a gradient and that no optimizer holds",
    threshold="one; a note where they are all of the first modules and most of the model, as in training a head alone",
    source="torch.optim: only what is in param_groups is stepped",
    needs=needs.OPTIMIZER,
    next_check="compare the names with those handed to the optimizer: a filter by name, or modules made or moved "
    "after it",
    evidence=("params", "count", "cause"),
    causes=("name_filter", "optimizer_holds_old_tensors"),
)
def param_not_in_optimizer(facts: Facts) -> Answers:
    foreign = [shape for optimizer in facts.optimizers for shape in optimizer.get("foreign", [])]
    strange = facts.events("foreign_optimizer")
    missing = [
        name
        for name in facts.trainable
        if name not in facts.held and name in facts.gradients and not _changes(facts, name)
    ]
    if not missing or not (facts.held or strange):
        if facts.held or facts.parameters:
            known = len(facts.held.intersection(facts.trainable))
            yield Clear(f"{known} of {len(facts.trainable)} trainable parameters are in an optimizer, 0 of the others get a "
                        "gradient and never change")  # fmt: skip
        return
    old = foreign or [shape for event in strange for shape in event.details["shapes"]]
    shapes = [list(facts.described[name]["shape"]) for name in missing if name in facts.described]
    replaced = bool(shapes) and all(shape in old for shape in shapes)
    held_too = [name for name in facts.trainable if name in facts.held and name in facts.gradients]
    lazily = not replaced and _only_the_front(facts.trainable, missing, held_too)
    yield Found(
        "info" if lazily else "error",
        f"no optimizer holds {listed(missing)}, which require a gradient and get one: they never change",
        facts.gradients[missing[0]].first_step,
        missing[0],
        {
            "params": missing,
            "count": len(missing),
            "cause": "optimizer_holds_old_tensors" if replaced else "name_filter",
        },
    )


@rule(
    sees="a frozen parameter that an optimizer changes all the same",
    threshold="its value changed in a step in which it did not require a gradient, in two or more such steps",
    source="torch.optim: a parameter whose .grad is left over from before is stepped, and momentum and decay go on",
    needs=needs.UPDATES,
    next_check="set its .grad to None when freezing, or give the optimizer only what is trainable",
    evidence=("params", "count", "cause"),
    causes=("stale_grad_or_momentum",),
)
def frozen_param_changed(facts: Facts) -> Answers:
    changed: dict[str, list[int]] = {}
    for name, first, last in _frozen_spans(facts):
        site = facts.updates.get(name)
        if site is not None and site.last_nonzero is not None and site.last_nonzero >= first:
            module, _, slot = name.rpartition(".")
            rows = facts.sql(
                "SELECT DISTINCT step FROM tensors WHERE phase::VARCHAR = 'update' AND zeros < count "
                f"AND module::VARCHAR = {quoted(module)} AND slot::VARCHAR = {quoted(slot)} "
                f"AND step >= {first} AND step < {last} ORDER BY step"
            )["step"].to_pylist()
            changed.setdefault(name, []).extend(rows)
    names = [name for name, steps in changed.items() if len(steps) >= 2]
    if names:
        yield Found(
            "warning",
            f"{listed(names)} do not require a gradient and yet optimizer steps change them",
            min(changed[name][0] for name in names),
            names[0],
            {"params": names, "count": len(changed[names[0]]), "cause": "stale_grad_or_momentum"},
        )
    elif facts.updates:
        frozen = {name for name, *_ in _frozen_spans(facts)}
        yield Clear(f"0 of {len(frozen)} frozen parameters change")


def _frozen_spans(facts: Facts) -> Iterator[tuple[str, int, int]]:
    """(parameter, first step, step after the last) of each stretch of steps that began frozen and in which no flag
    changed."""
    events = facts.events("trainable")
    for event, end in zip(events, [*(event.step for event in events[1:]), 1 << 62], strict=False):
        for name in event.details["frozen"]:
            yield name, event.step, end


def _changes(facts: Facts, name: str) -> bool:
    """Whether a parameter changes at all: updates by hand need no optimizer."""
    site = facts.parameters.get(name)
    return site is not None and site.changed


def _only_the_front(order: Sequence[str], missing: Sequence[str], held: Sequence[str]) -> bool:
    if not held:
        return False
    before = order.index(held[0])
    return len(missing) > len(held) and all(order.index(name) < before for name in missing)


@rule(
    sees="steps that are far too small, or far too large, for the weights",
    threshold="the relative update ‖Δw‖/‖w‖, in the median of all weights of two dimensions or more, is below "
    f"{TOO_SMALL:g}, or above {TOO_LARGE:g}, over {LASTING} or more steps in which the loss does not fall by a "
    "hundredth",
    source="Karpathy, Stanford CS231n: the ratio should be near 1e-3; SageMaker Debugger's WeightUpdateRatio",
    needs=needs.UPDATES,
    next_check="experiments.learning_rate_range(…) sweeps the rate; change it by ten and look at the first steps",
    evidence=("ratio", "learning_rate", "params", "count", "cause"),
    causes=("learning_rate_too_small", "learning_rate_too_large"),
)
def update_ratio(facts: Facts) -> Answers:
    ratios = facts.relative_updates
    if not ratios:
        yield from _nothing_changes(facts)
        return
    if max(facts.updates[name].rows for name in ratios) < LASTING:
        return
    usual = float(np.median(list(ratios.values())))
    small = usual < TOO_SMALL and _clipped_to(facts) is None
    if (small or usual > TOO_LARGE) and not facts.falls and facts.held:
        rate = max((float(series.values.max()) for series in facts.scalars("lr/").values()), default=None)
        params = sorted(ratios, key=lambda name: ratios[name], reverse=not small)
        text = (
            f"a step changes weights by {usual:.1e} of their norm, where a thousandth is usual, and the loss does "
            "not fall"
        )
        cause = "learning_rate_too_small" if small else "learning_rate_too_large"
        evidence = {"ratio": usual, "learning_rate": rate, "params": params[:20], "count": len(params), "cause": cause}
        yield Found("warning", text, facts.run_start, params[0], evidence)
    yield Clear(f"a step changes weights by {usual:.1e} of their norm, in the median of {len(ratios)} weights")


@rule(
    sees="gradients that are clipped to next to nothing",
    threshold="the gradient norm is one and the same number, to 0.1 %, in nine of ten steps, the optimizer does not "
    f"divide by it (as Adam does), and a step changes weights by less than {CLIPPED_TO_NOTHING:g} of their norm while "
    "the loss does not fall by a hundredth",
    source="Pascanu, Mikolov and Bengio, 2013: the threshold belongs at the usual norm, half of it to ten times it",
    needs=needs.UPDATES,
    next_check="print the norm that clip_grad_norm_ returns: it is the one before clipping; set max_norm at its median",
    evidence=("max_norm", "ratio", "count", "cause"),
    causes=("max_norm_too_small",),
)
def clipped_away(facts: Facts) -> Answers:
    top, ratios = _clipped_to(facts), facts.relative_updates
    if not ratios:
        yield from _nothing_changes(facts)
        return
    if not len(facts.scalar("grad_norm").values):
        return
    usual = float(np.median(list(ratios.values())))
    if top is not None and usual < CLIPPED_TO_NOTHING and not facts.falls and facts.optimizers and not facts.adaptive:
        norm = facts.scalar("grad_norm")
        text = (
            f"gradients are clipped to a norm of {top:.3g} in {len(norm.values)} steps: they change weights by "
            f"{usual:.1e}"
        )
        evidence = {"max_norm": top, "ratio": usual, "count": len(norm.values), "cause": "max_norm_too_small"}
        yield Found("warning", text, int(norm.steps[0]), "", evidence)
    yield Clear(
        f"a step changes weights by {usual:.1e} of their norm" + ("" if top is None else f", clipped to {top:.3g}")
    )


@rule(
    sees="training in which no optimizer ever steps, or whose steps do nothing",
    threshold=f"{NEVER} or more losses, or {LASTING} or more steps with gradients, while no optimizer has stepped and "
    "no parameter has changed; or parameters that keep every bit through all steps though the rate would move them by "
    "far more than rounding takes away",
    source="torch.optim: parameters change in step() alone; after it each that has a gradient is another",
    needs=needs.GRADIENTS + ", or an optimizer",
    next_check="is step() called, on the optimizer that holds these parameters, outside of any condition that is "
    "never true?",
    evidence=("params", "count", "cause"),
    causes=("never_stepped", "step_without_effect"),
)
def optimizer_step_skipped(facts: Facts) -> Answers:
    rates = facts.scalars("lr/")
    losses = facts.scalar("loss").values
    seen = [site for site in facts.gradients.values() if site.rows >= LASTING]
    waiting = len(losses) >= NEVER and not facts.gradients
    changed = [name for name in facts.trainable if _changes(facts, name)]
    if not rates and (seen or waiting) and not changed and not facts.events("optimizer_step_skipped"):
        text = f"no optimizer stepped in {len(losses)} backward passes, and no parameter changed"
        evidence = {"params": facts.trainable[:20], "count": len(losses), "cause": "never_stepped"}
        yield Found("error", text, facts.run_start, "", evidence)
    still = [name for name, site in facts.updates.items() if stands_still(facts, site)]
    if still:
        text = f"{listed(still)} keep every bit in all steps though they have gradients and a learning rate"
        evidence = {"params": still, "count": len(still), "cause": "step_without_effect"}
        yield Found("error", text, facts.run_start, still[0], evidence)
    if facts.updates:
        yield Clear(f"{len(facts.updates)} parameters were stepped, 0 of them keep every bit against the rate")
    elif changed:
        yield Clear(f"{len(changed)} of {len(facts.trainable)} parameters change without an optimizer")


def stands_still(facts: Facts, update: Seen) -> bool:
    """Whether a parameter never changes though its gradient and the rate would move it by far more than rounding."""
    weight, gradient = facts.parameters.get(update.name), facts.gradients.get(update.name)
    if update.rows < LASTING or update.last_nonzero is not None or weight is None or gradient is None:
        return False
    if not gradient.rms or 2 * gradient.zeros > gradient.elements:
        return False
    size = gradient.rms / (gradient.rms + EPSILON) if facts.adaptive else gradient.rms
    lost = 16 * RESOLUTION.get(weight.dtype, 1.0) * (weight.absmax or 0.0)
    return _rate_of(facts, update.name) * size > lost


def _rate_of(facts: Facts, name: str) -> float:
    """The smallest learning rate of the group that holds a parameter; 0 where none is known."""
    number = 0
    for optimizer in facts.optimizers:
        for group in optimizer.get("groups", []):
            series = facts.scalar(f"lr/{number}")
            number += "lr" in group
            if name in group.get("parameters", []):
                return float(series.values.min()) if len(series.values) else 0.0
    return 0.0


def _nothing_changes(facts: Facts) -> Answers:
    """What is known of relative updates where none is above zero, as at a learning rate of zero."""
    still = [site for site in facts.updates.values() if site.rows >= LASTING and site.last_nonzero is None]
    if still:
        rows = max(site.rows for site in still)
        yield Clear(f"steps change 0 of {len(still)} parameters: each update is exactly zero in {rows} steps")


def _clipped_to(facts: Facts) -> float | None:
    """The norm to which nine of ten gradients were clipped; None where they were not."""
    norms = facts.scalar("grad_norm").values
    if len(norms) < LASTING or not norms.max() > 0:
        return None
    top = float(norms.max())
    return top if (np.abs(norms - top) <= 1e-3 * top).mean() >= 0.9 else None


RULES = (
    zero_lr,
    update_ratio,
    clipped_away,
    grads_not_zeroed,
    param_not_in_optimizer,
    optimizer_step_skipped,
    frozen_param_changed,
)
