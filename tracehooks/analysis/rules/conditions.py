"""Conditions, such as captions and controls: absent, constant, truncated, dropped, not learned from."""

from __future__ import annotations

from typing import Any

import numpy as np

from tracehooks.analysis.rules import needs
from tracehooks.analysis.rules.facts import LASTING, Facts
from tracehooks.analysis.rules.rule import Answers, Clear, Found, listed, rule

ALIKE = 4
ABSENT = 0.5
DROPPED = 0.5
MATERIAL = (
    "mask",
    "position",
    "type_id",
    "index",
    "edge",
    "adj",
    "coord",
    "grid",
    "length",
    "cache",
    "step",
    "time",
    "sigma",
)
"""Parts of the names of inputs that are often the same for good reason."""


CONDITIONS = ("cond", "caption", "text", "prompt", "control", "label", "class", "descr", "genre", "style")
"""Parts of the names of inputs that say what is to be made."""


@rule(
    sees="a condition that never varies: the same for every sample of every batch",
    threshold=f"one fingerprint in {ALIKE} or more batches of two or more samples, while another input has many; "
    "inputs named like masks, positions or times are left out",
    source="content hashes of the samples: an empty caption, a label that is always the same",
    needs=needs.SAMPLES,
    next_check="print the condition next to its source: is it lost in tokenisation, in the collation, or absent from "
    "the data?",
    evidence=("input", "modules", "count", "cause"),
    causes=("empty_condition",),
)
def constant_input(facts: Facts) -> Answers:
    varied = {batches.name for batches in facts.batches if len(np.unique(batches.digests)) > 0.5 * len(batches.digests)}
    if len(varied) == len(facts.batches):
        if varied:
            yield Clear(f"all {len(varied)} inputs vary from batch to batch")
        return
    rows = facts.sql(
        "SELECT name::VARCHAR AS name, count(DISTINCT hash) AS contents, count(*) AS samples, "
        "count(DISTINCT step) AS steps, max(index) AS largest FROM samples WHERE split::VARCHAR = 'train' "
        "GROUP BY ALL ORDER BY name"
    ).to_pylist()
    for row in rows:
        if (
            varied
            and row["contents"] == 1
            and row["steps"] >= ALIKE
            and row["largest"]
            and not is_material(row["name"])
        ):
            text = f"{row['name']} is the same for all {row['samples']} samples of {row['steps']} steps"
            evidence = {
                "count": row["samples"],
                "cause": "empty_condition",
                "input": row["name"],
                "modules": facts.takers.get(row["name"]),
            }
            yield Found("warning", text, facts.run_start, f"input.{row['name']}", evidence)
        else:
            yield Clear(f"{row['name']} has {row['contents']} contents in {row['samples']} samples")


@rule(
    sees="a condition that is given in some training passes and missing in most",
    threshold=f"an input named like one, such as caption, prompt or label: no rows of it in more than {ABSENT:.0%} of "
    f"the training passes of {ALIKE} or more steps",
    source="Ho and Salimans, 2022: guidance drops a condition in 10 % to 20 % of the cases; more is more than intended",
    needs=needs.SAMPLES,
    next_check="which branch of the collation or of the training step leaves it out?",
    evidence=("input", "share", "count", "cause"),
    causes=("missing_in_most_passes",),
)
def condition_absent(facts: Facts) -> Answers:
    passes = {row["name"]: row for row in _inputs(facts)}
    most = max((row["passes"] for row in passes.values()), default=0)
    for name, row in passes.items():
        absent = 1 - row["passes"] / most
        if absent > ABSENT and most >= ALIKE and _is_condition(name):
            text = f"{name} is missing in {most - row['passes']} of {most} training passes"
            evidence = {
                "input": name,
                "share": absent,
                "count": most - row["passes"],
                "cause": "missing_in_most_passes",
            }
            yield Found("warning", text, row["step"], f"input.{name}", evidence)
        yield Clear(f"{name} is given in {row['passes']} of {most} training passes")


@rule(
    sees="a condition whose samples are for the most part one and the same: dropped more often than intended",
    threshold=f"more than {DROPPED:.0%} of the samples, but not all, have the commonest fingerprint, over {ALIKE} or "
    "more steps, while most of the others are different from each other; for inputs of two floating or four other "
    "elements a sample, named like a condition",
    source="Ho and Salimans, 2022: classifier-free guidance drops the condition of 10 % to 20 % of the samples",
    needs=needs.SAMPLES,
    next_check="count how often the condition is replaced by the empty one: is the probability applied twice?",
    evidence=("input", "share", "count", "cause"),
    causes=("dropped_too_often",),
)
def condition_dropped(facts: Facts) -> Answers:
    for row in _inputs(facts):
        name, share = row["name"], row["commonest"] / row["samples"]
        if row["steps"] < ALIKE or not facts.is_large(name) or not _is_condition(name):
            continue
        rest = row["samples"] - row["commonest"]
        if DROPPED < share < 1 and row["contents"] - 1 > 0.5 * rest and len(facts.batches) > 1:
            text = f"{share:.0%} of the samples of {name} are one and the same"
            evidence = {"input": name, "share": share, "count": row["commonest"], "cause": "dropped_too_often"}
            yield Found("warning", text, row["step"], f"input.{name}", evidence)
        yield Clear(f"the commonest content of {name} is that of {share:.0%} of the samples")


