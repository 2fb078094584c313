"""How recording and reading grow: a large model, a long run, and a trace of a hundred million rows.

    python -m benchmarks.scale [--modules 5000] [--steps 40] [--long 100000] [--rows 100000000]

Recording: a model of ``--modules`` modules trains for ``--steps``, a tiny one for ``--long``; the memory of the process and
what the recorder holds must not grow from step to step. Reading: opening a trace of ``--rows`` rows, its first non-finite
value from the event and from the rows alone, one step of it, and comparing one step of it with another, each in a process
of its own: seconds, bytes read, peak memory. Nothing is reported unless what was planted is found.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.diff import SITES, block, peak_mib
from benchmarks.machine import describe_machine
from tracehooks.core.records import Batch
from tracehooks.storage import RunWriter
from tracehooks.surface import offline

BLOCK_STEPS = 100
LOOKS = 20
"""How often memory is looked at while a run is recorded."""


def resident_mib() -> float:
    """Resident size of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def record(modules: int, steps: int) -> dict[str, Any]:
    """Train a model of many modules for some steps, recording every tensor."""
    import torch
    from torch import nn

    import tracehooks

    layers = [m for _ in range(modules // 2) for m in (nn.Linear(8, 8), nn.Tanh())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        sizes, objects = [], []
        with tracehooks.attach(model, path, quiet=True) as trace:
            for step in range(steps):
                optimizer.zero_grad()
                model(torch.randn(4, 8)).square().mean().backward()
                optimizer.step()
                if step % (steps // LOOKS) == 0:
                    gc.collect()
                    sizes.append(resident_mib())
                    objects.append(len(gc.get_objects()))
        start = time.perf_counter()
        trace.close()
        rows = tracehooks.open(path).tensors(columns=["step"]).num_rows
        if rows != steps * (rows // steps) or rows // steps < 2 * modules:
            raise SystemExit(f"{rows} rows of {steps} steps and {modules} modules: not every tensor was recorded")
        size = sum(file.stat().st_size for file in path.rglob("*.parquet"))
    half = len(sizes) // 2
    return {
        "case": "recording",
        "modules": modules,
        "steps": steps,
        "rows_per_step": rows // steps,
        "bytes_per_row": round(size / rows, 1),
        "mib_at_half": round(sizes[half]),
        "mib_at_end": round(sizes[-1]),
        "objects_grown_since_half": objects[-1] - objects[half],
        "close_seconds": round(time.perf_counter() - start, 2),
    }


def write(path: Path, rows: int) -> float:
    """A trace of so many rows with one NaN in its last step; seconds it took."""
    steps = rows // SITES
    random, jitter = np.random.default_rng(0), np.random.default_rng(1)
    columns = block(range(BLOCK_STEPS), random, jitter, 0.0, False)
    writer = RunWriter(path, {"status": "running", "config": {}})
    start = time.perf_counter()
    for first in range(0, steps, BLOCK_STEPS):
        now = dict(columns)
        now["step"] = columns["step"] + first
        now["hash"] = columns["hash"] + np.uint64(first)
        if first + BLOCK_STEPS >= steps:
            now["nan"] = columns["nan"].copy()
            now["nan"][-SITES + 7] = 3
        writer.write([Batch("tensors", now)])
    writer.close()
    return time.perf_counter() - start


def plant_event(path: Path, steps: int) -> None:
    """What a recorder would have noted of the NaN."""
    details = {"step": steps - 1, "phase": "forward", "module": "planted", "value": "nan", "message": "planted"}
    writer = RunWriter(path, {"status": "running"}, resume=True)
    event: dict[str, Any] = {
        "step": [steps - 1], "micro": [0], "time_ns": [0], "seq": [0], "kind": ["nonfinite"], "severity": ["error"],
        "module": ["planted"], "slot": [None], "message": ["planted"], "details": [json.dumps(details)],
    }  # fmt: skip
    writer.write([Batch("events", event)])
    writer.close()


def opened(path: str, steps: int) -> object:
    """Open it, and ask what run.json says."""
    return offline.open(path).status == "closed"


def first_of_rows(path: str, steps: int) -> object:
    """The first non-finite value where no recorder noted it."""
    found = offline.first(path)
    return found is not None and found.step == steps - 1


def first_of_event(path: str, steps: int) -> object:
    """The same from the event."""
    found = offline.first(path)
    return found is not None and found.module == "planted"


def one_step(path: str, steps: int) -> object:
    """All rows of one step in the middle."""
    rows = offline.query(path, f"select count(*) n from tensors where step = {steps // 2}")
    return rows["n"].to_pylist() == [SITES]


def diff_of_step(path: str, steps: int) -> object:
    """One step compared with itself in another copy of the run's directory."""
    return offline.diff(path, path, steps=steps // 2).counts["equal"] == SITES


def measure(work: Callable[[str, int], object], path: str, steps: int, out: Any) -> None:
    """In a process of its own: seconds, bytes read and peak memory of one question."""
    before, read = peak_mib(), _bytes_read()
    start = time.perf_counter()
    right = work(path, steps)
    seconds = time.perf_counter() - start
    read = _bytes_read() - read
    out.put({"right": bool(right), "seconds": round(seconds, 3), "mib_read": round(read / 2**20, 1),
             "peak_mib": round(peak_mib()), "imports_mib": round(before)})  # fmt: skip


def _bytes_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


def ask(work: Callable[[str, int], object], path: Path, steps: int) -> dict[str, Any]:
    """`measure` in a fresh process; refuses a wrong answer."""
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    process = context.Process(target=measure, args=(work, str(path), steps, out))
    process.start()
    found: dict[str, Any] = out.get(timeout=900)
    process.join()
    if not found.pop("right"):
        raise SystemExit(f"{work.__name__}: the answer is wrong, no numbers are reported")
    return {"case": work.__name__, **found}


def main() -> None:
    """Print one JSON line a case, the machine first."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--modules", type=int, default=5_000)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--long", type=int, default=100_000)
    parser.add_argument("--rows", type=int, default=100_000_000)
    args = parser.parse_args()
    print(json.dumps(describe_machine()))
    for modules, steps in ((args.modules, args.steps), (4, args.long)):
        print(json.dumps(record(modules, steps)), flush=True)
    folder = Path(tempfile.mkdtemp())
    try:
        seconds = write(folder / "run", args.rows)
        steps = args.rows // SITES
        size = sum(file.stat().st_size for file in folder.rglob("*.parquet"))
        written = {"case": "writing", "rows": args.rows, "rows_per_second": round(args.rows / seconds)}
        print(json.dumps({**written, "bytes_per_row": round(size / args.rows, 1)}), flush=True)
        for work in (opened, first_of_rows, one_step, diff_of_step):
            print(json.dumps(ask(work, folder / "run", steps)), flush=True)
        plant_event(folder / "run", steps)
        print(json.dumps(ask(first_of_event, folder / "run", steps)), flush=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
