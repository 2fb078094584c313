"""Every private name of torch that tracehooks uses, each with a fallback. No other file may touch one.

Checked on torch 2.6 to 2.13; tests/capture/test_torch_internals.py says what each is expected to do.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

DispatchMode = TorchDispatchMode
"""Base class of modes that see every op below autograd."""


def _absent(*_: Any) -> Any:
    return None


def _lookup(root: object, path: str, fallback: Callable[..., Any] = _absent) -> Callable[..., Any]:
    for part in path.split("."):
        root = getattr(root, part, None)
        if root is None:
            return fallback
    return root  # type: ignore[return-value]


_graph_task_id = _lookup(torch, "_C._current_graph_task_id", lambda: -1)
_peek_interpreter = _lookup(torch, "_C._functorch.peek_interpreter_stack")
_is_functorch_wrapped = _lookup(torch, "_C._functorch.is_functorch_wrapped_tensor", lambda x: False)
_get_unwrapped = _lookup(torch, "_C._functorch.get_unwrapped")
_dispatch_modes = _lookup(torch, "_C._len_torch_dispatch_stack", lambda: 0)
_function_modes = _lookup(torch, "_C._len_torch_function_stack", lambda: 0)
_tracing_state = _lookup(torch, "_C._get_tracing_state")
_current_node = _lookup(torch, "_C._current_autograd_node")
_next_sequence = _lookup(torch, "_C._autograd._get_sequence_nr", lambda: 0)
_differences = _lookup(torch, "_foreach_sub", lambda new, old: [a - b for a, b in zip(new, old, strict=True)])
_copies = _lookup(torch, "_foreach_copy_", lambda into, values: [a.copy_(b) for a, b in zip(into, values, strict=True)])
_has_side_effect = _lookup(torch, "fx.node.has_side_effect")
_disable_function = _lookup(torch, "_C.DisableTorchFunction", contextlib.nullcontext)


LANE_NAMES = "_version", "_backward_hooks", "_register_hook_dict", "grad_fn", "requires_grad"
"""Attributes of a tensor, and of the autograd node that made it, by which lane.cpp does what Tensor.register_hook does."""


graph_task_id: Callable[[], int] = _graph_task_id
"""Number of the backward pass that this thread is in; -1 outside of one."""


def current_node() -> tuple[str | None, int]:
    """Name and sequence number of the autograd node that runs now; (None, -1) outside of one."""
    node = _current_node()
    return (None, -1) if node is None else (node.name(), node._sequence_nr())


def sequence_of(node: Any) -> int:
    """Sequence number of an autograd node: which op made it."""
    return int(node._sequence_nr())


def result_shapes(node: Any) -> list[tuple[int, ...]]:
    """Shapes of the results of the op that made an autograd node; empty where they are not known."""
    return [tuple(int(size) for size in known.shape) for known in getattr(node, "_input_metadata", ())]


def saved(node: Any, name: str) -> Any:
    """What an autograd node keeps of its op under a name: a number, or a tensor that nobody's hooks packed (to unpack
    it would run them); None where there is none."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    if raw is None:
        return getattr(node, f"_saved_{name}", None)
    return raw.data if getattr(raw, "unpack_hook", raw) is None else None


def in_reentrant_checkpoint() -> bool:
    """Whether this thread is in the forward pass of torch.utils.checkpoint's reentrant kind, which runs without
    gradients."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "forward" and frame.f_code.co_filename.endswith("utils/checkpoint.py"):
            return True
        frame = frame.f_back
    return False


def push_mode(mode: Any) -> None:
    """Put a dispatch mode on top of the stack."""
    from torch.utils._python_dispatch import _push_mode

    _push_mode(mode)


def remove_mode(mode: Any) -> None:
    """Take a dispatch mode off this thread's stack wherever it is by now; the others stay in order."""
    from torch.utils._python_dispatch import _pop_mode, _push_mode

    above = []
    while _dispatch_modes():
        top = _pop_mode()
        if top is mode:
            break
        above.append(top)
    for other in reversed(above):
        _push_mode(other)


