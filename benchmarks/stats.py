"""What measuring a tensor costs, as multiples of ``tensor.sum()`` and against the five reductions that it replaces.

Run ``python -m benchmarks.stats [--rounds 30] [--threads 1 2]``. Each case is a line of JSON: the least time over rounds
in which all cases take turns, so that a busy machine disturbs them alike. Then each target and whether it holds. The last
line names the machine and its load. Nothing is reported unless the kernel's row agrees with the reference first.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.machine import describe_machine
from tracehooks import stats
from tracehooks.stats import Spec, reference

SIZES = (1000, 1 << 20, 1 << 24)
SMALL, MEDIUM, LARGE = SIZES
PLAIN, SKETCHED, ALL, UNHASHED = Spec(), Spec(sketch=True), Spec(sketch=True, histogram=True), Spec(hash=False)


def correct() -> bool:
    """Whether exact columns equal the reference's and moments agree, on tensors with and without holes."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64):
        x = (torch.randn(100_003, generator=torch.Generator().manual_seed(0)) * 100).to(dtype)
        if dtype.is_floating_point:
            x[::97], x[1::89] = float("nan"), float("inf")
        found, wanted = stats.summarize(x, ALL), reference.summarize(x, ALL)
        exact = torch.ones(ALL.width, dtype=torch.bool)
        exact[8:11], exact[12:28] = False, False  # mean, std, rms; sketch
        floats = [row.view(torch.float64)[~exact] for row in (found, wanted)]
        if not torch.equal(found[exact], wanted[exact]) or not torch.allclose(*floats, rtol=1e-10, atol=1e-7):
            return False
    return True


def five_reductions(x: Tensor) -> tuple[Tensor, ...]:
    """What one writes without this package."""
    return x.mean(), x.std(), x.min(), x.max(), x.isfinite().all()


def cases(x: Tensor) -> dict[str, Callable[[], object]]:
    """What takes turns: the yardstick first."""
    half, wide, far = x.to(torch.bfloat16), x.to(torch.float64), x + 1000
    holes = x.clone()
    holes[::5] = float("inf")
    clipped = x.relu()
    row = torch.empty(PLAIN.width, dtype=torch.int64)
    return {
        "sum": x.sum,
        "without hash": lambda: stats.summarize(x, UNHASHED),
        "summarize": lambda: stats.summarize(x, PLAIN),
        "summarize into a row": lambda: stats.summarize(x, PLAIN, row),
        "with sketch": lambda: stats.summarize(x, SKETCHED),
        "with sketch and histogram": lambda: stats.summarize(x, ALL),
        "bfloat16": lambda: stats.summarize(half, PLAIN),
        "float64": lambda: stats.summarize(wide, PLAIN),
        "mean far above std": lambda: stats.summarize(far, PLAIN),
        "sum of float64": wide.sum,
        "half of it zeros": lambda: stats.summarize(clipped, PLAIN),
        "one fifth infinite": lambda: stats.summarize(holes, PLAIN),
        "five reductions": lambda: five_reductions(x),
    }


def least_times(todo: dict[str, Callable[[], object]], rounds: int, repeats: int) -> dict[str, float]:
    """Seconds of each case: the least over rounds of the mean of some repeats, right after one that warms the caches."""
    least = dict.fromkeys(todo, float("inf"))
    for _ in range(rounds):
        for name, case in todo.items():
            case()
            start = time.perf_counter()
            for _ in range(repeats):
                case()
            least[name] = min(least[name], (time.perf_counter() - start) / repeats)
    return least


def targets(least: dict[str, float], size: int) -> list[dict[str, object]]:
    """What a size has to reach, as multiples of another case's time or in microseconds.

    Whether it holds is null while more processes run than there are cores: the yardstick is disturbed as well, and a
    ratio to it says nothing, in either direction.
    """
    busy = os.getloadavg()[0] > (os.cpu_count() or 1)
    times_sum = {LARGE: {"summarize": 1.5, "with sketch": 2.2}, MEDIUM: {"summarize": 1.8}}.get(size, {})
    rows = [(f"{case}, times sum", limit, least[case] / least["sum"]) for case, limit in times_sum.items()]
    rows.append(("summarize, times five reductions", 1 / 20, least["summarize"] / least["five reductions"]))
    if size == SMALL:
        rows = [("summarize into a row, microseconds", 2.0, least["summarize into a row"] * 1e6)]
    return [
        {"target": name, "limit": limit, "measured": round(found, 3), "holds": None if busy else found <= limit}
        for name, limit, found in rows
    ]


def main() -> None:
    """Check, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, torch.get_num_threads()])
    options = parser.parse_args()
    if not correct():
        sys.exit("the kernel disagrees with the reference: nothing is measured")
    for threads in dict.fromkeys(options.threads):
        torch.set_num_threads(threads)
        for size in SIZES:
            x = torch.randn(size, generator=torch.Generator().manual_seed(1))
            least = least_times(cases(x), options.rounds, 200 if size < 10_000 else 1)
            for name, seconds in least.items():
                line = {"case": name, "elements": size, "threads": threads, "microseconds": round(seconds * 1e6, 2)}
                print(json.dumps(line | {"times_sum": round(seconds / least["sum"], 2)}), flush=True)
            for line in targets(least, size):
                print(json.dumps(line | {"elements": size, "threads": threads}), flush=True)
    load = {"kernel": stats.kernel_name("cpu"), "load": round(os.getloadavg()[0], 1)}
    print(json.dumps(describe_machine() | load))


if __name__ == "__main__":
    main()
