"""Specification of how hooks take the fast lane: what they count, whom they leave alone, where their errors go."""

from __future__ import annotations

import gc
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tracehooks
from tests.capture.test_lane import Functions, Ops
from tracehooks.capture.lane import CLOSED, KEY, RECORDING, WATCHING
from tracehooks.capture.places import Site

from .laning import LEFT, Served, X, needs_native, seated

pytestmark = [
    needs_native,
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
]


@pytest.fixture
def served() -> Served:
    """A lane that serves nobody, and records."""
    made = Served()
    made.lane.recording = made.lane.reached = True
    return made


def nothing_done(served: Served) -> bool:
    """No row, number, count, error or hook."""
    told = served.drain()
    return not (
        told.heads or len(told.packed) or served.calls or served.failures or served.hooks.tables or served.otherwise
    )


# ---- what is taken


def test_each_call_has_its_own_site(served: Served) -> None:
    """By number of the call in the pass and of the pass in the step; a site is asked for once."""
    seat, gate = seated(served)
    for micro in (0, 1, 0, 1):
        served.calls.clear()
        served.lane.micro = micro
        assert [seat.take(X + i) for i in range(3)] == [True] * 3
    assert served.calls == {("m", False): 3}
    assert gate.asked == [("output", call, micro, False) for micro in (0, 1) for call in range(3)]
    assert [(h.place.call, h.place.micro) for h in served.drain().heads] == [
        (call, micro) for micro in (0, 1) * 2 for call in range(3)
    ]


def test_calls_without_an_end_are_not_remembered_without_an_end(served: Served) -> None:
    """After some hundred calls sites are asked for anew, and are the right ones."""
    seat, gate = seated(served)
    for _ in range(1300):
        assert seat.take(X)
    assert [h.place.call for h in served.drain().heads] == list(range(1300))
    assert len(gate.asked) == 1300
    assert sum(type(thing) is Site for thing in gc.get_referents(seat)) <= 512


def test_only_what_is_recorded_of_modules(served: Served) -> None:
    """Outputs without gradients, gradients without outputs; a call counts either way."""
    seat, _ = seated(served)
    served.lane.outputs = False
    y = nn.Parameter(X) * 2
    assert seat.take(y)
    assert not served.drain().heads
    assert KEY in y._backward_hooks
    served.lane.outputs, served.lane.gradients = True, False
    z = nn.Parameter(X) * 2
    assert seat.take(z)
    assert len(served.drain().heads) == 1
    assert z._backward_hooks is None
    assert served.calls == {("m", False): 2}


@pytest.mark.parametrize("mode", [RECORDING, WATCHING])
@pytest.mark.parametrize("like", LEFT)
def test_what_a_seat_leaves(served: Served, like: str, mode: int) -> None:
    """Tensors of another kind: no row, number, count or hook."""
    seat, _ = seated(served, mode)
    other = LEFT[like]()
    assert not seat.take(other)
    assert not served.lane.arrived(served.site(), other)
    for nested in ((X,), [X], {"x": X}, None):
        assert not seat.take(nested)
    assert nothing_done(served)


def test_what_is_closed_takes_nothing(served: Served) -> None:
    """Outside of passes, and gradients of a pass that is not ours or not recorded."""
    seat, _ = seated(served, CLOSED)
    assert not seat.take(X)
    for recording, reached in ((False, True), (True, False)):
        served.lane.recording, served.lane.reached = recording, reached
        assert not served.lane.arrived(served.site(), X)
    assert nothing_done(served)


@pytest.mark.parametrize("mode", [Ops, Functions, lambda: torch.device("cpu")])
def test_nothing_is_taken_while_a_mode_is_active(served: Served, mode: Callable[[], Any]) -> None:
    """Whoever put it there would see what is done."""
    seat, _ = seated(served)
    with mode():
        assert not seat.take(X)
        assert not served.lane.arrived(served.site(), X)
    assert nothing_done(served)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_nothing_is_taken_in_transforms_and_traces(served: Served) -> None:
    """Inside vmap, grad and jit.trace; a module that runs again in a backward pass is Python's, gradients are not."""
    seat, _ = seated(served)

    def within(x: Tensor) -> Tensor:
        assert not seat.take(x)
        return x.sum()

    torch.func.vmap(within)(torch.ones(3, 2))
    torch.func.grad(within)(torch.ones(3))
    torch.jit.trace(within, torch.ones(3), check_trace=False)
    assert nothing_done(served)

    taken = []
    y = nn.Parameter(X) * 2
    y.register_hook(lambda gradient: taken.extend([seat.take(gradient), served.lane.arrived(served.site(), gradient)]))
    (y * y).sum().backward()
    assert taken == [False, True]


