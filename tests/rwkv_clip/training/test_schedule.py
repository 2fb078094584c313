"""Learning rate and first beta at every step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rwkv_clip import create_RWKV_Model
from rwkv_clip.training.optimizer import make_optimizer
from rwkv_clip.training.schedule import Schedule, learning_rate_factor

SHAPES = ["cosine", "linear"]


def test_one_cycle_is_the_originals(numbers):
    """With a warm-up of a tenth the rate equals the recorded one at every step of a run of 100."""
    recorded = numbers("onecycle.json")
    total = recorded["steps_per_epoch"] * recorded["epochs"]
    for step in range(total):
        factor = learning_rate_factor(step, total, warmup=recorded["pct_start"], shape="cosine")
        assert recorded["max_lr"] * factor == pytest.approx(recorded["lr_beta1_by_step"][step][0], abs=1e-15), step


@given(total=st.integers(2, 200), warmup=st.floats(0.05, 0.9))
def test_one_cycle_is_torchs(total, warmup):
    """Where torch's OneCycleLR is defined, the rate equals its own at every step."""
    if not 1e-6 < warmup * total - 1 < total - 1 - 1e-6:
        return
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
    theirs = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=total, pct_start=warmup)
    for step in range(total):
        ours = learning_rate_factor(step, total, warmup=warmup, shape="cosine")
        assert ours == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        if step < total - 1:
            theirs.step()


@given(
    total=st.integers(1, 60), warmup=st.floats(0, 1, exclude_max=True), shape=st.sampled_from(SHAPES)
)  # fmt: skip
def test_every_length_and_step_has_a_rate(total, warmup, shape):
    """The rate is in [0, 1] for every run length and step, past the end too, rising to its peak and then falling."""
    factors = [learning_rate_factor(step, total, warmup=warmup, shape=shape) for step in range(total + 3)]
    assert all(0 <= factor <= 1 for factor in factors)
    peak = factors.index(max(factors))
    assert factors[: peak + 1] == sorted(factors[: peak + 1])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)
    assert factors[total] == factors[total + 2]


def test_warmup_share_is_honoured():
    """The peak comes after the asked share of the run, not after a fixed one."""
    for shape in SHAPES:
        for share in (0.2, 0.5):
            factors = [learning_rate_factor(step, 101, warmup=share, shape=shape) for step in range(101)]
            assert abs(factors.index(max(factors)) - 101 * share) <= 1.5


def test_linear_without_warmup_falls_evenly_to_zero():
    """Linear without warm-up is the original's: from the peak to zero in equal steps."""
    factors = [learning_rate_factor(step, 4, warmup=0, shape="linear") for step in range(5)]
    assert factors == [1, 0.75, 0.5, 0.25, 0]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("total", [1, 10])
def test_betas_stay_and_the_last_step_is_safe(small_config, shape, total):
    """Over a whole run of 10 steps, and one step more, the betas stay as given and nothing is raised."""
    model = create_RWKV_Model(small_config)
    optimizer = make_optimizer(model, lr=0.5, betas=(0.8, 0.97), weight_decay=0.1)
    schedule = Schedule(0.5, total, 0.1, shape)
    for step in range(total + 1):
        schedule.apply(optimizer, step)
        expected = 0.5 * learning_rate_factor(step, total, warmup=0.1, shape=shape)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([expected] * 2)
        assert all(group["betas"] == (0.8, 0.97) for group in optimizer.param_groups)
        optimizer.step()


def test_cycled_momentum_is_the_originals(numbers):
    """With cycle_momentum the first beta equals the recorded one at every step, and the second stays."""
    recorded = numbers("onecycle.json")
    total = recorded["steps_per_epoch"] * recorded["epochs"]
    schedule = Schedule(recorded["max_lr"], total, recorded["pct_start"], cycle_momentum=True)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(()))], betas=(0.9, 0.98))
    for step in range(total):
        schedule.apply(optimizer, step)
        (group,) = optimizer.param_groups
        rate, beta1 = recorded["lr_beta1_by_step"][step]
        assert (group["lr"], group["betas"][0]) == pytest.approx((rate, beta1), abs=1e-12), step
        assert group["betas"][1] == 0.98
