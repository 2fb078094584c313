"""How good distances from sketches are: estimated against true relative L2 error and cosine of random pairs of tensors.

Run ``python -m benchmarks.sketch [--pairs 1000]``. Each kind of pair is a line of JSON: the bias of the estimated distance
(mean of estimate / truth − 1), its spread (standard deviation of estimate / truth), the spread that the estimates claimed
for themselves, the share of pairs whose truth lies within two claimed standard errors, and the same of the cosine. The
last line names the machine. Nothing is reported unless a multiple and a flipped tensor come out exact first.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.machine import describe_machine
from tracehooks.analysis.distance import distances
from tracehooks.stats import Spec, summarize
from tracehooks.stats.layout import unpack

SPEC = Spec(hash=False, sketch=True)
ROWS, COLUMNS = 64, 64

KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "noise 1e-6": lambda x: x + 1e-6 * torch.randn_like(x),
    "noise 1e-4": lambda x: x + 1e-4 * torch.randn_like(x),
    "noise 1e-2": lambda x: x + 1e-2 * torch.randn_like(x),
    "noise 1": lambda x: x + torch.randn_like(x),
    "rounded to bfloat16": lambda x: x.bfloat16().float(),
    "transposed": lambda x: x.t().contiguous(),
    "rows permuted": lambda x: x[torch.randperm(ROWS)],
    "two rows exchanged": lambda x: x[[1, 0, *range(2, ROWS)]],
    "one row changed": lambda x: torch.cat((torch.randn_like(x[:1]), x[1:])),
    "another tensor": torch.randn_like,
    "heavy tails": lambda x: x + 0.1 * torch.randn_like(x) ** 5,
}


def columns(tensors: list[Tensor]) -> dict[str, Any]:
    """The columns of rows that measure these tensors."""
    return unpack(np.stack([summarize(tensor, SPEC).numpy() for tensor in tensors]), SPEC)


def exact() -> bool:
    """Whether multiples are known without error."""
    x = torch.randn(ROWS, COLUMNS)
    found = distances(columns([x, x, x]), columns([x, 2 * x, -x]))
    return bool(np.allclose(found.relative_l2, [0, 1, 2], atol=1e-5) and np.allclose(found.cosine, [1, 1, -1]))


def measure(change: Callable[[Tensor], Tensor], pairs: int) -> dict[str, float]:
    """Bias, spread and coverage over random pairs of one kind."""
    a = [torch.randn(ROWS, COLUMNS) for _ in range(pairs)]
    b = [change(x) for x in a]
    found = distances(columns(a), columns(b))
    truth = np.array(list(_true(a, b)))
    ratio, apart = found.relative_l2 / truth[:, 0], np.abs(found.relative_l2 - truth[:, 0])
    turned = np.abs(found.cosine - truth[:, 1])
    numbers = {
        "relative_l2": truth[:, 0].mean(),
        "bias": ratio.mean() - 1,
        "spread": ratio.std(),
        "claimed": (found.relative_l2_error / truth[:, 0]).mean(),
        "within_two": (apart <= 2 * found.relative_l2_error).mean(),
        "cosine": truth[:, 1].mean(),
        "cosine_spread": turned.std(),
        "cosine_within_two": (turned <= 2 * found.cosine_error + 1e-6).mean(),
    }
    return {name: float(f"{number:.3g}") for name, number in numbers.items()}


def _true(a: list[Tensor], b: list[Tensor]) -> Iterator[tuple[float, float]]:
    for x, y in zip(a, b, strict=True):
        x, y = x.double().flatten(), y.double().flatten()
        yield float((x - y).norm() / x.norm()), float(x @ y / (x.norm() * y.norm()))


def main() -> None:
    """Check, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=1000)
    options = parser.parse_args()
    torch.manual_seed(0)
    if not exact():
        sys.exit("multiples are not exact: nothing is measured")
    for kind, change in KINDS.items():
        print(json.dumps({"kind": kind, "pairs": options.pairs, **measure(change, options.pairs)}), flush=True)
    print(json.dumps(describe_machine()))


if __name__ == "__main__":
    main()
