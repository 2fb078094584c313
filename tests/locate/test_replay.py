"""Running a step again touches nothing of the run, is not believed when it ends otherwise, and never communicates."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import torch
from torch import nn

import tracehooks


class Stateful(nn.Module):
    """Keeps state of some kind, uses it, and takes the logarithm of a negative number at the third call."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind, self.calls = nn.Linear(4, 4), kind, 0
        self.list, self.deque, self.dict = [], collections.deque(maxlen=2), {}
        self.tuple, self.count = (torch.zeros(4),), torch.zeros(4)
        self.generator, self.numpy = torch.Generator().manual_seed(3), np.random.default_rng(3)
        self.code = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        y = self.layer(x)
        y = y + self.state(y.detach().mean(0))
        return torch.log(y * 0 - 1) if self.calls == 3 else y

    def state(self, now):
        if self.kind in ("list", "deque"):
            held = getattr(self, self.kind)
            held.append(now)
            return torch.stack(list(held)).sum(0)
        if self.kind == "dict":
            self.dict[len(self.dict)] = now
            return sum(self.dict.values())
        if self.kind == "tuple":
            self.tuple = (self.tuple[0] * 0.5 + now,)
            return self.tuple[0]
        if self.kind == "tensor":
            self.count += 1
            return self.count
        if self.kind == "generator":
            return torch.randn(4, generator=self.generator)
        if self.kind == "numpy":
            return torch.from_numpy(self.numpy.normal(size=4)).float()
        if self.kind == "parameter":
            with torch.no_grad():
                self.code.mul_(0.9).add_(now)
            return self.code
        self.steps = self.steps + 1
        return self.steps


KINDS = ("list", "deque", "dict", "tuple", "tensor", "generator", "numpy", "parameter", "buffer")


def trained(folder, kind, attached):
    torch.manual_seed(0)
    model = Stateful(kind)
    optimizer = torch.optim.Adam(model.layer.parameters(), 0.01)
    trace = tracehooks.attach(model, folder / kind, quiet=True) if attached else None
    losses = []
    for _ in range(6):
        loss = model(torch.randn(3, 4)).square().mean()
        losses.append(loss.item())
        loss.backward()
        if np.isfinite(losses[-1]):
            optimizer.step()
        optimizer.zero_grad()
    if trace is not None:
        trace.close()
        first = trace.first_nonfinite
        assert (first.step, first.phase) == (2, "forward"), first.message
    return repr(losses) + repr([p.tolist() for p in model.parameters()]) + repr(model.steps)


@pytest.mark.parametrize("kind", KINDS)
def test_state_of_every_kind_is_left_alone(tmp_path, kind) -> None:
    """Lists, dicts, tuples, tensors changed in place, generators, parameters changed in forward, buffers replaced."""
    assert trained(tmp_path, kind, True) == trained(tmp_path, kind, False)


def test_an_argument_that_forward_changes_is_left_alone(tmp_path) -> None:
    """A cache that the caller hands in grows by one entry a call, also when a call was looked at again."""

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x, cache):
            cache.append(self.layer(x))
            x.add_(1)
            return torch.stack(cache).sum(0) * (torch.nan if len(cache) == 2 else 1)

    model, cache, x = Cached(), [], torch.ones(2, 4)
    with tracehooks.attach(model, tmp_path / "run", quiet=True), torch.no_grad():
        for _ in range(4):
            model(x, cache)
    assert len(cache) == 4
    assert torch.equal(x, torch.full((2, 4), 5.0))


def test_an_optimizer_in_backward_does_not_step_again(tmp_path) -> None:
    """Hooks on parameters, which may update them, do not fire when backward runs again."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizers = {p: torch.optim.SGD([p], 0.01) for p in model.parameters()}
    steps = []

    def step(parameter):
        steps.append(1)
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    with tracehooks.attach(model, tmp_path / "run", quiet=True) as trace:
        for i in range(3):
            (model(torch.ones(2, 4)) * (0 if i == 1 else 1)).abs().sqrt().sum().backward()
    assert trace.first_nonfinite is not None
    assert len(steps) == 12


def test_a_replay_never_communicates(tmp_path) -> None:
    """A collective in forward is not called again: other processes would not answer."""
    import torch.distributed as dist

    class Gathers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.sums = nn.Linear(4, 4), 0

        def forward(self, x):
            y = self.layer(x)
            shared = y.detach().sum().reshape(1)
            dist.all_reduce(shared)
            return y / (shared * 0)

    calls = []
    real = dist.all_reduce
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        dist.all_reduce = lambda *a, **k: (calls.append(1), real(*a, **k))
        model = Gathers()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with tracehooks.attach(model, tmp_path / "run", quiet=True) as trace:
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    finally:
        dist.all_reduce = real
        dist.destroy_process_group()
    first = trace.first_nonfinite
    assert (first.step, first.phase, first.module, first.op) == (0, "forward", "", None)
    assert "could not be run again (WouldCommunicateError: c10d.allreduce_" in first.message


def test_a_replay_that_ends_otherwise_is_not_believed(tmp_path) -> None:
    """Where the step does not end the same way again, what was seen is said, and nothing else is blamed for it."""
    outside = []

    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            outside.append(1)
            return self.layer(x) / (0.0 if len(outside) == 2 else 1.0)

    model = nn.Sequential(Once(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tracehooks.attach(model, tmp_path / "run", quiet=True) as trace:
        for _ in range(2):
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
    first = trace.first_nonfinite
    assert (first.step, first.phase, first.module, first.op) == (1, "forward", "0", None)
    assert "run again, the step did not end the same way" in first.message


def test_the_line_of_a_model_of_torch_modules_is_that_of_its_call(tmp_path) -> None:
    """Where no line of the user's lies inside the model, the line that called it is named, not the optimizer's."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tracehooks.attach(model, tmp_path / "run", quiet=True) as trace:
        output = model(torch.randn(3, 4) * 1e38)
        output.mean().backward()
        optimizer.step()
    assert trace.first_nonfinite.code == "output = model(torch.randn(3, 4) * 1e38)"