@rule(
    sees="tokens of a condition that always fill their length: what does not fit is cut off",
    threshold=f"a probe of tokens that is given pad= and named like a condition sees no padding in {LASTING} or more "
    "looks of two or more sequences; a note",
    source="captions differ in length; where none is padded, all are at least as long as the limit",
    needs="tokens of the condition that a probe saw: tracehooks.tokens(ids, 'caption', pad=…)",
    next_check="tokenise some conditions without the limit: how many are longer?",
    evidence=("site", "length", "count", "cause"),
    causes=("cut_at_the_limit",),
)
def condition_truncated(facts: Facts) -> Answers:
    shapes = {f"{seen.module}.{seen.slot}".lstrip("."): seen.shape for seen in facts.of_phase("probe")}
    for name, padding in facts.scalars("tokens/").items():
        site, _, number = name.removeprefix("tokens/").rpartition("/")
        if number != "padding" or not _is_condition(site.rpartition(".")[2]):
            continue
        shape = shapes.get(site, ())
        if not padding.values.any() and len(padding.values) >= LASTING and len(shape) > 1 and shape[0] > 1:
            evidence = {"site": site, "length": shape[-1], "count": len(padding.values), "cause": "cut_at_the_limit"}
            text = f"every sequence of {site} fills its {shape[-1]} positions"
            yield Found("info", text, int(padding.steps[0]), site, evidence)
        yield Clear(f"{np.median(padding.values):.0%} of the positions of {site} are padding")


@rule(
    sees="a condition that goes into modules none of whose parameters is trained",
    threshold="an input named like a condition whose takers have parameters, all frozen; a note: a pretrained encoder "
    "is often frozen on purpose",
    source="torch.nn.Module.requires_grad_: a frozen encoder keeps what it was given, at random where nothing was loaded",
    needs="the first backward pass of the model: attach before it",
    next_check="was the encoder loaded from a checkpoint? tracehooks.checkpoint.check(model, state) tells",
    evidence=("input", "modules", "count", "cause"),
    causes=("encoder_frozen",),
)
def condition_frozen(facts: Facts) -> Answers:
    trainable = set(facts.trainable)
    for name, takers in facts.takers.items():
        inside = [p for p in facts.described if any(p.startswith(f"{path}.") for path in takers)]
        trained = len(trainable.intersection(inside))
        if _is_condition(name) and inside and not trained and trainable:
            evidence = {"input": name, "modules": takers, "count": len(inside), "cause": "encoder_frozen"}
            text = f"{name} goes into {listed(takers)}, whose {len(inside)} parameters are all frozen"
            yield Found("info", text, facts.run_start, f"input.{name}", evidence)
        yield Clear(f"{trained} of the {len(inside)} parameters that take {name} are trained")


def _inputs(facts: Facts) -> list[dict[str, Any]]:
    """The inputs of the root in training: passes, samples, contents, how many samples have the commonest one."""
    rows: list[dict[str, Any]] = facts.sql(
        "WITH contents AS (SELECT name::VARCHAR AS name, hash, count(*) AS times FROM samples "
        "WHERE split::VARCHAR = 'train' GROUP BY ALL), "
        "shown AS (SELECT name::VARCHAR AS name, count(DISTINCT step * 4096 + micro) AS passes, "
        "count(DISTINCT step) AS steps, min(step) AS step FROM samples WHERE split::VARCHAR = 'train' GROUP BY ALL) "
        "SELECT name, any_value(passes) AS passes, any_value(steps) AS steps, any_value(step) AS step, "
        "sum(times)::BIGINT AS samples, count(*) AS contents, max(times) AS commonest "
        "FROM contents JOIN shown USING (name) GROUP BY name ORDER BY name"
    ).to_pylist()
    return rows


def is_material(name: str) -> bool:
    """Whether an input is named like one that goes with samples and is none, such as a mask."""
    return any(part in name.lower() for part in MATERIAL)


def _is_condition(name: str) -> bool:
    return any(part in name.lower() for part in CONDITIONS) and not is_material(name)


RULES = (constant_input, condition_absent, condition_dropped, condition_truncated, condition_frozen)
