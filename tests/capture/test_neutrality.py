"""attach() never changes a run: everything that a run leaves behind is bit for bit what it is without it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import io
import itertools
import os
import pickle
import re
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import FlopCounterMode

import tracehooks
from tests.models import (
    EVERY,
    OWN,
    Photograph,
    Subject,
    assert_same,
    batch_of,
    exact,
    hooks_of,
    mlp,
    photograph,
    plain_step,
    random_states,
    seed_everything,
    shape_of,
    squares,
    tensors,
    values_of,
)
from tracehooks.core.config import RECORDABLE
from tracehooks.core.errors import AlreadyAttachedError, UnknownNameError

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]

OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "everything": {"record": RECORDABLE, "sketch": True, "histogram": True},
}

Attach = Callable[..., tracehooks.Trace]


def process_state() -> dict[str, object]:
    """What attach() touches in the process: patched functions, global hooks, threads, open files, modes."""
    tables = {
        name: len(table)
        for name, table in vars(torch.nn.modules.module).items()
        if name.startswith("_global_") and hasattr(table, "__len__")
    }
    optimizer = sys.modules["torch.optim.optimizer"]
    return {
        "torch.autograd.backward": torch.autograd.backward,
        "GradScaler.scale": torch.amp.GradScaler.scale,
        "GradScaler.step": torch.amp.GradScaler.step,
        "GradScaler": sorted(vars(torch.amp.GradScaler)),
        "global module hooks": tables,
        "global optimizer hooks": (len(optimizer._global_optimizer_pre_hooks), len(optimizer._global_optimizer_post_hooks)),
        "threads": sorted(thread.name for thread in threading.enumerate() if thread.name != "tqdm_monitor"),
        "open files": _open_files(),
        "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "dtype": torch.get_default_dtype(),
    }  # fmt: skip


def _open_files() -> list[str]:
    """Files below the runs of a test that this process holds open, as far as the system tells."""
    folder = Path("/proc/self/fd")
    found = []
    for name in os.listdir(folder) if folder.exists() else []:
        with contextlib.suppress(FileNotFoundError):  # another thread closed it meanwhile
            found.append(os.readlink(folder / name))
    return sorted(path for path in found if "runs-of-this-test" in path)


@pytest.fixture(autouse=True)
def process_is_as_before() -> Iterator[None]:
    """After every test of this file the process is as it was before it."""
    before = process_state()
    yield
    for _ in range(100):  # a reader of Parquet lets go of its files a little later
        if process_state() == before:
            break
        time.sleep(0.02)
    assert process_state() == before


@pytest.fixture
def attach(tmp_path: Path) -> Iterator[Attach]:
    """attach(model, **options) with a run directory of its own; what the test leaves open is closed after it."""
    traces: list[tracehooks.Trace] = []

    def start(model: nn.Module, **options: Any) -> tracehooks.Trace:
        path = tmp_path / "runs-of-this-test" / str(len(traces))
        traces.append(tracehooks.attach(model, path, quiet=True, **options))
        return traces[-1]

    yield start
    for trace in traces:
        trace.close()


def rows(trace: tracehooks.Trace, **where: object) -> list[dict[str, Any]]:
    """Tensor rows of a closed trace; nothing in it may be unreadable, and the recorder may not have failed."""
    trace.close()
    run = tracehooks.open(trace.path)
    assert not run.problems
    assert [event["message"] for event in run.events().to_pylist() if event["kind"] == "recorder_error"] == []
    names = ["step", "micro", "seq", "phase", "module", "slot", "call", "shape", "recompute"]
    found = run.tensors(names).to_pylist()
    return [row for row in found if all(row[name] == value for name, value in where.items())]


def modules_in(found: list[dict[str, Any]], phase: str) -> set[str]:
    """Modules that have a row of a phase."""
    return {row["module"] for row in found if row["phase"] == phase}


def steps_in(found: list[dict[str, Any]], phase: str = "forward") -> list[int]:
    """Numbers of the steps that have a row of a phase."""
    return sorted({row["step"] for row in found if row["phase"] == phase})


FOUR_ROWS = batch_of(4, 8)


def train(model: nn.Module, steps: int = 1, batch: Callable[[], Any] = FOUR_ROWS) -> list[object]:
    """A few steps of AdamW; what came of it."""
    subject = Subject(model, batch, squares)
    optimizers = subject.optimizers(model)
    seen: list[object] = []
    for _ in range(steps):
        plain_step(subject, optimizers, lambda output, loss: seen.append(exact(loss)))
    return [*seen, values_of(model), random_states()]


@functools.cache
def bare(name: str) -> Photograph:
    """A run without attach."""
    return photograph(EVERY[name])


def both_ways(work: Callable[[nn.Module], object], attach: Attach, make: Callable[[], nn.Module] = mlp) -> list[Any]:
    """What ``work`` returns for a model without and with attach; they must be equal. The rows of the trace."""
    results = []
    for watched in (False, True):
        seed_everything(3)
        model = make()
        trace = attach(model) if watched else None
        results.append((work(model), random_states()))
        if trace is not None:
            found = rows(trace)
            assert hooks_of(model) == {}
    assert results[0] == results[1]
    return found


# ---- the run is the same


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", EVERY)
def test_nothing_changes(name: str, options: str, attach: Attach) -> None:
    """Outputs, losses, graphs, gradients, parameters, buffers, optimizers, random states and the model's attributes are
    bit for bit the same with attach, in training and in evaluation; no hook is left and the model dies; and the trace
    did record."""
    traces: list[tracehooks.Trace] = []

    def watch(model: nn.Module) -> tracehooks.Trace:
        traces.append(attach(model, **OPTIONS[options]))
        return traces[0]

    watched = photograph(EVERY[name], watch)
    assert_same(bare(name), watched)
    assert watched["the model dies"]
    found = rows(traces[0])
    phases = {row["phase"] for row in found}
    expected = {"forward"} if name == "methods_only" else {"forward", "input"}
    if any(key.startswith("step 0") for key in watched):
        expected |= {"backward"} if name == "by_hand" else {"backward", "gradient", "parameter", "update"}
        assert steps_in(found, "backward")[:3] == [0, 1, 2]
    assert expected <= phases
    if options == "everything" and "gradient" in expected:
        assert "optimizer" in phases


class Poison(torch.autograd.Function):
    """Passes values on, and not a number back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * float("nan")


