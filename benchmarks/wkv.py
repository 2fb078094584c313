"""The WKV engines against each other, at the shapes of RWKV-CLIP B/32, and on a GPU against others and the memory's floor.

Run ``python -m benchmarks.wkv [--batch 4] [--gpu-batch 512] [--threads 1] [--rounds 5]``. Each case is a line of JSON: the
least time over rounds in which all contenders take turns. The last line names the machine. On the CPU the contenders are
the reference and the chunked engine. Where torch sees a GPU they are the chunked and the CUDA engine and, if installed,
flash-linear-attention's RWKV-6 kernels run once in each direction of time; and the time that a copy as fast as the
largest one measured would take to read every input once and write every output once. Our engines must agree with the
reference or nothing is reported; another's error is reported beside its time.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.machine import describe_machine
from rwkv_clip.wkv import Engine, wkv6_bidirectional

SHAPES = {"image": (49, 8, 80), "text": (77, 10, 64)}
"""T, H, N of the two towers."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
CHECKED_BATCH = 16
"""Samples that are compared with the reference, which keeps every state."""
GIBIBYTE = 1 << 30

Operator = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
Work = Callable[[list[Tensor], Operator], list[Tensor]]


def inputs(batch: int, shape: tuple[int, int, int], device: str, dtype: torch.dtype) -> list[Tensor]:
    """r, k, v, w, u as leaves, with decays as they are after some training; w and u stay float32, as under autocast."""
    T, H, N = shape
    generator = torch.Generator().manual_seed(0)
    r, k, v, w = (torch.randn(batch, T, H, N, generator=generator) for _ in range(4))
    halves = [x.to(device, dtype) for x in (r, k, v)]
    return [
        x.requires_grad_() for x in (*halves, (w - 3).to(device), torch.randn(H, N, generator=generator).to(device))
    ]


def forward(leaves: list[Tensor], operator: Operator) -> list[Tensor]:
    """The output alone."""
    with torch.no_grad():
        r, k, v, w, u = leaves
        return [operator(r, k, v, w, u)]


def forward_and_backward(leaves: list[Tensor], operator: Operator) -> list[Tensor]:
    """The output and the gradients of half its sum of squares."""
    r, k, v, w, u = leaves
    y = operator(r, k, v, w, u)
    return [y.detach(), *torch.autograd.grad(y, leaves, y.detach())]


WORK: dict[str, Work] = {"forward": forward, "forward and backward": forward_and_backward}


def engine(name: Engine) -> Operator:
    """One of our engines."""
    return lambda r, k, v, w, u: wkv6_bidirectional(r, k, v, w, u, name)


def flash_linear_attention() -> dict[str, Operator]:
    """flash-linear-attention's causal RWKV-6 in both directions, the bonus counted once; empty if not installed."""
    try:
        from fla.ops.rwkv6 import chunk_rwkv6, fused_recurrent_rwkv6
    except ImportError:
        return {}

    def both_ways(causal: Callable[..., tuple[Tensor, Tensor | None]]) -> Operator:
        def operator(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
            logarithm = -torch.exp(w)
            ahead, _ = causal(r, k, v, logarithm, u, scale=1.0)
            turned = [x.flip(1) for x in (r, k, v, logarithm)]
            behind, _ = causal(*turned, torch.zeros_like(u), scale=1.0)
            return ahead + behind.flip(1)

        return operator

    return {"fla chunk": both_ways(chunk_rwkv6), "fla recurrent": both_ways(fused_recurrent_rwkv6)}


def error(leaves: list[Tensor], operator: Operator) -> float:
    """Largest difference from the reference's output and gradients, relative to each one's largest value."""
    pairs = zip(forward_and_backward(leaves, operator), forward_and_backward(leaves, engine("reference")), strict=True)
    return max(float((a.double() - b.double()).abs().max() / b.double().abs().max()) for a, b in pairs)


def seconds(work: Callable[[], object], device: str, repeats: int) -> float:
    """Mean time of some runs, after one that warms up; on a GPU until its queue is empty."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    work()
    wait()
    started = time.perf_counter()
    for _ in range(repeats):
        work()
    wait()
    return (time.perf_counter() - started) / repeats


def least_times(todo: dict[str, Callable[[], object]], device: str, rounds: int) -> dict[str, float]:
    """Seconds of each contender's fastest round; they take turns."""
    least = dict.fromkeys(todo, math.inf)
    for _ in range(rounds):
        for name, work in todo.items():
            least[name] = min(least[name], seconds(work, device, 20 if device == "cuda" else 1))
    return least


def copied_bytes_a_second() -> float:
    """Bytes read and written a second by a copy of 2 GiB on the GPU."""
    source = torch.empty(2 * GIBIBYTE, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / min(seconds(lambda: target.copy_(source), "cuda", 5) for _ in range(5))


def floor_bytes(leaves: list[Tensor], work: str) -> int:
    """Bytes that must move: every input read and every output written, once in each pass."""
    sizes = [x.numel() * x.element_size() for x in leaves]
    once = sum(sizes) + sizes[2]
    return once if work == "forward" else 2 * once + sum(sizes)


def measure(
    device: str, batch: int, dtype: torch.dtype, ours: list[Engine], others: dict[str, Operator], rounds: int
) -> bool:
    """Print the lines of one device and dtype; False, without them, when one of our engines is wrong."""
    bandwidth = copied_bytes_a_second() if device == "cuda" else None
    for tower, shape in SHAPES.items():
        leaves = inputs(batch, shape, device, dtype)
        contenders: dict[str, Operator] = {name: engine(name) for name in ours} | others
        few = inputs(min(batch, CHECKED_BATCH), shape, device, dtype)
        errors = {name: error(few, operator) for name, operator in contenders.items()}
        wrong = [name for name in ours if not errors[name] < TOLERANCE[dtype]]
        if wrong:
            print(f"{tower}: {wrong[0]} is off by {errors[wrong[0]]:.1e}, limit {TOLERANCE[dtype]}", file=sys.stderr)
            return False
        case = {"tower": tower, "device": device, "batch": batch, "T, H, N": shape, "dtype": str(dtype)[6:]}
        for work, run in WORK.items():
            todo = {name: partial(run, leaves, operator) for name, operator in contenders.items()}
            least = least_times(todo, device, rounds)
            for name, taken in least.items():
                line = case | {"work": work, "engine": name, "milliseconds": round(1e3 * taken, 3)}
                line |= {
                    "times faster than the first": round(least[ours[0]] / taken, 2),
                    "error": f"{errors[name]:.0e}",
                }
                if bandwidth:
                    line["times the memory floor"] = round(taken * bandwidth / floor_bytes(leaves, work), 2)
                print(json.dumps(line), flush=True)
    return True


def main() -> int:
    """Check, measure, print; exit status 1 when one of our engines disagrees with the reference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4, help="on the CPU")
    parser.add_argument("--gpu-batch", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    right = measure("cpu", args.batch, torch.float32, ["reference", "chunked"], {}, args.rounds)
    if torch.cuda.is_available():
        others = flash_linear_attention()
        for dtype in TOLERANCE:
            right = right and measure("cuda", args.gpu_batch, dtype, ["chunked", "cuda"], others, args.rounds)
    else:
        print(
            "no GPU: the CUDA engine, flash-linear-attention and the memory's floor are not measured", file=sys.stderr
        )
    print(json.dumps(describe_machine() | {"threads": args.threads}))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
