"""Checkpoints: what was kept of a model, and whether it is what a model holds."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracehooks.checkpoint.check import check as check
    from tracehooks.checkpoint.difference import diff as diff
    from tracehooks.checkpoint.health import first_bad as first_bad
    from tracehooks.checkpoint.health import verify as verify
    from tracehooks.checkpoint.inspection import inspect as inspect

_ROOMS = {"check": "check", "diff": "difference", "first_bad": "health", "inspect": "inspection", "verify": "health"}

__all__ = sorted(_ROOMS)


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module 'tracehooks.checkpoint' has no attribute {name!r}")
    # an import binds the module under its own name, which may be the function's, too
    globals()[name] = getattr(importlib.import_module(f"tracehooks.checkpoint.{_ROOMS[name]}"), name)
    return globals()[name]
