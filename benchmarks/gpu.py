"""What recording costs on a GPU, after checking there that it is right and waits for nothing: under five minutes.

    python -m benchmarks.gpu [--part kernel,waits,steps] [--rounds 5] [--steps 10]

The kernel's rows are compared with the reference's, a training step is recorded under torch's prohibition of waiting, and
only then is anything timed: the kernel over ``tensor.sum()``, and training steps with a trace over bare ones, taking turns
in one run. One JSON line a result, the machine first. Without a GPU it says so and exits with 2.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import tracehooks
from benchmarks.machine import describe_machine
from benchmarks.overhead import Attention
from rwkv_clip.clip import RWKVCLIP
from rwkv_clip.config import load_model_configs
from rwkv_clip.loss import ClipLoss
from tracehooks import stats
from tracehooks.stats import Spec, gpu, reference
from tracehooks.storage import Run

ALL = Spec(sketch=True, histogram=True)
SIZES = (0, 1, 1023, 4097, 1_000_003)
PARTS = ("kernel", "waits", "steps")
Loss = Callable[[], Tensor]


# ---- is it right?


def samples(dtype: torch.dtype) -> Iterator[Tensor]:
    """Tensors of a dtype on the host: all sizes, with holes and without, a mean far above the spread."""
    for size in SIZES:
        x = torch.randn(size, generator=torch.Generator().manual_seed(size), dtype=torch.float64) * 50
        if not dtype.is_floating_point:
            yield x.abs().clamp(max=100).to(dtype)
            continue
        yield x.to(dtype)
        yield (1000 + x * 1e-3).to(dtype)
        x[::97], x[1::89], x[2::83], x[3::5] = math.nan, math.inf, -math.inf, -0.0
        yield x.to(dtype)


def differences(found: Tensor, wanted: Tensor) -> str | None:
    """What is wrong with a row with everything in it, None where nothing is: moments and sketch may differ by rounding."""
    rounded = torch.zeros(ALL.width, dtype=torch.bool)
    rounded[8:11], rounded[12:28] = True, True  # mean, std, rms; sketch
    if not torch.equal(found[~rounded], wanted[~rounded]):
        return f"columns {(found != wanted).logical_and(~rounded).nonzero().flatten().tolist()} differ"
    a, b = (row.view(torch.float64)[rounded] for row in (found, wanted))
    scale = wanted[10].view(torch.float64).nan_to_num() * max(1.0, float(wanted[0])) ** 0.5
    if not torch.allclose(a, b, rtol=1e-9, atol=1e-12 * float(scale) + 1e-300, equal_nan=True):
        return f"moments differ: {a.tolist()} instead of {b.tolist()}"
    return None


def failures() -> Iterator[str]:
    """What the kernel gets wrong on this device."""
    if stats.kernel_name("cuda:0") != "triton":
        yield "the kernel does not start"
        return
    everything = []
    for dtype in gpu.KINDS:
        for x in samples(dtype):
            everything.append(x)
            for kind, there in (
                ("tensor", x.cuda()),
                ("view", torch.cat([x[:1], x]).cuda()[1:] if len(x) else x.cuda()),
            ):
                row = stats.summarize(there, ALL)
                if wrong := differences(row.cpu(), reference.summarize(x, ALL)):
                    yield f"{kind} of {len(x)} {dtype}: {wrong}"
                if not torch.equal(row, stats.summarize(there, ALL)):
                    yield f"{kind} of {len(x)} {dtype}: another row the second time"
    there = [x.cuda() for x in everything]
    rows = stats.summarize_many(there, ALL, torch.empty((len(there), ALL.width), dtype=torch.int64, device="cuda"))
    for x, row in zip(everything, rows.cpu(), strict=True):
        if wrong := differences(row, reference.summarize(x, ALL)):
            yield f"in a list, {len(x)} {x.dtype}: {wrong}"
    yield from failures_on_streams(there[-1].double())
    yield from failures_in_a_graph()


def failures_on_streams(x: Tensor) -> Iterator[str]:
    """Launches on two streams at once do not disturb one another."""
    wanted = stats.summarize(x, ALL)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found = []
    for _ in range(50):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(stats.summarize(x, ALL))
    torch.cuda.synchronize()
    if not all(torch.equal(row, wanted) for row in found):
        yield "two streams disturb one another"


def failures_in_a_graph() -> Iterator[str]:
    """A launch that a CUDA graph holds measures anew at each replay."""
    x, y = torch.randn(100_000, device="cuda"), torch.ones(7, device="cuda")
    rows = torch.empty((2, ALL.width), dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stats.summarize_many([x, y], ALL, rows)
    for _ in range(3):
        x.normal_()
        graph.replay()
        for measured, row in zip((x, y), rows, strict=True):
            if wrong := differences(row.cpu(), reference.summarize(measured.cpu(), ALL)):
                yield f"replayed by a CUDA graph: {wrong}"


# ---- does it wait?


def errors_of(run: Path) -> list[str]:
    """Messages of recorder_error events in a run's directory."""
    events = Run(run).read("events").to_pylist()
    return [event["message"] for event in events if event["kind"] == "recorder_error"]


