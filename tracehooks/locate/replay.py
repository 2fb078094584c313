"""A forward pass and its backward pass once more, on a copy of the model, under the op-level mode.

What the pass depended on is captured when it begins: arguments, random state, autocast, buffers, simple attributes of
modules. It runs again on a deep copy that is put back to that state, so nothing of the live model is touched: not its
parameters, gradients, buffers, lists, generators or hooks on parameters. Code that cannot be copied, or that would
communicate with other processes, is not run again.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import random
from collections.abc import Iterator
from itertools import chain
from operator import methodcaller
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parameter import UninitializedBuffer

from tracehooks.capture import torch_internals
from tracehooks.capture.leaves import leaves
from tracehooks.capture.select import behind_fast_path, named_modules
from tracehooks.locate.ops import Describe, OpMode, Place

SMALL_BUFFER = 1 << 20
"""Elements up to which a buffer is copied at every pass; larger ones are taken to be constant."""
MAX_GRADIENT_BYTES = 256 << 20
"""Size up to which the gradient of an output of the root is held until the step ends."""
SIMPLE = (int, float, bool, str, type(None), Tensor)


class Randomness:
    """The state of torch's, NumPy's and Python's generators."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        started = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._cuda = torch.cuda.get_rng_state_all() if started else None
        self._numpy, self._python = np.random.get_state(legacy=False), random.getstate()

    def content(self) -> list[str]:
        """What the states hold: equal for equal states."""
        devices = [self._cpu, *(self._cuda or ())]
        return [*(str(state.tolist()) for state in devices), pickle.dumps(self._numpy).hex(), repr(self._python)]

    def restore(self) -> None:
        """Set every generator back."""
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)
        np.random.set_state(self._numpy)
        random.setstate(self._python)


class Modules:
    """The modules of a model, each once, in an order that a copy has, too. Found anew where they are not what they were:
    asked in every pass, past all Python code where nothing changed."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._tables: list[Any] = []
        self._children: list[int] = [0]

    def of_users(self) -> list[tuple[int, nn.Module]]:
        """Those of classes that are not torch's, whose attributes do not change while they run; numbered."""
        self._look()
        return self._of_users

    def with_buffers(self) -> Iterator[tuple[int, nn.Module]]:
        """Those that hold buffers themselves, numbered."""
        self._look()
        return ((i, self._found[i]) for i, buffers in enumerate(self._buffers) if buffers)

    def _look(self) -> None:
        if self._children == self._now():
            return
        self._found = _modules(self._root)
        self._tables, self._buffers = [m._modules for m in self._found], [m._buffers for m in self._found]
        self._children = self._now()
        self._of_users = [(i, m) for i, m in enumerate(self._found) if not type(m).__module__.startswith("torch.")]

    def _now(self) -> list[int]:
        return list(map(id, chain.from_iterable(map(_VALUES, self._tables))))


_VALUES = methodcaller("values")


class Pass:
    """What one forward pass of the root was given, and what came back to it."""

    def __init__(
        self, modules: Modules, args: tuple[Any, ...], kwargs: dict[str, Any], micro: int, place: Place | None
    ) -> None:
        self.args, self.kwargs, self.micro, self.place = args, kwargs, micro, place
        self.training = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.randomness = Randomness()
        self.attributes: dict[int, dict[str, Any]] = {}
        """Of modules of the user's own classes, by their number in `Modules`."""
        self.buffers: dict[int, dict[str, Tensor]] = {}
        for i, module in modules.of_users():
            self.attributes[i] = {key: _held(value) for key, value in _simple(module).items()}
        for i, module in modules.with_buffers():
            self.buffers[i] = {slot: b.detach().clone() for slot, b in _buffers(module) if b.numel() <= SMALL_BUFFER}
        self.autocast = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")]
        self.gradients: dict[str, Tensor] = {}
        """Gradient of each output of the root, by slot."""

    def keep_gradient(self, slot: str, gradient: Tensor) -> None:
        """Keep the gradient of an output, added up over backward passes; without large ones only forward is run again."""
        if gradient.nbytes > MAX_GRADIENT_BYTES:
            return
        known = self.gradients.get(slot)
        self.gradients[slot] = gradient.detach() if known is None else known + gradient.detach()

    def began_finite(self, root: nn.Module, buffer: Tensor) -> bool:
        """Whether a buffer of ``root``, the model or a copy, is known to have been finite when the pass began."""
        for i, module in enumerate(_modules(root)):
            for slot, before in self.buffers.get(i, {}).items():
                if module._buffers.get(slot) is buffer:
                    return bool(torch.isfinite(before).all())
        return False

    def put_back(self, twin: nn.Module) -> None:
        """Bring a copy of the model to the state in which the pass began, and the generators too."""
        for i, module in enumerate(_modules(twin)):
            if i in self.attributes:
                saved = self.attributes[i]
                for key in _simple(module).keys() - saved.keys():
                    del vars(module)[key]
                vars(module).update(saved)
            for slot, before in self.buffers.get(i, {}).items():
                buffer = module._buffers[slot]
                if buffer is not None:
                    buffer.copy_(before)
        self.randomness.restore()


