"""The call of a guilty op, kept in a file, and run again from it.

A file is safetensors: the tensors of the call, and in its metadata the op and how its arguments are put together. No code is
in it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from tracehooks.capture.leaves import leaves
from tracehooks.core.errors import SnapshotError
from tracehooks.locate.describe import describe_tensor

OP_FILE, BATCH_FILE = "op.safetensors", "batch.safetensors"


def call_bytes(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """The call of an aten overload as a safetensors file."""
    tensors: dict[str, Tensor] = {}
    call = {
        "args": [_packed(arg, tensors) for arg in args],
        "kwargs": {k: _packed(v, tensors) for k, v in kwargs.items()},
    }
    return save(tensors, {"op": op, "call": json.dumps(call)})


def batch_bytes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """The tensors among a model's arguments as a safetensors file, by position or name."""
    named = {**{str(i): value for i, value in enumerate(args)}, **kwargs}
    return save({slot.lstrip("."): _plain(tensor) for slot, tensor in leaves(named, "")})


def rerun(path: Path) -> tuple[str, list[dict[str, Any]], list[dict[str, Any]]]:
    """Run a kept call again: the op, its tensors and its results in numbers.

    Raises:
        SnapshotError: the file is not there, is damaged, or names an op that this torch does not have.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - it is no mapping
        call = json.loads(metadata["call"])
        func = _op(metadata["op"])
    except (OSError, SafetensorError, KeyError, ValueError, AttributeError) as error:
        raise SnapshotError(path, _reason(path, error)) from error
    args = [_unpacked(arg, tensors) for arg in call["args"]]
    kwargs = {name: _unpacked(value, tensors) for name, value in call["kwargs"].items()}
    inputs = [describe_tensor(tensor) for tensor in tensors.values()]
    with torch.no_grad():
        output = func(*args, **kwargs)
    return metadata["op"], inputs, [describe_tensor(tensor) for _, tensor in leaves(output, "output")]


def _reason(path: Path, error: Exception) -> str:
    if path.exists():
        return str(error).splitlines()[0]
    if path.with_name(BATCH_FILE).exists():
        return f"no op made the value, or none that could be kept; the batch of the step is kept in {BATCH_FILE}"
    return "nothing is kept there; record with snapshot=True to keep the first non-finite op"


def kept(value: Any) -> Any:
    """A copy of an argument whose tensors nobody changes any more."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, list | tuple):
        return [kept(item) for item in value]
    return value


def _packed(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        key = f"tensor.{len(tensors)}"
        tensors[key] = _plain(value)
        return {"tensor": key}
    if isinstance(value, list | tuple):
        return {"list": [_packed(item, tensors) for item in value]}
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": "cpu"}
    if isinstance(value, float):
        return {"float": repr(value)}
    return {"value": value}


def _unpacked(packed: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    ((kind, value),) = packed.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "list":
        return [_unpacked(item, tensors) for item in value]
    if kind == "torch":
        return getattr(torch, value)
    if kind == "device":
        return torch.device(value)
    return float(value) if kind == "float" else value


def _plain(x: Tensor) -> Tensor:
    return x.detach().cpu().contiguous().clone()


def _op(name: str) -> Any:
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
