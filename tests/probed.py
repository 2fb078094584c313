"""A model with a probe of every kind in it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tracehooks


class Block(nn.Module):
    """A linear layer, with a probe between it and an activation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return tracehooks.probe(self.layer(x), "hidden").sin().relu_() + x


class Probed(nn.Module):
    """Ids, a mask and a signal, two blocks, and a probe of what comes out.

    Args:
        reentrant: which kind of checkpointing the blocks run under; None for none.
    """

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.drop = nn.Dropout(0.2)
        self.reentrant = reentrant

    def forward(self, ids: Tensor) -> Tensor:
        """Ids of shape (batch, length) to (batch, length, 4)."""
        tracehooks.tokens(ids, "ids", vocab_size=6, pad=0)
        kept = tracehooks.mask(ids != 0, "kept")
        tracehooks.mask(torch.zeros(ids.shape).masked_fill(~kept, -torch.inf), "added")
        h = self.drop(self.embed(ids))
        tracehooks.audio(h.flatten(1), "wave", sample_rate=100)
        for block in self.blocks:
            h = self.inside(block, h)
        return tracehooks.probe(h, "last")

    def inside(self, block: nn.Module, h: Tensor) -> Tensor:
        """A block and a probe behind it, under checkpointing or not."""

        def run(h: Tensor) -> Tensor:
            return tracehooks.probe(block(h), "inside")

        return run(h) if self.reentrant is None else checkpoint(run, h, use_reentrant=self.reentrant)
