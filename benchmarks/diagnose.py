"""Diagnosing a run of ten million rows: seconds and peak memory, in a process of its own.

    python -m benchmarks.diagnose [--rows 10000000]

The run is a thousand sites over as many steps as that takes, with a batch of samples and the usual scalars in each. A
gradient that stays zero and a learning rate that ends at zero are planted: nothing is reported unless both are found, and
nothing else.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.diff import SITES, block, peak_mib
from benchmarks.machine import describe_machine
from tracehooks.core.records import Batch
from tracehooks.storage import RunWriter
from tracehooks.surface import offline

BLOCK_STEPS = 100
SAMPLES = 16
DEAD = 640
"""The site, a gradient, that is zero in every step."""
RUN = {"status": "running", "config": {}}


def scalars(steps: range, last: int) -> dict[str, Any]:
    """A loss that falls, times that waver, and a rate that is zero in the last fifth of the run."""
    random = np.random.default_rng(steps.start)
    number = np.arange(steps.start, steps.stop)
    named = {
        "loss": 2.0 * np.exp(-number / last) + 0.1 * random.random(len(number)),
        "grad_norm": 1.0 + random.random(len(number)),
        "lr/0": np.where(number < 0.8 * last, 1e-3, 0.0),
        "time/data": 0.001 + 0.001 * random.random(len(number)),
        "time/step": 0.1 + 0.01 * random.random(len(number)),
        "overhead": np.full(len(number), 0.02),
    }
    return {
        "step": np.tile(number, len(named)), "micro": np.zeros(len(named) * len(number), np.int32),
        "time_ns": np.tile(number * 10**9, len(named)), "name": [name for name in named for _ in number],
        "value": np.concatenate(list(named.values())),
    }  # fmt: skip


def samples(steps: range) -> dict[str, Any]:
    """Samples that never come twice."""
    step = np.repeat(np.arange(steps.start, steps.stop), SAMPLES)
    size, random = len(step), np.random.default_rng(steps.start)
    return {
        "step": step, "micro": np.zeros(size, np.int32), "time_ns": step * 10**9,
        "index": np.tile(np.arange(SAMPLES), len(steps)), "name": ["x"] * size, "split": ["train"] * size,
        "hash": random.integers(0, 2**63, size, dtype=np.uint64), "source_id": [None] * size,
    }  # fmt: skip


def write(path: Path, rows: int) -> int:
    """The run; how many steps it has."""
    steps = rows // SITES
    random, jitter = np.random.default_rng(0), np.random.default_rng(1)
    columns = block(range(BLOCK_STEPS), random, jitter, 0.0, False)
    dead = np.arange(len(columns["step"])) % SITES == DEAD
    for name in ("min", "max", "mean", "std", "rms", "absmax"):
        columns[name] = np.where(dead, 0.0, columns[name])
    columns["zeros"] = np.where(dead, columns["count"], 0)
    names = sorted(
        {f"{m}.weight" for m, p in zip(columns["module"], columns["phase"], strict=True) if p == "parameter"}
    )
    parameters = [{"name": name, "shape": [64, 512], "requires_grad": True} for name in names]
    optimizer = {"class": "AdamW", "groups": [{"lr": 1e-3, "parameters": names}], "foreign": []}
    writer = RunWriter(path, {**RUN, "model": {"parameters": parameters, "modules": []}, "optimizers": [optimizer]})
    for first in range(0, steps, BLOCK_STEPS):
        chosen = range(first, first + BLOCK_STEPS)
        now = {**columns, "step": columns["step"] + first, "hash": columns["hash"] + np.uint64(first)}
        writer.write(
            [Batch("tensors", now), Batch("scalars", scalars(chosen, steps)), Batch("samples", samples(chosen))]
        )
    writer.close()
    return steps


def measure(path: str, out: Any) -> None:
    """In a process of its own."""
    before, start, cpu = peak_mib(), time.perf_counter(), time.process_time()
    found = offline.diagnose(path)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    told = sorted((finding.rule, finding.site) for finding in found)
    out.put({"seconds": round(seconds, 2), "cpu_seconds": round(cpu, 2), "peak_mib": round(peak_mib()),
             "imports_mib": round(before), "found": told})  # fmt: skip


def main() -> None:
    """Print one JSON line, the machine first."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    args = parser.parse_args()
    print(json.dumps(describe_machine()))
    folder = Path(tempfile.mkdtemp())
    try:
        steps = write(folder / "run", args.rows)
        size = sum(file.stat().st_size for file in folder.rglob("*.parquet"))
        context = multiprocessing.get_context("spawn")
        out = context.Queue()
        process = context.Process(target=measure, args=(str(folder / "run"), out))
        process.start()
        found: dict[str, Any] = out.get(timeout=600)
        process.join()
    finally:
        shutil.rmtree(folder)
    told = found.pop("found")
    if [rule for rule, _ in told] != ["zero_gradient", "zero_lr"]:
        raise SystemExit(f"what was planted is not what was found: {told}")
    print(json.dumps({"case": "diagnose", "rows": args.rows, "steps": steps, "mib": round(size / 2**20), **found}))


if __name__ == "__main__":
    main()
