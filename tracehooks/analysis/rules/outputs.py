"""What the model says: whether it follows the input, reaches the loss, and stays in range."""

from __future__ import annotations

import math

import numpy as np

from tracehooks.analysis.rules import needs
from tracehooks.analysis.rules.facts import LASTING, Facts, Seen
from tracehooks.analysis.rules.rule import Answers, Clear, Found, listed, rule
from tracehooks.analysis.rules.series import ends, running

LARGE_LOGIT, LOGIT_GROWTH = 100.0, 10.0
CLIP_CLAMP = math.log(100)
SCALES = ("logit_scale", "logit_bias", "temperature", "log_scale", "inv_temp")
BEFORE = 8


@rule(
    sees="the same output for different inputs: predictions that are kept and used again, or a part of the model that "
    "no longer runs",
    threshold=f"every floating output of the root has the same bits in all of {LASTING} or more steps though an input "
    f"changes; or a module with parameters to be trained returns in the first tenth of {BEFORE} or more steps and "
    "never again",
    source="content hashes of outputs and inputs: a cache keyed by the wrong thing, features computed once before training",
    needs=needs.OUTPUTS + ', and "hash"',
    next_check="where is the output kept: a cache, a property, an attribute that only the first call sets?",
    evidence=("modules", "count", "cause"),
    causes=("same_output", "no_longer_called"),
)
def stale_output(facts: Facts) -> Answers:
    outputs = [site for site in _root(facts, "forward") if "float" in site.dtype and site.least_hash is not None]
    inputs = [site for site in facts.of_phase("input") if not site.module]
    seen = min((site.rows for site in outputs), default=0)
    if seen >= LASTING and any(site.changed for site in inputs):
        if not any(site.changed for site in outputs):
            text = f"the output of the model has the same bits in {seen} steps though its input changes"
            yield Found(
                "error", text, outputs[0].first_step, "", {"modules": [""], "count": seen, "cause": "same_output"}
            )
        yield Clear(
            f"{sum(site.changed for site in outputs)} of {len(outputs)} outputs of the model change from step to step"
        )
    stopped = _no_longer_called(facts)
    if stopped:
        text = f"{listed(stopped)} ran in the first steps and never again, though they are to be trained"
        evidence = {"modules": stopped, "count": len(stopped), "cause": "no_longer_called"}
        yield Found("warning", text, facts.run_start, stopped[0], evidence)


@rule(
    sees="a loss that does not depend on what the model returns",
    threshold=f"in {LASTING} or more steps parameters get gradients while no output of the root gets one, or one of "
    "zeros alone; for runs in which the root itself is called in training",
    source="autograd: the gradient of an output that the loss does not use is None",
    needs='gradients of outputs: keep "outputs" and "output_grads" in record=',
    next_check="which tensor is handed to the loss function: the model's output, or something computed before it?",
    evidence=("modules", "count", "cause"),
    causes=("output_not_used", "output_multiplied_by_zero"),
)
def output_not_in_loss(facts: Facts) -> Answers:
    outputs = [site for site in _root(facts, "forward") if "float" in site.dtype and site.rows >= LASTING]
    slots = {site.slot for site in outputs}
    reached = [site for site in _root(facts, "backward") if site.slot in slots]  # probes have gradients there, too
    elsewhere = any(site.module and site.last_nonzero is not None for site in facts.of_phase("backward"))
    if not outputs or not facts.batches or not any(site.rows >= LASTING for site in facts.gradients.values()):
        return
    if elsewhere and not any(site.last_nonzero is not None for site in reached):
        cause = "output_multiplied_by_zero" if reached else "output_not_used"
        text = f"parameters get gradients, but the output of the model gets {'only zeros' if reached else 'none'}"
        yield Found("warning", text, facts.run_start, "", {"modules": [""], "count": outputs[0].rows, "cause": cause})
    if reached:
        yield Clear(f"{len(reached)} of {len(outputs)} outputs of the model get a gradient from the loss")