def test_a_child_process_takes_nothing(served: Served) -> None:
    """After fork the parent goes on recording, the child does not."""
    seat, _ = seated(served)
    child = os.fork()
    if not child:
        done = seat.take(X) or served.lane.arrived(served.site(), X) or not nothing_done(served)
        own, _ = seated(Served())  # whoever attaches in the child records there
        os._exit(int(done or not own.take(X)))
    assert os.waitpid(child, 0)[1] == 0
    assert seat.take(X)


def test_what_another_thread_holds_is_left(served: Served) -> None:
    """To Python, which waits for it; our own thread may hold it already."""
    seat, _ = seated(served)
    taken: list[bool] = []
    with served.lock:
        thread = threading.Thread(target=lambda: taken.extend([seat.take(X), served.lane.arrived(served.site(), X)]))
        thread.start()
        thread.join()
        assert taken == [False, False]
        assert nothing_done(served)
        assert seat.take(X)
    assert served.lock.acquire(blocking=False)
    served.lock.release()


# ---- the watch


def test_the_watch_counts_what_is_finite_and_leaves_what_is_not(served: Served) -> None:
    """No row is made; what is left is not counted. The root's outputs are Python's."""
    seat, gate = seated(served, WATCHING)
    bad = torch.tensor([1.0, torch.nan])
    good = [X, X, X.long(), torch.zeros(0), X.double(), torch.randn(1 << 17)]
    assert all(map(seat.take, good))
    assert served.calls == {("m", False): len(good)}
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        assert not seat.take(bad.to(dtype))
        assert not seat.take(torch.full((1 << 18,), torch.inf, dtype=dtype))
    assert served.calls == {("m", False): len(good)}
    x = torch.ones(3)
    assert seat.take(x)
    x[0] = torch.inf  # the same tensor, which was looked at
    assert not seat.take(x)
    root, _ = seated(served, WATCHING, path="")
    assert not root.take(X)
    assert not served.drain().heads
    assert not gate.asked


# ---- errors


def test_errors_go_to_the_session_never_to_the_run(served: Served) -> None:
    """Of what is asked of Python: sites, heads, what torch is asked. The lock is free afterwards."""
    seat, gate = seated(served)
    gate.site = lambda *call: 1 / 0
    assert seat.take(X)
    gate.site = lambda *call: (1,)
    assert seat.take(X)
    gate.site = lambda *call: ("no site", None)
    assert seat.take(X)
    broken = served.site()
    type(served.site()).head, kept = (lambda *rest: 1 / 0), type(broken).head
    try:
        assert served.lane.arrived(broken, X)
    finally:
        type(broken).head = kept
    served.calls["m", False] = "no number"
    assert seat.take(X)
    assert [(where, type(error)) for where, error in served.failures] == [
        ("module_returned", ZeroDivisionError),
        ("module_returned", IndexError),
        ("module_returned", TypeError),
        ("gradient_arrived", ZeroDivisionError),
        ("module_returned", TypeError),
    ]
    assert not served.drain().heads
    thread = threading.Thread(target=lambda: served.failures.append(served.lock.acquire(blocking=False)))
    thread.start()
    thread.join()
    assert served.failures[-1] is True


def test_an_interruption_goes_to_the_user(served: Served) -> None:
    """Ctrl-C inside a hook stops the run."""
    seat, gate = seated(served)

    def interrupted(*call: Any) -> None:
        raise KeyboardInterrupt

    gate.site = interrupted
    with pytest.raises(KeyboardInterrupt):
        seat.take(X)
    assert not served.failures


# ---- hooks on tensors


def run_backward(served: Served | None, order: list[str]) -> Tensor:
    """A backward pass through a tensor with the user's hooks before and after ours, and one that is taken off."""
    w = nn.Parameter(torch.ones(3))
    y = w * 2
    y.register_hook(lambda g: order.append("before") or g * 3)
    ours = lambda g: order.append(f"ours {g[0].item():g}")  # noqa: E731
    if served is None:
        y.register_hook(ours)
    else:
        seated(served, hook=ours)[0].take(y)
    gone = y.register_hook(lambda g: order.append("gone"))
    y.register_hook(lambda g: order.append("after") or g * 5)
    gone.remove()
    z = y * 1
    z.sum().backward(retain_graph=True)
    z.sum().backward()
    return w.grad