def poisoned(name: str, where: str) -> Subject:
    """A model whose second training batch brings a value that is not finite: in its input, in the loss, in backward."""
    subject = OWN[name]()
    calls = {"input": itertools.count(), "loss": itertools.count()}

    def inputs() -> Any:
        batch = subject.inputs()
        if where == "input" and next(calls["input"]) == 2:
            batch[0].view(-1)[0] = float("nan")
        return batch

    def loss(output: Any) -> Tensor:
        value = subject.loss(output)
        if next(calls["loss"]) == 1:
            value = {"loss": value.log().abs().exp() * float("inf"), "backward": Poison.apply(value)}.get(where, value)
            value = (value - value.detach()).abs().sqrt() if where == "square root" else value
        return value

    return dataclasses.replace(subject, inputs=inputs, loss=loss)


@pytest.mark.parametrize("where", ["input", "loss", "backward", "square root"])
@pytest.mark.parametrize(
    "name", ["mlp", "cnn", "augmented", "codebook", "accumulation", "scaler", "checkpoint_non_reentrant", "sparse"]
)
def test_a_run_that_goes_wrong_goes_wrong_the_same_way(name: str, where: str, attach: Attach) -> None:
    """Finding out where a value that is not finite was born leaves random states, buffers, gradients and all that comes
    after bit for bit as they are without attach."""
    if name == "sparse" and where == "input":
        pytest.skip("its input is token ids")
    traces: list[tracehooks.Trace] = []
    watched = photograph(
        functools.partial(poisoned, name, where), lambda model: traces.append(attach(model)) or traces[0]
    )
    assert_same(photograph(functools.partial(poisoned, name, where)), watched)
    assert rows(traces[0])
    if name != "scaler" or where == "input":
        assert traces[0].first_nonfinite is not None
        assert traces[0].first_nonfinite.step == (0 if name == "accumulation" else 1)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_loss_may_be_compiled_between_forward_and_backward(attach: Attach) -> None:
    """Loss code that is compiled, or transformed by torch.func, while it runs for the first time is compiled and
    transformed as without attach."""
    from torch._dynamo.backends.debugging import aot_eager

    def work(model: nn.Module) -> object:
        sizes: list[int] = []

        def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            sizes.append(len(graph.graph.nodes))
            return aot_eager(graph, inputs)

        torch._dynamo.reset()
        try:
            loss_of = torch.compile(lambda y: y.square().mean().exp(), backend=backend, fullgraph=True)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                output = model(torch.randn(4, 8))
                slopes = torch.func.vmap(torch.func.grad(lambda y: y.sin().sum()))(output.detach())
                (loss_of(output) + (slopes * output).sum()).backward()
                optimizer.step()
            return sizes, values_of(model)
        finally:
            torch._dynamo.reset()

    assert steps_in(both_ways(work, attach), "update") == [0, 1]


@pytest.mark.parametrize("then", ["inference mode", "another thread", "close", "an exception"])
def test_a_pass_without_backward_leaves_torch_as_it_was(then: str, attach: Attach) -> None:
    """After a forward pass with gradients that no backward follows on this thread, whatever comes next, tensors can be
    made and no mode is left. (In a thread of its own: what may break is the state of a thread.)"""
    depths: list[int] = []

    def work() -> None:
        model = mlp()
        trace = attach(model)
        loss = squares(model(torch.randn(2, 8)))
        if then == "inference mode":
            with torch.inference_mode():
                model(torch.randn(2, 8))
        elif then == "another thread":
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join(60)
        elif then == "an exception":
            with contextlib.suppress(ValueError), torch.inference_mode():
                model(torch.randn(2, 8))
                raise ValueError
        trace.close()
        torch.ones(2).add(1)
        depths.append(torch._C._len_torch_dispatch_stack())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert depths == [0]


@pytest.mark.parametrize("leave", ["before backward", "after backward", "after the next pass"])
def test_a_mode_entered_between_forward_and_backward(leave: str, attach: Attach) -> None:
    """A dispatch mode that the user enters after the forward pass sees the same ops, whenever he leaves it, and the
    stack of modes is then as he left it."""

    def work(model: nn.Module) -> object:
        seen, depths = [], []
        for _ in range(2):
            loss = squares(model(torch.randn(4, 8)))
            with Ops() as mode:
                loss = loss.exp()
                if leave != "before backward":
                    loss.backward()
                if leave == "after the next pass":
                    loss = squares(model(torch.randn(4, 8)))
            if leave == "before backward":
                loss.backward()
            depths.append(torch._C._len_torch_dispatch_stack())
            seen.append(mode.seen)
        return seen, depths, values_of(model)

    both_ways(work, attach)


