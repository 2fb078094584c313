"""The image and the text tower: stacks of the same layer, differing in their shift, their inputs and their pooling.

Legend: B batch, T positions (patches or tokens), D channels, S image side in pixels, y and x patch rows and columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from einops import rearrange, reduce
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rwkv_clip.config import ModelConfig
from rwkv_clip.mixing import GROUP_NORM_EPS, ChannelMix, TimeMix
from rwkv_clip.shifts import b_shift, q_shift

__all__ = ["DropPath", "ImageTower", "Layer", "TextTower"]

Shift = Callable[[Tensor], Tensor]


class DropPath(nn.Module):
    """Drop a whole branch of a sample with chance ``rate`` in training; the kept ones are scaled by 1 / (1 - rate).

    Source: Huang et al., "Deep Networks with Stochastic Depth" (2016).
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, branch_BTD: Tensor) -> Tensor:
        """Return (B, T, D), some samples all zero."""
        if self.rate == 0 or not self.training:
            return branch_BTD
        kept = branch_BTD.new_empty(branch_BTD.shape[0], 1, 1).bernoulli_(1 - self.rate)
        return branch_BTD * kept / (1 - self.rate)

    def extra_repr(self) -> str:
        """Show the rate in the module's repr."""
        return f"rate={self.rate}"


class Layer(nn.Module):
    """One pre-norm residual layer: ``x += att(ln1 x)``, then ``x += ffn(ln2 x)``.

    The first layer of a tower also normalises its input (``ln0``). ``drop_path`` acts on a branch, ``dropout`` on the
    sum after it.
    """

    def __init__(
        self, att: TimeMix, ffn: ChannelMix, width: int, *, first: bool, drop_path: float = 0.0, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(width)
        self.ln2 = nn.LayerNorm(width)
        self.ln0 = nn.LayerNorm(width) if first else None
        self.att = att
        self.ffn = ffn
        self.drop_path = DropPath(drop_path)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor, shift: Shift) -> Tensor:
        """Return (B, T, D); ``shift`` maps (B, T, D) to the neighbours' channels, (B, T, D)."""
        x = x_BTD if self.ln0 is None else self.ln0(x_BTD)
        for norm, branch in ((self.ln1, self.att), (self.ln2, self.ffn)):
            normed = norm(x)
            x = self.dropout(x + self.drop_path(branch(normed, shift(normed))))
        return cast(Tensor, x)


class PatchEmbedding(nn.Module):
    """Cut the image into square patches and map each to D channels; a partial last patch is padded with zeros."""

    def __init__(self, width: int, patch: int) -> None:
        super().__init__()
        self.patch = patch
        self.projection = nn.Conv2d(3, width, kernel_size=patch, stride=patch)

    def forward(self, image_B3SS: Tensor) -> Tensor:
        """Return the grid of patches, (B, D, rows, columns)."""
        height, width = image_B3SS.shape[-2:]
        padded = nn.functional.pad(image_B3SS, (0, -width % self.patch, 0, -height % self.patch))
        return cast(Tensor, self.projection(padded))


