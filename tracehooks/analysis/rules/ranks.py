"""Several processes that train one model: slow, silent, or no longer equal."""

from __future__ import annotations

from typing import Any

import numpy as np

from tracehooks.analysis.rules.facts import Facts
from tracehooks.analysis.rules.rule import Answers, Clear, Found, listed, rule

RANKS = "a run of two or more ranks: attach() in each process, into one directory"
SLOWER = 1.5
BEHIND = 3
STEPS = 5


@rule(
    sees="a rank that is slower than the others, which wait for it",
    threshold=f"its forward pass takes {SLOWER:g} times the median of the ranks, in the median over {STEPS} or more "
    "steps; backward passes are not compared, since ranks wait for each other in them",
    source="collective operations end when the last rank has come; time of the forward pass by each host's clock",
    needs=RANKS,
    next_check="is its device shared or throttled, its data larger, its loader short of processors?",
    evidence=("rank", "ratio", "seconds", "count", "cause"),
    causes=("slow_rank",),
)
def slow_rank(facts: Facts) -> Answers:
    rows = facts.sql(
        "SELECT rank, median(value) AS seconds, count(*) AS steps FROM scalars WHERE name::VARCHAR IN ('time/forward') "
        "AND step > (SELECT min(step) FROM scalars) GROUP BY rank ORDER BY rank"
    ).to_pylist()
    if len(rows) < 2 or min(row["steps"] for row in rows) < STEPS:
        return
    usual = float(np.median([row["seconds"] for row in rows])) if len(rows) > 2 else min(row["seconds"] for row in rows)
    worst = max(rows, key=lambda row: row["seconds"])
    ratio = worst["seconds"] / max(usual, 1e-9)
    if ratio > SLOWER and worst["seconds"] - usual > 0.005:
        text = f"the forward pass of rank {worst['rank']} takes {ratio:.2g} times as long as that of the others"
        evidence = {
            "rank": worst["rank"],
            "ratio": ratio,
            "seconds": worst["seconds"],
            "count": len(rows),
            "cause": "slow_rank",
        }
        yield Found("warning", text, None, f"rank {worst['rank']}", evidence)
    yield Clear(f"the slowest of {len(rows)} ranks takes {ratio:.2f} times as long as the others")


@rule(
    sees="a rank that stopped while the others went on",
    threshold=f"its last step is {BEHIND} or more before that of the furthest rank; ranks that record nothing are "
    "none: one may be enough to watch",
    source="ranks of one training take the same steps; a process that died, or waits in a collective alone, takes none",
    needs=RANKS,
    next_check="what did this process print last, and is it alive? py-spy dump shows where it waits",
    evidence=("ranks", "last_steps", "count", "cause"),
    causes=("silent_rank",),
)
def silent_rank(facts: Facts) -> Answers:
    rows = facts.sql("SELECT rank, max(step) AS last FROM scalars GROUP BY rank ORDER BY rank").to_pylist()
    last = {row["rank"]: row["last"] for row in rows}
    if len(last) < 2:
        return
    furthest = max(last.values())
    silent = [rank for rank, step in last.items() if furthest - step >= BEHIND]
    if silent:
        text = f"rank {listed(map(str, silent))} of {len(last)} stopped before step {furthest}, which others reached"
        evidence = {
            "ranks": silent,
            "last_steps": [last[rank] for rank in silent],
            "count": len(silent),
            "cause": "silent_rank",
        }
        yield Found("error", text, min(last[rank] for rank in silent), f"rank {silent[0]}", evidence)
    yield Clear(f"the last steps of {len(last)} ranks are {min(last.values())} to {furthest}")


@rule(
    sees="data-parallel ranks that no longer hold the same weights",
    threshold="one parameter with other bits on two ranks in one step, of a model under DistributedDataParallel",
    source="torch.nn.parallel.DistributedDataParallel: equal weights and averaged gradients keep ranks equal",
    needs=RANKS + ', with "parameters" and hash=True',
    next_check="is a parameter changed outside of the optimizer, or left out of DDP? Compare the ranks' seeds at the start",
    evidence=("params", "count", "cause"),
    causes=("ranks_drift",),
)
def unequal_ranks(facts: Facts) -> Answers:
    wrappers = (facts.run.info.get("model") or {}).get("wrappers", [])
    if "DistributedDataParallel" not in wrappers:
        return
    rows: list[dict[str, Any]] = facts.sql(
        "SELECT module, slot, count(*) AS steps, count_if(kinds > 1)::BIGINT AS unequal, "
        "min(CASE WHEN kinds > 1 THEN step END) AS step FROM (SELECT module::VARCHAR AS module, slot::VARCHAR AS "
        "slot, step, "
        "count(DISTINCT hash) AS kinds, count(DISTINCT rank) AS ranks, count(DISTINCT shape) AS shapes FROM tensors "
        "WHERE phase::VARCHAR = 'parameter' AND hash IS NOT NULL GROUP BY ALL HAVING count(DISTINCT rank) > 1 "
        "AND count(DISTINCT shape) = 1) GROUP BY module, slot ORDER BY min(step), module, slot"
    ).to_pylist()
    unequal = [row for row in rows if row["unequal"]]
    if unequal:
        names = [f"{row['module']}.{row['slot']}".lstrip(".") for row in unequal]
        text = f"{listed(names)} have other bits on different ranks since step {unequal[0]['step']}"
        yield Found(
            "error", text, unequal[0]["step"], names[0], {"params": names, "count": len(names), "cause": "ranks_drift"}
        )
    if rows:
        yield Clear(f"0 of {len(rows)} parameters differ between ranks in {max(row['steps'] for row in rows)} steps")


RULES = (slow_rank, silent_rank, unequal_ranks)
