"""What is recorded where the optimizer steps: gradients as used, parameters, updates, scaler, scalars."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import tracehooks


def test_gradients_are_those_the_optimizer_used(record) -> None:
    """Clipping before the step shows in the recorded gradients, and their norm is the scalar grad_norm."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def work(trace):
        model(torch.ones(2, 3) * 100).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

    recorded = record(model, work)
    rows = recorded.rows(phase="gradient")
    norm = math.sqrt((rows["rms"] ** 2 * rows["count"]).sum())
    assert norm == pytest.approx(0.5, rel=1e-5)
    assert recorded.values("grad_norm") == [(0, pytest.approx(norm))]
    assert len(recorded.rows(phase="backward", module="")) == 1


@pytest.mark.parametrize("size", [(16, 16), (512, 300)])
def test_updates_are_what_the_step_did(record, size) -> None:
    """The row of an update has the change's norm: exactly for small parameters, within 5 % from a sample of large ones."""
    model = nn.Linear(*size)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    truth = []

    def work(trace):
        for _ in range(3):
            model(torch.randn(4, size[0])).square().sum().backward()
            before = model.weight.detach().double().clone()
            optimizer.step()
            truth.append((model.weight.detach().double() - before).square().mean().sqrt().item())

    recorded = record(model, work)
    rows = recorded.rows(phase="update", slot="weight")
    exact = size[0] * size[1] <= 65_536
    assert list(rows["rms"]) == pytest.approx(truth, rel=1e-12 if exact else 0.05)
    assert set(rows["count"]) == {size[0] * size[1] if exact else 4096}
    assert [list(shape) for shape in rows["shape"]] == [[size[1], size[0]]] * 3


def test_an_update_lost_to_rounding_is_all_zeros(record) -> None:
    """A bf16 parameter that a tiny step cannot change has an update row of zeros only."""
    model = nn.Linear(4, 4, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), 1e-8)

    def work(trace):
        model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()

    (row,) = record(model, work).rows(phase="update", slot="weight").to_dict("records")
    assert (row["zeros"], row["count"], row["dtype"]) == (16, 16, "bfloat16")


def test_frozen_unused_and_tied_parameters(record) -> None:
    """Frozen parameters are recorded without gradient, unused ones too; tied ones once, their second name in run.json."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.unused = nn.Embedding(5, 3), nn.Linear(3, 3)
            self.frozen, self.head = nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(self.frozen(self.embed(ids)))

    model = Model()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.1)

    def work(trace):
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()

    recorded = record(model, work)
    parameters = {f"{m}.{s}" for m, s, _ in recorded.sites("parameter")}
    assert parameters == {
        "embed.weight", "unused.weight", "unused.bias", "frozen.weight", "frozen.bias",
    }  # fmt: skip
    assert recorded.sites("gradient") == [("embed", "weight", 0)]
    (tied,) = [p for p in recorded.run.info["model"]["parameters"] if p["name"] == "embed.weight"]
    assert tied["aliases"] == ["head.weight"]


def test_sparse_gradients(record) -> None:
    """A sparse gradient is measured by its stored values, duplicates summed; its shape is the parameter's."""
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters(), 0.1)

    def work(trace):
        model(torch.tensor([1, 1, 3])).sum().backward()
        optimizer.step()

    (row,) = record(model, work).rows(phase="gradient").to_dict("records")
    assert (row["count"], row["absmax"], list(row["shape"])) == (8, 2.0, [10, 4])


