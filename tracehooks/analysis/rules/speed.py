"""Time and memory: waiting for data, graphs that grow."""

from __future__ import annotations

import numpy as np

from tracehooks.analysis.rules import needs
from tracehooks.analysis.rules.facts import LASTING, Facts, Floats, Ints
from tracehooks.analysis.rules.rule import Answers, Clear, Found, rule
from tracehooks.core.records import Severity

BOUND_SHARE, BOUND_SECONDS = 0.5, 0.01
STALL_FACTOR, STALL_SECONDS, PAUSE_SECONDS = 20.0, 1.0, 0.25
GRAPH_GROWTH = 2.0
AGAIN, SETTLED = 3, 6
MEMORY_SHARE, MEMORY_BYTES = 0.1, 64 * 2**20
PAUSE_FACTOR = 5.0


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
    steps, counts = _looks(facts, "graph/nodes")
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


@rule(
    sees="a compiled model that is compiled again and again",
    threshold=f"the number of compiled graphs grows at {AGAIN} or more of the looks after step {SETTLED}",
    source="torch.compile guards its graphs on shapes, dtypes, modes and globals, and compiles anew where one does not hold",
    needs="torch.compile in the process of the training; it is looked at in the first steps and then at powers of two",
    next_check="TORCH_LOGS=recompiles names the guard that failed; mark_dynamic for a length that varies",
    evidence=("count", "graphs", "cause"),
    causes=("guards_fail",),
)
def recompilation(facts: Facts) -> Answers:
    steps, graphs = _looks(facts, "compiled/graphs", SETTLED)
    if len(steps) < AGAIN + 1:
        return
    grown = np.diff(graphs) > 0
    if grown.sum() >= AGAIN:
        text = f"graphs were compiled anew at {int(grown.sum())} of {len(grown)} looks: {graphs[-1]:.0f} by now"
        evidence = {"count": int(grown.sum()), "graphs": int(graphs[-1]), "cause": "guards_fail"}
        yield Found("warning", text, int(steps[1:][grown][0]), "", evidence)
    yield Clear(f"graphs were compiled anew at {int(grown.sum())} of {len(grown)} looks after step {SETTLED}")


@rule(
    sees="memory that grows from step to step",
    threshold=f"over four or more looks after step {SETTLED} by more than {MEMORY_BYTES / 2**20:g} MiB and "
    f"{MEMORY_SHARE:.0%}, in proportion to the steps (correlation 0.98)",
    source="what tensors hold on GPUs, as the allocator counts it, or else the process's resident size; looked at in "
    "the first steps and then at powers of two",
    needs=f"some {8 * SETTLED} training steps",
    next_check="what is kept from step to step: losses with their graphs, outputs in a list, a cache without a bound?",
    evidence=("first", "last", "per_step", "count", "cause"),
    causes=("kept_from_step_to_step",),
)
def memory_growth(facts: Facts) -> Answers:
    known = facts.scalars("memory/")
    name = next((name for name in ("memory/device", "memory/resident") if name in known), "")
    steps, sizes = _looks(facts, name, SETTLED)
    if len(steps) < 4:
        return
    first, last = float(sizes[0]), float(sizes[-1])
    each = (last - first) / float(steps[-1] - steps[0])
    steady = np.ptp(sizes) > 0 and float(np.corrcoef(steps, sizes)[0, 1]) >= 0.98
    if steady and last - first > max(MEMORY_BYTES, MEMORY_SHARE * first):
        text = f"memory grew from {first / 2**20:.0f} to {last / 2**20:.0f} MiB, by {each / 2**10:.0f} KiB a step"
        evidence = {
            "first": first,
            "last": last,
            "per_step": each,
            "count": len(steps),
            "cause": "kept_from_step_to_step",
        }
        yield Found("warning", text, int(steps[0]), "", evidence)
    yield Clear(f"memory went from {first / 2**20:.0f} to {last / 2**20:.0f} MiB over {len(steps)} looks")


@rule(
    sees="training that stands still while checkpoints are kept",
    threshold=f"after {LASTING} or more of the steps in which a checkpoint was noted the wait is {STALL_SECONDS:g} s "
    f"and {PAUSE_FACTOR:g} ordinary steps or more, in the median, and not after others",
    source="time from the end of a step to the start of the next forward pass, by the host's clock, counted with the next",
    needs="checkpoints that are noted, trace.checkpoint(name, state), in three or more steps",
    next_check="write checkpoints in the background (torch.distributed.checkpoint.async_save), or more rarely",
    evidence=("seconds", "share", "count", "cause"),
    causes=("checkpoint",),
)
def checkpoint_pause(facts: Facts) -> Answers:
    steps, columns = facts.together("time/data", "time/step")
    kept = np.isin(steps, [event.step + 1 for event in facts.events("checkpoint")])
    if kept.sum() < LASTING or kept.all():
        return
    waits, wholes = columns
    after, otherwise, whole = (float(np.median(x)) for x in (waits[kept], waits[~kept], wholes))
    if after > max(STALL_SECONDS, PAUSE_FACTOR * whole) and otherwise < 0.5 * after:
        share = float(waits[kept].sum() / max(wholes.sum() + waits.sum(), 1e-9))
        text = f"training waits {after:.2g} s after each of {int(kept.sum())} checkpoints, {share:.0%} of its time"
        evidence = {"seconds": after, "share": share, "count": int(kept.sum()), "cause": "checkpoint"}
        yield Found("warning", text, int(steps[kept][0]), "", evidence)
    yield Clear(f"training waits {after * 1000:.0f} ms after a checkpoint, {otherwise * 1000:.0f} ms after other steps")


def _looks(facts: Facts, name: str, after: int = -1) -> tuple[Ints, Floats]:
    """A scalar that is looked at now and then: steps after one, and the last value in each."""
    series = facts.scalar(name)
    steps = np.unique(series.steps[series.steps > after])
    return steps, series.at(steps)


RULES = (stall, recompilation, graph_growth, memory_growth, checkpoint_pause)
