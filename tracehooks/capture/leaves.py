"""The tensors inside what a module takes or returns, with a name for each.

A hand-written walk: it sees dataclasses, which torch's pytree does not, consumes nothing and calls nothing of the
user's but mapping and sequence access.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

MAX_DEPTH = 16
"""Deeper nesting, or a container that holds itself, is not followed."""


def leaves(value: Any, name: str, depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in tuples, lists, mappings (ModelOutput too), NamedTuples, dataclasses and attrs classes.

    Names grow by index, key or field: ``output``, ``output.0``, ``output.logits``. Anything else is ignored.
    """
    if isinstance(value, Tensor):
        yield name, value
    elif depth < MAX_DEPTH:
        for key, item in _items(value):
            yield from leaves(item, f"{name}.{key}", depth + 1)


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, tuple | list):
        names = getattr(type(value), "_fields", None) or range(len(value))
        yield from zip(names, value, strict=False)
    elif isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, type):
        return
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield field.name, getattr(value, field.name, None)
    elif hasattr(type(value), "__attrs_attrs__"):
        for field in type(value).__attrs_attrs__:
            yield field.name, getattr(value, field.name, None)