def test_buffers_and_optimizer_state(record, train) -> None:
    """Buffers are recorded with the parameters; the optimizer's state on request, by parameter and name."""
    model = nn.BatchNorm1d(3)
    optimizer = torch.optim.Adam(model.parameters())

    def work(trace):
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()

    recorded = record(model, work, record=["parameters", "optimizer_state"])
    assert [slot for _, slot, _ in recorded.sites("buffer")] == ["running_mean", "running_var", "num_batches_tracked"]
    assert [slot for _, slot, _ in recorded.sites("optimizer")] == [
        "weight.exp_avg", "weight.exp_avg_sq", "bias.exp_avg", "bias.exp_avg_sq",
    ]  # fmt: skip
    assert not len(recorded.rows(phase="forward"))


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler(record, fused) -> None:
    """With a GradScaler loss and gradients are unscaled, the scale is a scalar, a skipped step counts and is an event."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    truth = []

    def work(trace):
        for i in range(4):
            loss = model(torch.ones(2, 3)).sum() * (1e38 if i == 1 else 1)  # finite, until it is scaled
            scaler.scale(loss).backward()
            truth.append(loss.item())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    recorded = record(model, work)
    assert recorded.values("scale") == [(0, 1024.0), (1, 1024.0), (2, 512.0), (3, 512.0)]
    losses = [value for _, value in recorded.values("loss")]
    assert losses == pytest.approx(truth)
    gradient = recorded.rows(phase="gradient", slot="bias")
    assert list(gradient["step"]) == [0, 1, 2, 3]
    assert gradient["absmax"].iloc[0] == 2.0
    assert gradient["posinf"].iloc[1] + gradient["neginf"].iloc[1] + gradient["nan"].iloc[1] == 2
    skipped = recorded.events[recorded.events["kind"] == "optimizer_step_skipped"]
    assert list(skipped["step"]) == [1]
    assert recorded.run.first_nonfinite is None


def test_scalars(record, train) -> None:
    """Loss, learning rates, gradient norm, phase times, throughput and overhead are there for every step."""
    model = nn.Linear(3, 2)
    recorded = record(model, train(model, torch.randn(4, 3), steps=3))
    for name in (
        "loss",
        "lr/0",
        "grad_norm",
        "time/forward",
        "time/backward",
        "time/optimizer",
        "time/step",
        "overhead",
    ):
        assert [step for step, _ in recorded.values(name)] == [0, 1, 2], name
    assert [step for step, _ in recorded.values("time/data")] == [1, 2]
    assert all(value > 0 for _, value in recorded.values("samples_per_second"))
    losses = [value for _, value in recorded.values("loss")]
    assert losses[0] > losses[2] > 0


def test_own_scalars_notes_and_checkpoints(record) -> None:
    """What the user says is recorded at the current step; a state dict that shares memory with the model is named."""
    model = nn.Linear(3, 2)

    def work(trace):
        trace.scalar("accuracy", torch.tensor(0.5))
        trace.scalar("epoch", 3)
        trace.note("hello")
        trace.checkpoint("best", model.state_dict())
        trace.checkpoint("copy", {k: v.clone() for k, v in model.state_dict().items()})
        with pytest.raises(tracehooks.TracehooksError, match="one real number"):
            trace.scalar("bad", torch.ones(2))

    recorded = record(model, work)
    assert recorded.values("accuracy") == [(0, 0.5)]
    assert recorded.values("epoch") == [(0, 3.0)]
    events = recorded.events.set_index("kind")
    assert events.loc["note", "message"] == "hello"
    messages = list(events.loc["checkpoint", "message"])
    assert messages == ["checkpoint best: 2 tensors, 2 share memory with the model", "checkpoint copy: 2 tensors"]


def test_ema_distance(record) -> None:
    """A module that should follow the model is compared with it at the end of each step."""
    model = nn.Linear(3, 2, bias=False)
    ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def work(trace):
        for _ in range(3):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            ema.update_parameters(model)

    values = record(model, work, ema=ema).values("ema/distance")
    assert [step for step, _ in values] == [0, 1, 2]
    assert all(0 <= value < 2 for _, value in values)
    assert values[1][1] > 0


@pytest.mark.parametrize("mode", ["record", "locate", "raise", "skip"])
def test_on_nonfinite(record, capsys, mode) -> None:
    """A NaN is found in its step: noted, said, raised before the parameters are touched, or its gradients dropped."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []

    def work(trace):
        for i in range(3):
            x = torch.full((2, 3), torch.nan if i == 1 else 1.0)
            before = [p.detach().clone() for p in model.parameters()]
            model(x).sum().backward()
            try:
                optimizer.step()
            except tracehooks.NonFiniteError as error:
                found.append(error.first)
            untouched = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            assert untouched == (i == 1 and mode in ("raise", "skip"))
            optimizer.zero_grad()
            if mode in ("record", "locate") and i == 1:
                for p in model.parameters():
                    p.data.fill_(0.5)

    first = record(model, work, on_nonfinite=mode).run.first_nonfinite
    assert (first.step, first.phase, first.module, first.value) == (1, "data", "", "nan")
    assert bool(found) == (mode == "raise")
    assert "6 of 6" in first.message


