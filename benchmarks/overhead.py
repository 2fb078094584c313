"""What recording everything at every step costs: the time of a training step with a trace over that without, in one run.

    python -m benchmarks.overhead [--workload gpt,conv,mlp] [--rounds 5] [--every 1] [--budget 0.02]

Each round times bare steps, traced steps and bare steps again on the same model; a round's ratio is traced over the mean
of both bare medians, the figure is the median over rounds. After close() the model must be as fast as before: that ratio is
shown, too. The floor is the ratio that a recording would have that did nothing but read each tensor once, at the bandwidth
that ``sum()`` of a large tensor has in the same run. Absolute times are not to be compared between machines.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import tracehooks
from benchmarks.machine import describe_machine

Step = Callable[[], None]

WARM_UP = 4
"""Steps of a trace before those that count: the first ones of a run are looked at more closely."""


class Attention(nn.Module):
    """Causal self-attention and an MLP, both with a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time_, width = x.shape
        query, key, value = self.mix(self.before(x)).view(batch, time_, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time_, width))
        return x + self.mlp(self.after(x))


def gpt() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """Six layers of width 384, 1,024 tokens a step."""
    model = nn.Sequential(nn.Embedding(8192, 384), *[Attention(384, 6) for _ in range(6)], nn.Linear(384, 8192))
    ids = torch.randint(0, 8192, (4, 256))
    return model, lambda: functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def conv() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """Twelve 3x3 convolutions with batch norm on 16 images of 32x32."""
    layers = [
        m for _ in range(12) for m in (nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(inplace=True))
    ]
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
    )
    x, y = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
    return model, lambda: functional.cross_entropy(model(x), y)


def mlp() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """97 tiny modules: what a hook itself costs."""
    layers = [m for _ in range(32) for m in (nn.LayerNorm(128), nn.Linear(128, 128), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(128, 10))
    x, y = torch.randn(64, 128), torch.randint(0, 10, (64,))
    return model, lambda: functional.cross_entropy(model(x), y)


WORKLOADS = {"gpt": gpt, "conv": conv, "mlp": mlp}


def median_time(step: Step, steps: int) -> float:
    """Seconds of a step, the median."""
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def bandwidth() -> float:
    """Bytes a second that all threads together read of a tensor much larger than any cache, at best."""
    x = torch.ones(1 << 26)
    return x.nbytes / min(median_time(lambda: x.sum(), 1) for _ in range(7))


def bytes_read(run: tracehooks.Run, step: int) -> int:
    """Bytes of the tensors of a step, those of the same content once: no other knows how to tell of fewer."""
    rows = run.tensors(columns=["hash", "count", "dtype"], where=f"step = {step}").to_pylist()
    distinct = {(row["hash"], row["count"], row["dtype"]) for row in rows}
    return sum(count * getattr(torch, dtype).itemsize for _, count, dtype in distinct)


def measure(workload: str, rounds: int, steps: int, options: dict[str, object]) -> dict[str, object]:
    """Ratios and bytes of one workload."""
    torch.manual_seed(0)
    model, loss = WORKLOADS[workload]()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    step()
    ratios, afterwards, bare = [], [], []
    for _ in range(rounds):
        before = median_time(step, steps)
        with tempfile.TemporaryDirectory() as folder:
            with tracehooks.attach(model, Path(folder) / "run", optimizer=optimizer, quiet=True, **options):
                for _ in range(WARM_UP):
                    step()
                traced = median_time(step, steps)
            run = tracehooks.open(Path(folder) / "run")
            recorded = run.tensors(columns=["step"]).column("step").to_pylist()
            reading = bytes_read(run, max(recorded))
            size = sum(path.stat().st_size for path in Path(folder).rglob("*.parquet"))
        after = median_time(step, steps)
        ratios.append(traced / ((before + after) / 2))
        afterwards.append(after / before)
        bare.append(before)
    return {
        "workload": workload,
        **options,
        "ratio": round(statistics.median(ratios), 3),
        "low": round(min(ratios), 3),
        "high": round(max(ratios), 3),
        "floor": round(1 + reading / bandwidth() / statistics.median(bare), 3),
        "after_close": round(statistics.median(afterwards), 3),
        "bare_ms": round(1e3 * statistics.median(bare), 1),
        "rows_per_step": len(recorded) // len(set(recorded)),
        "bytes_per_row": round(size / len(recorded), 1),
    }


def unchanged() -> bool:
    """Whether a recorded step is the bare one bit for bit: what costs less than it should may have changed the run."""
    ends = []
    for attached in (False, True):
        torch.manual_seed(0)
        model, loss = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
        with tempfile.TemporaryDirectory() as folder:
            trace = tracehooks.attach(model, Path(folder) / "run", quiet=True) if attached else None
            for _ in range(2):
                optimizer.zero_grad()
                loss().backward()
                optimizer.step()
            if trace is not None:
                trace.close()
        ends.append([parameter.detach().clone() for parameter in model.parameters()])
    return all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def main() -> None:
    """Print one JSON line a workload, the machine first. Refuses to when recording changes the run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workload", default=",".join(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--budget", type=float)
    args = parser.parse_args()
    if not unchanged():
        parser.exit(1, "a recorded step is not the bare one bit for bit: nothing is reported\n")
    options = {"every": args.every} | ({} if args.budget is None else {"budget": args.budget})
    print(json.dumps(describe_machine()))
    for workload in args.workload.split(","):
        print(json.dumps(measure(workload, args.rounds, args.steps, options)), flush=True)


if __name__ == "__main__":
    main()