def graphs_compiled() -> int:
    """How many graphs torch.compile has compiled in this process so far."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return int(counters["stats"]["unique_graphs"]) if "stats" in counters else 0


def anything_compiled() -> bool:
    """Whether torch.compile was used in this process: under a dispatch mode compiled code would run uncompiled."""
    backends = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", {})
    return any(backend is not None for backend in backends.values())


def last_sequence() -> int:
    """Sequence number of the autograd node that was made last on this thread."""
    return int(_next_sequence()) - 1


def storage_key(x: Tensor) -> int:
    """Identity of the memory that a tensor and its views share, as long as it lives."""
    return int(x.untyped_storage()._cdata)


def memory_of(x: Tensor) -> Hashable:
    """A token for the memory that a tensor and its views share: equal tokens are the same memory, and as long as one is
    kept no other memory gets its address. It keeps no values alive."""
    return StorageWeakRef(x.untyped_storage())  # type: ignore[no-untyped-call]


def has_values(x: Tensor) -> bool:
    """Whether a tensor's memory is there: FSDP frees that of shards while tensors still point to it, and to read them
    crashes the process."""
    if type(x) is not Tensor and type(x) is not torch.nn.Parameter:
        return True
    return x.layout is not torch.strided or x.is_meta or not x.numel() or bool(x.untyped_storage().nbytes())


def tracing() -> bool:
    """Whether torch.jit.trace is recording: what runs now becomes part of somebody's graph."""
    return _tracing_state() is not None


def not_a_pass() -> bool:
    """Whether a module is called for another reason than a forward pass: a checkpoint recomputes, a trace is made."""
    return graph_task_id() != -1 or tracing()


def unwrapped(x: Tensor) -> Tensor | None:
    """The tensor that holds the values: what functorch's transforms wrap (all samples of a vmap together), a DTensor's
    local shard. None for tensors without values (meta, fake) and for collectives still under way.
    """
    while _is_functorch_wrapped(x):
        x = _get_unwrapped(x)
    if type(x) is Tensor or type(x) is torch.nn.Parameter:
        return None if x.is_meta else x
    name = type(x).__name__
    if name == "DTensor":
        return unwrapped(x._local_tensor)  # type: ignore[attr-defined]
    if name in ("FakeTensor", "FunctionalTensor", "AsyncCollectiveTensor", "ProxyTensor"):
        return None
    return None if x.is_meta else x


def all_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors are what they look like, all of them on the host: of torch's own two classes, and in no transform."""
    kinds = Tensor, torch.nn.Parameter
    return not modes_active() and all(type(x) in kinds and x.is_cpu for x in tensors)


def local(x: Tensor) -> Tensor:
    """A DTensor's local shard; any other tensor as it is."""
    values = unwrapped(x)
    return x if values is None else values


def sizes(x: Tensor) -> tuple[int, ...]:
    """A tensor's shape in plain ints; -1 for the ragged dimensions of a nested tensor."""
    if x.is_nested and x.layout == torch.strided:  # such a tensor has no shape at all
        return (x.size(0), *(-1 for _ in range(x.dim() - 1)))
    return tuple(size if type(size) is int else -1 for size in x.shape)


def calls_on_stack(owner: object, function: str) -> int:
    """How many calls of a method by that name with this ``self`` this thread is in. A call that an exception ended in a
    way that its hooks were not told of is not among them."""
    count = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == function and frame.f_locals.get("self") is owner:
            count += 1
        frame = frame.f_back
    return count


def traced_modules() -> list[int]:
    """Identities of the modules that torch.compile is in the middle of, the outermost first: called while it traces."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        stack = getattr(frame.f_locals.get("self"), "nn_module_stack", None)
        if isinstance(stack, dict):
            return [int(number) for key in stack if (number := str(key).partition("@")[0]).isdigit()]
        frame = frame.f_back
    return []


def keep_in_graph(op: Any) -> None:
    """Have torch.compile keep an op whose result nobody uses."""
    _has_side_effect(op)


CUDA_GRAPHS_STOP_HERE: tuple[Any, ...] = tuple(
    tag for tag in (getattr(torch.Tag, "cudagraph_unsafe", None),) if tag is not None
)
"""Tags of an op that has to run every time: the graphs of torch.compile's mode="reduce-overhead" end before it."""

