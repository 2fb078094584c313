"""Specification of the fast lane: the same rows as without it for what is usual, nothing at all for the rest."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.stats.measuring import EVERYTHING, FLOATING, INTEGRAL, of_kind
from tracehooks import stats
from tracehooks.capture import lane
from tracehooks.stats import Spec, cpu
from tracehooks.stats.layout import INTEGERS

from .laning import LEFT, Served, X, needs_native

pytestmark = [
    needs_native,
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
]

SHAPES = [(), (1,), (0,), (0, 3), (3, 0), (1, 3, 1), (1000,), (2, 250), (4097,), (1,) * 9 + (2,)]


class Ops(TorchDispatchMode):
    """A dispatch mode that does nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """A function mode that does nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.fixture
def served() -> Served:
    """A lane that serves nobody."""
    return Served()


def numbers_of(served: Served, *tensors: Tensor) -> list[int]:
    """Take tensors; the numbers of their packed rows."""
    for x in tensors:
        assert served.lane.take(x, served.site())
    return served.drain().numbers


# ---- one tensor


@pytest.mark.parametrize("dtype", FLOATING + INTEGRAL, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spec", [Spec(), EVERYTHING], ids=["defaults", "everything"])
def test_a_row_is_what_stats_measures(dtype: torch.dtype, shape: tuple[int, ...], spec: Spec) -> None:
    """For every native dtype in any shape, views with an offset and what requires a gradient among them."""
    served = Served(spec)
    x = of_kind("holes", 5007, dtype)[7:][: math.prod(shape)].view(shape)
    for tensor in (x, nn.Parameter(x, requires_grad=dtype.is_floating_point)):
        if not served.lane.take(tensor, served.site("taken")):
            assert 0 in shape[1:]  # strides of such are none of theirs
            continue
        told = served.drain()
        assert torch.equal(told.packed[0], stats.summarize(x, spec))
        [head] = told.heads
        assert (head.dtype, head.device, head.shape) == (str(dtype)[6:], "cpu", shape)
        assert head.place.slot == "taken"


@pytest.mark.parametrize("like", LEFT)
def test_what_is_left(served: Served, like: str) -> None:
    """Of another kind: no row, no note, no number."""
    other = LEFT[like]()
    assert not served.lane.take(other, served.site())
    assert not served.lane.returned(other)
    assert not served.lane.take_many([X, other], [served.site()] * 2, [X, other])
    assert not served.lane.take_many([X], [served.site()], [other])
    assert not served.lane.keep([X, other])
    served.lane.take_changes([], [])
    assert served.lane.norm([X, other]) is None
    assert len(served.lane) == served.lane.next() == 0
    told = served.drain()
    assert not told.heads
    assert not len(told.packed)


@pytest.mark.parametrize("mode", [Ops, Functions])
def test_lists_are_left_while_a_mode_is_active(served: Served, mode: Callable[[], Any]) -> None:
    """The mode would see what is asked of them."""
    with mode():
        assert not served.lane.take_many([X], [served.site()], [X])
        assert not served.lane.keep([X])
        assert served.lane.norm([X]) is None
    assert not served.drain().heads


def test_what_is_batched_is_left(served: Served) -> None:
    """Tensors inside vmap and grad, and what is left of them outside."""
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append(x)
        assert not served.lane.take(x, served.site())
        assert not served.lane.take_many([X], [served.site()], [X])
        return x.sum()

    torch.func.vmap(look)(torch.ones(3, 2))
    torch.func.grad(look)(torch.ones(3))
    assert [served.lane.take(x, served.site()) for x in seen] == [False, False]
    assert not served.drain().heads


def test_wrong_arguments(served: Served) -> None:
    """They are errors, and nothing is done."""
    quick, site = served.lane, served.site()
    for wrong in (
        lambda: quick.take(X),
        lambda: quick.take(X, "site"),
        lambda: quick.arrived("site", X),
        lambda: quick.take_many([X], [site], (X,)),
        lambda: quick.take_many([X], ["site"], [X]),
        lambda: quick.keep(X),
        lambda: quick.norm((X,)),
        lambda: quick.take_changes([X], [site]),
        lambda: quick.add("head"),
        lambda: quick.begin("one"),
        lambda: quick.serve({}, [], served.lock),
        lambda: quick.serve([], [], served.lock, print, print, 1),
        lambda: type(quick)("flags"),
        lambda: lane.seat(quick, None, 5),
    ):
        with pytest.raises(TypeError):
            wrong()
    for misfit in (None, "rows", X.long()[0], X, torch.zeros(EVERYTHING.width + 1, dtype=torch.int64), X.long()[:0]):
        with pytest.raises(ValueError, match="rows of 92 int64"):
            quick.put(misfit)
    with pytest.raises(ValueError, match="different lengths"):
        quick.take_many([X], [site], [])
    assert not served.drain().heads


# ---- what is known


def test_what_is_the_same_is_measured_once(served: Served) -> None:
    """A tensor, its whole view and what shares its memory in order have one row; what differs has its own."""
    x = torch.randn(4, 6)
    for y in (x, x, x.view(24), x.detach(), x[:2], x.clone(), x.view(torch.int32)):
        assert served.lane.take(y, served.site())
    told = served.drain()
    assert told.numbers == [0, 0, 0, 0, 1, 2, 3]
    for row, y in zip(told.packed, (x, x[:2], x, x.view(torch.int32)), strict=True):
        assert torch.equal(row, stats.summarize(y, EVERYTHING))
    assert [head.shape for head in told.heads][:4] == [(4, 6), (4, 6), (24,), (4, 6)]


def test_a_change_in_place_is_measured_anew(served: Served) -> None:
    """By whichever view it was made."""
    x = torch.zeros(4, 6)
    served.lane.take(x, served.site())
    x[1:].add_(1)
    served.lane.take(x, served.site())
    served.lane.take(x.view(-1), served.site())
    told = served.drain()
    assert told.numbers == [0, 1, 1]
    assert torch.equal(told.packed[1], stats.summarize(x, EVERYTHING))


def test_a_drain_and_forgetting_end_what_is_known(served: Served) -> None:
    """What comes after is measured again, in rows numbered from 0."""
    x = torch.zeros(4)
    assert numbers_of(served, x, x) == [0, 0]
    assert numbers_of(served, x) == [0]
    served.lane.take(x, served.site())
    served.lane.forget()
    assert numbers_of(served, x, x) == [0, 1, 1]


def test_memory_that_went_to_another_tensor_is_not_known(served: Served) -> None:
    """The tensor that was measured is gone; its address says nothing any more."""
    memory = np.zeros(1000, np.float32)
    for value in range(3):
        memory[:] = value
        assert served.lane.take(torch.from_numpy(memory), served.site())
    told = served.drain()
    assert told.numbers == [0, 1, 2]
    assert told.packed[:, 8].view(torch.float64).tolist() == [0, 1, 2]


def test_what_a_module_returned_stays_so(served: Served) -> None:
    """It is noted when it is seen returned, also where it was measured before; another look does not take it back."""
    x, backward = torch.zeros(4), served.site(phase="backward")
    for site, noted in ((backward, False), (served.site(), True), (backward, True)):
        served.lane.take(x, site)
        assert served.lane.returned(x) is noted
    assert served.lane.returned(x.view(2, 2))
    assert not served.lane.returned(x[:2])
    x.add_(1)
    assert not served.lane.returned(x)
    assert not served.lane.returned(torch.zeros(0))


def test_tensors_of_inference_mode_and_without_elements_are_measured_each_time(served: Served) -> None:
    """Their changes are not counted, or they have no address."""
    with torch.inference_mode():
        x = torch.ones(3)
        assert numbers_of(served, x, x, torch.ones(0), torch.ones(0)) == [0, 1, 2, 3]
        assert not served.lane.returned(x)


def test_it_keeps_no_tensor_alive(served: Served) -> None:
    """Not what it took, nor what it kept."""
    x, y = torch.zeros(4), torch.zeros(5)
    served.lane.take(x, served.site())
    served.lane.take_many([y], [served.site()], [y])
    served.lane.keep([x, y])
    gone = weakref.ref(x), weakref.ref(y)
    del x, y
    assert [ref() for ref in gone] == [None, None]


# ---- heads, numbers and columns


def test_heads_change_with_the_kind_of_tensor_alone(served: Served) -> None:
    """Shape, dtype, and whether gradients are computed; sites do not share them."""
    site, other, x = served.site(), served.site("other"), torch.zeros(2, 3)
    kinds = [x, torch.ones(2, 3), x.view(3, 2), x.view(6), x.double(), x.view(1, 1, 1, 1, 1, 1, 1, 1, 6), x]
    for y in kinds:
        served.lane.take(y, site)
    served.lane.training = False
    served.lane.take(x, site)
    served.lane.take(x, other)
    heads = served.drain().heads
    assert heads[0] is heads[1]
    assert [(h.shape, h.dtype, h.training) for h in heads] == [
        *((tuple(y.shape), str(y.dtype)[6:], True) for y in kinds),
        ((2, 3), "float32", False),
        ((2, 3), "float32", False),
    ]
    assert heads[-2].place.slot == "output"
    assert heads[-1].place.slot == "other"


def test_rows_that_were_measured_elsewhere(served: Served) -> None:
    """`put` numbers them along with the lane's own; `add` refers to them, or to a device's; `next` and `begin` number
    what comes."""
    served.lane.begin(7)
    served.lane.take(X, served.site())
    rows = stats.summarize_many([X.t(), X[0]], EVERYTHING, torch.zeros(2, EVERYTHING.width, dtype=torch.int64))
    assert served.lane.put(rows) == 1
    assert served.lane.next() == 1
    for number in (2, -5):
        served.lane.add(served.site().head(X[0], True), number)
    served.lane.begin(8)
    served.lane.take(X[1], served.site())
    assert len(served.lane) == 4
    told = served.drain()
    assert (told.steps, told.sequence, told.numbers) == ([7, 7, 7, 8], [0, 2, 3, 0], [0, 2, -5, 3])
    assert torch.equal(told.packed[1:3], rows)
    assert len(served.lane) == 0
    assert served.lane.step == 8


def test_it_says_whether_all_is_finite(served: Served) -> None:
    """Of rows measured here and elsewhere, until the next drain."""
    bad = torch.tensor([1.0, torch.nan])
    for tell in (
        lambda: served.lane.take(bad, served.site()),
        lambda: served.lane.take_many([X, bad], [served.site()] * 2, [X, bad]),
        lambda: served.lane.put(stats.summarize(bad, EVERYTHING)),
    ):
        served.lane.take(X, served.site())
        assert served.lane.finite
        tell()
        assert not served.lane.finite
        served.drain()
        assert served.lane.finite


# ---- beside other threads


@pytest.mark.parametrize("size", [1 << 17, 1 << 19])
def test_others_run_while_a_large_tensor_is_measured(served: Served, size: int) -> None:
    """Above 256 KiB Python's lock is given away, above 1 MiB threads help: rows and numbers are the same, whatever another
    thread does with lanes of its own meanwhile."""
    served.lane.threads = 2
    x, stop, beside = torch.randn(size), threading.Event(), Served()
    turns = []

    def others() -> None:
        while not stop.is_set():
            beside.lane.take(x[:200_000], beside.site())
            beside.drain()
            turns.append(1)

    thread = threading.Thread(target=others)
    thread.start()
    try:
        for _ in range(20):
            assert served.lane.take(x, served.site())
            assert served.lane.take_many([x, X], [served.site()] * 2, [x, X])
            assert served.lane.keep([X, x])
            served.lane.take_changes([X, x], [served.site()] * 2)
            assert served.lane.norm([x]) == pytest.approx(x.double().norm().item(), rel=1e-12)
            served.lane.forget()
    finally:
        stop.set()
        thread.join()
    told = served.drain()
    assert turns
    assert told.numbers == list(range(100))
    row, small, none = (stats.summarize(y, EVERYTHING) for y in (x, X, torch.zeros(size)))
    for at, wanted in ((0, row), (1, row), (2, small), (4, none)):
        assert (told.packed[at::5] == wanted).all()


# ---- lists


def test_many_tensors_and_what_their_rows_say(served: Served) -> None:
    """Each has its own packed row, with dtype and shape of what is shown in its place."""
    tensors = [torch.randn(3, 4), torch.ones(5).half(), torch.arange(9), torch.randn(1 << 19)]
    shown = [tensors[0], torch.zeros(70, 70).half(), *tensors[2:]]
    assert served.lane.take_many(tensors, [served.site(str(i)) for i in range(4)], shown)
    told = served.drain()
    assert told.numbers == [0, 1, 2, 3]
    assert torch.equal(told.packed, torch.stack([stats.summarize(x, EVERYTHING) for x in tensors]))
    assert [(h.place.slot, h.shape) for h in told.heads] == [(str(i), tuple(x.shape)) for i, x in enumerate(shown)]


def test_an_error_at_one_of_many_leaves_all(served: Served) -> None:
    """A site that cannot say a head: its error, and no row."""

    class Broken(type(served.site())):  # type: ignore[misc]
        def head(self, x: Tensor, training: bool) -> None:
            raise RuntimeError("no head")

    sites = [served.site(), Broken(served.site().place)]
    with pytest.raises(RuntimeError, match="no head"):
        served.lane.take_many([X, X[0]], sites, [X, X[0]])
    with pytest.raises(RuntimeError, match="no head"):
        served.lane.take(X, sites[1])
    assert not served.drain().heads


EXTREME = [0.0, 1.0, -1.0, 1e-3, 1e300, -1e300, 1e-300, 5e-324, 1.7e308, 65504.0, 6e-8, 3e38, 1e-45]


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("count", [0, 1, 7, 4097, 300_000])
@pytest.mark.parametrize("spec", [Spec(), EVERYTHING], ids=["defaults", "everything"])
def test_changes_are_the_differences(dtype: torch.dtype, count: int, spec: Spec) -> None:
    """Of every element in float32 or wider, extreme magnitudes among them: the row of torch's own difference."""
    served = Served(spec)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    odd = torch.ones(3, dtype=torch.float16)  # what follows it begins where its type may not, if it follows at once
    for before, after in (
        (of_kind("normal", count, dtype), of_kind("normal", count, dtype, seed=1)),
        (of_kind("normal", count, dtype), of_kind("holes", count, dtype, seed=1)),
        (of_kind("tiny", count, dtype), torch.zeros(count, dtype=dtype)),
        (torch.tensor((EXTREME * count)[:count]).to(dtype), torch.tensor((EXTREME[::-1] * count)[:count]).to(dtype)),
    ):
        x, difference = before.clone(), after.to(wide) - before.to(wide)
        assert served.lane.keep([odd, x])
        x.copy_(after)
        served.lane.take_changes([odd, x], [served.site("odd"), served.site("x")])
        told = served.drain()
        wanted = stats.summarize(difference, spec)
        if difference.isnan().any():  # which bits it has is nobody's promise
            wanted[INTEGERS.index("hash")] = told.packed[1, INTEGERS.index("hash")]
        assert torch.equal(told.packed[1], wanted)
        assert not told.packed[0][6:12].any()
        assert [h.dtype for h in told.heads] == ["float16", str(dtype)[6:]]


