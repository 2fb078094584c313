"""The first non-finite op: phase, step, module, op, line and cause of each failure, and silence where all is well."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from torch import nn

import tracehooks
from tests.locate.failures import FAILURES, Failure
from tracehooks.core.errors import SnapshotError
from tracehooks.locate import snapshot
from tracehooks.surface.cli import main


def recorded(folder: Path, model, step, steps=3, **options):
    with tracehooks.attach(model, folder / "run", quiet=True, **options):
        for i in range(steps):
            step(i)
    run = tracehooks.open(folder / "run")
    kinds = run.events().column("kind").to_pylist()
    assert "recorder_error" not in kinds, run.events().to_pandas().to_string()
    return run


@pytest.mark.filterwarnings("ignore:std\\(\\):UserWarning", "ignore:.*degrees of freedom:UserWarning")
@pytest.mark.parametrize("locate", ["replay", "ops"])
@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.name)
def test_every_kind_of_failure(tmp_path, failure: Failure, locate: str) -> None:
    """Each is reported in its own step with phase, module, op, value, cause and the guilty line, whether the step is run
    again or was watched."""
    model, _, step = failure.build()
    first = recorded(tmp_path, model, step, steps=failure.step + 1, locate=locate).first_nonfinite
    assert first is not None
    assert (first.step, first.phase, first.module) == (failure.step, failure.phase, failure.module), first.message
    if failure.op is not None:
        assert first.op == failure.op, first.message
    assert first.value == failure.value, first.message
    assert first.cause in failure.causes, first.message
    if failure.code:
        assert failure.code in (first.code or ""), first.message
        assert first.file == str(Path(__file__).with_name("failures.py"))
    assert f"step {failure.step}" in first.message
    assert "cause" in first.message


class Masked(nn.Module):
    """Attention with everything that is full of infinities and healthy."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.drop = nn.Linear(4, 4), nn.Dropout(0.2)
        self.register_buffer("causal", torch.full((5, 5), -torch.inf).triu(1))
        self.register_buffer("low", torch.tensor(torch.inf))
        self.register_buffer("high", torch.tensor(-torch.inf))

    def forward(self, x, keep):
        scratch = torch.empty(1000).resize_(2000)
        del scratch
        self.low, self.high = torch.minimum(self.low, x.min()), torch.maximum(self.high, x.max())
        scores = self.mix(x) @ x.transpose(1, 2) + self.causal
        scores = scores.masked_fill(~keep[:, None, :], -torch.inf)
        state = torch.log(keep.float())[:, None, :]
        return self.drop((scores + state).softmax(-1) @ x), scores


def test_infinities_that_were_meant_are_no_finding(tmp_path) -> None:
    """Masks, log-space states, min/max buffers that start infinite, masked second outputs and uninitialised memory."""
    model = Masked()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    keep = torch.ones(2, 5, dtype=torch.bool)
    keep[1, 3:] = False

    def step(i):
        optimizer.zero_grad()
        model(torch.randn(2, 5, 4), keep)[0].square().mean().backward()
        optimizer.step()

    assert recorded(tmp_path, model, step).first_nonfinite is None


