"""Find where a PyTorch training run goes wrong.

Every public name is bound when it is first used: ``import tracehooks`` and work on written traces never import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracehooks import checkpoint as checkpoint
    from tracehooks import experiments as experiments
    from tracehooks.capture.probes import audio as audio
    from tracehooks.capture.probes import mask as mask
    from tracehooks.capture.probes import probe as probe
    from tracehooks.capture.probes import tokens as tokens
    from tracehooks.capture.trace import Trace as Trace
    from tracehooks.core.config import Config as Config
    from tracehooks.core.errors import NonFiniteError as NonFiniteError
    from tracehooks.core.errors import TracehooksError as TracehooksError
    from tracehooks.core.records import Finding as Finding
    from tracehooks.core.records import FirstNonFinite as FirstNonFinite
    from tracehooks.experiments import golden as golden
    from tracehooks.experiments.neutral import neutrality as neutrality
    from tracehooks.surface.attach import attach as attach
    from tracehooks.surface.offline import checklist as checklist
    from tracehooks.surface.offline import diagnose as diagnose
    from tracehooks.surface.offline import diff as diff
    from tracehooks.surface.offline import open as open
    from tracehooks.surface.offline import verify_fix as verify_fix

__version__ = "0.1.0"

_ROOMS = {
    "Config": "core.config",
    "Diff": "analysis.diff",
    "Finding": "core.records",
    "FirstNonFinite": "core.records",
    "NonFiniteError": "core.errors",
    "Run": "storage.reader",
    "Trace": "capture.trace",
    "TracehooksError": "core.errors",
    "attach": "surface.attach",
    "audio": "capture.probes",
    "checklist": "surface.offline",
    "checkpoint": "checkpoint",
    "diagnose": "surface.offline",
    "diff": "surface.offline",
    "experiments": "experiments",
    "golden": "experiments.golden",
    "mask": "capture.probes",
    "neutrality": "experiments.neutral",
    "open": "surface.offline",
    "probe": "capture.probes",
    "repair": "storage.repair",
    "tokens": "capture.probes",
    "verify_fix": "surface.offline",
}

__all__ = [*sorted(_ROOMS), "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module 'tracehooks' has no attribute {name!r}")
    room = importlib.import_module(f"tracehooks.{_ROOMS[name]}")
    found = room if name in ("checkpoint", "experiments", "golden") else getattr(room, name)
    globals()[name] = found  # a probe is looked up in every forward pass
    return found


def __dir__() -> list[str]:
    return __all__
