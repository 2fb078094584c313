"""What the optimizer does: rates, what it holds, what it should not touch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tracehooks.analysis.rules import needs
from tracehooks.analysis.rules.facts import Facts
from tracehooks.analysis.rules.rule import Answers, Clear, Found, listed, rule
from tracehooks.analysis.rules.series import longest

ZERO_RATE_STEPS = 2
CARRIED_SHARE = 0.4


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
    threshold=f"two or more steps, and {CARRIED_SHARE:.0%} of those looked at, began with the old gradient still "
    "there at every backward pass since the step before",
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
                f"AND module::VARCHAR = {_quoted(module)} AND slot::VARCHAR = {_quoted(slot)} "
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


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


RULES = (zero_lr, grads_not_zeroed, param_not_in_optimizer, frozen_param_changed)
