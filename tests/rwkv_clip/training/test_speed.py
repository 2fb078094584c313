"""The line of a training run."""

from __future__ import annotations

import io
import logging
import re

import pytest
import torch

from rwkv_clip import SpeedCallBack


class Clock:
    """A clock that moves when told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def run(steps: int, *, frequent: int = 2, pause: float = 0.0, **options):
    """Half a second a step, batches of 8; returns the lines and the intervals."""
    lines, clock = io.StringIO(), Clock()
    logger = logging.Logger("test")
    logger.addHandler(logging.StreamHandler(lines))
    speed = SpeedCallBack(frequent, 7206, 8, logger=logger, clock=clock, **options)
    intervals = []
    for step in range(1, steps + 1):
        clock.now += 0.5
        with speed.paused():
            clock.now += pause
        intervals.append(
            speed(step, loss=torch.tensor(float(step)), grad_norm=torch.tensor(10.0 - step), learning_rate=1e-3,
                  scale=torch.tensor(14.3))
        )  # fmt: skip
    return lines.getvalue().splitlines(), intervals


def test_the_first_interval_has_a_line():
    """The first line comes after the first interval, with its speed, mean loss, rate and the time to go."""
    lines, _ = run(3)
    assert lines == [
        "rank:16 total:16 lr:[0.00100000] step:2/7206 amp:1 skipped:0 loss:1.5000 grad_norm:9.000 "
        "scale:14.30 required:1.0 hours"
    ]


def test_each_interval_counts_for_itself():
    """Loss is the mean and the gradient norm the largest of the interval's own steps, not of the whole run."""
    _, intervals = run(6)
    assert [interval and (interval.step, interval.loss, interval.grad_norm) for interval in intervals] == [
        None, (2, 1.5, 9.0), None, (4, 3.5, 7.0), None, (6, 5.5, 5.0),
    ]  # fmt: skip


def test_every_ranks_own_speed_is_shown():
    """With several ranks the line has each one's speed, the loss is their mean, and the total is by the clock."""
    (line,), (_, interval) = run(2, gather=lambda own: [own, (4.0, own[1] + 1)])
    assert line.startswith("rank:16 total:32 ranks:[16 4] lr:")
    assert interval.ranks == [16.0, 4.0]
    assert interval.loss == 2.0


def test_waiting_for_others_is_not_a_ranks_own_slowness():
    """A rank that waits half its time for another is twice as fast by itself; the total stays."""
    lines, clock = io.StringIO(), Clock()
    logger = logging.Logger("test")
    logger.addHandler(logging.StreamHandler(lines))
    speed = SpeedCallBack(1, 10, 8, gather=lambda own: [own, (8.0, 0.0)], logger=logger, clock=clock)
    clock.now += 1.0
    zero = torch.zeros(())
    speed(1, loss=zero, grad_norm=zero, learning_rate=1e-3, scale=zero, waited=0.5)
    assert lines.getvalue().startswith("rank:16 total:16 ranks:[16 8]")


def test_skipped_steps_are_counted():
    """Skipped steps are counted over the whole run, those before a resume too, and their infinite norm is left out."""
    speed = SpeedCallBack(2, 10, 8, skipped=3, logger=logging.Logger("test"))
    step = {"loss": torch.ones(()), "learning_rate": 1e-3, "scale": torch.ones(())}
    assert speed(1, grad_norm=torch.tensor(torch.inf), skipped=True, **step) is None
    interval = speed(2, grad_norm=torch.tensor(2.0), **step)
    assert (interval.skipped, interval.grad_norm) == (4, 2.0)


def test_pauses_do_not_slow_the_speed():
    """Time spent evaluating and saving is left out of the interval."""
    assert run(4, pause=30.0)[0] == run(4)[0]


@pytest.mark.parametrize("frequent", [1, 5])
def test_a_line_every_so_many_steps(frequent):
    """There is one line for every ``frequent`` steps, also when that is one."""
    lines, _ = run(11, frequent=frequent)
    assert [int(re.search(r"step:(\d+)", line)[1]) for line in lines] == list(range(frequent, 12, frequent))