@rule(
    sees="logits that grow out of bounds",
    threshold=f"in a classification the largest logit of the last tenth of the steps is above {LARGE_LOGIT:g} and "
    f"{LOGIT_GROWTH:g} times that of the first",
    source="Chowdhery et al., 2022, PaLM: a z-loss keeps the softmax normaliser near 0; Wortsman et al., 2023: logit "
    "divergence",
    needs=needs.TARGETS + ", and outputs of the root",
    next_check="add a z-loss or weight decay on the head, or lower the learning rate; look at the norm of the last weights",
    evidence=("slot", "first", "last", "count", "cause"),
    causes=("logits_diverge",),
)
def exploding_logits(facts: Facts) -> Answers:
    if not len(facts.scalar("targets/kept").values):
        return
    for slot, steps, largest in facts.over_steps("absmax", "phase = 'forward' AND module = ''"):
        if len(steps) < BEFORE or "loss" in slot:
            continue
        first, last = ends(largest)
        if last > max(LARGE_LOGIT, LOGIT_GROWTH * first):
            text = f"the largest logit of {slot} grew from {first:.3g} to {last:.3g}"
            evidence = {"slot": slot, "first": first, "last": last, "count": len(steps), "cause": "logits_diverge"}
            yield Found("warning", text, int(steps[int(np.argmax(largest > LARGE_LOGIT))]), slot, evidence)
        yield Clear(f"the largest logit of {slot} went from {first:.3g} to {last:.3g}")


@rule(
    sees="a learned scale of logits that sits at its clamp",
    threshold=f"a parameter of one element whose name has one of {', '.join(SCALES)}: the same value in {LASTING} or "
    "more steps up to the last, its largest or smallest, while the optimizer goes on changing it",
    source=f"Radford et al., 2021, CLIP: the logit scale is clipped at ln 100 = {CLIP_CLAMP:.4f}",
    needs=needs.UPDATES,
    next_check="lower the learning rate or the decay of the scale; is one class or pair too easy?",
    evidence=("params", "value", "count", "cause"),
    causes=("at_its_clamp",),
)
def logit_scale_at_clamp(facts: Facts) -> Answers:
    scales = {name: site for name, site in facts.parameters.items() if site.count == 1 and _is_scale(site)}
    for name, site in scales.items():
        for _, steps, values in facts.over_steps("max", f"phase = 'parameter' AND {facts.is_site(site)}"):
            held = running(values == values[-1])
            update = facts.updates.get(name)
            pushed = update is not None and facts.steps_between(update.last_nonzero, update.last_step) < LASTING
            if held >= LASTING and pushed and values[-1] in (values.max(), values.min()):
                text = f"{name} is {values[-1]:.5g} in each of the last {held} steps though the optimizer changes it"
                evidence = {"params": [name], "value": float(values[-1]), "count": held, "cause": "at_its_clamp"}
                yield Found("warning", text, int(steps[-held]), name, evidence)
            yield Clear(f"{name} went from {values[0]:.4g} to {values[-1]:.4g} over {len(values)} steps")
    if facts.parameters and not scales:
        yield Clear(f"0 of {len(facts.parameters)} parameters are a scale of logits")


def _root(facts: Facts, phase: str) -> list[Seen]:
    return [site for site in facts.of_phase(phase) if not site.module]


def _no_longer_called(facts: Facts) -> list[str]:
    steps = facts.recorded
    if len(steps) < BEFORE:
        return []
    last: dict[str, int] = {}
    for site in facts.of_phase("forward"):
        last[site.module] = max(last.get(site.module, -1), site.last_step)
    early = int(steps[max(0, len(steps) // 10 - 1)])
    held = {name.rpartition(".")[0] for name in facts.held.intersection(facts.trainable)}
    return [path for path, step in last.items() if path in held and step <= early < last.get("", -1)]


def _is_scale(site: Seen) -> bool:
    return any(part in site.slot.lower() for part in SCALES)


RULES = (stale_output, output_not_in_loss, exploding_logits, logit_scale_at_clamp)
