"""Time and memory: waiting for data, graphs that grow."""

from __future__ import annotations

import numpy as np

from tracehooks.analysis.rules import needs
from tracehooks.analysis.rules.facts import Facts
from tracehooks.analysis.rules.rule import Answers, Clear, Found, rule
from tracehooks.core.records import Severity

BOUND_SHARE, BOUND_SECONDS = 0.5, 0.01
STALL_FACTOR, STALL_SECONDS, PAUSE_SECONDS = 20.0, 1.0, 0.25
GRAPH_GROWTH = 2.0


@rule(
    sees="training that waits for its data: all the time, or in one step",
    threshold=f"more than {BOUND_SHARE:.0%} of the time of a step without its recording, and "
    f"{BOUND_SECONDS * 1000:.0f} ms, as medians over five or more steps after the first; or one wait of "
    f"{STALL_SECONDS:g} s and {STALL_FACTOR:g} ordinary steps, a note from {PAUSE_SECONDS:g} s",
    source="time from the end of a step to the start of the next forward pass, by the host's clock",
    needs=needs.TIMES,
    next_check="time the loader alone; more workers, a cheaper transform, or the file system",
    evidence=("share", "seconds", "cause"),
    causes=("loader_wait",),
)
def stall(facts: Facts) -> Answers:
    steps, columns = facts.together("time/data", "time/step", "overhead")
    steps, (waits, wholes, recording) = steps[1:], [column[1:] for column in columns]
    if len(steps) < 4:
        return
    wholes = wholes * (1 - recording)
    share, usual = float(np.median(waits / np.maximum(wholes, 1e-9))), float(np.median(waits))
    if share > BOUND_SHARE and usual > BOUND_SECONDS:
        whole_ms = float(np.median(wholes)) * 1000
        text = f"{share:.0%} of the time of a step is waiting for data ({usual * 1000:.0f} ms of {whole_ms:.0f} ms)"
        yield Found("warning", text, int(steps[0]), "", {"share": share, "seconds": usual, "cause": "loader_wait"})
        return
    worst = int(np.argmax(waits))
    if waits[worst] > max(PAUSE_SECONDS, STALL_FACTOR * float(np.median(wholes))):
        ordinary = float(np.median(wholes))
        text = (
            f"before step {steps[worst]} training waited {waits[worst]:.2f} s, an ordinary step takes {ordinary:.3g} s"
        )
        severity: Severity = "warning" if waits[worst] > STALL_SECONDS else "info"
        yield Found(severity, text, int(steps[worst]), "", {"seconds": float(waits[worst]), "cause": "loader_wait"})
    yield Clear(f"{share:.0%} of the time of a step is waiting for data, {waits[worst] * 1000:.0f} ms at most")


@rule(
    sees="a loss whose graph grows from step to step: something of the last step is kept with its graph",
    threshold=f"the number of autograd nodes grows at every look, at least {GRAPH_GROWTH:g}-fold over four or more "
    "looks, in proportion to the steps",
    source="autograd keeps the graph of a tensor as long as the tensor lives; looked at in the first steps and then "
    "at powers of two",
    needs=needs.GRAPH + ", in four or more steps",
    next_check="detach what is carried from step to step: a hidden state, a running buffer, a sum of losses",
    evidence=("buffers", "nodes", "cause"),
    causes=("buffer_not_detached",),
)
def graph_growth(facts: Facts) -> Answers:
    nodes = facts.scalar("graph/nodes")
    steps, last = np.unique(nodes.steps[::-1], return_index=True)
    counts = nodes.values[::-1][last]
    if len(counts) < 2 or not (np.diff(counts) > 0).all():
        if len(counts) >= 2:
            yield Clear(
                f"the graph of the loss has {counts.min():.0f} to {counts.max():.0f} nodes over {len(counts)} looks"
            )
        return
    buffers = [name for event in facts.events("graph_held") for name in event.details["buffers"]]
    grown = len(counts) >= 4 and counts[-1] >= GRAPH_GROWTH * counts[0] and np.corrcoef(steps, counts)[0, 1] >= 0.99
    if not grown and not (buffers and len(counts) < 4):
        yield Clear(
            f"the graph of the loss went from {counts[0]:.0f} to {counts[-1]:.0f} nodes over {len(counts)} looks"
        )
        return
    each = (counts[-1] - counts[0]) / (steps[-1] - steps[0])
    yield Found(
        "warning",
        f"the graph of the loss grows by {each:.0f} nodes a step, from {counts[0]:.0f} to {counts[-1]:.0f}",
        int(steps[1]),
        buffers[0] if buffers else "",
        {"buffers": buffers or None, "nodes": float(counts[-1]), "cause": "buffer_not_detached"},
    )


RULES = (stall, graph_growth)
