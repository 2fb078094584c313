"""Checkpoints: what was kept of a model, and whether it is what a model holds."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracehooks.checkpoint.check import check as check

__all__ = ["check"]


def __getattr__(name: str) -> Any:
    if name != "check":
        raise AttributeError(f"module 'tracehooks.checkpoint' has no attribute {name!r}")
    # an import binds the module under its own name, which is the function's, too
    globals()[name] = importlib.import_module("tracehooks.checkpoint.check").check
    return globals()[name]
