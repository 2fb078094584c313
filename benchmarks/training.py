"""A training step of rwkv_clip traced over the bare step, and what the demonstration's run reaches.

    python -m benchmarks.training [--config digits,B32] [--rounds 3] [--seconds 10] [--without-demo]

Each round times the same model bare, traced with the defaults, bare, traced with ``budget=0.02``, and bare again, each
for some seconds after two steps that are not counted. A ratio is the mean seconds of a traced step over those of a bare
one on both sides, the median over rounds; means, as a budget records few steps and lets many pass. A traced step must be
the bare one bit for bit, or nothing is reported. The last line is the demonstration's whole run.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import tracehooks
from benchmarks.machine import describe_machine
from rwkv_clip import train
from rwkv_clip.data.loading import Batch, load_steps
from rwkv_clip.training.distributed import Place
from rwkv_clip.training.flags import parse_args
from rwkv_clip.training.run import Run, build, computing

PLACE = Place(torch.device("cpu"))
CONFIGS = {
    "digits": ["--config", "digits"],
    "B32": ["--config", "RWKV_CLIP_B32", "--batch-size", "4"],
}
TRACED: dict[str, dict[str, Any]] = {"defaults": {}, "budget=0.02": {"budget": 0.02}}
DEMO = [sys.executable, "-m", "rwkv_clip.demo"]
WARM_UP = 2


def build_run(config: str, folder: str) -> tuple[Run, list[Batch]]:
    """A run on the digits, and its first batches."""
    run = build(parse_args([*CONFIGS[config], "--output", folder]), PLACE)
    run.model.train()
    return run, [batches[0] for batches in itertools.islice(load_steps(run.pairs, run.plan, 0), 8)]


@contextlib.contextmanager
def traced(run: Run, options: dict[str, Any] | None) -> Iterator[None]:
    """Record the run's steps while the block runs; None: do not."""
    if options is None:
        yield
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        tracehooks.attach(run.model, Path(folder) / "run", optimizer=run.updater.optimizer, quiet=True, **options),
    ):
        yield


def seconds_a_step(run: Run, batches: Iterator[Batch], seconds: float) -> float:
    """Mean over as many steps as fit into these seconds, at least two."""
    for _ in range(WARM_UP):
        train.train_step(run, [next(batches)])
    started, steps = time.perf_counter(), 0
    while (passed := time.perf_counter() - started) < seconds or steps < WARM_UP:
        train.train_step(run, [next(batches)])
        steps += 1
    return passed / steps


def measure(config: str, rounds: int, seconds: float) -> dict[str, object]:
    """Ratios of one configuration, and its bare throughput."""
    with tempfile.TemporaryDirectory() as folder:
        run, several = build_run(config, folder)
    batches = itertools.cycle(several)
    ratios: dict[str, list[float]] = {name: [] for name in TRACED}
    bare = [seconds_a_step(run, batches, seconds)]
    for _ in range(rounds):
        for name, options in TRACED.items():
            with traced(run, options):
                recorded = seconds_a_step(run, batches, seconds)
            bare.append(seconds_a_step(run, batches, seconds))
            ratios[name].append(recorded / statistics.mean(bare[-2:]))
    images, tokens = several[0].tokens.shape[0], several[0].tokens.numel()
    step = statistics.median(bare)
    line: dict[str, object] = {"config": config, "batch": images, "context": run.bare.config.ctx_len}
    line |= {"bare_ms": round(1e3 * step, 1), "images_per_second": round(images / step, 1)}
    line |= {"tokens_per_second": round(tokens / step)}
    for name, values in ratios.items():
        line[name] = round(statistics.median(values), 3)
        line[f"{name} images_per_second"] = round(images / step / statistics.median(values), 1)
        line[f"{name} tokens_per_second"] = round(tokens / step / statistics.median(values))
        line[f"{name} low, high"] = [round(min(values), 3), round(max(values), 3)]
    return line


def unchanged() -> bool:
    """Whether traced steps end with the bare ones' weights, bit for bit."""
    ends = []
    for options in (None, *TRACED.values()):
        with tempfile.TemporaryDirectory() as folder:
            run, batches = build_run("digits", folder)
        with traced(run, options):
            for batch in batches[:3]:
                train.train_step(run, [batch])
        ends.append([parameter.detach().clone() for parameter in run.model.parameters()])
    return all(torch.equal(a, b) for end in ends[1:] for a, b in zip(ends[0], end, strict=True))


def demonstrate() -> dict[str, object]:
    """Run what ``make demo`` runs, and read what came out from its trace."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        subprocess.run([*DEMO, "--output", folder], stdout=sys.stderr, check=True)
        taken = time.perf_counter() - started
        table = tracehooks.open(Path(folder) / "trace").scalars().to_pylist()
    values = {row["name"]: row["value"] for row in sorted(table, key=lambda row: row["step"])}
    return {
        "demo": "digits",
        "steps": 1 + max(row["step"] for row in table),
        "zero_shot_accuracy": values["zero_shot_accuracy"],
        "loss": values["interval_loss"],
        "seconds": round(taken, 1),
    }


def main() -> None:
    """Print one JSON line a configuration, the machine first. Refuses to when tracing changes the run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", default=",".join(CONFIGS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--without-demo", action="store_true")
    args = parser.parse_args()
    if not unchanged():
        parser.exit(1, "a traced step is not the bare one bit for bit: nothing is reported\n")
    print(json.dumps(describe_machine()))
    for config in args.config.split(","):
        with computing(parse_args([*CONFIGS[config], "--output", "."])):
            print(json.dumps(measure(config, args.rounds, args.seconds)), flush=True)
    if not args.without_demo:
        print(json.dumps(demonstrate()), flush=True)


if __name__ == "__main__":
    main()