class ImageTower(nn.Module):
    """Patches, position embedding, layers with Q-shift, a last norm, and the mean over patches (or the class token)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        D, depth = config.image_embed_dims, config.image_depth
        self.heads, self.grid, self.recompute = config.image_num_heads, config.image_grid, config.with_cp
        self.output_cls_token = config.image_output_cls_token
        self.patch_embed = PatchEmbedding(D, config.image_patch_size)
        self.pos_embed = nn.Parameter(torch.zeros(1, self.grid**2, D))
        self.cls_token = nn.Parameter(torch.zeros(1, 1, D)) if config.image_with_cls_token else None
        self.layers = nn.ModuleList(
            Layer(
                TimeMix(D, self.heads, layer=i, depth=depth, engine=config.wkv_engine),
                ChannelMix(D, config.image_hidden_rate * D, layer=i, depth=depth, weighs="own"),
                D,
                first=i == 0,
                drop_path=config.drop_path_rate * i / max(depth - 1, 1),
            )
            for i in range(depth)
        )
        self.ln1 = nn.LayerNorm(D)

    def forward(self, image_B3SS: Tensor) -> Tensor:
        """Return the features, (B, D), not normalised, of images (B, 3, height, width).

        Other sizes than ``input_size`` work: the position embedding is resized bicubically to the grid at hand.
        """
        patches = self.patch_embed(image_B3SS)
        rows, columns = patches.shape[-2:]
        x = rearrange(patches, "b d y x -> b (y x) d") + self._positions(rows, columns)
        if self.cls_token is not None:
            x = torch.cat([x, self.cls_token.expand(x.shape[0], -1, -1)], dim=1)

        def shift(normed_BTD: Tensor) -> Tensor:
            return q_shift(normed_BTD, self.heads, (rows, columns))

        for layer in self.layers:
            if self.recompute and self.training:
                x = checkpoint(layer, x, shift, use_reentrant=False)
            else:
                x = layer(x, shift)
        x = self.ln1(x)
        feature = x[:, -1] if self.output_cls_token else reduce(x[:, : rows * columns], "b t d -> b d", "mean")
        return cast(Tensor, feature)

    def _positions(self, rows: int, columns: int) -> Tensor:
        if (rows, columns) == (self.grid, self.grid):
            return self.pos_embed
        square = rearrange(self.pos_embed, "1 (y x) d -> 1 d y x", y=self.grid)
        resized = nn.functional.interpolate(square, (rows, columns), mode="bicubic", align_corners=False)
        return rearrange(resized, "1 d y x -> 1 (y x) d")


class TextTower(nn.Module):
    """Token embedding, layers with B-shift, a last norm, and the mean over all positions of the unit-length rows.

    Padding is not masked: it takes part in the recurrence and in the mean, as in the published models.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        D, depth = config.n_embd, config.n_layer
        self.heads = config.text_heads
        self.emb = nn.Embedding(config.vocab_size, D)
        eps = GROUP_NORM_EPS * config.head_size_divisor**2
        self.blocks = nn.ModuleList(
            Layer(
                TimeMix(D, self.heads, layer=i, depth=depth, eps=eps, engine=config.wkv_engine),
                ChannelMix(D, config.text_hidden, layer=i, depth=depth, weighs="shift"),
                D,
                first=i == 0,
                dropout=config.dropout,
            )
            for i in range(depth)
        )
        self.ln_out = nn.LayerNorm(D)
        if config.text_initialization:
            self._initialize()

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return the features, (B, D), not normalised, of token ids (B, T), integer, each below vocab_size."""
        x = self.emb(tokens_BT)
        for block in self.blocks:
            x = block(x, lambda normed_BTD: b_shift(normed_BTD, self.heads))
        x = nn.functional.normalize(self.ln_out(x), dim=-1)
        return reduce(x, "b t d -> b d", "mean")

    @torch.no_grad()
    def _initialize(self) -> None:
        """Set the initial weights of the published recipe: every branch starts out silent (its output map is zero)."""
        nn.init.uniform_(self.emb.weight, -1e-4, 1e-4)
        for i, block in enumerate(self.blocks):
            att, ffn = cast(TimeMix, block.att), cast(ChannelMix, block.ffn)
            for silent in (att.output, ffn.value, ffn.receptance):
                nn.init.zeros_(silent.weight)
            for linear, gain in ((att.receptance, 1.0), (att.value, 1.0), (att.key, 0.1), (att.gate, 0.1)):
                nn.init.orthogonal_(linear.weight, gain)
            nn.init.orthogonal_(ffn.key.weight, 0.5 * (ffn.key.out_features / ffn.key.in_features) ** 0.5)
            nn.init.zeros_(att.time_maa_w1)
            nn.init.zeros_(att.time_decay_w1)
            nn.init.uniform_(att.time_maa_w2, -0.01, 0.01)
            nn.init.uniform_(att.time_decay_w2, -0.01, 0.01)
            nn.init.constant_(att.ln_x.weight, ((1 + i) / len(self.blocks)) ** 0.7)