@contextmanager
def waiting_forbidden() -> Iterator[None]:
    """torch raises where the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def waits(step: Callable[[], None], model: nn.Module, mode: str, optimizer: torch.optim.Optimizer) -> list[str]:
    """Where recording waits in five steps, after three in which everything is allocated. The flag that is read before an
    optimizer step is an event that the host waits for, which torch does not count."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        with tracehooks.attach(model, run, optimizer=optimizer, quiet=True, on_nonfinite=mode):
            for _ in range(3):
                step()
            with waiting_forbidden():
                for _ in range(5):
                    step()
        return [f"on_nonfinite={mode}: {message}" for message in errors_of(run)]


# ---- what does it cost?


def gpt2_small(compute: torch.dtype = torch.bfloat16) -> tuple[nn.Module, Loss]:
    """Twelve layers of width 768 over 8 sequences of 1,024 tokens, in bfloat16 where autocast says so."""
    model = nn.Sequential(nn.Embedding(50304, 768), *[Attention(768, 12) for _ in range(12)], nn.Linear(768, 50304))
    ids = torch.randint(0, 50304, (8, 1024), device="cuda")

    def loss() -> Tensor:
        with torch.autocast("cuda", dtype=compute):
            return functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

    return model.cuda(), loss


def rwkv_clip() -> tuple[nn.Module, Loss]:
    """RWKV-CLIP B/32 over 32 pairs, in float32, with the engine that works anywhere."""
    config = replace(load_model_configs("RWKV_CLIP_B32"), wkv_engine="chunked")
    model = RWKVCLIP(config).cuda()
    images = torch.randn(32, 3, config.input_size, config.input_size, device="cuda")
    tokens = torch.randint(1, config.vocab_size, (32, config.ctx_len), device="cuda")
    contrast = ClipLoss()

    def loss() -> Tensor:
        image, text, scale = model(images, tokens)
        return contrast(functional.normalize(image, dim=-1), functional.normalize(text, dim=-1), scale)

    return model, loss


WORKLOADS = {"gpt2-small": gpt2_small, "rwkv-clip": rwkv_clip}


def seconds(step: Callable[[], None], steps: int) -> float:
    """Of one step, the mean of some that the device does back to back."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


def ratios(bare: Callable[[], None], traced: Callable[[], float], rounds: int, steps: int) -> dict[str, float]:
    """Traced over bare steps, which are timed before and after: the median over rounds, and how far they are apart."""
    found, plain, closed = [], [], []
    for _ in range(rounds):
        before, during, after = seconds(bare, steps), traced(), seconds(bare, steps)
        found.append(2 * during / (before + after))
        closed.append(after / before)
        plain += [before, after]
    numbers = {"ratio": statistics.median(found), "low": min(found), "high": max(found)}
    numbers["after_close"] = statistics.median(closed)
    return {name: round(value, 3) for name, value in numbers.items()} | {
        "bare_ms": round(1e3 * statistics.median(plain), 2)
    }


def recorded(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: Callable[[], None],
    steps: int,
    *,
    scoped: bool,
    **options: object,
) -> float:
    """Seconds of a step while everything is recorded, after two steps that allocate what is needed."""
    with tempfile.TemporaryDirectory() as folder:
        trace = tracehooks.attach(model, Path(folder) / "run", optimizer=optimizer, quiet=True, **options)

        def one() -> None:
            with trace.step_scope() if scoped else nullcontext():
                step()

        with trace:
            one(), one()
            return seconds(one, steps)


def captured(loss: Loss, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """A whole step as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad()
    with torch.cuda.graph(graph):
        loss().backward()
        optimizer.step()
    return graph.replay


