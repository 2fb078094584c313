"""Experiments on a live model: one batch, run on purpose, recorded, and the model left as it was."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracehooks.experiments.precisions import precision as precision
    from tracehooks.experiments.shadows import shadow as shadow

_ROOMS = {"precision": "precisions", "shadow": "shadows"}

__all__ = sorted(_ROOMS)


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module 'tracehooks.experiments' has no attribute {name!r}")
    return getattr(importlib.import_module(f"tracehooks.experiments.{_ROOMS[name]}"), name)
