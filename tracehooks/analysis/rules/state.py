"""What is kept of a model: snapshots, averages, checkpoints."""

from __future__ import annotations

from tracehooks.analysis.rules.facts import Facts
from tracehooks.analysis.rules.rule import Answers, Clear, Found, listed, rule


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


RULES = (aliased_snapshot, ema_buffers_stale)