def test_hooks_are_called_as_if_they_were_registered(served: Served) -> None:
    """In order with the user's own, which still change the gradient, in every backward pass."""
    plain: list[str] = []
    with_lane: list[str] = []
    assert torch.equal(run_backward(None, plain), run_backward(served, with_lane))
    assert plain == with_lane == ["before", "ours 3", "after"] * 2
    assert len(served.otherwise) == 1  # the user's hook was there first


def test_a_tensor_without_hooks_gets_a_table_that_the_user_can_use(served: Served) -> None:
    """The user's hooks come after ours, their handles work, ours can be taken off."""
    order: list[str] = []
    seat, _ = seated(served, hook=lambda g: order.append("ours"))
    y = nn.Parameter(torch.ones(3)) * 2
    assert seat.take(y)
    handle = y.register_hook(lambda g: order.append("after"))
    other = y.register_hook(lambda g: order.append("other"))
    assert list(y._backward_hooks) == [KEY, handle.id, other.id]
    other.remove()
    y.sum().backward(retain_graph=True)
    served.hooks.remove()
    assert list(y._backward_hooks) == [handle.id]
    y.sum().backward()
    assert order == ["ours", "after", "after"]
    assert not served.otherwise


def test_whose_gradients_are_not_hooked(served: Served) -> None:
    """Tensors without gradient, or where none are computed; leaves are left to whoever takes their hooks off again, and so
    is a tensor that two modules return."""
    seat, _ = seated(served)
    leaf, made = nn.Parameter(X.clone()), nn.Parameter(X) * 2
    with torch.no_grad():
        assert seat.take(made)
    assert seat.take(X)
    assert not served.hooks.tables
    for x in (leaf, leaf.detach().requires_grad_()):
        assert seat.take(x) is (type(x) is Tensor)  # a parameter is left altogether
    assert seat.take(made)
    assert seat.take(made)
    assert [x is made for x in served.otherwise] == [False, True]
    assert len(made._backward_hooks) == 2
    served.hooks.remove()
    assert not made._backward_hooks


def test_a_view_made_stale_by_a_change_in_place(served: Served) -> None:
    """Its node is another by now: the hook sees the gradient of what the view is now."""
    seen: list[list[float]] = []
    seat, _ = seated(served, hook=lambda g: seen.append(g.tolist()))
    base = nn.Parameter(torch.ones(4)) * 1
    view = base[:2]
    base.mul_(3)
    assert seat.take(view)
    (view * torch.tensor([1.0, 2.0])).sum().backward()
    assert seen == [[1, 2]]


def test_double_backward(served: Served) -> None:
    """The hook sees the gradients of both passes, as one that was registered."""
    seen: list[list[float]] = [[], []]
    for hook_on, into in ((lambda y, hook: seated(served, hook=hook)[0].take(y), 0), (Tensor.register_hook, 1)):
        w = nn.Parameter(torch.tensor(3.0))
        y = w * w
        hook_on(y, lambda g, into=into: seen[into].append(g.item()))
        (first,) = torch.autograd.grad(y * y, w, create_graph=True)
        first.backward()
    assert seen[0] == seen[1]
    assert len(seen[0]) == 2


def test_two_recordings_of_one_tensor(served: Served) -> None:
    """Each has its hook; taking off one leaves the other, taking off both leaves none."""
    order: list[str] = []
    other = Served()
    y = nn.Parameter(torch.ones(3)) * 2
    for name, one in (("first", served), ("second", other)):
        assert seated(one, hook=lambda g, name=name: order.append(name))[0].take(y)
    y.sum().backward(retain_graph=True)
    served.hooks.remove()
    y.sum().backward(retain_graph=True)
    other.hooks.remove()
    y.sum().backward()
    assert order == ["first", "second", "second"]
    assert not y._backward_hooks


def test_an_output_is_pickled_without_the_hook(tmp_path: Path) -> None:
    """As one without hooks, and without a warning."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    inside: list[Tensor] = []
    model[0].register_forward_hook(lambda module, args, output: inside.append(output))
    with tracehooks.attach(model, tmp_path / "run", quiet=True):
        for _ in range(5):  # the first steps are looked at more closely
            model(torch.ones(2, 3)).sum().backward()
        model(torch.ones(2, 3))
        assert KEY in inside[-1]._backward_hooks
        assert torch.equal(pickle.loads(pickle.dumps(inside[-1])), inside[-1])
    assert not inside[-1]._backward_hooks
