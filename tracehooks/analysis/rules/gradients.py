"""Gradients that do not arrive, fade or grow on their way, or arrive where nobody uses them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tracehooks.analysis.rules import needs
from tracehooks.analysis.rules.facts import Event, Facts, Seen
from tracehooks.analysis.rules.rule import Answers, Clear, Found, listed, rule
from tracehooks.analysis.rules.series import ends, trend

DETACHED = ("detach", "no_grad_region", "reentrant_checkpoint_without_grad_input")
UNUSED = ("branch_not_in_loss", "module_not_called")
LAYERS = 4
FADED = 1e-4
GROWN = 1e3
DIVERGED = 100
OUT_OF_PROPORTION = 1e4


@rule(
    sees="parameters in an optimizer that no gradient reaches although their module ran: a detach, a region without "
    "gradients, or reentrant checkpointing of an input that needs none lies between them and the loss",
    threshold="no gradient in any step",
    source="autograd: .grad stays None behind detach(), torch.no_grad() and "
    "torch.utils.checkpoint(use_reentrant=True) of inputs that require no gradient",
    needs=needs.GRAPH,
    next_check="look between the parameter's module and the named one for detach(), .data, no_grad or checkpoint",
    evidence=("params", "modules", "count", "cause"),
    causes=("detach", "no_grad_region", "reentrant_checkpoint_without_grad_input"),
)
def detached(facts: Facts) -> Answers:
    for event, names in _unreached(facts, DETACHED):
        yield Found(
            "error",
            f"no gradient reaches {listed(names)}: {_words(event)}",
            facts.run_start,
            event.module or "",
            {"params": names, "modules": [event.module or ""], "count": len(names), "cause": event.details["cause"]},
        )
    yield from _reached(facts, "cut off by detach(), no_grad or checkpointing")


@rule(
    sees="parameters in an optimizer that no gradient reaches because what follows their module takes whole numbers",
    threshold="no gradient in any step, and the next module takes integers made inside the model",
    source="autograd: argmax, rounding to integers and comparisons have no derivative, and integers require no "
    "gradient",
    needs=needs.GRAPH,
    next_check="use a soft choice (softmax, Gumbel-softmax) or a straight-through estimator in place of the conversion",
    evidence=("params", "modules", "cause"),
    causes=("integer_conversion",),
)
def integer_conversion(facts: Facts) -> Answers:
    for event, names in _unreached(facts, ("integer_conversion",)):
        text = f"no gradient reaches {listed(names)}: {event.module or '(root)'} takes whole numbers in their place"
        evidence = {"params": names, "modules": [event.module or ""], "cause": "integer_conversion"}
        yield Found("error", text, facts.run_start, event.module or "", evidence)
    yield from _reached(facts, "cut off by whole numbers")


@rule(
    sees="parameters in an optimizer that take no part in the loss: their module is never called, or its result never "
    "used",
    threshold="no gradient in any step, experts behind a router left out; a warning under DistributedDataParallel, "
    "which then fails or hangs, else a note",
    source="torch.nn.parallel.DistributedDataParallel: every parameter must get a gradient, or find_unused_parameters "
    "be set",
    needs=needs.GRAPH,
    next_check="use the result in the loss, or take the module out of the model or of the optimizer",
    evidence=("params", "count", "cause"),
    causes=("branch_not_in_loss",),
)
def unused_params(facts: Facts) -> Answers:
    wrappers = (facts.run.info.get("model") or {}).get("wrappers", [])
    routed = tuple(f"{path}." for paths in facts.routed.values() for path in paths)
    by_reason: dict[str, list[str]] = {}
    for event, names in _unreached(facts, UNUSED):
        kept = [name for name in names if not name.startswith(routed)]
        by_reason.setdefault(event.details["cause"], []).extend(kept)
    for reason, names in by_reason.items():
        called = reason == "branch_not_in_loss"
        why = "the result of their module does not reach the loss" if called else "their module is never called"
        if names:
            yield Found(
                "warning" if "DistributedDataParallel" in wrappers else "info",
                f"no gradient reaches {listed(names)}: {why}",
                facts.run_start,
                names[0].rpartition(".")[0],
                {"params": names, "count": len(names), "cause": "branch_not_in_loss"},
            )
    yield from _reached(facts, "left out of the loss")


@rule(
    sees="tensors that require a gradient and reach the loss but are no parameters of the model",
    threshold="one in an attribute of a module, or one parameter used inside the model; a note where an optimizer "
    "holds them",
    source="torch.nn.Module registers parameters and modules that are attributes of their own: not those in lists, "
    "dicts, plain objects, nor tensors that are no nn.Parameter",
    needs=needs.GRAPH,
    next_check="use nn.ModuleList, nn.ModuleDict, nn.ParameterList or nn.Parameter",
    evidence=("owner", "attr", "params", "shapes", "count", "cause"),
    causes=("python_list_of_modules", "tensor_is_no_parameter", "not_an_attribute"),
)
def unregistered_params(facts: Facts) -> Answers:
    for event in facts.events("unregistered"):
        owner, attribute, count = event.details["owner"], event.details["attribute"], event.details["count"]
        where = (
            f"in {owner or 'the model'}.{attribute}" if attribute else "used inside the model, in no attribute of it"
        )
        yield Found(
            "info" if event.details["in_optimizer"] else "error",
            f"{count} tensors {where} reach the loss and require gradients but are not registered: no optimizer is given "
            "them, no checkpoint holds them",
            event.step,
            f"{owner}.{attribute}".strip(".") if attribute else "",
            {
                "owner": owner,
                "attr": attribute,
                "params": event.details["names"],
                "shapes": event.details["shapes"],
                "count": count,
                "cause": _unregistered_cause(event),
            },
        )
    if facts.graphs:
        yield Clear(f"0 tensors that are no parameters of the model in {facts.graphs} graphs of the loss")


@rule(
    sees="gradients that fade layer by layer on their way to the first ones",
    threshold=f"over {LAYERS} or more weights in order of execution the norm falls towards the input by more than "
    f"{1 / FADED:g}, in rank order (Spearman 0.8), and so do the gradients of outputs; geometric means over all steps",
    source="Hochreiter, 1991; Glorot and Bengio, 2010: a product of derivatives below one; sigmoids contribute at "
    "most 1/4 each",
    needs=needs.GRADIENTS,
    next_check="put normalisation or residual connections between the layers, or another activation",
    evidence=("params", "ratio_first_to_last", "count", "cause"),
    causes=("deep_sigmoid_stack", "product_of_small_derivatives"),
)
def vanishing_gradients(facts: Facts) -> Answers:
    chain = _chain(facts)
    if len(chain) < LAYERS:
        if facts.gradients:
            yield Clear(f"{len(chain)} weights with a gradient in a row, fewer than {LAYERS}")
        return
    norms = np.array([site.norm for site in chain])
    ratio = norms[0] / norms[-1]
    if ratio < FADED and trend(norms) >= 0.8 and _outputs_fade(facts):
        activations = {site.type for site in facts.of_phase("forward")} & {"Sigmoid", "Tanh", "Softsign", "LogSigmoid"}
        yield Found(
            "warning",
            f"gradients fade: that of {chain[0].name} is {ratio:.1e} of that of {chain[-1].name}, {len(chain)} layers on",
            chain[0].first_step,
            chain[0].name,
            {
                "params": [site.name for site in chain if site.norm < FADED * norms[-1]],
                "ratio_first_to_last": float(ratio),
                "count": len(chain),
                "cause": "deep_sigmoid_stack" if activations else "product_of_small_derivatives",
            },
        )
    yield Clear(f"over {len(chain)} weights the gradient of the first is {ratio:.2g} of that of the last")


@rule(
    sees="gradients that grow out of bounds, over the steps together with the loss, or within a step back in time",
    threshold=f"gradient norm up by {DIVERGED:g} and loss by 10 from the first tenth of the steps to the last; "
    f"gradients of one module's calls that grow by {GROWN:g} towards the first call; or, with a module that works step "
    f"by step in time, a gradient norm of {OUT_OF_PROPORTION:g} times that of the weights",
    source="Pascanu, Mikolov and Bengio, 2013: recurrent weights with a gain above one; a step beyond 2/curvature "
    "diverges",
    needs=needs.LOSS + ", in four or more steps",
    next_check="halve the learning rate until the loss falls; for recurrence clip the norm or bound the recurrent gain",
    evidence=("modules", "growth", "count", "cause"),
    causes=("learning_rate_too_high", "recurrent_gain_above_1"),
)
def exploding_gradients(facts: Facts) -> Answers:
    recurrent = _growing_calls(facts)
    if recurrent is not None:
        module, growth, calls = recurrent
        text = f"gradients grow {growth:.1e}-fold over {calls} calls of {module or '(root)'} on their way back in time"
        yield Found("warning", text, facts.run_start, module, {"modules": [module], "growth": growth, "count": calls,
                                                              "cause": "recurrent_gain_above_1"})  # fmt: skip
        return
    norm, loss = facts.scalar("grad_norm"), facts.scalar("loss")
    if min(len(norm.values), len(loss.values)) < 4:
        return
    memory, weights = _recurrent(facts), _weight_norm(facts)
    usual = float(np.median(norm.values))
    if memory and usual > OUT_OF_PROPORTION * weights > 0:
        text = f"the gradient norm is {usual:.2g}, that of the weights {weights:.2g}: it grows inside {listed(memory)}"
        evidence = {"modules": memory, "growth": usual / weights, "cause": "recurrent_gain_above_1"}
        yield Found("warning", text, facts.run_start, memory[0], evidence)
        return
    norms, losses = ends(norm.values), ends(np.abs(loss.values))
    if norms[1] > DIVERGED * norms[0] > 0 and losses[1] > 10 * losses[0]:
        grown = (
            f"{name} grew from {a:.3g} to {b:.3g}" for name, (a, b) in (("gradient norm", norms), ("loss", losses))
        )
        yield Found(
            "error",
            ", ".join(grown),
            int(norm.steps[int(np.argmax(norm.values > 10 * norms[0]))]),
            "",
            {"growth": norms[1] / norms[0], "cause": "learning_rate_too_high"},
        )
    yield Clear(
        f"the gradient norm went from {norms[0]:.3g} to {norms[1]:.3g}, the loss from {losses[0]:.3g} to {losses[1]:.3g}"
    )


def _unreached(facts: Facts, causes: tuple[str, ...]) -> Iterator[tuple[Event, list[str]]]:
    """Events that say so, with those parameters that really never got a gradient and that an optimizer holds."""
    for event in facts.events("unreached"):
        if event.details["cause"] in causes:
            held = facts.held or set(event.details["parameters"])
            names = [n for n in event.details["parameters"] if n in held and n not in facts.gradients]
            if names:
                yield event, names


def _reached(facts: Facts, how: str) -> Answers:
    held = facts.held or set(facts.trainable)
    if facts.graphs and held:
        got = len(held & facts.gradients.keys())
        yield Clear(f"{got} of {len(held)} parameters to be trained get a gradient, none of the others is {how}")


def _words(event: Event) -> str:
    where = event.module or "(root)"
    checkpointed = f"{where} is checkpointed, reentrant, on an input that requires no gradient"
    return {
        "detach": f"the path to the loss is cut before {where}",
        "no_grad_region": f"{where} runs without gradients",
        "reentrant_checkpoint_without_grad_input": checkpointed,
    }[str(event.details["cause"])]


def _unregistered_cause(event: Event) -> str:
    names = event.details["names"]
    if not event.details["attribute"]:
        return "not_an_attribute"
    return "python_list_of_modules" if any(name.count(".") for name in names) else "tensor_is_no_parameter"


def _chain(facts: Facts) -> list[Seen]:
    """Gradients of weights in order of execution of their modules, those that stay zero left out."""
    weights = [
        site
        for site in facts.gradients.values()
        if site.module in facts.order and len(site.shape) >= 2 and site.rms and "Embedding" not in site.type
    ]
    return sorted(weights, key=lambda site: facts.order[site.module])


def _outputs_fade(facts: Facts) -> bool:
    """Whether gradients of module outputs fade as well: of the first third not one is above the bound that the last third
    sets. Weights of queries and keys have small gradients in any attention that begins uniform; what passes them by on a
    residual path has not."""
    order = {(site.module, site.slot, site.call): site.order for site in facts.of_phase("forward")}
    known = [site for site in facts.of_phase("backward") if (site.module, site.slot, site.call) in order and site.rms]
    norms = [site.norm for site in sorted(known, key=lambda site: order[site.module, site.slot, site.call])]
    third = len(norms) // 3
    return third > 0 and max(norms[:third]) < FADED * max(norms[-third:])


def _recurrent(facts: Facts) -> list[str]:
    """Modules that work step by step in time: torch's recurrent ones, and those called eight times or more in a pass."""
    often = {site.module for site in facts.of_phase("forward") if site.call >= 7}
    return [path for path, kind in facts.modules.items() if path in often or kind.startswith(("RNN", "GRU", "LSTM"))]


def _weight_norm(facts: Facts) -> float:
    """L2 norm over all trainable parameters."""
    return float(np.sqrt(sum(facts.parameters[n].norm ** 2 for n in facts.trainable if n in facts.parameters)))


def _growing_calls(facts: Facts) -> tuple[str, float, int] | None:
    calls: dict[tuple[str, str], list[Seen]] = {}
    for site in facts.of_phase("backward"):
        if site.rms:
            calls.setdefault((site.module, site.slot), []).append(site)
    for (module, _), sites in calls.items():
        if len(sites) < 8:
            continue
        rms = np.array([site.rms for site in sorted(sites, key=lambda site: site.call)], dtype=np.float64)
        if rms[0] > GROWN * rms[-1] and trend(rms) <= -0.8:
            return module, float(rms[0] / rms[-1]), len(sites)
    return None


RULES = (
    detached,
    integer_conversion,
    unused_params,
    unregistered_params,
    vanishing_gradients,
    exploding_gradients,
)
