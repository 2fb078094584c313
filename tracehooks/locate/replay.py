"""A forward pass and its backward pass once more, bit for bit, under the op-level mode.

What the pass depended on is captured when it begins: arguments, random state, autocast, buffers, simple attributes of
modules. Afterwards the run is exactly as it was: gradients, buffers, random state and attributes are put back.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parameter import UninitializedBuffer

from tracehooks.capture.hooks import named_arguments
from tracehooks.capture.leaves import leaves
from tracehooks.capture.select import argument_names, behind_fast_path, named_modules
from tracehooks.locate.ops import OpMode, Unseen

SMALL_BUFFER = 1 << 20
"""Elements up to which a buffer is copied at every pass; larger ones are taken to be constant."""
MAX_GRADIENT_BYTES = 256 << 20
"""Size up to which the gradient of an output of the root is held until the step ends."""
SIMPLE = (int, float, bool, str, type(None), Tensor)


class Randomness:
    """The state of torch's, NumPy's and Python's generators."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = (
            torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        )
        self._numpy, self._python = np.random.get_state(legacy=False), random.getstate()

    def restore(self) -> None:
        """Set every generator back."""
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)
        np.random.set_state(self._numpy)
        random.setstate(self._python)


class Attributes:
    """Simple attributes (numbers, flags, tensors) of the user's own module classes, counters and caches, and which tensors
    are every module's buffers: forward() may put others in their place."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._saved = [(module, self._simple(module)) for module in modules if _own_class(module)]
        self._buffers = [(module._buffers, dict(module._buffers)) for module in modules if module._buffers]

    @staticmethod
    def _simple(module: nn.Module) -> dict[str, Any]:
        return {key: value for key, value in vars(module).items() if isinstance(value, SIMPLE)}

    def restore(self) -> None:
        """Put them back; what came since goes."""
        for module, saved in self._saved:
            for key in self._simple(module).keys() - saved.keys():
                del vars(module)[key]
            vars(module).update(saved)
        for table, buffers in self._buffers:
            table.update(buffers)


class Pass:
    """What one forward pass of the root was given, and what came back to it."""

    def __init__(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], micro: int) -> None:
        self.args, self.kwargs, self.micro = args, kwargs, micro
        self.training = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.randomness = Randomness()
        self.attributes = Attributes(list(root.modules()))
        self.buffers = [(b, b.detach().clone()) for b in _buffers(root) if b.numel() <= SMALL_BUFFER]
        self.autocast = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")]
        self.versions = [(t, _version(t)) for _, t in leaves((args, kwargs), "")]
        self.gradients: dict[str, Tensor] = {}
        """Gradient of each output of the root, by slot."""

    def keep_gradient(self, slot: str, gradient: Tensor) -> None:
        """Keep the gradient of an output, added up over backward passes; without large ones only forward is run again."""
        if gradient.nbytes > MAX_GRADIENT_BYTES:
            return
        known = self.gradients.get(slot)
        self.gradients[slot] = gradient.detach() if known is None else known + gradient.detach()

    def buffer(self, buffer: Tensor) -> Tensor | None:
        """What a buffer held when the pass began; None for one too large to be copied."""
        return next((value for held, value in self.buffers if held is buffer), None)

    def argument(self, root: nn.Module, unseen: Unseen) -> tuple[str, Tensor] | None:
        """The argument of the root that lies in the memory of a tensor no op wrote, with its name."""
        for name, value in named_arguments(argument_names(root), self.args, self.kwargs):
            for slot, tensor in leaves(value, name):
                if OpMode.same_memory(tensor, unseen):
                    return slot, tensor
        return None

    def sent(self, unseen: Unseen) -> bool:
        """Whether a tensor no op wrote is a gradient that came from outside, and so was not born in this pass."""
        return any(OpMode.same_memory(gradient, unseen) for gradient in self.gradients.values())

    @property
    def exact(self) -> bool:
        """Whether no argument has been changed in place since."""
        return all(_version(tensor) == version for tensor, version in self.versions)


class Record(Protocol):
    """What ran in a pass, op by op."""

    mode: OpMode
    outputs: list[int | None]
    """The op that wrote each output of the root; None or negative where none was seen."""


class Replay:
    """One pass run again. `forward` and `backward` leave records in ``mode``."""

    def __init__(self, root: nn.Module, taken: Pass, describe: Any) -> None:
        self.root, self.taken = root, taken
        self._stack: list[str] = []
        self.mode = OpMode(lambda: self._stack[-1] if self._stack else None, describe)
        self.output: Any = None
        self.outputs: list[int | None] = []
        self.failed: Exception | None = None

    def run(self) -> None:
        """Forward, then backward where gradients came back; the run's state is restored whatever happens."""
        with _undone(self.root), paths_followed(self.root, self._stack), contextlib.ExitStack() as stack:
            self._restore()
            for device, enabled, dtype in self.taken.autocast:
                if device == "cpu" or torch.cuda.is_available():
                    stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
            if self.taken.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.taken.training))
            stack.enter_context(self.mode)
            try:
                self.output = self.root(*self.taken.args, **self.taken.kwargs)
                self.outputs = [self.mode.writer(tensor) for _, tensor in leaves(self.output, "output")]
                self._backward()
            except Exception as error:  # code that cannot run twice: what was recorded up to there is used
                self.failed = error
        if self.mode.failed is not None:
            raise self.mode.failed

    def _backward(self) -> None:
        pairs = [
            (tensor, self.taken.gradients[slot])
            for slot, tensor in leaves(self.output, "output")
            if slot in self.taken.gradients and tensor.requires_grad
        ]
        if pairs:
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])

    def _restore(self) -> None:
        self.taken.randomness.restore()
        self.taken.attributes.restore()
        for buffer, value in self.taken.buffers:
            buffer.data.copy_(value)  # .data: a graph that is still needed must not take it for a change
        for parameter in self.root.parameters():
            parameter.grad = None


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


@contextlib.contextmanager
def _undone(root: nn.Module) -> Iterator[None]:
    """Whatever happens inside, afterwards gradients, buffers, random state and attributes are as they were."""
    randomness, attributes = Randomness(), Attributes(list(root.modules()))
    buffers = [(buffer, buffer.detach().clone()) for buffer in _buffers(root)]
    renormalised = [(m, m.max_norm) for m in root.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    gradients = [(parameter, parameter.grad) for parameter in root.parameters()]
    for module, _ in renormalised:  # the pass renormalised its rows; doing it again would touch the live weights
        module.max_norm = None
    try:
        yield
    finally:
        for module, norm in renormalised:
            module.max_norm = norm
        for parameter, gradient in gradients:
            parameter.grad = gradient
        attributes.restore()
        for buffer, value in buffers:
            buffer.data.copy_(value)
        randomness.restore()


def _buffers(root: nn.Module) -> Iterator[Tensor]:
    """Buffers with values."""
    return (b for b in root.buffers() if not isinstance(b, UninitializedBuffer) and not b.is_meta)


def _own_class(module: nn.Module) -> bool:
    return not type(module).__module__.startswith("torch.")


def _version(x: Tensor) -> int:
    return -1 if x.is_inference() else x._version
