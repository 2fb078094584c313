"""Specification of the quick way to the native kernel: small dense tensors get the same rows, the rest is left alone."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tracehooks.capture.measured import Measured
from tracehooks.stats import Spec, cpu

from .measuring import EVERYTHING, FLOATING, INTEGRAL, of_kind

KERNEL = cpu.library()

pytestmark = pytest.mark.skipif(
    KERNEL is None or KERNEL.door is None, reason="built without Python's headers, or an older torch"
)


@pytest.mark.parametrize("dtype", FLOATING + INTEGRAL, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (1, 3, 1), (1000,), (2, 250)])
def test_what_it_takes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Every native dtype in any shape, views with an offset and what requires a gradient among them."""
    x = of_kind("normal", 1007, dtype)[7:][: math.prod(shape)].view(shape)
    for tensor in (x, torch.nn.Parameter(x, requires_grad=dtype.is_floating_point)):
        out = torch.zeros(EVERYTHING.width, dtype=torch.int64)
        assert cpu.measured(tensor, EVERYTHING, out)
        assert torch.equal(out, cpu.summarize(x, EVERYTHING, torch.zeros_like(out)))


@pytest.mark.parametrize(
    "like",
    [
        lambda x: x.t(),
        lambda x: x[:, ::2],
        lambda x: x[0].expand(6, 6),
        lambda x: torch._neg_view(x),
        lambda x: x.to_sparse(),
        lambda x: x.to(torch.complex64),
        lambda x: x.to(torch.float8_e4m3fn),
        lambda x: x.to("meta"),
        lambda x: torch.zeros(1 << 17),
        lambda x: x.as_subclass(type("Named", (Tensor,), {})),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_what_it_leaves(like: Any) -> None:
    """Other tensors are left to the caller, and nothing is written."""
    out = torch.full((EVERYTHING.width,), -7)
    assert not cpu.measured(like(torch.randn(6, 6)), EVERYTHING, out)
    assert (out == -7).all()


@pytest.mark.parametrize("misfit", [torch.zeros(13, dtype=torch.int64), torch.zeros(12), torch.zeros(24).long()[::2]])
def test_rows_that_it_leaves(misfit: Tensor) -> None:
    """A row of another size, type or stride is left to the caller."""
    assert not cpu.measured(torch.ones(5), Spec(), misfit)
    assert not misfit.any()


def odd_ones() -> list[Tensor]:
    """Tensors that the door takes among such as it leaves, at 2, 4 and 6."""
    x = torch.randn(40, 50)
    x[3, 4], x[5, 6] = torch.inf, torch.nan
    return [
        x,
        x[7],
        x.t(),
        torch.nn.Parameter(x.half()),
        x.to_sparse(),
        torch.arange(9),
        torch._neg_view(x),
        x.bfloat16(),
    ]


@pytest.fixture
def without_door(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Takes the door away."""
    return lambda: monkeypatch.setattr(cpu, "library", lambda: replace(KERNEL, door=None))


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("large", [False, True])
def test_many_are_the_same_with_and_without_it(large: bool, without_door: Callable[[], None]) -> None:
    """Rows of a list, and which tensors are left to the caller; with threads, too."""
    tensors = odd_ones() + ([torch.randn(1 << 19), torch.randn(1 << 19)] if large else [])
    out, plainly = torch.full((2, len(tensors), EVERYTHING.width), -7)
    left = cpu.summarize_many(tensors, EVERYTHING, out)
    without_door()
    assert left == cpu.summarize_many(tensors, EVERYTHING, plainly) == [2, 4, 6]
    assert torch.equal(out, plainly)
    assert (out[left] == -7).all()


@pytest.mark.filterwarnings("ignore:Sparse")
def test_the_watch_sees_the_same_with_and_without_it(without_door: Callable[[], None]) -> None:
    """What a list holds together, and which tensors were not looked at."""
    everything = odd_ones()
    lists = [everything, everything[1:2], everything[5:7], [torch.full((1 << 19,), -torch.inf)], []]
    seen = [cpu.nonfinite(tensors) for tensors in lists]
    without_door()
    for tensors, (kinds, left) in zip(lists, seen, strict=True):
        plain_kinds, plain_left = cpu.nonfinite(tensors)
        assert kinds == plain_kinds
        assert [id(x) for x in left] == [id(x) for x in plain_left]


def test_rows_for_many_that_it_leaves() -> None:
    """Rows of another size leave all to the caller."""
    assert KERNEL.door.measure_many([torch.ones(5)], torch.zeros(13, dtype=torch.int64), 1, 1) is None


class Notes:
    """Rows, and what is known of tensors, as `once` is given them."""

    def __init__(self) -> None:
        self.rows, self.known, self.written = torch.full((9, Spec().width), -7), {}, 0

    def number(self, x: Tensor, returned: bool = False) -> int:
        row = self.rows[self.written]
        number = KERNEL.door.once(x, self.known, row.data_ptr(), self.written, Spec().flags, returned)
        self.written += number == self.written
        return number


def test_what_is_the_same_is_measured_once() -> None:
    """A tensor, its whole view and what shares its memory in order have one row; what differs has its own."""
    notes, x = Notes(), torch.randn(4, 6)
    assert [notes.number(y) for y in (x, x, x.view(24), x.detach())] == [0, 0, 0, 0]
    assert [notes.number(y) for y in (x[:2], x.clone())] == [1, 2]
    assert torch.equal(notes.rows[0], cpu.summarize(x, Spec()))
    assert torch.equal(notes.rows[1], cpu.summarize(x[:2], Spec()))
    assert notes.number(x.view(torch.int32)) == 3
    assert (notes.rows[4:] == -7).all()


def test_a_change_in_place_is_measured_anew() -> None:
    """By whichever view it was made."""
    notes, x = Notes(), torch.zeros(4, 6)
    assert notes.number(x) == 0
    x[1:].add_(1)
    assert notes.number(x) == 1
    assert notes.number(x.view(-1)) == 1
    assert torch.equal(notes.rows[1], cpu.summarize(x, Spec()))


def test_memory_that_went_to_another_tensor_is_not_known() -> None:
    """The tensor that was measured is gone; its address says nothing any more."""
    notes, x = Notes(), torch.zeros(4)
    notes.number(x)
    [(address, (_, *rest))] = notes.known.items()
    gone = weakref.ref(torch.zeros(4))
    notes.known[address] = gone, *rest
    assert notes.number(x.view(2, 2)) == 1


def test_what_a_module_returned_stays_so() -> None:
    """It is noted when it is seen returned, also where it was measured before; another look does not take it back."""
    notes, x = Notes(), torch.zeros(4)
    for returned, noted in ((False, False), (True, True), (False, True)):
        assert notes.number(x, returned) == 0
        assert [known[-1] for known in notes.known.values()] == [noted]


@pytest.mark.filterwarnings("ignore:Sparse")
def test_what_once_leaves() -> None:
    """Tensors of other kinds get a negative number, and nothing is written or noted."""
    notes = Notes()
    x = torch.randn(6, 6)
    for left in (x.t(), torch._neg_view(x), x.to_sparse(), x.to("meta"), x.to(torch.complex64), torch.zeros(1 << 17)):
        assert notes.number(left) == -1
    assert not notes.known
    assert (notes.rows == -7).all()


def test_tensors_of_inference_mode_and_without_elements_are_measured_each_time() -> None:
    """Their changes are not counted, or they have no address."""
    notes = Notes()
    with torch.inference_mode():
        x = torch.ones(3)
    assert [notes.number(x), notes.number(x), notes.number(torch.ones(0)), notes.number(torch.ones(0))] == [0, 1, 2, 3]
    assert not notes.known


def test_once_takes_what_measured_notes_and_the_other_way_round() -> None:
    """The recorder's own notes are of the same make."""
    notes, ours, x = Notes(), Measured(), torch.zeros(4)
    ours.known = notes.known
    notes.number(x)
    assert ours.find(x.view(2, 2)) == (0, False)
    y = torch.zeros(5)
    ours.add(y, 17, True)
    assert notes.number(y.view(1, 5)) == 17