ROOT_CALL = "_call_impl"
"""Name of nn.Module's method whose frame is on the stack while a module is called."""
BACKWARD_CALL = "_engine_run_backward"
"""Name of torch.autograd's function whose frame is on the stack while a backward pass runs."""
OPTIMIZER_CALL = "wrapper"
"""Name of the function that torch.optim puts around step()."""


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Run tensor operations of our own unseen by the user's dispatch modes, function modes (a default device is one)
    and functorch levels, whose results they would otherwise change or which would count them.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_disable_function())
        if _peek_interpreter() is not None:
            from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

            stack.enter_context(temporarily_clear_interpreter_stack())
        if _dispatch_modes():
            from torch.utils._python_dispatch import _disable_current_modes

            stack.enter_context(_disable_current_modes())
        yield


def modes_active() -> bool:
    """Whether dispatch modes or functorch levels are active: asked before `undisturbed`, which costs much more."""
    return bool(_dispatch_modes()) or _peek_interpreter() is not None


def differences(new: list[Tensor], old: list[Tensor]) -> list[Tensor]:
    """new - old, one tensor after another."""
    return _differences(new, old) if new else []


def copy_each(into: list[Tensor], values: list[Tensor]) -> None:
    """Copy tensors, one after another."""
    if into:
        _copies(into, values)


def anything_active() -> bool:
    """Whether modes of any kind or functorch levels are active, or a CUDA graph is captured."""
    if _dispatch_modes() or _function_modes() or _peek_interpreter() is not None:
        return True
    return _MAY_CAPTURE and _capturing()


def undisturbed_where_needed() -> contextlib.AbstractContextManager[Any]:
    """`undisturbed` where modes or functorch levels are active, else the little that is enough."""
    return undisturbed() if modes_active() else without_torch_function()


def is_last_forward_hook(module: torch.nn.Module, handle: Any) -> bool:
    """Whether no forward hook of a module comes after that of a handle."""
    return bool(next(reversed(module._forward_hooks), None) == handle.id)


def silence_backward(module: torch.nn.Module) -> None:
    """Take every hook on a module's backward off it."""
    module._backward_hooks.clear()
    module._backward_pre_hooks.clear()


def capturing() -> bool:
    """Whether a CUDA graph is captured: what is asked of the device now is done at the replays, and not before."""
    return _MAY_CAPTURE and _capturing()


_MAY_CAPTURE = bool(torch.version.cuda or torch.version.hip)
_capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing


def pretending() -> bool:
    """Whether a mode is active under which tensors have no values: fake tensors, a trace for export, the capture of a
    CUDA graph."""
    if capturing():
        return True
    if not _dispatch_modes():
        return False
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return any(type(mode).__name__ in _PRETENDERS for mode in _get_current_dispatch_mode_stack())


_PRETENDERS = ("FakeTensorMode", "ProxyTorchDispatchMode", "FunctionalTensorMode")


def without_torch_function() -> contextlib.AbstractContextManager[Any]:
    """Run unseen by function modes (a default device is one) and by tensor subclasses' ``__torch_function__``."""
    return _disable_function()  # type: ignore[no-any-return]


def entangled() -> bool:
    """Whether a dispatch mode must neither be entered nor left now: inference mode and functorch levels keep dispatch
    state of their own, which they put back when they end."""
    return torch.is_inference_mode_enabled() or _peek_interpreter() is not None


def loss_scale(scaler: object) -> Tensor | float | None:
    """A GradScaler's scale without waiting for the device: a 0-dim tensor, before its first use the initial scale."""
    scale = getattr(scaler, "_scale", None)
    return scale if scale is not None else getattr(scaler, "_init_scale", None)


def still_scaled(scaler: object, optimizer: object) -> bool | None:
    """Whether a GradScaler has yet to unscale the gradients that an optimizer is about to use; None where that is not
    known."""
    states = getattr(scaler, "_per_optimizer_states", None)
    stage = states[id(optimizer)].get("stage") if states is not None and id(optimizer) in states else None
    return None if states is None else getattr(stage, "name", "READY") == "READY"


def fused_scaling(optimizer: object) -> tuple[Tensor | None, Tensor | None]:
    """(grad_scale, found_inf) that a GradScaler leaves on an optimizer that unscales by itself; None each otherwise."""
    return getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)


LANE_QUESTIONS = (
    (_dispatch_modes, 0),
    (_function_modes, 0),
    (_peek_interpreter, None),
    (_capturing if _MAY_CAPTURE else None, False),
    (_graph_task_id, -1),
    (_tracing_state, None),
)
"""What lane.cpp asks before it takes a tensor, in its order, and the answers that let it."""
