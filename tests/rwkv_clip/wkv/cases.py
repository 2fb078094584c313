"""What the tests of the WKV operator share: its cases, random inputs, and how far two results are apart."""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from rwkv_clip.wkv import wkv6_bidirectional

CASES = ["t1", "t2", "t3", "t7", "t16n16", "t49n80", "slow", "fast", "mixed"]
NAMES = ("r", "k", "v", "w", "u")
RESULTS = ("y", "gr", "gk", "gv", "gw", "gu")
DECAYS = {"slow": (-6.0, -4.0), "mid": (-3.0, 0.0), "fast": (1.0, 3.0), "mixed": (-6.0, 3.0), "saturated": (5.0, 95.0)}


def random_inputs(B: int, T: int, H: int, N: int, decay: str, seed: int, dtype=torch.float64) -> list[Tensor]:
    """r, k, v, w, u and gy; a share of the decays stays moderate so that there is something to lose."""
    generator = torch.Generator().manual_seed(seed)
    r, k, v, gy = (torch.randn(B, T, H, N, generator=generator, dtype=torch.float64) for _ in range(4))
    low, high = DECAYS[decay]
    w = low + (high - low) * torch.rand(B, T, H, N, generator=generator, dtype=torch.float64)
    if decay == "saturated":
        w = torch.where(torch.rand(w.shape, generator=generator) < 0.5, w, -w.remainder(3))
    u = torch.randn(H, N, generator=generator, dtype=torch.float64)
    return [x.to(dtype) for x in (r, k, v, w, u, gy)]


def output_and_gradients(inputs: list[Tensor], engine: str) -> list[Tensor]:
    *tensors, gy = inputs
    leaves = [x.clone().requires_grad_() for x in tensors]
    y = wkv6_bidirectional(*leaves, engine=engine)
    return [y.detach(), *torch.autograd.grad(y, leaves, gy)]


def largest_error(seen: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest value (at least 1)."""
    assert seen.shape == expected.shape
    assert bool(torch.isfinite(seen).all())
    return float((seen.double() - expected.double()).abs().max() / max(1.0, float(expected.abs().max())))


def recorded_case(recorded: dict[str, Any], case: str, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """The original's inputs (r, k, v, w, u, gy) and results of one case."""
    heads = recorded[f"{case}/u"].shape[0]

    def read(name: str) -> Tensor:
        value = torch.from_numpy(recorded[f"{case}/{name}"]).double()
        return value if value.dim() == 2 else rearrange(value, "b t (h n) -> b t h n", h=heads)

    return [read(name).to(dtype) for name in (*NAMES, "gy")], [read(name) for name in RESULTS]
