"""Experiments on a live model: one batch, run on purpose, recorded, and the model left as it was."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracehooks.experiments.influences import influence as influence
    from tracehooks.experiments.overfits import overfit as overfit
    from tracehooks.experiments.precisions import precision as precision
    from tracehooks.experiments.rates import learning_rate_range as learning_rate_range
    from tracehooks.experiments.shadows import shadow as shadow

_ROOMS = {
    "influence": "influences",
    "learning_rate_range": "rates",
    "overfit": "overfits",
    "precision": "precisions",
    "shadow": "shadows",
}

__all__ = sorted(_ROOMS)


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module 'tracehooks.experiments' has no attribute {name!r}")
    return getattr(importlib.import_module(f"tracehooks.experiments.{_ROOMS[name]}"), name)
