"""What is kept of a model: snapshots, averages, checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tracehooks.analysis.rules.facts import Facts, Floats
from tracehooks.analysis.rules.rule import Answers, Clear, Found, listed, rule

JUMP, AROUND = 2.0, 5
RECOMPUTED = 100


@rule(
    sees="a state dict that was kept for later and that goes on changing with the model",
    threshold="one tensor of it in the model's own memory, and at least one step after it was kept",
    source="torch.nn.Module.state_dict returns the tensors themselves, not copies",
    needs="a state dict that is kept: trace.checkpoint(name, state)",
    next_check="keep copy.deepcopy(model.state_dict()), or write it to a file at once",
    evidence=("params", "count", "snapshot", "cause"),
    causes=("state_dict_without_copy",),
)
def aliased_snapshot(facts: Facts) -> Answers:
    for event in facts.events("checkpoint"):
        shared = event.details.get("shares_memory_with_model") or []
        if shared and facts.trains_after(event.step):
            name = event.details["name"]
            text = f"{len(shared)} tensors of the state kept as {name} are the model's own: they go on changing"
            evidence = {"params": shared, "count": len(shared), "cause": "state_dict_without_copy", "snapshot": name}
            yield Found("warning", text, event.step, name, evidence)
            return
    if kept := facts.events("checkpoint"):
        yield Clear(f"0 of {len(kept)} kept states share memory with the model and go on changing")


@rule(
    sees="a moving average of a model whose buffers stand still while the model's change",
    threshold="every floating buffer named has its first content at the end, and the model's own has not",
    source="averaging parameters() leaves out running statistics; "
    "torch.optim.swa_utils.AveragedModel(use_buffers=True)",
    needs="the moving average: attach(…, ema=…)",
    next_check="copy or average the buffers as well, or run update_bn before evaluating the average",
    evidence=("buffers", "count", "cause"),
    causes=("ema_skips_buffers",),
)
def ema_buffers_stale(facts: Facts) -> Answers:
    for event in facts.events("average"):
        stale = event.details["stale_buffers"]
        if stale:
            text = f"{listed(stale)} of the moving average never change, those of the model do"
            evidence = {"buffers": stale, "count": len(stale), "cause": "ema_skips_buffers"}
            yield Found("warning", text, facts.run_start, stale[0].rpartition(".")[0], evidence)
    if len(facts.scalar("ema/distance").values):
        yield Clear("0 buffers of the moving average stand still while the model's change")


@rule(
    sees="training that was resumed with an optimizer that has forgotten its state",
    threshold="the run was resumed, the optimizer had no state before its first step there, and it is one that keeps "
    "some: moments, or momentum",
    source="torch.optim.Optimizer.load_state_dict: moments and step counts are not in the model's state dict; Adam "
    "then takes steps of the full rate in every direction",
    needs="a resumed run: attach(…, resume=True) on the run's directory",
    next_check="save optimizer.state_dict() beside the model's, and load it before the first step",
    evidence=("optimizer", "count", "cause"),
    causes=("state_not_loaded",),
)
def optimizer_state_missing(facts: Facts) -> Answers:
    resumed = _resumed(facts)
    if resumed is None or not facts.optimizers or "had_state" not in facts.optimizers[0]:
        return
    for optimizer in facts.optimizers:
        group: Mapping[str, Any] = next(iter(optimizer.get("groups", [])), {})
        keeps = group.get("momentum", 0) if optimizer["class"] == "SGD" else True
        if keeps and not optimizer["had_state"]:
            text = f"{optimizer['class']} began without state when the run was resumed at step {resumed}"
            evidence = {"optimizer": optimizer["class"], "count": 1, "cause": "state_not_loaded"}
            yield Found("warning", text, resumed, "", evidence)
    yield Clear(
        f"{len(facts.optimizers)} optimizers had what state they keep when the run was resumed at step {resumed}"
    )


@rule(
    sees="a learning rate that jumps where training was resumed",
    threshold=f"it changes by more than {JUMP:g}-fold over the resumption, and by less from step to step in the "
    f"{AROUND} steps on both sides",
    source="torch.optim.lr_scheduler: a scheduler that is not loaded begins its schedule anew",
    needs="a resumed run: attach(…, resume=True) on the run's directory",
    next_check="save scheduler.state_dict() and load it, or make the scheduler with last_epoch",
    evidence=("before", "after", "count", "cause"),
    causes=("schedule_restarted",),
)
def lr_jump(facts: Facts) -> Answers:
    resumed, rates = _resumed(facts), facts.scalar("lr/0")
    if resumed is None or not (rates.steps < resumed).any() or not (rates.steps >= resumed).any():
        return
    at = int(np.searchsorted(rates.steps, resumed))
    factors = _factors(rates.values[max(0, at - AROUND) : at + AROUND])
    jump, usual = _factors(rates.values[at - 1 : at + 1])[0], np.delete(factors, min(AROUND, at) - 1)
    if jump > JUMP and (not len(usual) or usual.max() < jump):
        text = f"the learning rate went from {rates.values[at - 1]:.3g} to {rates.values[at]:.3g} where the run was resumed"
        evidence = {"before": float(rates.values[at - 1]), "after": float(rates.values[at]), "count": 1,
                    "cause": "schedule_restarted"}  # fmt: skip
        yield Found("warning", text, resumed, "lr/0", evidence)
    yield Clear(
        f"the learning rate went from {rates.values[at - 1]:.3g} to {rates.values[at]:.3g} where the run was resumed"
    )


@rule(
    sees="a recomputed forward pass whose outputs are not those of the first one",
    threshold=f"one output with other bits when activation checkpointing computes it again, in the first {RECOMPUTED} "
    "steps that do",
    source="torch.utils.checkpoint: preserve_rng_state=True repeats the random numbers; state that the pass itself "
    "changes is not put back",
    needs="activation checkpointing while the trace is attached, and outputs with hashes",
    next_check="is there dropout with preserve_rng_state=False, a counter, a cache or a buffer that the pass changes?",
    evidence=("modules", "count", "cause"),
    causes=("not_repeatable",),
)
def recomputation_differs(facts: Facts) -> Answers:
    rows = facts.sql(
        "SELECT module, count(*) AS pairs, count_if(kinds > 1)::BIGINT AS unequal, min(step) AS step FROM ("
        "SELECT module::VARCHAR AS module, step, count(DISTINCT hash) AS kinds FROM tensors "
        f"WHERE phase::VARCHAR = 'forward' AND hash IS NOT NULL AND step IN (SELECT DISTINCT step FROM tensors "
        f"WHERE recompute ORDER BY step LIMIT {RECOMPUTED}) GROUP BY rank, step, micro, module, slot, call, shape "
        "HAVING bool_or(recompute) AND NOT bool_and(recompute)) GROUP BY module ORDER BY min(step), module"
    ).to_pylist()
    unequal = [row for row in rows if row["unequal"]]
    if unequal:
        modules = [row["module"] for row in unequal]
        count = sum(row["unequal"] for row in unequal)
        text = f"{count} outputs of {listed(modules)} are others when they are computed again"
        evidence = {"modules": modules, "count": count, "cause": "not_repeatable"}
        yield Found("warning", text, unequal[0]["step"], modules[0], evidence)
    if rows:
        yield Clear(f"0 of {sum(row['pairs'] for row in rows)} recomputed outputs differ from the first ones")


def _resumed(facts: Facts) -> int | None:
    """The first step after the last time the run was resumed in its directory; None where it never was."""
    resumed = [event.step for event in facts.events("run_resumed")]
    return resumed[-1] if resumed else None


def _factors(values: Floats) -> Floats:
    """By how much each value is above, or below, the one before."""
    positive = np.maximum(values, 1e-30)
    return np.exp(np.abs(np.diff(np.log(positive))))


RULES = (aliased_snapshot, ema_buffers_stale, optimizer_state_missing, lr_jump, recomputation_differs)
