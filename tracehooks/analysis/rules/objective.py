"""The loss: what it compares with what, and how much of the targets counts."""

from __future__ import annotations

import numpy as np

from tracehooks.analysis.rules import needs
from tracehooks.analysis.rules.facts import Facts
from tracehooks.analysis.rules.rule import Answers, Clear, Found, rule

SHIFTED = 0.95
NEARLY_EMPTY = 0.001


@rule(
    sees="a difference of predictions and targets whose shapes were broadcast: one prediction a sample against every "
    "target",
    threshold="shapes (N, 1, …) and (N, …), N above one, that came out as (N, N, …), next to the loss and outside the "
    "modules",
    source="broadcasting of torch and NumPy: (N, 1) − (N,) is (N, N); such a model learns the mean of the targets",
    needs=needs.GRAPH,
    next_check="squeeze the prediction or unsqueeze the target, so that both shapes are equal",
    evidence=("op", "shapes", "result", "cause"),
    causes=("shape_mismatch_broadcast",),
)
def loss_broadcast(facts: Facts) -> Answers:
    for event in facts.events("loss_broadcast"):
        evidence = {**event.details, "cause": "shape_mismatch_broadcast"}
        prediction, target = event.details["shapes"]
        text = f"the loss compares a prediction of shape {prediction} with a target of shape {target}, all against all"
        yield Found("error", text, event.step, "", evidence)
    if facts.graphs:
        yield Clear(f"0 comparisons of all against all in {facts.graphs} graphs of the loss")


@rule(
    sees="probabilities handed to a loss function that applies softmax or sigmoid itself",
    threshold="nothing but views and casts between the softmax or sigmoid and the loss function",
    source="torch.nn.CrossEntropyLoss and BCEWithLogitsLoss take logits, NLLLoss log-probabilities",
    needs=needs.GRAPH,
    next_check="hand the logits to the loss; keep the softmax for prediction",
    evidence=("loss", "op", "modules", "cause"),
    causes=("probabilities_used_as_logits",),
)
def double_softmax(facts: Facts) -> Answers:
    for event in facts.events("loss_of_probabilities"):
        text = f"{event.details['loss']} is given the result of a {event.details['op']} where it takes logits"
        site = event.module or ""
        evidence = {**event.details, "modules": [site], "cause": "probabilities_used_as_logits"}
        yield Found("error", text, event.step, site, evidence)
    if facts.graphs:
        yield Clear(f"0 loss functions over logits are given probabilities in {facts.graphs} graphs of the loss")


@rule(
    sees="targets of which none, or nearly none, counts in the loss; masks that keep nothing",
    threshold="every target ignored in at least half of the steps, or a mask that keeps nothing in most of them while "
    f"loss or gradients are zero; single empty batches, and less than {NEARLY_EMPTY:.1%} kept, are a note",
    source="torch.nn.functional.cross_entropy(ignore_index): ignored targets do not contribute to the gradient",
    needs=needs.TARGETS + ", or " + needs.MASKS,
    next_check="decode one batch of labels: which positions should carry a target, and which rule removes them",
    evidence=("count", "share", "cause"),
    causes=("no_supervised_token", "empty_mask"),
)
def empty_mask(facts: Facts) -> Answers:
    kept = facts.scalar("targets/kept")
    empty = kept.values == 0
    if empty.any():
        often = bool(empty.mean() >= 0.5)
        yield Found(
            "error" if often else "info",
            f"in {int(empty.sum())} of {len(empty)} losses every target is ignored: there is nothing to learn from",
            int(kept.steps[empty][0]),
            "",
            {"count": int(empty.sum()), "cause": "no_supervised_token"},
        )
    elif len(kept.values) and np.median(kept.values) < NEARLY_EMPTY:
        share = float(np.median(kept.values))
        text = f"only {share:.2%} of the targets count in the loss"
        yield Found("info", text, int(kept.steps[0]), "", {"share": share, "cause": "no_supervised_token"})
    elif len(kept.values):
        yield Clear(
            f"{float(np.median(kept.values)):.0%} of the targets count in the loss, {kept.values.min():.1%} in the poorest"
        )
    yield from _empty_masks(facts)


@rule(
    sees="targets that are the token after the next one: shifted by the data and once more by the model",
    threshold=f"{SHIFTED:.0%} of the targets equal the input two positions on, and no fewer positions explain them",
    source="transformers: causal language models shift the labels themselves",
    needs=needs.TARGETS + ", over tokens that the model is given",
    next_check="hand the labels unshifted to a model that shifts them, or shift once in your own loss",
    evidence=("shift", "share", "cause"),
    causes=("double_shift",),
)
def misaligned_targets(facts: Facts) -> Answers:
    shares = {int(name.rpartition("/")[2]): series for name, series in facts.scalars("targets/shift/").items()}
    matches = {shift: float(np.median(series.values)) for shift, series in shares.items()}
    for shift in sorted(matches):
        if matches[shift] >= SHIFTED:
            if shift >= 2:
                text = f"targets are the tokens {shift} positions after their prediction, not the next ones"
                evidence = {"shift": shift, "share": matches[shift], "cause": "double_shift"}
                yield Found("error", text, int(shares[shift].steps[0]), "", evidence)
            yield Clear(f"{matches[shift]:.0%} of the targets are the token {shift} positions on")
            return
    if matches:
        yield Clear(
            f"at most {max(matches.values()):.0%} of the targets equal an input up to {max(matches)} positions on"
        )


def _empty_masks(facts: Facts) -> Answers:
    norm, loss = facts.scalar("grad_norm").values, facts.scalar("loss").values
    dead = bool((len(norm) and not norm.any()) or (len(loss) and not loss.any()))
    rows = facts.sql(
        "SELECT module::VARCHAR AS module, slot::VARCHAR AS slot, count(*) AS rows, "
        "count_if(kept = 0 AND count > 0)::BIGINT AS empty, min(step) AS first FROM masks GROUP BY ALL ORDER BY ALL"
    ).to_pylist()
    for row in rows:
        if not dead or row["empty"] < 0.8 * row["rows"]:
            yield Clear(f"the mask {row['slot']} keeps nothing in {row['empty']} of {row['rows']} passes")
        else:
            text = f"the mask {row['slot']} keeps nothing in {row['empty']} of {row['rows']} passes, and nothing is learned"
            yield Found("error", text, row["first"], row["module"], {"count": row["empty"], "cause": "empty_mask"})


RULES = (loss_broadcast, double_softmax, empty_mask, misaligned_targets)
