"""What proofs of flags are made with: runs with some flags, and the proofs by flag."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rwkv_clip import train
from rwkv_clip.data.loading import load_steps
from rwkv_clip.training.distributed import Place
from rwkv_clip.training.flags import parse_args
from rwkv_clip.training.run import Run, build, computing

CPU = Place(torch.device("cpu"))


class Bench:
    """Runs with some flags: built, trained for two steps, or whole."""

    def __init__(self, folder: Path, small: list[str], pictures: list[str], monkeypatch: Any, capsys: Any) -> None:
        self.folder, self.small, self.pictures = folder, small, pictures
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def build(self, *flags: str) -> Run:
        return build(parse_args([*self.small, "--output", str(self.folder / "out"), *flags]), CPU)

    def weights(self, *flags: str, steps: int = 2) -> torch.Tensor:
        """All weights after two steps, in one vector."""
        run = self.build(*flags)
        with computing(run.args):
            run.model.train()
            batches = load_steps(run.pairs, run.plan, 0)
            for _ in range(steps):
                train.train_step(run, next(batches))
        return torch.cat([p.detach().flatten() for p in run.model.parameters()])

    def changes(self, *flags: str, base: tuple[str, ...] = ()) -> bool:
        """Whether two steps end elsewhere with these flags than without."""
        with_flags, without = self.weights(*base, *flags), self.weights(*base)
        return with_flags.shape != without.shape or not torch.equal(with_flags, without)

    def main(self, *flags: str, output: str = "run") -> str:
        """Train to the end; returns what was printed."""
        assert train.main([*self.small, "--output", str(self.folder / output), *flags]) == 0
        return str(self.capsys.readouterr().out)


class Proofs(dict[str, Callable[[Bench], None]]):
    """Proofs by flag."""

    def of(self, flag: str) -> Callable[[Callable[[Bench], None]], Callable[[Bench], None]]:
        """The function below it proves that this flag does something."""
        return functools.partial(self.setdefault, flag)
