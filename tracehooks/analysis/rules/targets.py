"""Targets: constant, unbalanced, confused."""

from __future__ import annotations

import numpy as np

from tracehooks.analysis.rules import needs
from tracehooks.analysis.rules.facts import LASTING, Facts, Series
from tracehooks.analysis.rules.rule import Answers, Clear, Found, rule

DOMINANT, RARELY = 0.9, 0.1
CONFUSED = 0.5
WORST = 4


@rule(
    sees="targets that are all the same",
    threshold=f"one class, or one number, in all targets of {LASTING} or more steps; for one optimizer: the players of "
    "a GAN have constant targets, and so have residuals (zeros and ones, as numbers, are left out)",
    source="a loss over constant targets is minimised by a constant",
    needs=needs.TARGETS + ", or one that compares predictions and targets element by element (mse_loss, l1_loss)",
    next_check="print the targets of two batches: are they lost in the collation, or the wrong column?",
    evidence=("count", "cause"),
    causes=("one_class", "one_number"),
)
def constant_targets(facts: Facts) -> Answers:
    distinct, spread, mean = (facts.scalar(f"targets/{name}") for name in ("distinct", "std", "mean"))
    several = len(facts.optimizers) > 1
    if len(distinct.values) >= LASTING:
        share = facts.scalar("targets/largest_share").values
        one = bool((distinct.values == 1).all()) and len(np.unique(facts.scalar("targets/commonest").values)) == 1
        if one and not several:
            text = f"every target of {len(distinct.values)} losses is one and the same class"
            yield Found(
                "error", text, int(distinct.steps[0]), "", {"count": len(distinct.values), "cause": "one_class"}
            )
        yield Clear(
            f"{np.median(distinct.values):.0f} classes among the targets of a step, the largest share is "
            f"{np.median(share):.0%}"
        )
    elif len(spread.values) >= LASTING:
        one = not spread.values.any() and len(np.unique(mean.values)) == 1
        if one and not several and mean.values[0] not in (0.0, 1.0):
            text = f"every target of {len(spread.values)} losses is {mean.values[0]:.4g}"
            yield Found("error", text, int(spread.steps[0]), "", {"count": len(spread.values), "cause": "one_number"})
        yield Clear(f"targets of a step have a standard deviation of {np.median(spread.values):.3g}")


@rule(
    sees="one class that nearly all targets have",
    threshold=f"in the median of {LASTING} or more looks more than {DOMINANT:.0%} of the targets that count, always of "
    f"the same class, while at the last {LASTING} the others are predicted less than {RARELY:.0%} as often as they are "
    "there",
    source="He and Garcia, 2009, Learning from imbalanced data: predicting the majority alone has a low loss",
    needs=needs.TARGETS,
    next_check="weight the classes, draw them evenly, or judge by a measure that the majority cannot win",
    evidence=("share", "predicted_share", "classes", "commonest", "count", "cause"),
    causes=("majority_class",),
)
def class_imbalance(facts: Facts) -> Answers:
    share, said = facts.scalar("targets/largest_share"), facts.scalar("targets/predicted_share")
    if len(share.values) < LASTING:
        return
    usual, predicted = float(np.median(share.values)), said.values[-LASTING:]
    one = len(np.unique(facts.scalar("targets/commonest").values)) == 1
    majority = float(predicted.min()) if len(predicted) else 0.0
    if DOMINANT < usual < 1 and one and 1 - majority < RARELY * (1 - usual):
        text = f"{usual:.0%} of the targets have one class, and {majority:.0%} of the predictions"
        evidence = {
            "share": usual,
            "predicted_share": majority,
            "classes": _last(facts.scalar("targets/classes")),
            "commonest": _last(facts.scalar("targets/commonest")),
            "count": len(share.values),
            "cause": "majority_class",
        }
        yield Found("warning", text, int(share.steps[0]), "", evidence)
    yield Clear(f"the commonest class has {usual:.0%} of the targets and {majority:.0%} of the predictions")


@rule(
    sees="a class that is taken for another one more often than not, late in training",
    threshold=f"in the last {WORST} looks, which are ever further apart, the same pair of classes, and more than "
    f"{CONFUSED:.0%} of the one predicted as the other in each, while most other targets are right; a note",
    source="off-diagonal entries of the confusion matrix; labels that are swapped or hardly differ",
    needs=needs.TARGETS,
    next_check="look at a few samples of both classes: are labels swapped, or do they say the same?",
    evidence=("taken", "for_class", "share", "count", "cause"),
    causes=("one_class_taken_for_another",),
)
def confusion(facts: Facts) -> Answers:
    steps, columns = facts.together("targets/confused", "targets/confused_class", "targets/taken_for", "targets/right")
    if len(steps) < WORST:
        return
    share, taken, put, right = (column[-WORST:] for column in columns)
    if share.min() > CONFUSED and len(np.unique(taken)) == len(np.unique(put)) == 1 and right.min() > CONFUSED:
        text = f"class {taken[0]:.0f} is taken for class {put[0]:.0f} in {share.min():.0%} of its targets or more"
        evidence = {"taken": int(taken[0]), "for_class": int(put[0]), "share": float(share.min()), "count": WORST,
                    "cause": "one_class_taken_for_another"}  # fmt: skip
        yield Found("info", text, int(steps[-WORST]), "", evidence)
    yield Clear(
        f"{np.median(right):.0%} of the last targets are predicted; of the worst class {np.median(share):.0%} go to another"
    )


def _last(series: Series) -> int | None:
    return int(series.values[-1]) if len(series.values) else None


RULES = (constant_targets, class_imbalance, confusion)
