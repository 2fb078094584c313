"""Specification of what the fast lane leaves behind: nothing."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tracehooks.capture.lane import CLOSED, RECORDING, WATCHING
from tracehooks.capture.places import Head, Site
from tracehooks.capture.session import Session
from tracehooks.core.config import Config
from tracehooks.testing import MemorySink

from .laning import Served, X, needs_native, seated

pytestmark = needs_native


@pytest.fixture
def served() -> Served:
    """A lane that serves nobody, and records."""
    made = Served()
    made.lane.recording = made.lane.reached = True
    return made


def busy(served: Served, rounds: int) -> None:
    """Everything that a lane does, so many times."""
    seat, watched = seated(served)[0], seated(served, path="w")[0]
    sites = [served.site(), served.site()]
    for _ in range(rounds):
        x = torch.ones(3)
        y = nn.Parameter(torch.ones(4)) * 2
        served.lane.mode = RECORDING
        seat.take(x), seat.take(y), seat.take((x,)), seat.take(X.t())
        y.sum().backward()
        served.lane.arrived(sites[0], x)
        served.lane.take(x, sites[0]), served.lane.returned(x), served.lane.norm([x, y])
        served.lane.take_many([x, y], sites, [x, y]), served.lane.take_many([x, X.t()], sites, [x, X])
        served.lane.keep([x, y]), served.lane.take_changes([x, y], sites)
        served.lane.mode = WATCHING
        watched.take(x), watched.take(y)
        served.lane.forget()
        served.drain()
        served.calls.clear()
        served.hooks.forget()


def test_nothing_leaks(served: Served) -> None:
    """Neither references to what lives forever nor objects nor memory."""
    busy(served, 100)
    gc.collect()
    eternal = (None, True, False, X, Tensor, served.lane, served.calls, torch.is_grad_enabled, Site, (), Head)
    counts, objects, memory = [sys.getrefcount(x) for x in eternal], len(gc.get_objects()), resident()
    busy(served, 10_000)
    gc.collect()
    assert max(abs(sys.getrefcount(x) - n) for x, n in zip(eternal, counts, strict=True)) < 50
    assert len(gc.get_objects()) - objects < 50
    assert resident() - memory < 8 << 20


def test_errors_leak_nothing(served: Served) -> None:
    """Nor do wrong arguments and what goes to the session."""
    seat, gate = seated(served)
    gate.site = lambda *call: 1 / 0

    def wrong(rounds: int) -> None:
        for _ in range(rounds):
            seat.take(X)
            for call in (seat.take, served.lane.take, served.lane.put, served.lane.keep, served.lane.norm):
                with contextlib.suppress(TypeError, ValueError):
                    call(5)
            served.failures.clear()

    wrong(100)
    gc.collect()
    counts, objects = (
        [sys.getrefcount(x) for x in (None, True, False, X, gate, ZeroDivisionError)],
        len(gc.get_objects()),
    )
    wrong(5_000)
    gc.collect()
    after = [sys.getrefcount(x) for x in (None, True, False, X, gate, ZeroDivisionError)]
    assert max(abs(a - b) for a, b in zip(after, counts, strict=True)) < 50
    assert len(gc.get_objects()) - objects < 50


def test_large_values_are_let_go(served: Served) -> None:
    """Kept values and rows of a step do not pile up over steps."""
    x = torch.zeros(1 << 18)
    memory = resident()
    for _ in range(200):
        served.lane.keep([x])
        served.lane.take_changes([x], [served.site()])
        for i in range(100):
            served.lane.take(x[i : i + 1], served.site())
        served.drain()
    assert resident() - memory < 16 << 20


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_what_nobody_holds_is_collected() -> None:
    """A lane, its seats, hooks and sites refer to each other in circles."""
    served = Served()
    seat, gate = seated(served)
    gate.seat = seat
    assert seat.take(nn.Parameter(X) * 2)
    ends = [weakref.ref(thing) for thing in (served, gate)]
    del served, seat, gate
    gc.collect()
    assert [end() for end in ends] == [None, None]


@pytest.mark.parametrize("closed", [True, False])
def test_a_session_is_collected(closed: bool) -> None:
    """With its model and its tensors, closed or, if nothing was connected, just dropped."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    session = Session(model, Config(), MemorySink())
    outputs: list[Tensor] = []
    if closed:
        session.connect()
        outputs.append(model(torch.ones(2, 3)))
        outputs[0].sum().backward()
        outputs.append(model(torch.ones(2, 3)))
        session.close()
        assert not outputs[1]._backward_hooks
        assert session.lane.mode == CLOSED
    ends = [weakref.ref(thing) for thing in (model, session, *outputs, model[0].weight)]
    del model, session
    outputs.clear()
    gc.collect()
    assert [end() for end in ends] == [None] * len(ends)
