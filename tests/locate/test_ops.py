"""The op-level mode: what flows where, and what is read when."""

from __future__ import annotations

import pytest
import torch

from tracehooks.locate.chain import birth
from tracehooks.locate.ops import Details, OpMode, Status


def described(*_: object) -> Details:
    return Details("unknown", "", "")


def watched(work, **options) -> OpMode:
    mode = OpMode(lambda: None, described, **options)
    with mode:
        work()
    assert mode.failed is None
    return mode


def test_what_flows_where() -> None:
    """Each op names the ops that wrote its operands, through views and in-place changes; unseen tensors are negative."""
    x = torch.ones(3)

    def work():
        y = x * 2
        z = y.view(3, 1)
        z.add_(1)
        return y.exp()

    mode = watched(work)
    assert [op.name for op in mode.ops] == ["aten.mul.Tensor", "aten.add_.Tensor", "aten.exp.default"]
    assert [[writer for writer, _ in op.sources] for op in mode.ops] == [[-1], [0], [1]]
    assert [op.place.function for op in mode.ops] == ["test_what_flows_where.<locals>.work"] * 3


def test_a_part_that_is_poisoned_poisons_the_whole() -> None:
    """A NaN written into a slice is followed from there, and stays when another slice is overwritten."""
    x = torch.ones(4)

    def work():
        x[1].fill_(torch.nan)
        x[2].fill_(1.0)
        return x.sum()

    ops = watched(work).ops
    assert ops[-1].output == Status(nan=True)
    assert ops[-1].sources[0][1].nan


@pytest.mark.parametrize("waits", [True, False])
def test_what_is_on_a_device_is_read_once(monkeypatch, waits) -> None:
    """Without waiting, results that are not on the host are kept as two numbers and read together by resolve; the answer
    is the same."""
    reads = []
    if not waits:
        monkeypatch.setattr(OpMode, "_readable", lambda self, x: False)
        plain = torch.Tensor.__float__
        monkeypatch.setattr(torch.Tensor, "__float__", lambda self: reads.append(1) or plain(self))

    def work():
        y = torch.zeros(3).log()
        return (y * 0).sum()

    mode = watched(work, waits=waits)
    assert not reads
    mode.resolve()
    born = birth(mode.ops, mode.unseen, len(mode.ops) - 1)
    assert born.op.name == "aten.log.default"
    assert born.turned_nan.name == "aten.mul.Tensor"


def test_its_own_errors_stay_inside() -> None:
    """An error in the recording ends the recording, not the user's op."""

    def fails(*_: object) -> Details:
        raise ZeroDivisionError

    mode = OpMode(lambda: None, fails)
    with mode:
        y = torch.zeros(2).log()
    assert isinstance(mode.failed, ZeroDivisionError)
    assert torch.isneginf(y).all()


def test_batch_norm_writes_its_buffers_unsaid() -> None:
    """Running statistics that become infinite are a result of the normalisation."""
    norm = torch.nn.BatchNorm1d(2)
    mode = watched(lambda: norm(torch.tensor([[1e25, 0.0], [0.0, 0.0]])))
    op = mode.ops[mode.writer(norm.running_var)]
    assert "batch_norm" in op.name
    assert op.output.posinf


def test_an_op_that_returns_nothing_is_described_by_what_it_wrote() -> None:
    """The ops on lists of tensors change their operands and return None."""
    written = []

    def describe(func, args, kwargs, output, copies, makers):
        written.append([x.clone() for x in output])

    x = torch.full((2,), 3e38)
    with OpMode(lambda: None, describe):
        torch._foreach_mul_([x], 2.0)
    assert [[bool(torch.isinf(x).all()) for x in results] for results in written] == [[True]]
