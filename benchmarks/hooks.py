"""Microseconds of one hook: what a module more adds to a step, with and without recording, the tensors measured included.

    python -m benchmarks.hooks [--rounds 15] [--elements 16 8192]

Two chains of modules that each multiply by one are trained, a long one and a short one; a case costs what the long one's
step takes more than the short one's, for each module that it has more, beyond what that module takes by itself. So what
happens once a step does not count. Cases take turns, the least time of each counts. Nothing is reported unless every row
that a case is to record is there.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

import tracehooks
from benchmarks.machine import describe_machine
from tracehooks.capture import lane

SHORT, LONG = 50, 250
WARM_UP = 5
"""Steps before the first that counts: the first ones are looked at more closely."""
STEPS = 6


class Same(nn.Module):
    """A tensor like the one that comes in, by an op that autograd sees."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 1


@contextmanager
def bare(model: nn.Module, folder: Path) -> Iterator[None]:
    """No hooks."""
    yield


@contextmanager
def empty(model: nn.Module, folder: Path) -> Iterator[None]:
    """A hook on each module and on the gradient of its output, that does nothing: what torch itself takes."""

    def hook(module: nn.Module, args: object, output: Tensor) -> None:
        output.register_hook(_nothing)

    handles = [module.register_forward_hook(hook) for module in model]
    yield
    for handle in handles:
        handle.remove()


def recorded(*kinds: str, native: bool = True) -> Callable[[nn.Module, Path], object]:
    """A trace that records these kinds."""

    @contextmanager
    def case(model: nn.Module, folder: Path) -> Iterator[None]:
        original = lane.native
        lane.native = original if native else lambda: None
        try:
            with tracehooks.attach(model, folder / "run", record=kinds, quiet=True):
                yield
        finally:
            lane.native = original
        phases = {"outputs": "forward", "output_grads": "backward"}
        rows = tracehooks.open(folder / "run").tensors(columns=["phase"], where="step > 0").to_pylist()
        steps = WARM_UP + STEPS - 1
        for kind in kinds:
            found = sum(row["phase"] == phases[kind] for row in rows)
            if found != steps * (len(model) + 1):
                sys.exit(f"{kind}: {found} rows where {steps * (len(model) + 1)} were expected: nothing is reported")

    return case


CASES = {
    "bare": bare,
    "empty hooks": empty,
    "outputs": recorded("outputs"),
    "outputs and gradients": recorded("outputs", "output_grads"),
    "outputs and gradients, by way of Python": recorded("outputs", "output_grads", native=False),
}


def _nothing(gradient: Tensor) -> None:
    pass


def step_time(case: Callable[..., object], modules: int, elements: int) -> float:
    """Seconds of a step, the least of a few."""
    model = nn.Sequential(*[Same() for _ in range(modules)])
    x = torch.randn(elements, requires_grad=True)
    least = float("inf")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(case(model, folder))
        for step in range(WARM_UP + STEPS):
            start = time.perf_counter()
            model(x).sum().backward()
            if step >= WARM_UP:
                least = min(least, time.perf_counter() - start)
    return least


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--elements", type=int, nargs="+", default=[16, 8192])
    options = parser.parse_args()
    torch.set_num_threads(1)
    for elements in options.elements:
        least = dict.fromkeys(((name, modules) for name in CASES for modules in (SHORT, LONG)), float("inf"))
        for _ in range(options.rounds):
            for name, modules in least:
                least[name, modules] = min(least[name, modules], step_time(CASES[name], modules, elements))
        each = {name: (least[name, LONG] - least[name, SHORT]) / (LONG - SHORT) * 1e6 for name in CASES}
        for name, microseconds in each.items():
            line = {"case": name, "elements": elements, "microseconds_a_module": round(microseconds - each["bare"], 2)}
            print(json.dumps(line), flush=True)
    print(json.dumps(describe_machine()))


if __name__ == "__main__":
    main()
