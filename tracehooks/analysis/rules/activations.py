"""Modules: dead or constant outputs, modules that never run, the wrong mode, frozen ones that still change."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from tracehooks.analysis.rules import needs
from tracehooks.analysis.rules.facts import LASTING, Facts, Seen
from tracehooks.analysis.rules.rule import Answers, Clear, Found, listed, rule

TOKENS_EACH = 8
DEAD_UNITS, UNIT_STEPS, UNIT_ROWS = 0.5, 4, 32
FLAT = 0.01
DERIVATIVE = ("Sigmoid", "Tanh")
ROUNDING = 1e-4

RECTIFYING = frozenset(
    {"ReLU", "ReLU6", "Threshold", "Hardtanh", "Hardswish", "Hardsigmoid", "Hardshrink", "Softshrink"}
)
CAN_BE_CONSTANT = ("Norm", "Softmax", "Sigmoid", "Tanh", "GELU", "SiLU", "ELU", "Softsign")
"""Parts of the names of modules whose outputs vary with any input that does."""
MODAL = ("Dropout", "DropPath", "StochasticDepth", "BatchNorm")
"""Parts of the names of modules that do something else in training than in evaluation mode."""


@rule(
    sees="an activation that is zero for every input, so that nothing before it learns; functional ones by the module "
    "before",
    threshold=f"all elements zero in every one of {LASTING} or more steps up to the last (for a functional rectifier: "
    "nothing positive before it, and all gradients zero); a sparse layer in which every unit fires for some sample is "
    "fine",
    source="Maas, Hannun and Ng, 2013: a unit that is negative for all inputs has no gradient",
    needs=needs.OUTPUTS,
    next_check="find the step before: a large learning rate, or a bias that went far below zero",
    evidence=("modules", "fraction", "cause"),
    causes=("dying_relu",),
)
def dead_activations(facts: Facts) -> Answers:
    backward = {(site.module, site.slot, site.call): site for site in facts.of_phase("backward")}
    dead: dict[str, int] = {}
    for site in facts.of_phase("forward"):
        if site.type in RECTIFYING:
            since = site.last_nonzero
        elif site.last_positive is not None and _feeds_a_rectifier(site):
            gradient = backward.get((site.module, site.slot, site.call))
            if gradient is None or not facts.persists(gradient, gradient.last_nonzero):
                continue
            since = max(site.last_positive, gradient.last_nonzero if gradient.last_nonzero is not None else -1)
        else:
            continue
        if facts.persists(site, since):
            dead.setdefault(site.module, site.first_step if since is None else since + 1)
        elif site.type in RECTIFYING:
            dead.pop(site.module, None)
    rectifiers = {module: since for module, since in dead.items() if facts.modules.get(module) in RECTIFYING}
    for module, since in (rectifiers or dead).items():
        text = f"{module or '(root)'} is zero for every input since step {since}: nothing before it learns"
        evidence = {"modules": [module], "fraction": 1.0, "cause": "dying_relu"}
        yield Found("error", text, since, module, evidence)
    if any(site.rows >= LASTING for site in facts.of_phase("forward")):
        known = sum(kind in RECTIFYING for kind in facts.modules.values())
        yield Clear(f"0 of {known} rectifying modules, and of functional ones, give nothing but zeros")


@rule(
    sees="a normalisation or activation whose output does not depend on its input: it normalises one element, or is "
    "saturated",
    threshold=f"all elements equal in every one of {LASTING} or more steps up to the last, or an op of it at which "
    "gradients end",
    source="(x − mean(x)) of one element is zero; softmax of one element is one",
    needs=needs.OUTPUTS,
    next_check="check the dimension it runs over and its size",
    evidence=("modules", "cause"),
    causes=("norm_over_single_element", "saturated"),
)
def constant_activations(facts: Facts) -> Answers:
    constant: dict[str, int] = {}
    for site in facts.of_phase("forward"):
        if not any(part in site.type for part in CAN_BE_CONSTANT) or site.count < 2 or site.nonfinite:
            continue
        if facts.is_constant(site):
            constant.setdefault(site.module, site.first_step if site.last_varied is None else site.last_varied + 1)
    for event in facts.events("gradient_lost"):
        if event.module is not None and "Norm" in event.details["op"]:
            constant.setdefault(event.module, facts.run_start)
    for module in _scale_without_gradient(facts):
        constant.setdefault(module, facts.run_start)
    for module, since in constant.items():
        kind = facts.modules.get(module, "")
        evidence = {"modules": [module], "cause": "norm_over_single_element" if "Norm" in kind else "saturated"}
        text = f"{module or '(root)'} ({kind}) gives the same number for every input since step {since}"
        yield Found("warning", text, since, module, evidence)
    if any(site.rows >= LASTING for site in facts.of_phase("forward")):
        known = {
            site.module for site in facts.of_phase("forward") if any(part in site.type for part in CAN_BE_CONSTANT)
        }
        yield Clear(f"0 of {len(known)} normalisations and bounded activations give one number for everything")


@rule(
    sees="experts that a router never chooses",
    threshold="modules of one class in one list, some of which get all the tokens and some none in any step, where "
    f"chance would have given each {TOKENS_EACH} or more; next to them a parameter with one row for each of them",
    source="Shazeer et al., 2017: without a balancing loss a router settles on few experts",
    needs=needs.OUTPUTS,
    next_check="add or strengthen the load-balancing loss, or noise in the router; look at its logits",
    evidence=("modules", "count", "tokens", "cause"),
    causes=("router_collapse",),
)
def dead_modules(facts: Facts) -> Answers:
    used: dict[str, int] = defaultdict(int)
    for site in facts.of_phase("forward"):
        if site.slot.startswith("output") and site.shape:
            used[site.module] = max(used[site.module], site.elements // max(1, site.shape[-1]))
    for parent, members in facts.routed.items():
        idle = [path for path in members if not _any_used(path, used)]
        tokens = sum(used[path] for path in members)
        if not idle or len(idle) == len(members) or tokens < TOKENS_EACH * len(members):
            continue
        text = f"{len(idle)} of {len(members)} modules in {parent} never get a token: {listed(idle)}"
        evidence = {"modules": idle, "count": len(idle), "tokens": tokens, "cause": "router_collapse"}
        yield Found("warning", text, facts.run_start, idle[0], evidence)
    if used:
        experts = [path for members in facts.routed.values() for path in members]
        yield Clear(f"{sum(_any_used(path, used) for path in experts)} of {len(experts)} experts get tokens")


@rule(
    sees="training with modules in evaluation mode: dropout and batch statistics are off",
    threshold="the whole model, with a module to which the mode matters, in evaluation mode in a pass with gradients; "
    "parts that are set so inside a model in training mode are taken as meant",
    source="torch.nn.Module.eval stays in force until train() is called",
    needs="a training pass of the root while the trace is attached",
    next_check="call model.train() after every evaluation, and at the start after loading a model",
    evidence=("modules", "count", "cause"),
    causes=("missing_train_call",),
)
def eval_mode_in_training(facts: Facts) -> Answers:
    before: set[str] = set()
    for event in facts.events("training_mode"):
        evaluation = event.details["evaluation"]
        modal = [path for path in evaluation if any(part in facts.modules.get(path, "") for part in MODAL)]
        if "" in evaluation and modal and not before.intersection(modal) and facts.trains_after(event.step):
            flipped = bool(before)
            since = event.step
            text = f"the model is in evaluation mode since step {since} while it is trained: {listed(modal)} do nothing"
            evidence = {"modules": ["", *modal], "cause": "missing_train_call", "count": len(modal)}
            yield Found("warning" if flipped or _batch_norm(facts, modal) else "info", text, since, "", evidence)
            return
        before |= set(evaluation)
    if events := facts.events("training_mode"):
        off = len(events[-1].details["evaluation"])
        yield Clear(
            f"{off} of {off + len(events[-1].details['training'])} modules are in evaluation mode, not the whole model"
        )


@rule(
    sees="running statistics that change inside a module all of whose parameters are frozen",
    threshold="its parameters require no gradient and keep their bits, its buffers change; an average that follows "
    "another model changes its parameters too and is fine",
    source="torch.nn.BatchNorm: running_mean and running_var are updated in training mode whatever requires_grad says",
    needs='buffers in two or more steps: keep "parameters" and "hash"',
    next_check="call eval() on the frozen module after every model.train()",
    evidence=("buffers", "modules", "count", "cause"),
    causes=("bn_train_mode_in_frozen_module",),
)
def frozen_buffer_changed(facts: Facts) -> Answers:
    changed = [
        site
        for site in facts.of_phase("buffer")
        if site.slot in ("running_mean", "running_var") and site.changed and _frozen(facts, site.module)
    ]
    if changed and facts.trainable:
        modules = list(dict.fromkeys(site.module for site in changed))
        yield Found(
            "warning",
            f"running statistics of {listed(modules)} change although all parameters there are frozen",
            min(site.first_step for site in changed),
            modules[0],
            {
                "buffers": [site.name for site in changed],
                "modules": modules,
                "count": len(changed),
                "cause": "bn_train_mode_in_frozen_module",
            },
        )
    if facts.parameters:
        counted = [site for site in facts.of_phase("buffer") if site.slot in ("running_mean", "running_var")]
        yield Clear(f"{len(changed)} of {len(counted)} running statistics belong to frozen modules and change")


def _scale_without_gradient(facts: Facts) -> Iterator[str]:
    """Normalisations whose bias gets a gradient and whose scale gets nothing but rounding: what they scale is zero."""
    for name, bias in facts.gradients.items():
        scale = facts.gradients.get(f"{bias.module}.weight".lstrip("."))
        if bias.slot != "bias" or "Norm" not in bias.type or not bias.rms or scale is None or scale.rows < LASTING:
            continue
        if (scale.rms or 0.0) < ROUNDING * bias.rms:
            yield name.rpartition(".")[0]


def _feeds_a_rectifier(site: Seen) -> bool:
    """Whether a module is of a kind that functional rectifiers are put behind."""
    return any(part in site.type for part in ("Linear", "Conv", "Norm"))


def _any_used(path: str, used: dict[str, int]) -> bool:
    return used.get(path, 0) > 0 or any(count and name.startswith(f"{path}.") for name, count in used.items())


def _batch_norm(facts: Facts, paths: list[str]) -> bool:
    return any("BatchNorm" in facts.modules.get(path, "") for path in paths)


def _frozen(facts: Facts, module: str) -> bool:
    """Whether all parameters of a module, or of the nearest module around it that has any, are frozen and unchanged."""
    prefix = f"{module}." if module else ""
    own = [name for name in facts.described if name.startswith(prefix)]
    if not own:
        return bool(module) and _frozen(facts, module.rpartition(".")[0])
    trainable = set(facts.trainable)
    return all(
        name not in trainable and name in facts.parameters and not facts.parameters[name].changed for name in own
    )


@rule(
    sees="an embedding whose row for padding is not zero: padded positions are not silent",
    threshold="the norm of the row of padding_idx above zero at the first step; a note where the model is given a mask",
    source="torch.nn.Embedding zeroes the row of padding_idx when it is made; an initialisation that runs later "
    "overwrites it",
    needs="the first training pass of the root: attach before it",
    next_check="zero the row after the weights are initialised or loaded, or mask padded positions",
    evidence=("params", "modules", "cause"),
    causes=("init_overwrites_padding",),
)
def padding_row_nonzero(facts: Facts) -> Answers:
    rows = {name.partition("/")[2]: series for name, series in facts.scalars("padding_row/").items()}
    loud = [path for path, series in rows.items() if series.values[0] > 0]
    if loud:
        masked = any("mask" in site.slot for site in facts.of_phase("input"))
        text = f"the padding row of {listed(loud)} is not zero (norm {rows[loud[0]].values[0]:.3g})"
        evidence = {
            "params": [f"{path}.weight" for path in loud],
            "modules": loud,
            "cause": "init_overwrites_padding",
        }
        yield Found("info" if masked else "warning", text, facts.run_start, loud[0], evidence)
    if facts.events("training_mode"):
        yield Clear(f"{len(loud)} of {len(rows)} padding rows are not zero")


@rule(
    sees="a layer many of whose units never fire, before a rectifier",
    threshold=f"at least {DEAD_UNITS:.0%} of the elements of the gradient of its bias are exactly zero in each of "
    f"{UNIT_STEPS} or more recorded steps of the last half, over {UNIT_ROWS} or more outputs a unit and step, where "
    "part of the gradient of its output is zero too; in float32, the last module left out",
    source="Maas, Hannun and Ng, 2013; Lu et al., 2020, Dying ReLU: a unit that is negative for all inputs gets no gradient",
    needs=needs.GRADIENTS + ', and "output_grads"',
    next_check="a smaller learning rate, a leaky rectifier, or another initialisation; which step killed them?",
    evidence=("params", "modules", "fraction", "count", "cause"),
    causes=("dying_relu",),
)
def partly_dead_units(facts: Facts) -> Answers:
    if not facts.gradients or not facts.of_phase("backward") or len(facts.recorded) < 2 * UNIT_STEPS:
        return
    middle = int(facts.recorded[len(facts.recorded) // 2])
    shares = _never_reached(facts, middle)
    layers = {site.module: site for site in _before_rectifiers(facts) if site.module in shares}
    for module, site in layers.items():
        if DEAD_UNITS <= (share := shares[module]) < 1 and site.last_nonzero is not None:
            text = f"{share:.0%} of the units of {module or '(root)'} get no gradient in any of the last steps"
            evidence = {
                "params": [site.name],
                "modules": [module],
                "fraction": share,
                "count": round(share * site.count),
            }
            yield Found("warning", text, middle, module, evidence | {"cause": "dying_relu"})
    most = max((shares[module] for module in layers), default=0.0)
    yield Clear(f"at most {most:.0%} of the units of one of {len(layers)} layers before rectifiers get no gradient")


def _before_rectifiers(facts: Facts) -> Iterator[Seen]:
    """Gradients of biases of layers behind which part of the gradient is dropped, over enough outputs to tell."""
    masked = {site.module for site in facts.of_phase("backward") if 0 < site.zeros < site.elements}
    last = max((order for module, order in facts.order.items() if module), default=0)
    for site in facts.of_phase("forward"):
        units = site.shape[-1] if 0 < len(site.shape) < 4 else site.shape[1] if site.shape else 0
        bias = facts.gradients.get(f"{site.module}.bias".lstrip("."))
        if bias is None or bias.dtype != "float32" or bias.count < 2 or site.module not in masked:
            continue
        if site.order < last and units and site.count // units >= UNIT_ROWS:
            yield bias


def _never_reached(facts: Facts, since: int) -> dict[str, float]:
    """Of biases with gradients in `UNIT_STEPS` or more steps since one, the smallest share of elements that are zero."""
    rows = facts.sql(
        "SELECT module::VARCHAR AS module, min(zeros / count) AS least FROM tensors "
        f"WHERE phase::VARCHAR IN ('gradient', 'gradient_local') AND slot::VARCHAR = 'bias' AND step >= {since} "
        f"AND count > 0 GROUP BY ALL HAVING count(*) >= {UNIT_STEPS}"
    ).to_pylist()
    return {row["module"]: row["least"] for row in rows}


@rule(
    sees="a bounded activation inside the model that sits at its bounds",
    threshold=f"in every one of {LASTING} or more steps up to the last, by moments, the mean derivative of a sigmoid "
    f"is below {FLAT:g}, or that of a tanh; the last module of the model, whose targets may be at the bounds, is left "
    "out",
    source="Glorot and Bengio, 2010: saturated units pass no gradient; E[s(1 − s)] = mean − rms² for a sigmoid, 1 − "
    "rms² for tanh",
    needs=needs.OUTPUTS,
    next_check="normalise what goes in, or initialise the weights before it smaller",
    evidence=("modules", "derivative", "count", "cause"),
    causes=("saturated",),
)
def saturation(facts: Facts) -> Answers:
    bounded = [site for site in facts.of_phase("forward") if site.type in DERIVATIVE and site.count > 1]
    if not any(site.rows >= LASTING for site in facts.of_phase("forward")):
        return
    last = max((site.order for site in facts.of_phase("forward") if site.module), default=0)
    inner = {site.module: site for site in bounded if site.order < last}
    slope = {} if not inner else _slopes(facts)
    flat = {path: slope[path] for path in inner if path in slope and slope[path] < FLAT}
    for path, value in flat.items():
        text = f"{path or '(root)'} ({inner[path].type}) sits at its bounds: its mean derivative is at most {value:.2g}"
        evidence = {"modules": [path], "derivative": value, "count": inner[path].rows, "cause": "saturated"}
        yield Found("warning", text, inner[path].first_step, path, evidence)
    least = min((slope[path] for path in inner if path in slope), default=1.0)
    yield Clear(f"the smallest mean derivative of {len(inner)} inner sigmoids and tanhs is {least:.2g}")


def _slopes(facts: Facts) -> dict[str, float]:
    """The largest mean derivative of each sigmoid and tanh over the last recorded steps, by moments."""
    since = int(facts.recorded[-LASTING]) if len(facts.recorded) >= LASTING else facts.run_start
    rows = facts.sql(
        "SELECT module::VARCHAR AS module, max(CASE WHEN type::VARCHAR = 'Tanh' THEN 1 - rms * rms ELSE mean - rms * "
        "rms END) "
        "AS slope, count(DISTINCT step) AS steps FROM tensors WHERE phase::VARCHAR = 'forward' "
        f"AND type::VARCHAR IN ('Tanh', 'Sigmoid') AND step >= {since} AND rms IS NOT NULL GROUP BY ALL"
    )
    return {row["module"]: max(row["slope"], 0.0) for row in rows.to_pylist() if row["steps"] >= LASTING}


RULES = (
    dead_activations,
    partly_dead_units,
    saturation,
    constant_activations,
    dead_modules,
    eval_mode_in_training,
    frozen_buffer_changed,
    padding_row_nonzero,
)
