"""Specification of the lane's place in a run: a trace tells the same with the native lane as without, and neither shows."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tracehooks
from tests.models import EVERY, Subject, assert_same, mlp, photograph, plain_step, squares
from tracehooks.capture import lane
from tracehooks.capture.places import Site
from tracehooks.capture.session import Session
from tracehooks.core.config import RECORDABLE

from .laning import needs_native

pytestmark = [
    needs_native,
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]

STEPS = 6
"""The first ones are looked at more closely; then hooks take the lane."""
OF_THE_MACHINE = "time/", "samples_per_second", "overhead", "memory/"
"""Scalars that no two runs share."""


class Varying(nn.Module):
    """Batches of other sizes, modules called once or twice, an output that is at times a list, in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.act, self.turn = nn.Linear(8, 8), nn.ReLU(inplace=True), 0

    def forward(self, x: Tensor) -> Any:
        self.turn += 1
        x = self.act(self.inner(x[: 1 + self.turn % 4]))
        if self.turn % 3 == 0:
            x = self.act(self.inner(x))
        return [x, {"again": x}] if self.turn % 2 else x


class Sometimes(nn.Module):
    """Gradients and weights that are not finite in one step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last, self.turn = nn.Linear(8, 8), nn.Linear(8, 2), 0

    def forward(self, x: Tensor) -> Tensor:
        self.turn += 1
        return self.last(self.inner(x) * (math.inf if self.turn == 7 else 1))


def exchanging_step(subject: Subject, optimizers: list[torch.optim.Optimizer], see: Callable[..., None]) -> None:
    """The parameters' memory is exchanged in the middle of training, and a hook of the user's works in place."""
    handle = subject.model[0].register_forward_hook(lambda module, args, output: output.mul_(1.5))
    plain_step(subject, optimizers, see)
    handle.remove()
    subject.model[0].weight.data = subject.model[0].weight.data.clone()


def batch() -> tuple[Tensor]:
    return (torch.randn(4, 8),)


OWN_KINDS: dict[str, Callable[[], Subject]] = {
    "varying": lambda: Subject(Varying(), batch, squares),
    "not_finite": lambda: Subject(Sometimes(), batch, squares),
    "exchanged": lambda: Subject(mlp(), batch, squares, step=exchanging_step),
}
KINDS = EVERY | OWN_KINDS
CHOSEN = (
    "mlp", "cnn", "inplace_residual", "views", "tied_and_repeated", "structures", "custom_function",
    "checkpoint_reentrant", "checkpoint_non_reentrant", "parametrized", "sparse", "complex", "bfloat16", "float64",
    "autocast", "scaler", "scaler_clipped", "scaler_skips", "lbfgs", "two_optimizers", "frozen_backbone", "accumulation",
    "functional_call", "gradient_penalty", "backward_twice", "by_hand", "user_hooks", "methods_only", "nested_tensors",
    "leaf_output", "large_and_empty", "probes", "probes_checkpointed", "gpt2", "resnet", *OWN_KINDS,
)  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "everything": {"record": RECORDABLE, "sketch": True, "histogram": True},
    "outputs": {"record": ("outputs",)},
    "gradients_of_outputs": {"record": ("output_grads", "updates"), "every": 2},
    "every_other": {"every": 2},
    "rarely": {"every": 1000},
}


def both(
    build: Callable[[], Subject], path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> list[dict[str, Any]]:
    """What a bare run, one with the native lane and one without show; the traces of the last two."""
    traces, shown = [], [photograph(build, steps=STEPS)]
    for name in ("native", "plain"):

        @contextlib.contextmanager
        def attached(model: nn.Module, name: str = name) -> Iterator[None]:
            with tracehooks.attach(model, path / name, quiet=True, **options):
                yield

        with monkeypatch.context() as patched:
            if name == "plain":
                patched.setattr(lane, "native", lambda: None)
            shown.append(photograph(build, attached, steps=STEPS))
        traces.append(tables_of(path / name))
    assert_same(shown[0], shown[1])
    assert_same(shown[0], shown[2])
    return traces


def tables_of(path: Path) -> dict[str, Any]:
    """Every row of every table in order of observation, without times; numbers in a step by their order alone."""
    run = tracehooks.open(path)
    assert not run.problems
    found = {}
    for table in ("tensors", "scalars", "masks", "samples", "events"):
        rows = sorted(getattr(run, table)().to_pylist(), key=lambda row: (row["step"], row.get("seq", 0)))
        for row in rows:
            row.pop("time_ns", None), row.pop("seq", None)
        found[table] = [row for row in rows if not (row.get("name") or "").startswith(OF_THE_MACHINE)]
    return found


def assert_same_rows(native: dict[str, Any], plain: dict[str, Any]) -> None:
    """Equal in every value; the norm of gradients that were only watched is a sum in another order."""
    for table, rows in native.items():
        for one, other in zip(rows, plain[table], strict=True):
            if one.get("name") == "grad_norm":
                assert one.pop("value") == pytest.approx(other.pop("value"), rel=1e-12, nan_ok=True)
            assert repr(one) == repr(other)


@pytest.mark.parametrize("kind", CHOSEN)
def test_both_tell_the_same(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every kind of model and of training, with the default options."""
    native, plain = both(KINDS[kind], tmp_path, monkeypatch)
    assert native["tensors"]
    assert_same_rows(native, plain)


@pytest.mark.parametrize("every", [1, 1000])
def test_what_is_usual_takes_the_native_lane(every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first steps no output of a plain module comes to Python but the root's in steps that are only watched, and
    no gradient but those that do not lie in memory in order."""
    came: list[tuple[int, str]] = []
    for name in ("module_returned", "gradient_arrived"):
        real = getattr(Session, name)

        def counted(self: Session, what: Any, x: Any, real: Any = real) -> None:
            came.append((self.recorder.step, what.place.module if isinstance(what, Site) else what[0].path))
            real(self, what, x)

        monkeypatch.setattr(Session, name, counted)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    with tracehooks.attach(model, tmp_path / "run", quiet=True, every=every):
        for _ in range(STEPS):
            model(torch.randn(4, 8)).square().sum().backward()
    for step in range(STEPS):
        assert ((step, "1") in came) is (step < 3)
        assert ((step, "") in came) is (step < 3 or every > 1)


@pytest.mark.slow
@pytest.mark.parametrize("options", [name for name in OPTIONS if name != "defaults"])
@pytest.mark.parametrize("kind", KINDS)
def test_both_tell_the_same_whatever_is_recorded(
    kind: str, options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every kind that there is, with all other options."""
    assert_same_rows(*both(KINDS[kind], tmp_path, monkeypatch, **OPTIONS[options]))


@pytest.mark.parametrize("options", OPTIONS)
def test_the_options_of_a_small_model(options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that holds most of what is usual, and some of what is not."""
    for kind in ("varying", "accumulation", "not_finite"):
        assert_same_rows(*both(KINDS[kind], tmp_path / kind, monkeypatch, **OPTIONS[options]))
