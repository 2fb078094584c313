"""The two branches of a layer: TimeMix (across positions, around the WKV recurrence) and ChannelMix (within one).

Legend: B batch, T positions, D channels, H heads, N channels of a head, F hidden channels, R rank of a small map.
Parameter names are those of published RWKV checkpoints: ``maa`` weighs a position against its shifted neighbour,
``time_decay`` is the raw decay w, ``time_faaaa`` the bonus u. Source of the equations: Gu et al., "RWKV-CLIP" (EMNLP
2024), after Peng et al., "Eagle and Finch" (2024); they are written out in docs/rwkv_clip.md.
"""

from __future__ import annotations

from typing import Literal

import torch
from einops import einsum, rearrange
from torch import Tensor, nn

from rwkv_clip.wkv import Engine, wkv6_bidirectional

__all__ = ["ChannelMix", "TimeMix"]

MIX_RANK = 32
DECAY_RANK = 64
GROUP_NORM_EPS = 1e-5


class TimeMix(nn.Module):
    """Mix across positions: five data-dependent blends of x and its shift feed r, k, v, gate and decay; then WKV.

    Args:
        width: D, divisible by 4 * heads.
        heads: H.
        layer, depth: this layer's index and the number of layers; they set the initial values.
        eps: epsilon of the group norm over each head.
        engine: which WKV engine to use.
    """

    def __init__(
        self, width: int, heads: int, *, layer: int, depth: int, eps: float = GROUP_NORM_EPS, engine: Engine = "auto"
    ) -> None:
        super().__init__()
        self.heads, self.eps, self.engine = heads, eps, engine
        late = layer / max(depth - 1, 1)  # 0 in the first layer, 1 in the last
        left = 1 - layer / depth  # 1 in the first layer, 1/depth in the last
        channel = torch.arange(width) / width
        own = channel**left
        self.time_maa_x = _per_channel(1 - own)
        self.time_maa_w = _per_channel(1 - own)
        self.time_maa_k = _per_channel(1 - own)
        self.time_maa_v = _per_channel(1 - (own + 0.3 * late))
        self.time_maa_r = _per_channel(1 - channel ** (left / 2))
        self.time_maa_g = _per_channel(1 - channel ** (left / 2))
        self.time_maa_w1 = _small(width, 5 * MIX_RANK)
        self.time_maa_w2 = _small(5, MIX_RANK, width)

        place = torch.arange(width) / max(width - 1, 1)
        self.time_decay = _per_channel(-6 + 5 * place ** (0.7 + 1.3 * late))
        self.time_decay_w1 = _small(width, DECAY_RANK)
        self.time_decay_w2 = _small(DECAY_RANK, width)
        zigzag = 0.1 * ((torch.arange(width) + 1) % 3 - 1)
        self.time_faaaa = nn.Parameter(rearrange(late * (1 - place) + zigzag, "(h n) -> h n", h=heads))

        self.receptance = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, width, bias=False)
        self.ln_x = nn.GroupNorm(heads, width, eps=eps)

    def forward(self, x_BTD: Tensor, shifted_BTD: Tensor) -> Tensor:
        """Return (B, T, D) from the normalised positions and their shift, both (B, T, D)."""
        x_w, x_k, x_v, x_r, x_g = self._blend(x_BTD, shifted_BTD)
        gate = nn.functional.silu(self.gate(x_g))
        w = self.time_decay + torch.tanh(x_w @ self.time_decay_w1) @ self.time_decay_w2
        r, k, v, w = (
            rearrange(x, "b t (h n) -> b t h n", h=self.heads)
            for x in (self.receptance(x_r), self.key(x_k), self.value(x_v), w)
        )
        with torch.autocast(x_BTD.device.type, enabled=False):  # the operator itself chooses what it computes in
            y = wkv6_bidirectional(r, k, v, w, self.time_faaaa, self.engine)
        positions = x_BTD.shape[0]
        y = self.ln_x(rearrange(y, "b t h n -> (b t) (h n)"))
        mixed: Tensor = self.output(rearrange(y, "(b t) d -> b t d", b=positions) * gate)
        return mixed

    def _blend(self, x_BTD: Tensor, shifted_BTD: Tensor) -> tuple[Tensor, ...]:
        """Five (B, T, D) blends x + (shifted - x) * weight, in the order w, k, v, r, g."""
        toward = shifted_BTD - x_BTD
        low = torch.tanh((x_BTD + toward * self.time_maa_x) @ self.time_maa_w1)
        low = rearrange(low, "b t (five r) -> five b t r", five=5)
        learned = einsum(low, self.time_maa_w2, "five b t r, five r d -> five b t d")
        fixed = (self.time_maa_w, self.time_maa_k, self.time_maa_v, self.time_maa_r, self.time_maa_g)
        return tuple(x_BTD + toward * (base + shift) for base, shift in zip(fixed, learned, strict=True))


class ChannelMix(nn.Module):
    """Mix within a position: ``sigmoid(Wr x_r) * Wv relu(Wk x_k)^2`` on fixed blends of x and its shift.

    Args:
        width: D.
        hidden: F.
        layer, depth: this layer's index and the number of layers; they set the initial values.
        weighs: what the mixing parameters weigh. ``"shift"`` (text, named ``time_maa_*``): x + (shifted - x) * m.
            ``"own"`` (image, named ``spatial_mix_*``): x * m + shifted * (1 - m).
    """

    def __init__(
        self, width: int, hidden: int, *, layer: int, depth: int, weighs: Literal["own", "shift"] = "shift"
    ) -> None:
        super().__init__()
        self.weighs = weighs
        own = (torch.arange(width) / width) ** (1 - layer / depth)
        if weighs == "own":
            self.spatial_mix_k, self.spatial_mix_r = _per_channel(own), _per_channel(own)
        else:
            self.time_maa_k, self.time_maa_r = _per_channel(1 - own), _per_channel(1 - own)
        self.key = nn.Linear(width, hidden, bias=False)
        self.receptance = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(hidden, width, bias=False)

    def forward(self, x_BTD: Tensor, shifted_BTD: Tensor) -> Tensor:
        """Return (B, T, D) from the normalised positions and their shift, both (B, T, D)."""
        if self.weighs == "own":
            x_k = torch.lerp(shifted_BTD, x_BTD, self.spatial_mix_k)
            x_r = torch.lerp(shifted_BTD, x_BTD, self.spatial_mix_r)
        else:
            x_k = torch.lerp(x_BTD, shifted_BTD, self.time_maa_k)
            x_r = torch.lerp(x_BTD, shifted_BTD, self.time_maa_r)
        hidden = torch.relu(self.key(x_k)).square()
        mixed: Tensor = torch.sigmoid(self.receptance(x_r)) * self.value(hidden)
        return mixed


def _per_channel(values_D: Tensor) -> nn.Parameter:
    return nn.Parameter(rearrange(values_D, "d -> 1 1 d").clone())


def _small(*shape: int) -> nn.Parameter:
    """Uniform in +-1e-4: at first the data-dependent parts hardly act."""
    return nn.Parameter(torch.empty(shape).uniform_(-1e-4, 1e-4))
