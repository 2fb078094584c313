"""The two-tower model, and the ways to make one. Legend: B batch, T tokens, D channels, S image side in pixels."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor, nn

from rwkv_clip.checkpoint import load_model_weight
from rwkv_clip.config import ModelConfig, load_model_configs
from rwkv_clip.towers import ImageTower, TextTower

__all__ = ["RWKVCLIP", "create_RWKV_Model", "get_model_RWKV_CLIP"]

INITIAL_TEMPERATURE = 0.07


class RWKVCLIP(nn.Module):
    """An image and a text tower of one width, and the learned scale of their similarities.

    Parameters are named as in published RWKV-CLIP checkpoints. ``logit_scale`` holds the logarithm of the scale and
    starts at ln(1/0.07). Source: Radford et al., "CLIP" (2021), section 2.5.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.text_model = TextTower(config)
        self.image_model = ImageTower(config)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / INITIAL_TEMPERATURE)))

    def forward(self, image_B3SS: Tensor, tokens_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return image features (B, D), text features (B, D), neither normalised, and the scale exp(logit_scale), ().

        Args:
            image_B3SS: (B, 3, height, width), the model's float dtype.
            tokens_BT: (B, T) integer token ids.
        """
        return self.encode_image(image_B3SS), self.encode_text(tokens_BT), self.logit_scale.exp()

    def encode_image(self, image_B3SS: Tensor) -> Tensor:
        """Return image features (B, D), not normalised."""
        features: Tensor = self.image_model(image_B3SS)
        return features

    def encode_text(self, tokens_BT: Tensor) -> Tensor:
        """Return text features (B, D), not normalised."""
        features: Tensor = self.text_model(tokens_BT)
        return features


def create_RWKV_Model(  # noqa: N802 - the name people know
    cfg: ModelConfig | str | Path, model_weight_path: str | Path | None = None
) -> RWKVCLIP:
    """Build a model (float32, CPU) from a configuration, or its file or name, and load a checkpoint if one is given.

    Raises:
        InputError: when the configuration or the checkpoint does not fit.
    """
    config = cfg if isinstance(cfg, ModelConfig) else load_model_configs(cfg)
    model = RWKVCLIP(config)
    return model if model_weight_path is None else load_model_weight(model, model_weight_path)


def get_model_RWKV_CLIP(args: object) -> RWKVCLIP:  # noqa: N802 - the name people know
    """Build a model from an object with the configuration's fields as attributes, such as parsed arguments."""
    return create_RWKV_Model(ModelConfig.from_namespace(args))
