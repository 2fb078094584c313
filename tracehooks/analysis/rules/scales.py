"""Scales: weights that begin badly, and sites out of proportion to their siblings."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np

from tracehooks.analysis.rules import needs
from tracehooks.analysis.rules.facts import LASTING, Facts, Seen
from tracehooks.analysis.rules.rule import Answers, Clear, Found, listed, rule
from tracehooks.analysis.rules.series import trend

LAYERS = 6
FADES = 1e-4
ABOVE_CHANCE = 10.0
SIBLINGS = 4
OUT_OF_LINE = 1e4


@rule(
    sees="weights that begin badly: all equal, of a scale that fades or explodes through the layers, or far worse "
    "than chance",
    threshold="in the first step a weight of a linear or convolutional layer whose elements are all one number but "
    f"not zero; outputs over {LAYERS} or more weighted layers that change by {1 / FADES:g} in rank order (Spearman "
    f"0.8); or a cross-entropy of {ABOVE_CHANCE:g} times that of chance, ln(classes), and more",
    source="Glorot and Bengio, 2010; He et al., 2015: keep the variance from layer to layer; equal units get equal "
    "gradients for ever; Karpathy, 2019, A recipe for training neural networks: verify the loss at init",
    needs="the first step of the training: attach before it, with outputs and parameters recorded",
    next_check="torch.nn.init: kaiming_normal_ for rectifiers, xavier_uniform_ for tanh; scale the last layer down",
    evidence=("params", "ratio", "loss", "chance", "count", "cause"),
    causes=("constant_weights", "outputs_fade", "outputs_explode", "loss_above_chance"),
)
def poor_initialisation(facts: Facts) -> Answers:
    if not facts.parameters or facts.run_start > 0:
        return
    equal = _constant_weights(facts)
    if equal:
        text = f"all elements of {listed(equal)} begin as one number: their units stay equal"
        yield Found("warning", text, 0, equal[0], {"params": equal, "count": len(equal), "cause": "constant_weights"})
    ratio, layers = _through_the_layers(facts)
    if ratio is not None and not FADES <= ratio <= 1 / FADES:
        fades = ratio < 1
        text = (
            f"outputs {'fade' if fades else 'grow'} to {ratio:.1e} of their size over {layers} layers in the first step"
        )
        evidence = {"ratio": ratio, "count": layers, "cause": "outputs_fade" if fades else "outputs_explode"}
        yield Found("warning", text, 0, "", evidence)
    classes, loss = facts.scalar("targets/classes").values, facts.scalar("loss").values
    chance = math.log(classes[0]) if len(classes) and classes[0] > 1 else None
    if chance is not None and len(loss) and loss[0] > ABOVE_CHANCE * chance:
        text = f"the first loss is {loss[0]:.3g}, chance among {classes[0]:.0f} classes would give {chance:.3g}"
        evidence = {"loss": float(loss[0]), "chance": chance, "count": int(classes[0]), "cause": "loss_above_chance"}
        yield Found("warning", text, 0, "loss", evidence)
    told = "" if ratio is None else f", outputs keep {ratio:.2g} of their size over {layers} layers"
    yield Clear(f"0 of {len(facts.parameters)} parameters begin as one number other than zero{told}")


@rule(
    sees="a site whose numbers are out of all proportion to those of its siblings",
    threshold=f"of {SIBLINGS} or more outputs, or weights of two dimensions or more, of one class and shape one whose "
    f"magnitude, a geometric mean over the steps, is {OUT_OF_LINE:g} times more or less than the median of them; "
    "biases may well be: that of attention's keys has no gradient but rounding",
    source="SageMaker Debugger's TensorVariance bounds the variance by fixed numbers; here siblings set them",
    needs=needs.OUTPUTS,
    next_check="tracehooks show RUN --module PATH: since which step, and what changed there?",
    evidence=("modules", "params", "ratio", "count", "cause"),
    causes=("out_of_proportion",),
)
def tensor_variance(facts: Facts) -> Answers:
    groups: dict[tuple[object, ...], list[Seen]] = defaultdict(list)
    for site in facts.of_phase("forward", "parameter"):
        if site.rms and site.rows >= LASTING and (site.phase == "forward" or len(site.shape) >= 2) and site.count > 1:
            groups[site.phase, site.type, site.slot, site.shape].append(site)
    alike = {key: sites for key, sites in groups.items() if len({site.module for site in sites}) >= SIBLINGS}
    worst = 1.0
    for (phase, *_), sites in alike.items():
        usual = float(np.median([site.rms for site in sites if site.rms]))
        for site in sites:
            ratio = (site.rms or usual) / usual
            worst = max(worst, ratio, 1 / ratio)
            if not 1 / OUT_OF_LINE < ratio < OUT_OF_LINE:
                what = "output" if phase == "forward" else site.slot
                text = (
                    f"the {what} of {site.module or '(root)'} is {ratio:.1e} of that of its {len(sites) - 1} siblings"
                )
                evidence = {"modules": [site.module], "params": None if phase == "forward" else [site.name], "ratio": ratio,
                            "count": len(sites), "cause": "out_of_proportion"}  # fmt: skip
                yield Found("warning", text, site.first_step, site.module, evidence)
    if groups:
        yield Clear(f"in {len(alike)} groups of siblings none is further than {worst:.3g}-fold from the median")


def _constant_weights(facts: Facts) -> list[str]:
    trainable = set(facts.trainable)
    rows = facts.sql(
        "SELECT module::VARCHAR AS module, slot::VARCHAR AS slot FROM tensors WHERE phase::VARCHAR = 'parameter' "
        "AND (contains(type::VARCHAR, 'Linear') OR contains(type::VARCHAR, 'Conv')) AND step = 0 AND len(shape) >= 2 "
        "AND shape[1] > 1 AND shape[2] > 1 AND min = max AND max <> 0 GROUP BY ALL "
        "ORDER BY ALL"
    ).to_pylist()
    names = [f"{row['module']}.{row['slot']}".lstrip(".") for row in rows]
    return [name for name in names if name in trainable]


def _through_the_layers(facts: Facts) -> tuple[float | None, int]:
    """Magnitude of the last weighted layer's output over that of the first, in the first step, and how many there are."""
    weighted = {name.rpartition(".")[0] for name, described in facts.described.items() if len(described["shape"]) >= 2}
    rows = facts.sql(
        "SELECT module::VARCHAR AS module, min(seq) AS seq, avg(rms) AS rms FROM tensors WHERE phase::VARCHAR = 'forward' "
        "AND step = 0 AND micro = 0 AND rms > 0 AND NOT contains(type::VARCHAR, 'Embedding') GROUP BY ALL ORDER BY seq"
    ).to_pylist()
    sizes = np.array([row["rms"] for row in rows if row["module"] in weighted], dtype=np.float64)
    if len(sizes) < LAYERS:
        return None, len(sizes)
    ratio = float(sizes[-1] / sizes[0])
    steady = abs(trend(sizes)) >= 0.8
    return (ratio if steady else 1.0), len(sizes)


RULES = (poor_initialisation, tensor_variance)
