"""Time the chunked WKV engine against the reference recurrence, at the shapes of RWKV-CLIP B/32.

``python benchmarks/wkv.py [--batch 4] [--threads 1] [--repeats 5]``. Both engines are timed alternately in one run and
the ratio of their fastest times is printed. Nothing is timed unless both agree first.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from rwkv_clip.wkv import Engine, wkv6_bidirectional

SHAPES = {"image (T=49, 8 heads of 80)": (49, 8, 80), "text (T=77, 10 heads of 64)": (77, 10, 64)}
ENGINES: tuple[Engine, ...] = ("reference", "chunked")
TOLERANCE = 1e-4


def inputs(batch: int, T: int, H: int, N: int) -> list[Tensor]:
    """r, k, v, w, u as float32 leaves, with decays as they are after some training."""
    generator = torch.Generator().manual_seed(0)
    r, k, v, w = (torch.randn(batch, T, H, N, generator=generator) for _ in range(4))
    return [x.requires_grad_() for x in (r, k, v, w - 3, torch.randn(H, N, generator=generator))]


def forward(leaves: list[Tensor], engine: Engine) -> list[Tensor]:
    """The output alone."""
    with torch.no_grad():
        r, k, v, w, u = leaves
        return [wkv6_bidirectional(r, k, v, w, u, engine)]


def forward_and_backward(leaves: list[Tensor], engine: Engine) -> list[Tensor]:
    """The output and the gradients of its sum of squares over two."""
    r, k, v, w, u = leaves
    y = wkv6_bidirectional(r, k, v, w, u, engine)
    return [y.detach(), *torch.autograd.grad(y, leaves, y.detach())]


def disagreement(leaves: list[Tensor]) -> float:
    """Largest difference of the engines' outputs and gradients, relative to each one's largest value."""
    results = [forward_and_backward(leaves, engine) for engine in ENGINES]
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(*results, strict=True))


def fastest(work: Callable[[list[Tensor], Engine], object], leaves: list[Tensor], repeats: int) -> dict[Engine, float]:
    """Seconds of each engine's fastest of ``repeats`` runs, taken in turns."""
    best = dict.fromkeys(ENGINES, float("inf"))
    for _ in range(repeats):
        for engine in ENGINES:
            started = time.perf_counter()
            work(leaves, engine)
            best[engine] = min(best[engine], time.perf_counter() - started)
    return best


def main() -> int:
    """Check, time and print; exit status 1 when the engines disagree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"batch {args.batch}, {args.threads} thread(s), fastest of {args.repeats}, torch {torch.__version__}")
    for name, shape in SHAPES.items():
        leaves = inputs(args.batch, *shape)
        error = disagreement(leaves)
        if not error < TOLERANCE:
            print(f"{name}: the engines disagree by {error:.1e} (limit {TOLERANCE:.0e}); not timed", file=sys.stderr)
            return 1
        for label, work in (("forward", forward), ("forward and backward", forward_and_backward)):
            seconds = fastest(work, leaves, args.repeats)
            slow, fast = (1e3 * seconds[engine] for engine in ENGINES)
            print(f"{name}, {label}: reference {slow:.1f} ms, chunked {fast:.1f} ms, ratio {slow / fast:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
