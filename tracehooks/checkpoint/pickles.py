"""Pickles read without running anything of them.

The few names that PyTorch's own checkpoints need are known; any other class or function becomes an inert object that
keeps what it was given. So nothing in the file decides what is executed, and a checkpoint with an ``argparse.Namespace``
beside its weights is still read.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, BinaryIO

from tracehooks.checkpoint.stored import Stored

DTYPE_OF_STORAGE = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128", "UntypedStorage": "uint8",
}  # fmt: skip
_PLAIN_TYPES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (set, frozenset, list, dict, tuple, int, float, complex, str, bytes, bool, bytearray)
}


class Inert:
    """What stands for an object of a class that is not known: it keeps its attributes and items and does nothing."""

    kind = ""
    """The class's or function's dotted name."""

    state: dict[str, Any]
    items: list[Any]

    def __new__(cls, *_: Any, **named: Any) -> Inert:
        """Pickles make objects with and without calling __init__."""
        made = object.__new__(cls)
        made.state, made.items = named, []
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        parts = state if isinstance(state, tuple) else (state,)
        for part in parts:
            self.state |= part if isinstance(part, dict) else {}

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def append(self, value: Any) -> None:
        """As a list's."""
        self.items.append(value)

    def extend(self, values: Any) -> None:
        """As a list's."""
        self.items.extend(values)


class DType(str):
    """The name of a torch dtype."""


class Pickle(pickle.Unpickler):
    """One pickle. ``storage`` turns the tuple that names a storage into what `tensor` gets as its first argument."""

    def __init__(self, data: bytes | BinaryIO, storage: Callable[[Any], Any], tensor: Callable[..., Any]) -> None:
        super().__init__(io.BytesIO(data) if isinstance(data, bytes) else data, encoding="utf-8", errors="replace")
        self._storage, self._tensor = storage, tensor
        self.unknown: dict[str, type[Inert]] = {}
        """Classes and functions that were named and not known."""

    def persistent_load(self, pid: Any) -> Any:
        """A storage (or, in the oldest files, a module's class with its source, which is left alone)."""
        return pid[1] if pid[0] == "module" else self._storage(pid)

    def find_class(self, module: str, name: str) -> Any:
        """A known name, or the class of an inert object."""
        known = self._known(module, name)
        if known is not None:
            return known
        dotted = f"{module}.{name}"
        if dotted not in self.unknown:
            self.unknown[dotted] = type(name, (Inert,), {"kind": dotted})
        return self.unknown[dotted]

    def _known(self, module: str, name: str) -> Any:
        package, _, room = module.partition(".")
        if (package, room) == ("torch", "_utils") and name in _REBUILD_TENSOR:
            return self._tensor
        if (package, room) == ("torch", "_utils") and name in _REBUILD_PARAMETER:
            return _first
        if module in ("torch", "torch.cuda", "torch.storage") and name in DTYPE_OF_STORAGE:
            return DType(DTYPE_OF_STORAGE[name])
        if (module, name) == ("torch", "Size"):
            return _tuple
        if (module, name) == ("torch", "device"):
            return _device
        if module == "torch" and name.islower() and name.rstrip("0123456789_efmnuz") in _DTYPE_STEMS:
            return DType(name)
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module in ("builtins", "__builtin__"):
            return _PLAIN_TYPES.get(name)
        return None


_REBUILD_TENSOR = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3")
_REBUILD_PARAMETER = ("_rebuild_parameter", "_rebuild_parameter_with_state")
_DTYPE_STEMS = ("float", "bfloat", "int", "uint", "bool", "complex", "qint", "quint")


def _first(value: Any, *_: Any) -> Any:
    """A parameter is its tensor."""
    return value


def _tuple(values: Any = ()) -> tuple[Any, ...]:
    return tuple(values)


def _device(*parts: Any) -> str:
    return ":".join(str(part) for part in parts)


def tensors_in(tree: Any, name: str = "") -> dict[str, Stored]:
    """The tensors in nested mappings and sequences, named by their path with dots."""
    if isinstance(tree, Stored):
        return {name: tree}
    found: dict[str, Stored] = {}
    for key, item in _children(tree):
        found |= tensors_in(item, f"{name}.{key}" if name else str(key))
    return found


def values_in(tree: Any, name: str = "") -> dict[str, Any]:
    """The numbers, texts and truth values beside the tensors, named alike."""
    if isinstance(tree, bool | int | float | str) and not isinstance(tree, DType):
        return {name: tree}
    found: dict[str, Any] = {}
    for key, item in _children(tree):
        found |= values_in(item, f"{name}.{key}" if name else str(key))
    return found


def _children(tree: Any) -> list[tuple[Any, Any]]:
    if isinstance(tree, dict):
        return list(tree.items())
    if isinstance(tree, list | tuple):
        return list(enumerate(tree))
    if isinstance(tree, Inert):
        return [*tree.state.items(), *((str(k), v) for k, v in (i for i in tree.items if isinstance(i, tuple)))]
    return []