def training(workload: str) -> tuple[nn.Module, Loss, torch.optim.Optimizer, Callable[[], None]]:
    """A model and its step."""
    torch.manual_seed(0)
    model, loss = WORKLOADS[workload]()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, capturable=True, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    for _ in range(3):
        step()
    return model, loss, optimizer, step


def kernel_costs() -> Iterator[dict[str, object]]:
    """The kernel over the device's own sum, and what a launch costs the host."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for size in (1 << 20, 1 << 24, 1 << 27):
            x = torch.randn(size, device="cuda", dtype=torch.float32).to(dtype)
            row = torch.empty(Spec().width, dtype=torch.int64, device="cuda")
            stats.summarize(x, Spec(), row)
            spent = {"sum": x.sum, "summarize": lambda x=x, row=row: stats.summarize(x, Spec(), row)}
            least = {name: min(seconds(work, 50) for _ in range(5)) for name, work in spent.items()}
            yield {
                "dtype": str(dtype), "elements": size, "times_sum": round(least["summarize"] / least["sum"], 2),
                "gigabytes_per_second": round(x.nbytes / least["summarize"] / 1e9),
            }  # fmt: skip
    tensors = [torch.randn(1000 + i, device="cuda") for i in range(200)]
    rows = torch.empty((200, Spec().width), dtype=torch.int64, device="cuda")
    one = min(
        seconds(lambda: [stats.summarize(x, Spec(), row) for x, row in zip(tensors, rows, strict=True)], 5)
        for _ in range(5)
    )
    many = min(seconds(lambda: stats.summarize_many(tensors, Spec(), rows), 5) for _ in range(5))
    yield {
        "small_tensors": 200,
        "microseconds_one_by_one": round(5e3 * one, 1),
        "microseconds_in_a_list": round(5e3 * many, 1),
    }


def step_costs(workload: str, rounds: int, steps: int) -> Iterator[dict[str, object]]:
    """What recording everything costs, by what happens with non-finite values; the same around a CUDA graph."""
    model, loss, optimizer, step = training(workload)
    for mode in ("record", "locate"):

        def traced(mode: str = mode) -> float:
            return recorded(model, optimizer, step, steps, scoped=False, on_nonfinite=mode)

        yield {"workload": workload, "on_nonfinite": mode, **ratios(step, traced, rounds, steps)}
    replay = captured(loss, optimizer)

    def around_a_graph() -> float:
        return recorded(model, optimizer, replay, steps, scoped=True, on_nonfinite="record")

    yield {"workload": workload, "cuda_graph": True, **ratios(replay, around_a_graph, rounds, steps)}


def main() -> None:
    """Check, then measure; refuse to measure what is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", default=",".join(PARTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    parts = options.part.split(",")
    if not torch.cuda.is_available():
        parser.exit(2, "benchmarks.gpu: no GPU that torch can use is here\n")
    found = list(failures()) if "kernel" in parts else []
    if "waits" in parts:
        for workload in WORKLOADS:
            model, _, optimizer, step = training(workload)
            found += [message for mode in ("record", "locate") for message in waits(step, model, mode, optimizer)]
    if found:
        sys.exit("\n".join(["nothing is measured, because", *found]))
    print(json.dumps(describe_machine() | {"gpu": torch.cuda.get_device_name(), "kernel": stats.kernel_name("cuda:0")}))
    if "kernel" in parts:
        for line in kernel_costs():
            print(json.dumps(line), flush=True)
    for workload in WORKLOADS if "steps" in parts else ():
        for line in step_costs(workload, options.rounds, options.steps):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
