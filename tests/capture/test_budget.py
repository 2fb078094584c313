"""The budget: which steps are recorded so that recording keeps its share."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
import torch
from torch import nn

from tracehooks import stats
from tracehooks.capture import budget as budget_module
from tracehooks.capture import lane
from tracehooks.capture.budget import MOST, Budget, rounded_up


def run(budget: Budget, steps: int, recorded: float, watched: float, bare: float):
    """What a run with these costs records: (share that recording took, steps recorded, events)."""
    spent, length, chosen, events = 0.0, 0.0, [], []
    for step in range(steps):
        records = budget.records(step)
        seconds = recorded if records else watched
        if records:
            chosen.append(step)
        notice = budget.step_ended(records, seconds, bare + seconds)
        if notice is not None:
            events.append(notice)
        spent, length = spent + seconds, length + bare + seconds
    return spent / length, chosen, events


@pytest.mark.parametrize("recorded", [0.001, 0.004, 0.03, 0.5])
def test_the_share_is_kept(recorded: float) -> None:
    """Whatever a recorded step costs, over a long run recording takes no more than the budget."""
    share, chosen, events = run(Budget(0.02, 1), 3_000, recorded, 0.0005, 0.1)
    assert share <= 0.02 or recorded > 0.1  # the warm-up itself, where a recorded step is five times a bare one
    assert share <= 0.03
    assert len(events) <= 2  # the first choice does not know yet what a watched step costs
    if recorded > 0.02 * 0.1:
        assert len({b - a for a, b in pairwise(chosen[5:])}) == 1
        kind, severity, text, details = events[-1]
        assert (kind, severity) == ("recording_paced", "info")
        assert f"every {details['every']}. step" in text


def test_what_fits_is_recorded_at_every_step() -> None:
    """No event, no step left out."""
    share, chosen, events = run(Budget(0.02, 1), 100, 0.001, 0.0001, 0.1)
    assert chosen == list(range(100))
    assert not events
    assert share < 0.02


def test_every_is_widened_never_narrowed() -> None:
    """Steps that are recorded are among those that `every` names, whether it is a number or a predicate."""
    _, chosen, _ = run(Budget(0.02, 3), 1_000, 0.05, 0.0, 0.1)
    assert all(step % 3 == 0 for step in chosen)
    assert len(chosen) < 50
    _, chosen, events = run(Budget(0.02, lambda step: step % 7 == 1), 3_000, 0.05, 0.0, 0.1)
    assert all(step % 7 == 1 for step in chosen)
    assert "that `every` names" in events[0][2]


def test_a_watch_beyond_the_budget_is_said() -> None:
    """It goes on all the same: recording is as rare as can be, and only the model's ends are watched."""
    budget = Budget(0.02, 1)
    _, chosen, events = run(budget, 100, 0.05, 0.01, 0.1)
    assert budget.ends_only
    assert "only what the model returns, its loss, gradients and parameters are watched" in events[-1][2]
    assert "the watch for non-finite values alone takes more" in events[-1][2]
    assert events[-1][3]["every"] == MOST
    assert len(chosen) < 5


def test_modules_are_watched_where_that_is_cheap() -> None:
    """Half of the budget may go to it; a single slow step says nothing."""
    budget = Budget(0.02, 1)
    for step in range(200):
        recorded = budget.records(step)
        budget.step_ended(recorded, 0.05 if recorded else 0.02 if step == 3 else 0.0005, 0.1)
    assert not budget.ends_only


def test_hooks_come_off_where_only_the_ends_are_watched(record, monkeypatch) -> None:
    """Modules are called without hooks of ours in watched steps, the root with; a recorded step sees all of them; a value
    that is not finite is found in its own step, and in its module; hooks of others keep their place."""
    monkeypatch.setattr(budget_module, "MOST_FOR_WATCHING", 0.0)
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    nn.init.ones_(model[0].weight)
    counts = []
    model[2].register_forward_hook(lambda *_: None)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def work(trace):
        model[1].register_forward_hook(lambda *_: None)
        for step in range(60):
            loss = model(torch.full((2, 3), 3e38 if step == 50 else 1.0)).sum()
            counts.append([len(module._forward_hooks) for module in (*model, model)])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    recorded = record(model, work, budget=1e-6)
    assert counts[0] == [1, 2, 2, 2]
    assert counts[40] == [0, 2, 1, 2]
    full = next(step for step in recorded.rows(phase="forward", module="2")["step"])
    assert counts[full] == [1, 2, 2, 2]
    (found,) = recorded.events[recorded.events["kind"] == "nonfinite"].to_dict("records")
    assert (found["step"], found["module"]) == (50, "0")
    assert all(not module._forward_hooks or module in (model[1], model[2]) for module in (*model, model))


def test_a_run_that_gets_slower_is_recorded_more_often_again() -> None:
    """The choice follows the steps, but only where it is far from what would do."""
    budget = Budget(0.02, 1)
    run(budget, 500, 0.02, 0.0, 0.05)
    narrow = budget.stride
    run(budget, 2_000, 0.02, 0.0, 0.6)
    assert narrow == 20
    assert budget.stride < narrow / 2


def test_strides_are_round() -> None:
    """1, 2, 5, 10, 20 …"""
    assert [rounded_up(steps) for steps in (0.1, 1, 1.1, 3, 7, 10, 11, 99, 4_000)] == [
        1,
        1,
        2,
        5,
        10,
        10,
        20,
        100,
        5_000,
    ]


def test_a_slow_recorder_is_paced_and_the_watch_goes_on(record, monkeypatch) -> None:
    """With a kernel that takes ten milliseconds a tensor few steps are recorded, said by an event; a NaN in one of the
    others is found in its own step."""
    slow = stats.summarize

    def summarize(x, spec, out=None):
        time.sleep(0.01)
        return slow(x, spec, out)

    monkeypatch.setattr(stats, "summarize", summarize)
    monkeypatch.setattr(lane, "native", lambda: None)
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def work(trace):
        for step in range(30):
            x = torch.ones(2, 3)
            if step == 27:
                x[0, 0] = torch.nan
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    recorded = record(model, work, budget=0.02)
    steps = sorted(set(recorded.rows(phase="forward", module="")["step"]))
    assert len(steps) < 8
    assert 27 not in steps
    events = recorded.events
    assert "recording_paced" in set(events["kind"])
    (found,) = events[events["kind"] == "nonfinite"].to_dict("records")
    assert (found["step"], found["module"]) == (27, "")


def test_one_slow_step_does_not_decide_for_long() -> None:
    """A hiccup in the first watched step is forgotten as soon as others have been measured."""
    budget = Budget(0.02, 2)
    recorded = 0
    for step in range(3_000):
        chosen = budget.records(step)
        recorded += chosen
        budget.step_ended(chosen, 0.01 if step == 1 else 0.0005 if chosen else 0.00005, 0.1)
    assert recorded > 1_000
