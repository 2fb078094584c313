"""CLIP's contrastive loss. Legend: B batch, D channels."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

__all__ = ["ClipLoss"]


class ClipLoss(nn.Module):
    """Symmetric cross-entropy: each image should pick its own caption out of the batch, each caption its own image.

    Source: Radford et al., "CLIP" (2021), figure 3.
    """

    def forward(self, image_BD: Tensor, text_BD: Tensor, logit_scale: Tensor) -> Tensor:
        """Return the mean loss, (), in nats.

        Args:
            image_BD, text_BD: (B, D) features of unit length; row i of both belong together.
            logit_scale: () factor on the cosine similarities, already exponentiated.
        """
        logits_BB = logit_scale * image_BD @ text_BD.T
        own = torch.arange(logits_BB.shape[0], device=logits_BB.device)
        return (cross_entropy(logits_BB, own) + cross_entropy(logits_BB.T, own)) / 2
