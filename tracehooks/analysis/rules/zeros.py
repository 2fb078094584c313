"""Gradients that arrive as zeros, and where they end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tracehooks.analysis.rules import needs
from tracehooks.analysis.rules.facts import LASTING, Event, Facts
from tracehooks.analysis.rules.gradients import FADED
from tracehooks.analysis.rules.rule import Answers, Clear, Found, listed, rule
from tracehooks.core.records import Severity

WITHOUT_DERIVATIVE = frozenset(
    {"RoundBackward0", "RoundBackward1", "FloorBackward0", "CeilBackward0", "TruncBackward0", "SignBackward0",
     "SgnBackward0", "FloorDivideBackward0", "HeavisideBackward0", "NotImplementedBackward0"}
)  # fmt: skip
"""Nodes of ops whose derivative is zero wherever it exists."""
CHOOSING = frozenset(
    {"WhereBackward0", "MaskedFillBackward0", "MaskedFillBackward1", "MaskedScatterBackward0", "MulBackward0"}
)
"""Nodes that drop what a mask does not keep."""
LIMITING = frozenset(
    {"ReluBackward0", "ThresholdBackward0", "HardtanhBackward0", "ClampBackward0", "ClampBackward1", "ClampMinBackward0",
     "ClampMaxBackward0", "HardsigmoidBackward0", "HardswishBackward0", "LeakyReluBackward0"}
)  # fmt: skip
"""Nodes that stop a gradient outside of their range."""
NORMALISING = frozenset(
    {"NativeLayerNormBackward0", "NativeGroupNormBackward0", "NativeBatchNormBackward0", "FusedRmsNormBackward0",
     "CudnnBatchNormBackward0", "StdBackward0", "VarBackward0", "SubBackward0"}
)  # fmt: skip
MULTIPLYING = frozenset({"MmBackward0", "BmmBackward0", "AddmmBackward0", "MulBackward0", "ConvolutionBackward0"})


class End(NamedTuple):
    """Where the gradients of some parameters end, and why."""

    params: list[str]
    why: str
    severity: Severity = "info"
    cause: str | None = None
    op: str | None = None
    module: str | None = None
    """None: outside of the model, or unknown."""


@rule(
    sees="parameters whose gradient arrives but is exactly zero, and the op at which it ends",
    threshold=f"all of it zero in every one of {LASTING} or more steps up to the last; zero at the start alone is "
    "usual (LoRA, zero-initialised residual branches). A note where the loss itself is exactly zero in these steps, where "
    "an op outside of the model multiplies by zero, and of biases whose module's weight does get a gradient: theirs cancels",
    source="derivatives of torch's ops; the op is found by asking every node of one backward pass what it receives "
    "and sends",
    needs=needs.GRADIENTS,
    next_check="look at the named op: what would have to be different for its derivative not to be zero?",
    evidence=("params", "modules", "op", "count", "cause"),
    causes=(
        "non_differentiable_op",
        "softmax_over_singleton_dim",
        "dead_product_init",
        "normalised_singleton",
        "condition_always_dropped",
        "dying_relu",
        "empty_batches",
    ),
)
def zero_gradient(facts: Facts) -> Answers:
    lost = [
        name
        for name, site in facts.gradients.items()
        if name in facts.trainable and site.rows >= LASTING and facts.persists(site, site.last_nonzero)
    ]
    if _nothing_supervised(facts):
        yield Clear("0 targets count in the loss, which explains any gradient of zero")
        return
    if lost and len(lost) == len(facts.gradients) and _nothing_given(facts):
        since, evidence = _zero_since(facts, lost), {"params": lost, "cause": "empty_batches", "count": len(lost)}
        yield Found("error", "every batch has 0 elements: all gradients are exactly zero", since, lost[0], evidence)
        return
    ends = sorted(_ends(facts, lost), key=lambda end: facts.trainable.index(end.params[0]))
    for severity, cause in dict.fromkeys((end.severity, end.cause) for end in ends):
        yield _found(facts, [end for end in ends if (end.severity, end.cause) == (severity, cause)])
    if any(site.rows >= LASTING for site in facts.gradients.values()):
        yield Clear(f"{len(lost)} of {len(facts.gradients)} gradients are zero in the last {LASTING} steps and before")


def _ends(facts: Facts, lost: list[str]) -> Iterator[End]:
    """Where each of these gradients ends, every parameter once."""
    explained: set[str] = set()
    for event in facts.events("gradient_lost"):
        names = [name for name in event.details["parameters"] if name in lost and name not in explained]
        if names:
            explained |= set(names)
            yield _end(facts, event, names)
    for module, names in _before_constant_norms(facts).items():
        names = [name for name in names if name not in explained]
        if names:
            explained |= set(names)
            why = f"{module or '(root)'} normalises single elements, the rest is rounding"
            yield End(names, why, "error", "normalised_singleton", module=module)
    rest = [name for name in lost if name not in explained]
    if rest:
        yield End(rest, f"since step {_zero_since(facts, rest)}")


def _end(facts: Facts, event: Event, names: list[str]) -> End:
    cause, op, module = _cause(facts, event, names), event.details["op"], event.module
    if cause in (None, "dying_relu", "condition_always_dropped") and _loss_is_zero(facts, names):
        return End(names, "so is the loss", op=op, module=module)
    if cause is None and all(_cancels(facts, name) for name in names):
        return End(names, "what reaches their modules cancels", op=op, module=module)
    outside = module is None and op == "MulBackward0"
    why = f"they end at {op}" + (f" in {module or '(root)'}" if module is not None else "")
    return End(names, why, "info" if outside else "warning" if cause is None else "error", cause, op, module)


def _found(facts: Facts, ends: list[End]) -> Found:
    """One finding of ends of one cause."""
    first, names = ends[0], [name for end in ends for name in end.params]
    whys = dict.fromkeys(end.why for end in ends)
    text = f"the gradients of {listed(names)} are exactly zero: {listed(whys)}"
    modules = list(dict.fromkeys(end.module or "" for end in ends if end.op or end.module is not None))
    evidence = {"params": names, "op": first.op, "modules": modules, "cause": first.cause, "count": len(names)}
    site = first.module if first.module is not None else names[0]
    return Found(first.severity, text, _zero_since(facts, names), site, evidence)


def _loss_is_zero(facts: Facts, names: list[str]) -> bool:
    """Whether the loss has been exactly zero for as long as these gradients: there is nothing left to learn."""
    loss = facts.scalar("loss")
    late = loss.values[loss.steps >= _zero_since(facts, names)]
    return bool(len(late)) and not late.any()


def _cancels(facts: Facts, name: str) -> bool:
    """Whether a bias has no gradient although its module's weight has one: what reaches the module adds up to zero, as in
    a difference of two means of one network."""
    bias = facts.gradients[name]
    weight = facts.gradients.get(name.removesuffix("bias") + "weight")
    return bias.slot == "bias" and weight is not None and weight.last_nonzero == weight.last_step


def _nothing_given(facts: Facts) -> bool:
    """Whether no input of the root ever had an element."""
    given = [site for site in facts.of_phase("input") if not site.module]
    return bool(given) and all(site.last_filled is None for site in given)


def _zero_since(facts: Facts, names: list[str]) -> int:
    """The first step in which one of these gradients was zero and stayed so; the first of all where none is zero."""
    sites = [
        facts.gradients[name] for name in names if facts.gradients[name].last_nonzero != facts.gradients[name].last_step
    ]
    starts = (site.first_step if site.last_nonzero is None else site.last_nonzero + 1 for site in sites)
    return min(starts, default=facts.run_start)


def _nothing_supervised(facts: Facts) -> bool:
    kept = facts.scalar("targets/kept").values
    return bool(len(kept)) and not kept.any()


def _before_constant_norms(facts: Facts) -> dict[str, list[str]]:
    """Parameters in front of a normalisation that gives one number for everything, whose gradient is rounding noise."""
    largest = max((site.norm for site in facts.gradients.values()), default=0.0)
    found = {}
    for site in facts.of_phase("forward"):
        if "Norm" in site.type and site.count >= 2 and facts.is_constant(site):
            before = [
                name
                for name, gradient in facts.gradients.items()
                if name in facts.trainable
                and facts.order.get(gradient.module, site.order) < site.order
                and gradient.norm < FADED * largest
            ]
            if before:
                found[site.module] = before
    return found


def _cause(facts: Facts, event: Event, names: list[str]) -> str | None:
    op, dimension = event.details["op"], event.details["dimension"]
    zero_valued = [n for n in names if (site := facts.parameters.get(n)) is not None and site.last_nonzero is None]
    if op in WITHOUT_DERIVATIVE:
        return "non_differentiable_op"
    if op in ("SoftmaxBackward0", "LogSoftmaxBackward0") and dimension == 1:
        return "softmax_over_singleton_dim"
    if op in MULTIPLYING and zero_valued:
        return "dead_product_init"
    if op in NORMALISING:
        return "normalised_singleton"
    if op in CHOOSING:
        return "condition_always_dropped"
    if op in LIMITING:
        return "dying_relu"
    return None


RULES = (zero_gradient,)