@pytest.mark.parametrize(
    ("poison", "expected"),
    [
        (lambda m: m[1].weight.data.fill_(torch.inf), (0, "param", "1")),
        (lambda m: m[1].register_forward_hook(lambda mod, a, out: out.abs() / 0), (0, "forward", "1")),
        (lambda m: m[0].register_forward_hook(lambda mod, a, out: (out * 0).sqrt()), (0, "backward", "0")),
    ],
)
def test_first_nonfinite_names_phase_and_module(record, train, poison, expected) -> None:
    """Parameters poisoned before step 0, a division in forward and the square root of zero in backward are told apart."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    poison(model)
    first = record(model, train(model, torch.ones(2, 3))).run.first_nonfinite
    assert (first.step, first.phase, first.module) == expected


def test_masks_full_of_minus_infinity_are_no_finding(record, train) -> None:
    """-inf in an additive mask, a buffer or masked scores is not a non-finite value of anybody's concern."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores, self.keep = nn.Linear(4, 4), nn.Identity()
            self.register_buffer("causal", torch.full((4, 4), -torch.inf).triu(1))

        def forward(self, x, attention_mask):
            return self.keep(self.scores(x) + self.causal).softmax(-1) + attention_mask.exp()

    model = Masked()
    mask = torch.tensor([0.0, -torch.inf, 0.0, 0.0]).expand(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def work(trace):
        model(torch.ones(4, 4), mask).sum().backward()
        optimizer.step()

    recorded = record(model, work)
    assert (recorded.rows(phase="forward", module="keep")["neginf"] == 6).all()
    assert recorded.run.first_nonfinite is None


def test_loss_outside_the_model(record) -> None:
    """A loss that is not finite although every tensor of the model is: phase loss, no module."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def work(trace):
        (model(torch.ones(2, 3)).sum() + torch.tensor(torch.inf)).backward()
        optimizer.step()

    first = record(model, work).run.first_nonfinite
    assert (first.phase, first.module, first.value) == ("loss", None, "inf")


def test_pause_and_resume(record) -> None:
    """While paused no tensor is recorded, steps are counted; both ends are events."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def work(trace):
        for i in range(4):
            trace.pause() if i == 1 else trace.resume() if i == 3 else None
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()

    recorded = record(model, work)
    assert sorted(set(recorded.tensors["step"])) == [0, 3]
    assert [kind for kind in recorded.kinds() if kind in ("paused", "resumed")] == ["paused", "resumed"]
    assert [step for step, _ in recorded.values("lr/0")] == [0, 1, 2, 3]


def test_the_hyperparameters_are_in_run_json(record, train) -> None:
    """Each optimizer's class, settings and parameter names are in run.json."""
    model = nn.Linear(3, 2)
    (optimizer,) = record(model, train(model, torch.ones(2, 3), lr=0.25)).run.info["optimizers"]
    assert optimizer["class"] == "SGD"
    assert optimizer["groups"][0]["lr"] == 0.25
    assert optimizer["groups"][0]["parameters"] == ["weight", "bias"]


def test_gradient_norm_of_nothing_finite(record) -> None:
    """A gradient with infinities gives an infinite norm, never a finite one."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def work(trace):
        model(torch.ones(2, 3)).sum().backward()
        model.weight.grad[0, 0] = torch.inf
        optimizer.step()

    ((_, norm),) = record(model, work).values("grad_norm")
    assert np.isinf(norm)


def test_lazy_layers_are_recorded_once_they_have_a_shape(record) -> None:
    """Parameters without a shape at attach: their optimizer is seen from its first step on, they from the second."""
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(1))

    def work(trace):
        optimizer = None
        for _ in range(4):
            loss = model(torch.randn(4, 3)).square().mean()
            optimizer = optimizer or torch.optim.Adam(model.parameters(), 1e-3)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    recorded = record(model, work)
    assert [step for step, _ in recorded.values("lr/0")] == [0, 1, 2, 3]
    for phase in ("parameter", "gradient", "update"):
        assert sorted(set(recorded.rows(phase=phase)["step"])) == [1, 2, 3]
        assert set(recorded.rows(phase=phase)["module"]) == {"0", "2"}
