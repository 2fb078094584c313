"""Reading and comparing two traces of a million rows: seconds and peak memory, each case in a process of its own.

Cases: ``equal`` (the same trace twice, other directories), ``noise`` (every row differs in its last bits), ``shifted``
(one side misses a module, so rows have to be joined). Nothing is reported unless the diff of each case says what the
case was built to show.

With ``--engine local[2]`` Spark reads the runs; its start is measured too, and the peak is that of Python without Java.

    python -m benchmarks.diff [--rows 1000000] [--sketch] [--engine ENGINE] [--json]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from tracehooks.core.records import Batch
from tracehooks.storage import RunWriter
from tracehooks.surface import offline

SITES = 1000
"""Rows of a step: a model of about 200 modules with outputs, gradients, parameters and updates recorded."""

PHASES = ("forward", "backward", "parameter", "gradient", "update")
INFO = {"status": "running", "config": {}}


def write(path: Path, steps: int, *, seed: int, noise: float = 0.0, without: str | None = None, sketch: bool) -> None:
    """A trace whose numbers follow from ``seed``; ``noise`` moves every statistic by that relative amount."""
    # Another host: rounding noise is to be expected, also in initial parameters.
    writer = RunWriter(path, {**INFO, "host": "other" if noise else "one"})
    random = np.random.default_rng(seed)
    jitter = np.random.default_rng(seed + 1)
    for first in range(0, steps, 100):
        columns = block(range(first, min(first + 100, steps)), random, jitter, noise, sketch)
        if without is not None:
            kept = np.array([module != without for module in columns["module"]])
            columns = {name: chosen(column, kept) for name, column in columns.items()}
        writer.write([Batch("tensors", columns)])
    writer.close()


def chosen(column: Any, kept: Any) -> Any:
    """The rows of a column that are kept."""
    if column is None:
        return None
    return column[kept] if isinstance(column, np.ndarray) else [x for x, keep in zip(column, kept, strict=True) if keep]


def block(steps: range, random: Any, jitter: Any, noise: float, sketch: bool) -> dict[str, Any]:
    """The rows of some steps, by column."""
    size = len(steps) * SITES
    site = np.tile(np.arange(SITES), len(steps))
    step = np.repeat(np.arange(steps.start, steps.stop), SITES)
    phase = site // (SITES // len(PHASES))
    module = site % (SITES // len(PHASES))
    names = [f"blocks.{number // 8}.part{number % 8}" for number in range(SITES // len(PHASES))]
    rms = random.lognormal(0, 1, size)
    mean = rms * random.uniform(-0.1, 0.1, size)
    moved = 1 + noise * jitter.standard_normal(size) if noise else np.ones(size)
    hashes = random.integers(0, 2**63, size, dtype=np.uint64)
    sums = random.standard_normal((size, 16)).astype(np.float32) if sketch else None
    zero = np.zeros(size, np.int64)
    return {
        "step": step, "micro": zero.astype(np.int32), "time_ns": step * 10**9 + site, "seq": site,
        "phase": [PHASES[number] for number in phase], "module": [names[number] for number in module],
        "type": ["Linear"] * size, "slot": ["output" if number < 2 else "weight" for number in phase],
        "call": zero.astype(np.int32), "recompute": zero.astype(bool), "dtype": ["float32"] * size,
        "device": ["cpu"] * size, "shape": [(64, 512)] * size, "count": zero + 64 * 512,
        "nan": zero, "posinf": zero, "neginf": zero, "zeros": zero,
        "min": -4 * rms, "max": 4 * rms * moved, "mean": mean * moved, "std": rms * moved, "rms": rms * moved,
        "absmax": 4 * rms * moved, "hash": hashes + np.uint64(1) if noise else hashes,
        "sketch": sums, "histogram": None,
    }  # fmt: skip


def peak_mib() -> float:
    """The largest resident size of this process so far. (getrusage would count the parent's before exec.)"""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024


def measure(a: str, b: str, engine: str, out: Any) -> None:
    """In a process of its own: seconds and peak memory of opening both runs and comparing them."""
    before = peak_mib()
    start, cpu = time.perf_counter(), time.process_time()
    found = offline.diff(offline.open(a), offline.open(b), engine=engine)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    told = {"first": found.first and found.first.module, "counts": dict(found.counts)}
    out.put({"seconds": seconds, "cpu_seconds": cpu, "peak_mib": peak_mib(), "imports_mib": before, **told})


def isolated(a: Path, b: Path, engine: str) -> dict[str, Any]:
    """`measure` in a fresh process."""
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    process = context.Process(target=measure, args=(str(a), str(b), engine, out))
    process.start()
    found: dict[str, Any] = out.get(timeout=600)
    process.join()
    return found


def check(case: str, found: dict[str, Any], rows: int) -> None:
    """Refuse to report numbers of a diff that is wrong."""
    counts = found["counts"]
    expected = {
        "equal": counts["equal"] == rows,
        "noise": counts["within"] == rows,
        "shifted": counts["only_a"] == rows // (SITES // len(PHASES)) and found["first"] == "blocks.3.part1",
    }
    if not expected[case]:
        raise SystemExit(f"case {case}: the diff is wrong, no numbers are reported: {found}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--sketch", action="store_true", help="record sketches too")
    parser.add_argument("--engine", default="duckdb", help="duckdb, or a master of Spark's")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    steps = options.rows // SITES
    reported = {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write(root / "a", steps, seed=0, sketch=options.sketch)
        write(root / "equal", steps, seed=0, sketch=options.sketch)
        write(root / "noise", steps, seed=0, noise=1e-8, sketch=options.sketch)
        write(root / "shifted", steps, seed=0, without="blocks.3.part1", sketch=options.sketch)
        for case in ("equal", "noise", "shifted"):
            runs = [isolated(root / "a", root / case, options.engine) for _ in range(options.repeat)]
            for found in runs:
                check(case, found, steps * SITES)
            reported[case] = {
                "engine": options.engine,
                "rows": steps * SITES,
                "seconds": round(min(found["seconds"] for found in runs), 3),
                "cpu_seconds": round(min(found["cpu_seconds"] for found in runs), 3),
                "peak_mib": round(max(found["peak_mib"] for found in runs)),
                "imports_mib": round(max(found["imports_mib"] for found in runs)),
            }
    if options.json:
        print(json.dumps(reported))
    else:
        for case, numbers in reported.items():
            print(f"{case:8s} " + "  ".join(f"{name} {value}" for name, value in numbers.items()))


if __name__ == "__main__":
    main()