class Record(Protocol):
    """What ran in a pass, op by op."""

    mode: OpMode
    outputs: list[int | None]
    """The op that wrote each output of the root; None or negative where none was seen."""
    slots: list[str]
    """Their slots, where `outputs` can be held against what was recorded."""
    root: nn.Module
    """The model that ran, the live one or a copy."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    failed: Exception | None


class Replay:
    """One pass run again on a copy. `run` leaves records in ``mode``."""

    def __init__(self, root: nn.Module, taken: Pass, describe: Describe) -> None:
        self.taken = taken
        self.root: nn.Module = nn.Module()
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self._live, self._stack = root, list[str]()
        self.mode = OpMode(lambda: self._stack[-1] if self._stack else None, describe, place=taken.place)
        self.outputs: list[int | None] = []
        self.slots: list[str] = []
        self.failed: Exception | None = None
        """What kept it from running to its end; what was recorded before stands."""

    def run(self) -> None:
        """Forward, then backward where gradients came back. The generators are left as they were found."""
        now = Randomness()
        try:
            self.root = _copied_model(self._live)
            self.args, self.kwargs = _copied(self.taken.args), _copied(self.taken.kwargs)
            with torch.no_grad():
                self.taken.put_back(self.root)
            self._run()
        except Exception as error:  # the user's code, run a second time, may raise anything: the answer says so
            self.failed = error
        finally:
            now.restore()
        if self.mode.failed is not None:
            raise self.mode.failed

    def _run(self) -> None:
        with paths_followed(self.root, self._stack), contextlib.ExitStack() as stack:
            for device, enabled, dtype in self.taken.autocast:
                if device == "cpu" or torch.cuda.is_available():
                    stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
            if self.taken.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.taken.training))
            stack.enter_context(self.mode)
            output = self.root(*self.args, **self.kwargs)
            named = list(leaves(output, "output"))
            self.slots = [slot for slot, _ in named]
            self.outputs = [self.mode.writer(tensor) for _, tensor in named]
            given = self.taken.gradients
            pairs = [(tensor, given[slot]) for slot, tensor in named if slot in given and tensor.requires_grad]
            if pairs:
                torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])


@contextlib.contextmanager
def paths_followed(root: nn.Module, stack: list[str]) -> Iterator[None]:
    """Keep the stack of running modules. Own hooks come first and last, so that the user's hooks run inside; modules whose
    hook tables must stay empty are followed by global hooks."""
    modules = named_modules(root)
    shared = behind_fast_path(modules)
    handles = []
    for path, module in modules.items():
        if id(module) not in shared and not isinstance(module, torch.jit.ScriptModule):
            handles.append(module.register_forward_pre_hook(_Enter(stack, path), prepend=True))
            handles.append(module.register_forward_hook(_Leave(stack), always_call=True))
    if shared:
        paths = {id(module): path for path, module in modules.items() if id(module) in shared}
        handles.append(register_module_forward_pre_hook(_EnterShared(stack, paths)))
        handles.append(register_module_forward_hook(_LeaveShared(stack, paths), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Enter:
    def __init__(self, stack: list[str], path: str) -> None:
        self.stack, self.path = stack, path

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.stack.append(self.path)


class _Leave:
    def __init__(self, stack: list[str]) -> None:
        self.stack = stack

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.stack:
            self.stack.pop()


class _EnterShared:
    def __init__(self, stack: list[str], paths: dict[int, str]) -> None:
        self.stack, self.paths = stack, paths

    def __call__(self, module: nn.Module, args: Any) -> None:
        if id(module) in self.paths:
            self.stack.append(self.paths[id(module)])


class _LeaveShared(_EnterShared):
    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        if id(module) in self.paths and self.stack:
            self.stack.pop()


def _copied_model(root: nn.Module) -> nn.Module:
    """A deep copy whose hooks of the user's fire in the forward pass, because they are part of what it computes, and not
    in the backward pass. Generators that modules hold are copied with their state."""
    memo: dict[int, Any] = {}
    for module in root.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Generator):
                memo[id(value)] = torch.Generator(value.device).set_state(value.get_state())
    twin: nn.Module = copy.deepcopy(root, memo)
    for module in twin.modules():
        torch_internals.silence_backward(module)
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.max_norm = None  # the pass renormalised the rows it used
    return twin


def _copied(value: Any) -> Any:
    """Arguments that the pass may change as it likes."""
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if type(value) in (tuple, list):
        return type(value)(_copied(item) for item in value)
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    return copy.deepcopy(value)


def _simple(module: nn.Module) -> dict[str, Any]:
    """Simple attributes of a module: counters, flags, small cached tensors."""
    return {key: value for key, value in vars(module).items() if isinstance(value, SIMPLE) and _small(value)}


def _small(value: Any) -> bool:
    if not isinstance(value, Tensor):
        return True
    return not value.requires_grad and value.numel() <= SMALL_BUFFER and torch_internals.has_values(value)


def _held(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _modules(root: nn.Module) -> list[nn.Module]:
    """Every module once, in an order that a copy has, too."""
    found, seen, todo = [], {id(root)}, [root]
    while todo:
        module = todo.pop()
        found.append(module)
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                todo.append(child)
    return found


def _buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers of a module itself that have values."""
    return (
        (slot, buffer)
        for slot, buffer in module._buffers.items()
        if buffer is not None and not isinstance(buffer, UninitializedBuffer) and not buffer.is_meta
    )
