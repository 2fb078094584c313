"""RWKV-CLIP: an image and a text tower built on the bidirectional WKV recurrence, trained against each other.

``python -m rwkv_clip.train --help`` trains one; docs/rwkv_clip.md explains it. Names are imported when first used, in
any order; importing the package reads no environment variable and does no work.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rwkv_clip.checkpoint import load_model_weight, unwrap_model
    from rwkv_clip.clip import RWKVCLIP, create_RWKV_Model, get_model_RWKV_CLIP
    from rwkv_clip.config import ModelConfig, load_model_configs
    from rwkv_clip.errors import InputError
    from rwkv_clip.loss import ClipLoss
    from rwkv_clip.training.speed import SpeedCallBack
    from rwkv_clip.wkv import wkv6_bidirectional

__all__ = [
    "RWKVCLIP",
    "ClipLoss",
    "InputError",
    "ModelConfig",
    "SpeedCallBack",
    "create_RWKV_Model",
    "get_model_RWKV_CLIP",
    "load_model_configs",
    "load_model_weight",
    "unwrap_model",
    "wkv6_bidirectional",
]


def _home(name: str) -> str:
    """The module that defines a public name."""
    match name:
        case "load_model_weight" | "unwrap_model":
            return "checkpoint"
        case "RWKVCLIP" | "create_RWKV_Model" | "get_model_RWKV_CLIP":
            return "clip"
        case "ModelConfig" | "load_model_configs":
            return "config"
        case "InputError":
            return "errors"
        case "ClipLoss":
            return "loss"
        case "SpeedCallBack":
            return "training.speed"
        case _:
            return "wkv"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_home(name)}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
