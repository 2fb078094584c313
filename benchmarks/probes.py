"""What probes cost: the time of a training step with probes over that of the same model without, in one run.

    python -m benchmarks.probes [--rounds 5] [--steps 20]

A model has four probes in each block. Its step is timed beside that of its twin without probes: with no trace attached,
with one, and both compiled. A round's ratio is the one median over the other, the figure is the median over rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tracehooks
from benchmarks.machine import describe_machine

PROBES = 24
"""In the model: four in each of six blocks."""


class Block(nn.Module):
    """Attention without heads and an MLP, with a probe at every stage or with none."""

    def __init__(self, width: int, probed: bool) -> None:
        super().__init__()
        self.mix, self.up, self.down = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )
        self.probe: Callable[[Tensor, str], Tensor] = tracehooks.probe if probed else lambda x, name: x

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mix(x).chunk(3, -1)
        scores = self.probe(query @ key.mT, "scores")
        weights = self.probe(scores.softmax(-1), "weights")
        x = self.probe(x + weights @ value, "mixed")
        return x + self.down(self.probe(self.up(x), "hidden").relu())


def model(probed: bool) -> nn.Sequential:
    """Six blocks of width 256."""
    torch.manual_seed(0)
    return nn.Sequential(*[Block(256, probed) for _ in range(6)])


class Pair:
    """The model without probes and with them, compiled or not."""

    def __init__(self, compiled: bool) -> None:
        self.nets = model(False), model(True)
        self.calls = [torch.compile(net, fullgraph=True) if compiled else net for net in self.nets]
        self.optimizers = [torch.optim.SGD(net.parameters(), 1e-3) for net in self.nets]
        self.x = torch.randn(8, 64, 256)

    def step(self, which: int) -> tuple[float, Tensor]:
        """Seconds of a forward, a backward and an optimizer's step, and what the model returned."""
        start = time.perf_counter()
        self.optimizers[which].zero_grad()
        output = self.calls[which](self.x)
        output.square().mean().backward()
        self.optimizers[which].step()
        return time.perf_counter() - start, output

    def check(self, folder: Path | None, steps: int) -> None:
        """Both return the same bit for bit; a trace has a row for each probe and its gradient in each step."""
        outputs = [self.step(which)[1] for which in (0, 1)]
        assert torch.equal(*outputs), "a probe changes what the model returns"
        if folder is not None:
            run = tracehooks.open(folder)
            rows = run.tensors(["step", "phase", "slot"]).to_pylist()
            seen = Counter(row["phase"] for row in rows if row["slot"] in ("scores", "weights", "mixed", "hidden"))
            assert seen == {"probe": PROBES * steps, "backward": PROBES * steps}, seen


def ratio(compiled: bool, traced: bool, rounds: int, steps: int) -> float:
    """Step with probes over step without, the two in turn, median over rounds; a trace is attached to both models."""
    torch.compiler.reset()
    pair, found = Pair(compiled), []
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"quiet": True, "record": ("output_grads",), "modules": ""}
        paths = [Path(folder) / name for name in ("bare", "probed")]
        traces = [tracehooks.attach(net, path, **options) for net, path in zip(pair.nets, paths, strict=True) if traced]
        for _ in range(3):  # compile, and settle
            pair.step(0), pair.step(1)
        for _ in range(rounds):
            times: tuple[list[float], list[float]] = [], []
            for i in range(steps):
                for which in (i % 2, 1 - i % 2):  # who comes second finds the caches warm
                    times[which].append(pair.step(which)[0])
            found.append(statistics.median(times[1]) / statistics.median(times[0]))
        for trace in traces:
            trace.close()
        pair.check(paths[1] if traced else None, 3 + rounds * steps)
    return statistics.median(found)


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = {
        f"{'compiled' if compiled else 'eager'}, {'a trace' if traced else 'no trace'}": round(
            ratio(compiled, traced, args.rounds, args.steps), 3
        )
        for compiled in (False, True)
        for traced in (False, True)
    }
    print(
        json.dumps({"benchmark": "probes", "ratio": found, "probes": PROBES, "machine": describe_machine()}, indent=1)
    )


if __name__ == "__main__":
    main()