def test_a_nan_that_nothing_uses_is_no_finding(tmp_path) -> None:
    """NaN in an input that the model replaces harms nobody; the site is asked about once, not at every step."""

    class Fills(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            return self.layer(torch.nan_to_num(x))

    model = Fills()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    calls = []
    model.layer.register_forward_hook(lambda *a: calls.append(1))

    def step(i):
        model(torch.tensor([[torch.nan, 1.0, 2.0]])).sum().backward()
        optimizer.step()

    assert recorded(tmp_path, model, step, steps=5).first_nonfinite is None
    assert len(calls) == 6  # five steps and one replay


def test_a_nan_in_an_output_that_nothing_uses_is_no_finding(tmp_path) -> None:
    """A second output may hold NaN as long as loss and gradients are finite; in evaluation, where nothing says so, it may
    not."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            y = self.layer(x)
            return y, (y.detach() * 0) / 0

    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(i):
        model(torch.ones(2, 3))[0].sum().backward()
        optimizer.step()
        if i == 2:
            with torch.no_grad():
                model(torch.ones(2, 3))

    first = recorded(tmp_path, model, step, steps=4).first_nonfinite
    assert (first.step, first.phase, first.op) == (2, "eval", "aten.div.Tensor")


def test_overflow_is_reported_where_it_overflows(tmp_path) -> None:
    """An infinity that a later op turns to NaN is reported at the overflow, with the later op as its consequence."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.grow, self.norm = nn.Linear(3, 3), nn.LayerNorm(3)

        def forward(self, x):
            return self.norm(self.grow(x).square().exp())

    model = Late()
    nn.init.constant_(model.grow.weight, 5.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)

    def step(i):
        model(torch.full((2, 3), 1.0 if i == 1 else 0.1)).sum().backward()
        optimizer.step()

    first = recorded(tmp_path, model, step).first_nonfinite
    assert (first.op, first.module, first.value, first.cause) == ("aten.exp.default", "", "inf", "exp_overflow")
    assert "it turns to NaN in aten.native_layer_norm.default, module norm" in first.message


def test_samples_and_operands_are_named(tmp_path) -> None:
    """The message says which samples are hit and what the operands were."""
    model = nn.Sequential(nn.Identity(), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(i):
        x = torch.ones(6, 3)
        if i == 1:
            x[[1, 4]] = 3e38
        (model(x) * 1e-30).square().sum().backward()
        optimizer.step()

    nn.init.constant_(model[1].weight, 1.0)
    first = recorded(tmp_path, model, step).first_nonfinite
    assert (first.module, first.cause) == ("1", "overflow")
    assert first.output["samples"] == [1, 4]
    assert "samples 1, 4" in first.message
    assert any(abs(x["absmax"] - 3e38) < 1e32 for x in first.inputs)


class Random(nn.Module):
    """Everything that makes a second run differ: dropout, batch norm, NumPy's and Python's randomness, a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.calls = 0

    def forward(self, x, blow=False):
        self.calls += 1
        x = self.drop(self.norm(self.conv(x))) * float(np.random.rand()) * random.random() * self.calls
        return (x * (1e30 if blow else 1)).square().square() if blow else x


@pytest.mark.parametrize("mixed", [False, True])
def test_the_replay_leaves_no_trace(tmp_path, mixed) -> None:
    """Training with a located failure and without a trace end bit for bit alike: weights, buffers, counters, randomness."""
    ends = []
    for attached in (True, False):
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        model = Random()
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)

        def step(i, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                out = model(torch.randn(4, 3, 5), blow=i == 1)
            out.float().sum().backward()
            if i != 1:
                optimizer.step()

        if attached:
            first = recorded(tmp_path, model, step, steps=4).first_nonfinite
            assert (first.step, first.phase) == (1, "forward"), first.message
        else:
            for i in range(4):
                step(i)
        state = [*model.state_dict().values(), torch.get_rng_state()]
        ends.append([bytes(t.numpy().tobytes()) for t in state] + [model.calls, np.random.rand(), random.random()])
    assert ends[0] == ends[1]


def test_nothing_of_the_loss_watch_stays(tmp_path) -> None:
    """An exception in the loss, a mode of the user's around everything, and closing in the middle leave no mode behind."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
    from torch.utils.flop_counter import FlopCounterMode

    model = nn.Linear(3, 2)
    trace = tracehooks.attach(model, tmp_path / "run", quiet=True)
    out = model(torch.ones(2, 3))
    with FlopCounterMode(display=False):  # entered above ours, left while ours is still there
        out = out @ torch.ones(2, 2)
    with pytest.raises(ZeroDivisionError):
        _ = out.sum() / (1 // 0)
    with FlopCounterMode(display=False):
        out.sum().backward()
    assert _get_current_dispatch_mode_stack() == []
    model(torch.ones(2, 3))
    trace.close()
    assert _get_current_dispatch_mode_stack() == []


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_loss_stays_compiled(tmp_path) -> None:
    """Where torch.compile is used the loss is not watched op by op: compiled code goes on running compiled."""
    torch._dynamo.reset()
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    compiled = torch.compile(lambda y: (y * y).mean(), backend=counter, fullgraph=True)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(i):
        compiled(model(torch.ones(2, 3))).backward()
        optimizer.step()

    recorded(tmp_path, model, step)
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_the_instrument_that_stops_says_where(tmp_path) -> None:
    """on_nonfinite="raise" raises before the parameters are touched, with the op and the line in its message."""
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = model[0].weight.detach().clone()
    with tracehooks.attach(model, tmp_path / "run", quiet=True, on_nonfinite="raise"):
        (model(torch.ones(2, 3)).sum() * 0).log().backward()
        with pytest.raises(
            tracehooks.NonFiniteError, match=r"(?s)loss, outside the model.*aten\.log\.default.*test_locator\.py"
        ):
            optimizer.step()
    assert torch.equal(model[0].weight, before)


def test_accumulated_passes_are_told_apart(tmp_path) -> None:
    """With several forward passes in a step the one that is damaged is found."""
    model = nn.Sequential(nn.Identity(), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(i):
        optimizer.zero_grad()
        for k in range(3):
            x = torch.ones(2, 3)
            if (i, k) == (1, 1):
                x[0] = 0
            model(x.reciprocal()).nan_to_num(posinf=0, neginf=0, nan=0).sum().backward()
        optimizer.step()

    first = recorded(tmp_path, model, step).first_nonfinite
    assert (first.step, first.phase, first.cause) == (1, "data", "nonfinite_input")
    assert first.output["samples"] == [0]


def test_a_snapshot_runs_again(tmp_path) -> None:
    """snapshot=True keeps the guilty op's operands and the batch; `first --replay` runs the op from them."""

    class Logs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            return self.layer(x.log())

    model = Logs()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train(i):
        model(torch.tensor([[1.0, 2.0, 3.0 if i == 0 else 0.0]])).sum().backward()
        optimizer.step()

    recorded(tmp_path, model, train, steps=2, snapshot=True)
    folder = tmp_path / "run/snapshots/step-00000001"
    with safe_open(folder / "batch.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor("0"), torch.tensor([[1.0, 2.0, 0.0]]))
    command = ["first", str(tmp_path / "run"), "--replay", "--json"]
    done = subprocess.run([sys.executable, "-m", "tracehooks", *command], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    again = json.loads(done.stdout)["replay"]
    assert again["op"] == "aten.log.default"
    assert again["inputs"][0]["zeros"] == 1
    assert again["outputs"][0]["neginf"] == 1
    (folder / "op.safetensors").unlink()
    done = CliRunner().invoke(main, command, prog_name="tracehooks")
    assert done.exit_code == 2
    assert "batch.safetensors" in done.stderr
    assert "Traceback" not in done.stderr


def test_why_there_is_no_op_to_run_again(tmp_path) -> None:
    """Nothing was kept; or no op made the value, and the batch that held it was kept."""
    with pytest.raises(SnapshotError, match=r"nothing is kept there; record with snapshot=True"):
        snapshot.rerun(tmp_path / snapshot.OP_FILE)
    (tmp_path / snapshot.BATCH_FILE).write_bytes(snapshot.batch_bytes((torch.ones(2),), {}))
    with pytest.raises(SnapshotError, match=r"no op made the value, .* kept in batch.safetensors"):
        snapshot.rerun(tmp_path / snapshot.OP_FILE)
