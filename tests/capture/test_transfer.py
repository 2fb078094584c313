"""Specification of the way from a device to the host: nothing waits, nothing is lost, and late numbers are judged late.

The device is a stand-in on the CPU: what leaves it arrives when the test says so, and its memory is written anew at once.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tracehooks import stats
from tracehooks.capture import transfer
from tracehooks.capture.device_rows import BLOCK_ROWS, DeviceRows
from tracehooks.capture.lane import lane
from tracehooks.capture.packing import Packing
from tracehooks.capture.transfer import Copy, Transfer
from tracehooks.stats import Spec

from .conftest import Record


class Device:
    """A device that copies when told to; ``waits`` counts how often the host waited for it."""

    def __init__(self) -> None:
        self.passed, self.waits = False, 0

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.waits += not self.passed


class Distant(Tensor):
    """A tensor that says that it is not on the host."""

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Every tensor lies on a device."""
    found = Device()
    monkeypatch.setattr(transfer, "here", lambda x: False)
    monkeypatch.setattr(transfer, "begin_copy", lambda x: Copy(x.clone(), found))
    return found


def test_tensors_travel_together(device: Device) -> None:
    """Tensors of any dtype and shape arrive as they were when the transfer started."""
    sent = [
        torch.tensor(1.5), torch.arange(6).view(2, 3), torch.tensor([True]), torch.zeros(0, 4),
        torch.randn(3, 4).t(), torch.tensor([math.nan], dtype=torch.bfloat16),
    ]  # fmt: skip
    wanted = [x.clone() for x in sent]
    moving = Transfer()
    taken = [moving.add(x) for x in sent]
    moving.start()
    for x in sent:
        x.zero_()
    assert not moving.arrived()
    device.passed = True
    assert moving.arrived()
    assert device.waits == 0
    moving.wait()
    for take, x in zip(taken, wanted, strict=True):
        found = take()
        assert (found.dtype, found.shape) == (x.dtype, x.shape)
        assert torch.equal(found, x) or found.isnan().all()


def test_what_is_here_does_not_travel() -> None:
    """A tensor in the processor's memory is there at once."""
    moving, x = Transfer(), torch.randn(3)
    taken = moving.add(x)
    moving.start()
    assert moving.arrived()
    assert taken() is x


def test_blocks_are_written_anew() -> None:
    """Rows of any number come back in order, from memory that is allocated once."""
    rows = DeviceRows(torch.device("cpu"), 2)
    for _ in range(3):
        wanted = []
        for count in (1, BLOCK_ROWS - 2, 5, 3 * BLOCK_ROWS, 1):
            part = torch.randint(99, (count, 2))
            rows.take(count).copy_(part)
            wanted.append(part)
        assert torch.equal(rows.leave(), torch.cat(wanted))
        memory = getattr(rows, "_blocks", [])
    assert len(memory) == 4
    assert len(rows.leave()) == 0


def test_rows_of_host_and_device(device: Device) -> None:
    """Rows measured here and there, one by one and many at once, are found by their numbers, in any order."""
    rows = lane(Spec())
    packing = Packing(Spec(), rows)
    here = [torch.randn(n) for n in (3, 50, 7)]
    there = [torch.randn(n).as_subclass(Distant) for n in (4, 60, 9)]
    numbers = [packing.number_of(there[0], False), packing.number_of(here[0], False)]
    mixed = [here[1], there[1], there[2], here[2]]
    numbers += packing.measure_many(mixed)
    moving = Transfer()
    host = np.frombuffer(rows.drain()[-1], dtype=np.int64).reshape(-1, Spec().width)
    matrix = packing.send(np.array([*reversed(numbers), numbers[0]]), host, moving)
    moving.start()
    packing.number_of(torch.zeros(5).as_subclass(Distant), False)
    moving.wait()
    order = [*reversed([there[0], here[0], *mixed]), there[0]]
    wanted = [stats.summarize(x.as_subclass(Tensor), Spec()).numpy() for x in order]
    assert np.allclose(matrix()[:, :6], np.stack(wanted)[:, :6])


def trained(model: nn.Module, device: Device | None = None, poison: int | None = None, steps: int = 4) -> None:
    """A few steps, the input of one of them poisoned. The device passes every other step, or none."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(steps):
        x = torch.full((2, 3), math.nan if step == poison else 1.0)
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        if device is not None:
            device.passed = step % 2 == 1


def test_a_run_on_a_device_is_recorded_whole(record: Record, device: Device) -> None:
    """However late numbers arrive, every row and scalar is written, in its step, and the steps wait for nothing."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh())

    def work(trace: Any) -> None:
        trained(model, device)
        assert device.waits == 0

    recorded = record(model, work, on_nonfinite="record")
    assert [len(recorded.rows(step=step, phase="forward")) for step in range(4)] == [3] * 4
    assert [step for step, _ in recorded.values("grad_norm")] == [0, 1, 2, 3]
    assert [step for step, _ in recorded.values("loss")] == [0, 1, 2, 3]


def test_the_flag_is_the_one_wait(record: Record, device: Device) -> None:
    """Before each optimizer step, where non-finite values are acted on, the host waits once."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh())

    record(model, lambda trace: trained(model), on_nonfinite="raise")
    assert device.waits <= 4 + 4 + 1  # what the last step sent is taken in along with the flag, and once at the end


def test_late_numbers_are_found_late(record: Record, device: Device) -> None:
    """A NaN that arrives after its step is noted as it was seen, under its step."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh())

    recorded = record(model, lambda trace: trained(model, poison=1), on_nonfinite="record")
    found = recorded.events[recorded.events["kind"] == "nonfinite"]
    assert list(found["step"]) == [1]