def test_what_became_another_tensor_has_no_change(served: Served) -> None:
    """Other memory, another size, another dtype: no row; the others have theirs."""
    moved, stays, grown, cast = (nn.Parameter(torch.ones(4)) for _ in range(4))
    assert served.lane.keep([moved, stays, grown, cast])
    moved.data, grown.data, cast.data = torch.ones(4), grown.data[:2], cast.data.view(torch.bfloat16)[:4]
    stays.data.add_(1)
    served.lane.take_changes([moved, stays, grown, cast], [served.site(name) for name in "abcd"])
    told = served.drain()
    assert [h.place.slot for h in told.heads] == ["b"]
    assert told.packed[0, 6:8].view(torch.float64).tolist() == [1, 1]


def test_kept_values_are_told_of_once(served: Served) -> None:
    """A second asking, or one for other tensors, is an error; keeping nothing is nothing."""
    served.lane.keep([X])
    served.lane.take_changes([X], [served.site()])
    with pytest.raises(TypeError, match="tensors that were kept"):
        served.lane.take_changes([X], [served.site()])
    served.lane.keep([X])
    assert not served.lane.keep([X.long()])
    served.lane.take_changes([], [])
    assert len(served.lane) == 1


def test_the_norm_of_lists(served: Served) -> None:
    """That of all elements together; None where one is not finite or no float."""
    tensors = [torch.randn(30, dtype=torch.float64), torch.randn(5, 5).half().double(), torch.zeros(0).double()]
    wanted = torch.cat([x.reshape(-1) for x in tensors]).norm().item()
    assert served.lane.norm([tensors[0], tensors[1].half(), tensors[2]]) == pytest.approx(wanted, rel=1e-12)
    large = torch.randn(1 << 19)
    assert served.lane.norm([large, large]) == pytest.approx(math.sqrt(2) * large.double().norm().item(), rel=1e-12)
    for bad in (torch.nan, torch.inf, -torch.inf):
        assert served.lane.norm([X, torch.tensor([1.0, bad])]) is None
    assert served.lane.norm([X, X.long()]) is None
    assert served.lane.norm([]) == 0


def test_a_lane_of_other_sources_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would read the kernel's records wrongly."""
    monkeypatch.setattr(lane.importlib, "import_module", lambda name: SimpleNamespace(ABI=cpu.ABI - 1))
    assert lane._imported() is None
    monkeypatch.setattr(lane.importlib, "import_module", lambda name: SimpleNamespace(ABI=cpu.ABI))
    assert lane._imported() is not None
