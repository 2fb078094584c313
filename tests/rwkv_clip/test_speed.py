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


def run(steps: int, *, frequent: int = 2, world_size: int = 1, pause: float = 0.0):
    """Half a second a step, batches of 8; returns the lines and the intervals."""
    lines, clock = io.StringIO(), Clock()
    logger = logging.Logger("test")
    logger.addHandler(logging.StreamHandler(lines))
    speed = SpeedCallBack(frequent, 7206, 8, world_size=world_size, logger=logger, clock=clock)
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
        "rank:16 total:16 lr:[0.00100000] step:2/7206 loss:1.5000 grad_norm:9.000 scale:14.30 required:1.0 hours"
    ]


def test_each_interval_counts_for_itself():
    """Loss is the mean and the gradient norm the largest of the interval's own steps, not of the whole run."""
    _, intervals = run(6)
    assert [interval and (interval.step, interval.loss, interval.grad_norm) for interval in intervals] == [
        None, (2, 1.5, 9.0), None, (4, 3.5, 7.0), None, (6, 5.5, 5.0),
    ]  # fmt: skip


def test_total_is_the_sum_over_ranks():
    """The total is the rank's own speed times the number of ranks."""
    (line,), _ = run(2, world_size=4)
    assert line.startswith("rank:16 total:64 ")


def test_pauses_do_not_slow_the_speed():
    """Time spent evaluating and saving is left out of the interval."""
    assert run(4, pause=30.0)[0] == run(4)[0]


@pytest.mark.parametrize("frequent", [1, 5])
def test_a_line_every_so_many_steps(frequent):
    """There is one line for every ``frequent`` steps, also when that is one."""
    lines, _ = run(11, frequent=frequent)
    assert [int(re.search(r"step:(\d+)", line)[1]) for line in lines] == list(range(frequent, 12, frequent))
