"""Token shifts: every position hands some of its channels to its neighbours, so that mixing sees around it.

Legend: B batch, T positions, D channels, H heads, N channels of a head (D = H*N), y and x the rows and columns of the
patch grid.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["b_shift", "q_shift"]


def b_shift(x_BTD: Tensor, heads: int) -> Tensor:
    """Shift in time, both ways: in every head the first half of the channels comes from t-1, the rest from t+1.

    Args:
        x_BTD: (B, T, D), any float dtype, D divisible by ``2 * heads``.
        heads: H.

    Returns:
        (B, T, D); zeros where there is no neighbour. Source: RWKV-CLIP, the text tower's bidirectional shift.
    """
    earlier, later = rearrange(x_BTD, "b t (h half c) -> half b t h c", h=heads, half=2)
    from_before = pad(earlier[:, :-1], (0, 0, 0, 0, 1, 0))
    from_after = pad(later[:, 1:], (0, 0, 0, 0, 0, 1))
    return rearrange([from_before, from_after], "half b t h c -> b t (h half c)")


def q_shift(x_BTD: Tensor, heads: int, grid: tuple[int, int]) -> Tensor:
    """Shift on the patch grid: the quarters of every head come from the left, right, upper and lower neighbour.

    Args:
        x_BTD: (B, T, D) with T = rows * columns, row by row; further rows (a class token) pass through unchanged.
            Any float dtype, D divisible by ``4 * heads``.
        heads: H.
        grid: (rows, columns).

    Returns:
        (B, T, D); zeros where there is no neighbour. Source: Vision-RWKV, quad-directional shift.
    """
    rows, columns = grid
    patches, others = x_BTD[:, : rows * columns], x_BTD[:, rows * columns :]
    quarters = rearrange(patches, "b (y x) (h q c) -> q b y x h c", y=rows, h=heads, q=4)
    left, right, up, down = quarters
    shifted = [
        pad(left[:, :, :-1], (0, 0, 0, 0, 1, 0)),
        pad(right[:, :, 1:], (0, 0, 0, 0, 0, 1)),
        pad(up[:, :-1], (0, 0, 0, 0, 0, 0, 1, 0)),
        pad(down[:, 1:], (0, 0, 0, 0, 0, 0, 0, 1)),
    ]
    moved = rearrange(shifted, "q b y x h c -> b (y x) (h q c)")
    return torch.cat([moved, others], dim=1) if others.shape[1] else moved