def test_the_fused_encoder_path_is_still_taken(attach: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    """nn.TransformerEncoder in eval mode with a padding mask runs fused with attach as often as without, and its layers
    are recorded all the same."""
    calls: list[int] = []
    original = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(
        torch, "_transformer_encoder_layer_fwd", lambda *args, **kwargs: (calls.append(1), original(*args, **kwargs))[1]
    )

    def work(model: nn.Module) -> object:
        calls.clear()
        padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
        with torch.no_grad():
            output = model.eval()(torch.randn(2, 5, 8), src_key_padding_mask=padding)
        return exact(output), len(calls)

    found = both_ways(work, attach, lambda: OWN["encoder_fast_path"]().model)
    assert len(calls) == 2
    assert {"", "layers.0", "layers.1"} <= modules_in(found, "forward")


# ---- the comparison can fail


class Sabotage:
    """Attaches, and does one thing more than it should."""

    def __init__(self, attach: Attach, harm: Callable[[nn.Module], Any]) -> None:
        self.attach, self.harm = attach, harm

    @contextlib.contextmanager
    def __call__(self, model: nn.Module) -> Iterator[None]:
        with self.attach(model):
            undo = self.harm(model)
            yield
            if undo is not None:
                undo()


def draw_torch(model: nn.Module) -> None:
    torch.rand(())


def draw_numpy_in_forward(model: nn.Module) -> Callable[[], None]:
    import numpy as np

    return model[0].register_forward_hook(lambda *_: (np.random.rand(), None)[1]).remove


def full_backward_hook(model: nn.Module) -> Callable[[], None]:
    return model[3].register_full_backward_hook(lambda *_: None).remove


def attribute(model: nn.Module) -> Callable[[], None]:
    model[1].mark = 1
    return lambda: delattr(model[1], "mark")


def hook_left(model: nn.Module) -> None:
    model[3].register_forward_hook(lambda *_: None)


def parameter_hook_left(model: nn.Module) -> None:
    model[3].bias.register_hook(lambda gradient: None)


def last_bit_of_gradient(model: nn.Module) -> Callable[[], None]:
    def nudge(gradient: Tensor) -> Tensor:
        return torch.nextafter(gradient, torch.full_like(gradient, 9.0))

    return model[3].bias.register_hook(nudge).remove


def sign_of_a_zero(model: nn.Module) -> Callable[[], None]:
    def flip(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return torch.where(output == 0, -output, output)

    return model[2].register_forward_hook(flip).remove


def in_place_without_effect(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].weight.mul_(1)


def identity_in_the_graph(model: nn.Module) -> Callable[[], None]:
    return model[3].register_forward_hook(lambda module, args, output: output.view_as(output)).remove


def frozen_parameter(model: nn.Module) -> Callable[[], None]:
    model[0].bias.requires_grad_(False)
    return lambda: None


IMMORTAL: list[nn.Module] = []


@pytest.mark.parametrize(
    ("harm", "seen"),
    [
        (draw_torch, "random states"),
        (draw_numpy_in_forward, "random states"),
        (full_backward_hook, "graph"),
        (attribute, "while attached: module 1"),
        (hook_left, "at the end: hooks"),
        (parameter_hook_left, "at the end: hooks"),
        (last_bit_of_gradient, "gradient of 3.bias"),
        (sign_of_a_zero, "graph"),
        (in_place_without_effect, "version of 0.weight"),
        (identity_in_the_graph, "graph"),
        (frozen_parameter, "gradient of 0.bias|graph"),
        (IMMORTAL.append, "the model dies"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_comparison_notices(harm: Callable[[nn.Module], Any], seen: str, attach: Attach) -> None:
    """A run that differs in any one of these things does not pass for the same."""
    same = photograph(OWN["mlp"], attach)
    assert_same(bare("mlp"), same)
    spoilt = photograph(OWN["mlp"], Sabotage(attach, harm))
    IMMORTAL.clear()
    differing = "\n".join(name for name in same if same[name] != spoilt.get(name))
    with pytest.raises(AssertionError, match=r"without attach|with attach"):
        assert_same(bare("mlp"), spoilt)
    assert any(part in differing for part in seen.split("|")), differing


def test_exact_tells_bits_apart() -> None:
    """Tensors that compare equal but differ in their bits, and NaNs with the same bits, are told as such."""
    nan = torch.tensor([float("nan")])
    assert exact(nan) == exact(nan.clone())
    assert exact(torch.tensor([0.0])) != exact(torch.tensor([-0.0]))
    assert exact(torch.ones(2, 3)) != exact(torch.ones(3, 2).t())
    assert exact(torch.ones(2)) != exact(torch.ones(2, dtype=torch.float64))
    assert exact(torch.ones(2).to_sparse()) == exact(torch.ones(2).to_sparse())


# ---- what close() leaves


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_traces_closed_in_any_order_restore_the_process(order: tuple[int, ...], attach: Attach) -> None:
    """With several traces torch is patched until the last of them closes, whichever that is, and never after."""
    before = process_state()
    models = [mlp() for _ in range(3)]
    traces = [attach(model) for model in models]
    for i in order[:-1]:
        traces[i].close()
        assert hooks_of(models[i]) == {}
        assert torch.autograd.backward is not before["torch.autograd.backward"]
    traces[order[-1]].close()
    assert process_state() == before
    for trace in traces:
        trace.close()
    assert process_state() == before


def test_an_exception_in_the_block_restores_everything(attach: Attach) -> None:
    """Leaving the with block by an exception lets it through and leaves not one hook."""
    before, model = process_state(), mlp()
    shape = shape_of(model)

    def fails() -> None:
        with attach(model):
            model(torch.randn(2, 8)).sum().backward()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert process_state() == before
    assert hooks_of(model) == {}
    assert shape_of(model) == shape


def test_a_refused_attach_leaves_nothing(attach: Attach) -> None:
    """attach() that raises, for an option or a pattern, leaves model and process as they were."""
    before, model = process_state(), mlp()
    with pytest.raises(UnknownNameError):
        attach(model, modules="nothing.like.this")
    with pytest.raises(UnknownNameError):
        attach(model, evrey=2)
    assert process_state() == before
    assert hooks_of(model) == {}


def test_attaching_twice_names_the_trace(attach: Attach) -> None:
    """A second attach is refused and says where the first one records; the first goes on; after close it is allowed."""
    model = mlp()
    first = attach(model)
    with pytest.raises(AlreadyAttachedError) as caught:
        attach(model)
    assert str(first.path) in str(caught.value)
    train(model)
    assert steps_in(rows(first)) == [0]
    second = attach(model)
    train(model)
    assert steps_in(rows(second)) == [0]


def test_a_trace_that_nobody_closes_dies_with_its_model(tmp_path: Path) -> None:
    """When model and trace are forgotten without close() both are collected and the process is as it was."""
    before, model = process_state(), mlp()
    tracehooks.attach(model, tmp_path / "runs-of-this-test", quiet=True)
    train(model)
    death = weakref.ref(model)
    del model
    gc.collect()
    assert death() is None
    assert process_state() == before


def test_outputs_are_freed_as_soon_as_without(attach: Attach) -> None:
    """The recorder keeps no activation, gradient or loss alive: what the user drops is freed at once."""
    model = mlp()
    deaths = []
    model[1].register_forward_hook(lambda module, args, output: deaths.append(weakref.ref(output)))
    trace = attach(model, **OPTIONS["everything"])
    gc.collect()
    gc.disable()
    try:
        output = model(torch.randn(4, 8))
        loss = squares(output)
        loss.backward()
        deaths += [weakref.ref(output), weakref.ref(loss)]
        del output, loss
        assert [death() for death in deaths] == [None] * 3
        with torch.no_grad():
            deaths = [weakref.ref(model(torch.randn(4, 8)))]
        assert deaths[-1]() is None
    finally:
        gc.enable()
    trace.close()


def test_passes_without_backward_pile_up_nothing(attach: Attach) -> None:
    """A model that only runs forward with gradients enabled, for as long as it likes, leaves behind no more than a
    bounded number of objects."""
    model = OWN["leaf_output"]().model
    trace = attach(model)

    def held(passes: int) -> int:
        for _ in range(passes):
            model(torch.randn(2, 8))
        trace.flush()
        gc.collect()
        return len(gc.get_objects())

    before = held(600)
    assert held(3000) - before < 10_000
    assert len(model.prompt.weight._backward_hooks or ()) < 10


def test_a_wrapper_of_somebody_elses_survives(attach: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who wraps torch.autograd.backward while a trace is open keeps his wrapper after close, and it works."""
    model, calls = mlp(), []
    trace = attach(model)
    ours = torch.autograd.backward
    original = ours.__wrapped__

    def theirs(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        ours(*args, **kwargs)

    torch.autograd.backward = theirs
    try:
        trace.close()
        assert torch.autograd.backward is theirs
        train(model)
        second = attach(model)
        train(model, 2)
        assert steps_in(rows(second), "gradient") == [0, 1]
        assert torch.autograd.backward is theirs
        assert len(calls) == 3
    finally:
        torch.autograd.backward = original


# ---- copies


def copy_deep(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def copy_pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def copy_saved(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def without_versions(values: dict[str, object]) -> dict[str, object]:
    """A copy counts its changes in place anew."""
    return {name: value for name, value in values.items() if not name.startswith("version")}


COPIED = [
    "mlp", "cnn", "recurrent", "encoder_fast_path", "tied_and_repeated", "structures", "codebook", "lazy", "bfloat16",
    "sparse", "complex", "checkpoint_non_reentrant",
]  # fmt: skip


@pytest.mark.parametrize("copied", [copy_deep, copy_pickled, copy_saved])
@pytest.mark.parametrize("name", COPIED)
def test_a_copy_is_whole_and_silent(name: str, copied: Callable[[nn.Module], nn.Module], attach: Attach) -> None:
    """A model is copied, pickled and saved while attached; the copy holds nothing of the recording, computes and trains
    as the original does, and adds no row to its trace."""
    seed_everything(0)
    subject = EVERY[name]()
    subject.call(subject.model, subject.inputs())
    trace = attach(subject.model, **OPTIONS["everything"])
    twin = copied(subject.model)
    assert without_versions(values_of(twin)) == without_versions(values_of(subject.model))
    assert shape_of(twin) == shape_of(subject.model)
    losses = []
    for model in (twin, subject.model):
        seed_everything(1)
        subject.model.zero_grad()
        output = subject.call(model, subject.inputs())
        loss = subject.loss(output)
        loss.backward()
        losses.append(exact(loss))
    assert losses[0] == losses[1]
    twin_again = copied(twin)
    del output, loss
    trace.flush()
    for model in (twin, twin_again):
        with torch.no_grad():
            subject.call(model.eval(), subject.inputs())
    trace.close()
    assert {row["micro"] for row in rows(trace)} == {0}
    death = weakref.ref(subject.model)
    del subject, model
    gc.collect()
    assert death() is None


def test_an_average_of_the_model_is_silent(attach: Attach) -> None:
    """An AveragedModel, which copies the model, is updated and evaluated while attached and adds no row."""

    def work(model: nn.Module) -> object:
        average = torch.optim.swa_utils.AveragedModel(model)
        done = train(model, 2)
        average.update_parameters(model)
        with torch.no_grad():
            return done, exact(average(torch.ones(2, 8)))

    found = both_ways(work, attach)
    assert {(row["step"], row["micro"]) for row in found if row["phase"] == "forward"} == {(0, 0), (1, 0)}


def test_a_saved_model_loads_where_tracehooks_is_not(attach: Attach, tmp_path: Path) -> None:
    """A model saved whole while attached is loaded, run and saved again by a process that has no tracehooks."""
    seed_everything(0)
    model = nn.Sequential(OWN["encoder_fast_path"]().model, nn.Linear(8, 2)).eval()
    trace = attach(model, **OPTIONS["everything"])
    torch.save(model, tmp_path / "model.pt")
    x = torch.randn(2, 5, 8)
    torch.save((x, model(x).detach()), tmp_path / "io.pt")
    trace.close()
    script = (
        "import sys; sys.modules['tracehooks'] = None\n"
        "import torch; torch.set_num_threads(1)\n"
        "model = torch.load('model.pt', weights_only=False)\n"
        "x, y = torch.load('io.pt')\n"
        "assert torch.equal(model(x), y)\n"
        "torch.save(model, 'again.pt'); torch.load('again.pt', weights_only=False)(x).sum().backward()\n"
        "assert not [name for name in sys.modules if name.startswith('tracehooks.')]\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


def test_outputs_can_be_saved(attach: Attach) -> None:
    """An output with a graph, which carries a hook of ours, is pickled without a warning, as it is without attach."""

    def work(model: nn.Module) -> object:
        output = model(torch.randn(4, 8))
        buffer = io.BytesIO()
        torch.save(output, buffer)
        buffer.seek(0)
        return exact(torch.load(buffer))

    both_ways(work, attach)


def test_state_dicts_are_loaded_while_attached(attach: Attach) -> None:
    """load_state_dict, also with assign=True, does what it does without, and training goes on recorded."""

    def work(model: nn.Module) -> object:
        seen = [train(model)]
        state = {name: value.clone() * 2 for name, value in model.state_dict().items()}
        seen.append(str(model.load_state_dict(state)))
        seen.append(train(model))
        seen.append(str(model.load_state_dict(state, assign=True)))
        model.requires_grad_(True)
        return seen, train(model)

    found = both_ways(work, attach)
    assert steps_in(found, "gradient") == [0, 1, 2]
    assert steps_in(found, "update") == [0, 1, 2]


# ---- modes of torch that the run may be in


def test_attach_inside_no_grad(attach: Attach) -> None:
    """It does not matter whether gradients are enabled when attach() is called."""

    def quietly(model: nn.Module) -> tracehooks.Trace:
        with torch.no_grad():
            return attach(model)

    found = both_ways(lambda model: train(model, 2), quietly)
    assert steps_in(found, "backward") == [0, 1]
    assert steps_in(found, "update") == [0, 1]


def test_attach_inside_inference_mode(attach: Attach) -> None:
    """Nor whether it is called inside inference mode, which would make every tensor it creates unusable later."""

    def quietly(model: nn.Module) -> tracehooks.Trace:
        with torch.inference_mode():
            return attach(model, **OPTIONS["everything"])

    found = both_ways(lambda model: train(model, 2), quietly)
    assert steps_in(found, "update") == [0, 1]


def test_evaluation_in_inference_mode_between_steps(attach: Attach) -> None:
    """Passes in inference mode between training steps return inference tensors as without, and belong to the step made
    before."""

    def work(model: nn.Module) -> object:
        seen = []
        for _ in range(2):
            seen.append(train(model.train()))
            with torch.inference_mode():
                output = model.eval()(torch.ones(2, 8))
            seen.append((exact(output.clone()), output.is_inference()))
        return seen

    found = both_ways(work, attach)
    passes = {(row["step"], row["micro"]) for row in found if row["phase"] == "forward"}
    assert passes == {(0, 0), (0, 1), (1, 0), (1, 1)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_default_dtype(dtype: torch.dtype, attach: Attach) -> None:
    """The default dtype changes nothing of what is recorded, and the recorder changes nothing of it."""
    torch.set_default_dtype(dtype)
    try:
        found = both_ways(lambda model: train(model, 2, batch_of(4, 8, dtype=dtype)), attach)
    finally:
        torch.set_default_dtype(torch.float32)
    assert steps_in(found, "update") == [0, 1]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_default_device(device: str, attach: Attach) -> None:
    """A default device other than the model's does not lead the recorder's own tensors astray."""
    batches = [torch.randint(0, 4000, (2, 6)) for _ in range(3)]

    def work(model: nn.Module) -> object:
        feed = iter(batches)
        torch.set_default_device(device)
        try:
            return train(model, 3, lambda: (next(feed),))
        finally:
            torch.set_default_device(None)

    found = both_ways(work, functools.partial(attach, **OPTIONS["everything"]), lambda: OWN["large_and_empty"]().model)
    assert steps_in(found, "update") == [0, 1, 2]
    assert {row["slot"] for row in found if row["phase"] == "update"} == {"weight", "empty"}


@pytest.mark.parametrize("name", ["cnn", "sparse", "tied_and_repeated"])
def test_deterministic_algorithms(name: str, attach: Attach) -> None:
    """With deterministic algorithms demanded the recorder uses none that is not."""
    torch.use_deterministic_algorithms(True)
    try:
        traces = []
        watched = photograph(
            OWN[name], lambda model: traces.append(attach(model, **OPTIONS["everything"])) or traces[0]
        )
        assert_same(photograph(OWN[name]), watched)
        assert rows(traces[0])
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", ["cnn", "inplace_residual", "gradient_penalty", "checkpoint_non_reentrant"])
def test_anomaly_detection(name: str, attach: Attach) -> None:
    """Under anomaly detection a run is the same and no error is found that is not there."""
    with pytest.warns(UserWarning, match="Anomaly Detection has been enabled"):
        mode = torch.autograd.detect_anomaly()
    with mode:
        traces = []
        watched = photograph(
            OWN[name], lambda model: traces.append(attach(model, **OPTIONS["everything"])) or traces[0]
        )
        assert_same(photograph(OWN[name]), watched)
    assert rows(traces[0])


class Ops(TorchDispatchMode):
    """Writes down every op it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Writes down every function of torch that is called under it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "name", ["mlp", "large_and_empty", "sparse", "scaler", "scaler_fused", "transformer", "attention"]
)
@pytest.mark.parametrize("kind", [Ops, Functions])
def test_a_mode_of_the_users_sees_only_his_ops(kind: type[Ops] | type[Functions], name: str, attach: Attach) -> None:
    """What a dispatch or function mode around whole training steps sees is the same with attach: not one op of the
    recorder's."""
    build = OWN[name]
    seen = []
    for watched in (False, True):
        seed_everything(0)
        subject = build()
        trace = attach(subject.model, **OPTIONS["everything"]) if watched else None
        optimizers = subject.optimizers(subject.model)
        with kind() as mode:
            for _ in range(2):
                subject.step(subject, optimizers, lambda output, loss: None)
            with torch.no_grad():
                subject.call(subject.model, subject.inputs())
        seen.append(mode.seen)
    assert rows(trace, phase="update")
    extra = [op for op in seen[1] if op not in set(seen[0])]
    assert not extra
    assert seen[0] == seen[1]


def test_flops_are_counted_the_same(attach: Attach) -> None:
    """FlopCounterMode counts the same, module by module, and its trace is complete."""

    def work(model: nn.Module) -> object:
        with FlopCounterMode(display=False) as counter:
            train(model, 2, batch_of(4, 3, 8, 8))
        return {str(path): dict(flops) for path, flops in counter.get_flop_counts().items()}, counter.get_total_flops()

    found = both_ways(work, attach, lambda: OWN["cnn"]().model)
    assert steps_in(found, "update") == [0, 1]
    assert len(modules_in(found, "forward")) == 12


def test_saved_tensor_hooks_are_called_as_often(attach: Attach) -> None:
    """Hooks for saved tensors see what the model saves and nothing of the recorder's."""

    def work(model: nn.Module) -> object:
        seen: list[object] = []

        def pack(x: Tensor) -> Tensor:
            seen.append(("pack", tuple(x.shape)))
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: (seen.append("unpack"), x)[1]):
            return train(model, 2), seen

    both_ways(work, attach)


class Logged(torch.Tensor):
    """A tensor that writes down what is done with it."""

    seen: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs)


def test_a_tensor_subclass_sees_only_the_users_calls(attach: Attach) -> None:
    """Tensors of a class with __torch_function__ pass through recorded modules without one call of the recorder's."""

    def work(model: nn.Module) -> object:
        Logged.seen.clear()
        output = model(torch.randn(4, 8).as_subclass(Logged))
        loss = output.square().sum()
        loss.backward()
        return type(output).__name__, list(Logged.seen)

    found = both_ways(work, attach)
    assert len(modules_in(found, "forward")) == 5


def test_meta_modules_are_skipped(attach: Attach) -> None:
    """A model on the meta device runs as without attach; it has no values to record, and nothing fails."""

    def make() -> nn.Module:
        with torch.device("meta"):
            return mlp()

    def work(model: nn.Module) -> object:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            loss = model(torch.empty(4, 8, device="meta")).sum()
            loss.backward()
            optimizer.step()
        return loss.shape, loss.device.type

    both_ways(work, attach, make)


@pytest.mark.parametrize("inside", [True, False])
def test_fake_tensors_are_skipped(inside: bool, attach: Attach) -> None:
    """Under FakeTensorMode, with attach before or inside it, a training step runs as without; then the real model is
    trained, and recorded from its first step on."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = mlp()
    seed_everything(0)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = mlp()
        trace = attach(fake) if inside else None
        if trace is None:
            trace = attach(model)
            model(torch.randn(4, 8)).sum().backward()
        else:
            optimizer = torch.optim.AdamW(fake.parameters())
            for _ in range(2):
                loss = fake(torch.randn(4, 8)).sum()
                loss.backward()
                optimizer.step()
            assert type(loss).__name__ == "FakeTensor"
    if inside:
        assert rows(trace, phase="forward") == []
    else:
        model.zero_grad()
        train(model, 2)
        assert steps_in(rows(trace), "gradient") == [0, 1]


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, p, x: torch.func.grad(f)(p, x[0]),
        lambda f, p, x: torch.func.grad_and_value(f)(p, x[0]),
        lambda f, p, x: torch.func.vmap(torch.func.grad(f), (None, 0), randomness="different")(p, x),
        lambda f, p, x: torch.func.jacrev(f)(p, x[0]),
        lambda f, p, x: torch.func.jvp(lambda x: f(p, x), (x[0],), (torch.ones_like(x[0]),)),
        lambda f, p, x: torch.func.jacfwd(f, 1, randomness="same")(p, x[0]),
        lambda f, p, x: torch.func.hessian(f, 1)(p, x[0]),
    ],
    ids=["grad", "grad_and_value", "vmap_of_grad", "jacrev", "jvp", "jacfwd", "hessian"],
)
def test_transforms_of_torch_func(transform: Callable[..., Any], attach: Attach) -> None:
    """grad, vmap, jvp and what is made of them give the same through functional_call, and training afterwards is
    recorded as if they had not happened."""

    def work(model: nn.Module) -> object:
        model.eval()

        def loss_of(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
            return torch.func.functional_call(model, parameters, (x.unsqueeze(0),)).square().sum()

        parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
        result = transform(loss_of, parameters, torch.randn(3, 8))
        return [exact(tensor) for _, tensor in tensors(result)], train(model, 2)

    found = both_ways(work, attach)
    assert len(steps_in(found, "gradient")) == 2
    assert len(steps_in(found, "update")) == 2


def test_forward_mode_gradients(attach: Attach) -> None:
    """Dual numbers pass through recorded modules with their tangents."""

    def work(model: nn.Module) -> object:
        model.eval()
        with torch.autograd.forward_ad.dual_level():
            x = torch.autograd.forward_ad.make_dual(torch.randn(4, 8), torch.ones(4, 8))
            output = torch.autograd.forward_ad.unpack_dual(model(x))
            return exact(output.primal), exact(output.tangent)

    assert len(modules_in(both_ways(work, attach), "forward")) == 5


def test_functional_call_leaves_the_recording_as_it_is(attach: Attach) -> None:
    """Parameters lent by functional_call for one pass are not taken for a change of the model."""
    model = mlp()
    trace = attach(model)
    lent = {name: parameter.detach() * 2 for name, parameter in model.named_parameters()}
    with torch.no_grad():
        torch.func.functional_call(model, lent, (torch.randn(2, 8),))
    train(model, 2)
    assert steps_in(rows(trace), "gradient") == [0, 1]
    kinds = [event["kind"] for event in tracehooks.open(trace.path).events().to_pylist()]
    assert "parameters_replaced" not in kinds


# ---- compiling, tracing, exporting


def graphs_of(model: nn.Module, x: Tensor) -> tuple[list[int], object]:
    """Sizes of the graphs that torch.compile makes of a model, and what two steps of it give."""
    from torch._dynamo.backends.debugging import aot_eager

    sizes: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        sizes.append(len(graph.graph.nodes))
        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    try:
        for _ in range(2):
            loss = compiled(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(exact(loss))
        return sizes, (seen, values_of(model))
    finally:
        torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
@pytest.mark.parametrize("compiled_before", [False, True])
def test_a_compiled_model_is_one_graph(compiled_before: bool, attach: Attach) -> None:
    """torch.compile(fullgraph=True) of an attached model makes the same graphs as of one that is not, and the same
    numbers come out."""
    x = torch.randn(4, 8)

    def make() -> nn.Module:
        model = mlp().eval()
        if compiled_before:
            graphs_of(model, x)
        return model

    both_ways(lambda model: graphs_of(model, x), attach, make)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
@pytest.mark.parametrize("how", ["export", "fx", "jit_trace"])
def test_graphs_taken_of_an_attached_model(how: str, attach: Attach) -> None:
    """torch.export, torch.fx and torch.jit.trace take the same graph of an attached model as of one that is not."""

    def work(model: nn.Module) -> object:
        model.eval()
        x = torch.randn(4, 8)
        if how == "export":
            return str(torch.export.export(model, (x,)).graph)
        if how == "fx":
            return torch.fx.symbolic_trace(model).code
        return re.sub(r"\.___torch_mangle_\d+", "", str(torch.jit.trace(model, x).inlined_graph))

    both_ways(work, attach)


# ---- exceptions in the run


class Fails(nn.Module):
    """Raises what it is told to when it is told to, forward or backward."""

    class Refuse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise ArithmeticError("backward")

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 2)
        self.fails: type[BaseException] | str | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if isinstance(self.fails, type):
            raise self.fails("forward")
        if self.fails == "backward":
            x = self.Refuse.apply(x)
        return self.b(x)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, "backward"])
def test_training_goes_on_after_an_error(error: type[BaseException] | str, attach: Attach) -> None:
    """An error in forward or backward comes out as it is, and the steps made after it have the right numbers."""

    def work(model: nn.Module) -> object:
        optimizer = torch.optim.AdamW(model.parameters())
        seen = []
        for i in range(4):
            model.fails = error if i == 1 else None
            optimizer.zero_grad()
            try:
                loss = model(torch.randn(4, 8)).square().mean()
                loss.backward()
            except (Exception, KeyboardInterrupt, SystemExit) as caught:
                seen.append(repr(caught))
                continue
            optimizer.step()
            seen.append(exact(loss))
        model.fails = None
        return seen, values_of(model)

    found = both_ways(work, attach, Fails)
    assert steps_in(found, "gradient") == [0, 1, 2]
    assert steps_in(found, "update") == [0, 1, 2]
    assert steps_in(found) == [0, 1, 2]
    assert {row["micro"] for row in found if row["phase"] == "gradient"} <= {0, 1}


class Stubborn(torch.optim.SGD):
    """Its step fails when told to, before or after it has moved the parameters."""

    fails = False

    def step(self, closure: Any = None) -> None:
        if self.fails:
            raise MemoryError("no room for the state")
        super().step(closure)


@pytest.mark.parametrize("again", ["same", "another"])
def test_training_goes_on_after_an_optimizer_failed(again: str, attach: Attach) -> None:
    """A step that raised is no step; the next one, of the same optimizer or of one put in its place, is recorded under
    the next number."""

    def work(model: nn.Module) -> object:
        optimizer: torch.optim.Optimizer = Stubborn(model.parameters(), lr=0.1)
        kept = [optimizer]
        seen = []
        for i in range(4):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            if i == 1:
                kept[0].fails = True
                with pytest.raises(MemoryError):
                    optimizer.step()
                kept[0].fails = False
                if again == "another":
                    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                    kept.append(optimizer)
            else:
                optimizer.step()
            seen.append(exact(loss))
        return seen, values_of(model)

    found = both_ways(work, attach, Fails)
    assert steps_in(found, "update") == [0, 1, 2]
    assert steps_in(found) == [0, 1, 2]


def test_an_error_that_the_model_catches_itself(attach: Attach) -> None:
    """A module that fails inside a model that tries another way does not confuse the recording."""

    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Fails(), nn.Linear(8, 2)
            self.first.fails = ValueError

        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.first(x)
            except ValueError:
                return self.second(x)

    found = both_ways(lambda model: train(model, 3), attach, Tries)
    assert steps_in(found, "update") == [0, 1, 2]


def test_the_scaler_fails(attach: Attach) -> None:
    """A GradScaler that refuses to step raises what it raises without attach, and the loop goes on."""

    def work(model: nn.Module) -> object:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        with pytest.raises(AssertionError) as caught:
            scaler.step(optimizer)
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(4, 8)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        return str(caught.value), values_of(model)

    found = both_ways(work, attach)
    assert steps_in(found, "update") == [0, 1]


class Touchy:
    """No tensor is in it, and it does not like to be asked."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"asked for {name}")

    def __iter__(self) -> Any:
        raise RuntimeError("iterated")

    def __len__(self) -> int:
        raise RuntimeError("asked for its length")

    def __bool__(self) -> bool:
        raise RuntimeError("asked for its truth")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")

    __hash__ = None  # type: ignore[assignment]


def test_arguments_that_are_no_tensors_are_left_alone(attach: Attach) -> None:
    """Objects among arguments and outputs that hold no tensor are not asked for anything."""

    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor, thing: Any, **more: Any) -> tuple[Any, ...]:
            return self.inner(x, thing, attn_mask=None)

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, thing: Any, attn_mask: Any) -> tuple[Any, ...]:
            return self.linear(x), thing

    def work(model: nn.Module) -> object:
        output, thing = model(torch.randn(2, 8), Touchy(), also=Touchy())
        output.sum().backward()
        return exact(output), type(thing).__name__

    found = both_ways(work, functools.partial(attach, **OPTIONS["everything"]), Takes)
    assert modules_in(found, "forward") == {"", "inner", "inner.linear"}


# ---- several models, processes, threads


def test_several_models_keep_their_rows_apart(attach: Attach) -> None:
    """Models attached at once, one of them inside another, each record what is theirs and are not disturbed."""
    results, traces = [], []
    for watched in (False, True):
        seed_everything(5)
        first, second = mlp(), OWN["cnn"]().model
        outer = nn.Sequential(first, nn.Linear(4, 2))
        if watched:
            traces = [attach(model) for model in (first, second, outer)]
        results.append([train(outer, 2), train(second, 1, batch_of(4, 3, 8, 8)), train(outer, 1)])
    assert results[0] == results[1]
    found = [rows(trace) for trace in traces]
    assert modules_in(found[0], "forward") == {"", "0", "1", "2", "3"}
    assert modules_in(found[2], "forward") == {"", "0", "0.0", "0.1", "0.2", "0.3", "1"}
    assert [steps_in(part, "update") for part in found] == [[0, 1, 2], [0], [0, 1, 2]]
    assert modules_in(found[1], "update") == {"0", "1", "5", "6", "10"}


class Embedded(Dataset[Tensor]):
    """Samples made by the model itself, in whatever process loads them."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        with torch.no_grad():
            return self.model(torch.full((1, 8), float(index)))[0].repeat(2)


def test_worker_processes_are_silent(attach: Attach) -> None:
    """Workers of a DataLoader that fork while attached and call the model write no row, and the parent's trace is
    whole."""

    def work(model: nn.Module) -> object:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = []
        loader = DataLoader(
            Embedded(copy.copy(model).eval()), batch_size=4, num_workers=2, multiprocessing_context="fork"
        )
        for batch in loader:
            optimizer.zero_grad()
            loss = model.train()(batch).square().mean()
            loss.backward()
            optimizer.step()
            seen.append(exact(loss))
        return seen, values_of(model)

    found = both_ways(work, attach)
    assert {(row["step"], row["micro"]) for row in found} == {(0, 0), (1, 0)}


def test_a_forked_child_may_close_the_trace(attach: Attach) -> None:
    """close() in a forked child does not touch the run of its parent, which goes on."""
    model = mlp()
    trace = attach(model)
    train(model)
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            train(model)
            trace.close()
            code = 0 if hooks_of(model) == {} else 2
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    train(model)
    assert steps_in(rows(trace), "update") == [0, 1]
    assert tracehooks.open(trace.path).status == "closed"


def test_threads_call_the_model_at_once(attach: Attach) -> None:
    """Threads that run forward and backward through one model at the same time get what they get without attach."""

    def work(model: nn.Module) -> object:
        model.eval()
        results: dict[int, object] = {}
        errors: list[BaseException] = []
        barrier = threading.Barrier(4)

        def call(i: int) -> None:
            try:
                barrier.wait(10)
                for _ in range(5):
                    x = torch.full((4, 8), float(i), requires_grad=True)
                    output = model(x)
                    (gradient,) = torch.autograd.grad(squares(output), x)
                    with torch.no_grad():
                        model(x)
                    results[i] = exact(output), exact(gradient)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not errors
        return results

    found = both_ways(work, attach)
    assert modules_in(found, "forward") == {"", "0", "1", "2", "3"}
    assert modules_in(found, "backward") == {"", "0", "1", "2", "3"}


def test_backward_in_another_thread(attach: Attach) -> None:
    """A loss may go backward in a thread other than the one that made it."""

    def work(model: nn.Module) -> object:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            loss = squares(model(torch.randn(4, 8)))
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join(60)
            optimizer.step()
        return values_of(model)

    found = both_ways(work, attach)
    assert steps_in(found, "backward") == [0, 1]
    assert steps_in(found, "update") == [0, 1]


def test_distributed_data_parallel(attach: Attach, tmp_path: Path) -> None:
    """Inside DistributedDataParallel of one process the gradients that are reduced are the same."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = lambda: nn.parallel.DistributedDataParallel(mlp())  # noqa: E731
        results = []
        for watched in (False, True):
            seed_everything(0)
            model = wrapped()
            trace = attach(model) if watched else None
            results.append(train(model, 2))
        found = rows(trace)
    finally:
        torch.distributed.destroy_process_group()
    assert results[0] == results[1]
    assert modules_in(found, "forward") == {"", "0", "1", "2", "3"}
    assert steps_in(found, "gradient") == [0, 1]
