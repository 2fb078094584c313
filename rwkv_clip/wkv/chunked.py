"""The WKV recurrence as matrix products over chunks of time, in plain torch: the engine for CPUs and any device.

Legend of the shape suffixes:
    X   one batch entry and one head (B*H, cut into slabs)   C   chunks       L   positions of a chunk
    M   one chunk of one head (X*C)                          N   channels     S   L + 2: a chunk and its two gates

Within a chunk, the weight of position s on position t is the product of the decays strictly between them. The table of
these products, ``P``, is built by multiplying, one position further at a time; nothing is ever divided, and nothing is
the difference of two logarithms, so an underflowing decay gives an exact zero and not a NaN. The two gates are
positions 0 and L+1, before and after the chunk's own 1..L: their rows of P carry the states in and out. The derivation
is in docs/rwkv_clip.md.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from rwkv_clip.wkv.reference import decay, decay_slope

__all__ = ["wkv6_chunked", "wkv6_chunked_backward"]

SLAB_ELEMENTS = 1 << 20
"""The most elements of P held at once (4 MiB in float32: it should stay in a core's cache)."""


def chunk_length(T: int) -> int:
    """Return the length of the chunks that T time steps are cut into: about sqrt(T), at least 4, evenly filled.

    Within a chunk the work per position grows with the length, between chunks it falls with it.
    """
    chunks = math.ceil(T / max(4, math.isqrt(T)))
    return math.ceil(T / chunks)


def _compute_dtype(*tensors: Tensor) -> torch.dtype:
    widest = tensors[0].dtype
    for tensor in tensors[1:]:
        widest = torch.promote_types(widest, tensor.dtype)
    return torch.promote_types(widest, torch.float32)


def _cut(x: Tensor, L: int) -> Tensor:
    """(B, T, H, N) -> (B*H, C, L, N) contiguous, the missing end zero: nothing is added there and nothing lies beyond."""
    missing = -x.shape[1] % L
    if missing:
        x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, missing))
    return rearrange(x, "b (c l) h n -> (b h) c l n", l=L).contiguous()


def _join(x_XCLN: Tensor, like_BTHN: Tensor) -> Tensor:
    """Undo :func:`_cut`: (B*H, C, L, N) -> (B, T, H, N) in the dtype of ``like_BTHN``."""
    B, T, H, _ = like_BTHN.shape
    joined = rearrange(x_XCLN, "(b h) c l n -> b (c l) h n", b=B, h=H)
    return joined[:, :T].to(like_BTHN.dtype).contiguous()


def _products_between(a_LMN: Tensor) -> Tensor:
    """P (S, M, S, N): ``P[t, :, s]`` is the product of the decays strictly between t and s, zero for t == s.

    Rows 1..L are full; of row L+1 only the part before it is, and row 0 (never read) stays zero.
    """
    L, M, N = a_LMN.shape
    P = a_LMN.new_zeros(L + 2, M, L + 2, N)
    for t in range(1, L + 2):
        P[t, :, t - 1] = 1
        if t > 1:
            torch.mul(P[t - 1, :, : t - 1], a_LMN[t - 2].unsqueeze(1), out=P[t, :, : t - 1])
    for t in range(L, 0, -1):
        P[t, :, t + 1] = 1
        if t < L:
            torch.mul(P[t + 1, :, t + 2 :], a_LMN[t].unsqueeze(1), out=P[t, :, t + 2 :])
    return P


class _Chunk(NamedTuple):
    """What forward and backward both need of a slab."""

    P: Tensor  # (S, M, S, N), the table of products
    pre: Tensor  # (M, L, N), product of the chunk's decays before each position
    post: Tensor  # (M, L, N), and after it
    total: Tensor  # (X, C, N), and of the whole chunk
    a: Tensor  # (L, M, N), the decays


def _open_chunks(a_XCLN: Tensor) -> _Chunk:
    X, C, _, _ = a_XCLN.shape
    a_LMN = rearrange(a_XCLN, "x c l n -> l (x c) n").contiguous()
    P = _products_between(a_LMN)
    pre, post = rearrange(P[1:-1, :, 0], "l m n -> m l n"), rearrange(P[1:-1, :, -1], "l m n -> m l n")
    total = rearrange(P[-1, :, 0], "(x c) n -> x c n", x=X, c=C)
    return _Chunk(P, pre, post, total, a_LMN)


def _scan(total_XCN: Tensor, step_XCNN: Tensor, *, reverse: bool) -> Tensor:
    """State at the near edge of every chunk: S_0 = 0, S_{c+1} = diag(total_c) S_c + step_c, or the same backwards."""
    states = torch.zeros_like(step_XCNN)
    C = step_XCNN.shape[1]
    order = range(C - 1, 0, -1) if reverse else range(C - 1)
    for c in order:
        nearer = c - 1 if reverse else c + 1
        torch.addcmul(step_XCNN[:, c], total_XCN[:, c].unsqueeze(-1), states[:, c], out=states[:, nearer])
    return states


def _states(chunk: _Chunk, x_MLN: Tensor, z_MLN: Tensor) -> tuple[Tensor, Tensor]:
    """States (M, N, N) that enter each chunk from before and from after, when position s adds x_s z_s^T."""
    X, C, _ = chunk.total.shape
    per_chunk = "(x c) j i -> x c j i"
    steps_on = rearrange((x_MLN * chunk.post).mT @ z_MLN, per_chunk, x=X, c=C)
    steps_back = rearrange((x_MLN * chunk.pre).mT @ z_MLN, per_chunk, x=X, c=C)
    before = _scan(chunk.total, steps_on, reverse=False)
    after = _scan(chunk.total, steps_back, reverse=True)
    return before.flatten(0, 1), after.flatten(0, 1)


def _row_sums(P_LMLN: Tensor, x_MLN: Tensor, weights_LML: Tensor) -> Tensor:
    """(L, M, N): for each t, the sum over s of weights[t, m, s] P[t, m, s, n] x[m, s, n]."""
    return torch.einsum("tmsn,tms->tmn", P_LMLN * x_MLN, weights_LML)


def _scores(P_LMLN: Tensor, r_MLN: Tensor, k_MLN: Tensor) -> Tensor:
    """(L, M, L): for each t, s the sum over n of r[m, t, n] P[t, m, s, n] k[m, s, n]."""
    return torch.einsum("tmsn,mtn->tms", P_LMLN * k_MLN, r_MLN)


def _forward_slab(r: Tensor, k: Tensor, v: Tensor, a: Tensor) -> Tensor:
    """y without the bonus, (X, C, L, N), for one slab of inputs of that shape."""
    X, C, _, _ = r.shape
    chunk = _open_chunks(a)
    r_MLN, k_MLN, v_MLN = (x.flatten(0, 1) for x in (r, k, v))
    scores = _scores(chunk.P[1:-1, :, 1:-1], r_MLN, k_MLN)
    y = scores.transpose(0, 1) @ v_MLN
    if C > 1:
        before, after = _states(chunk, k_MLN, v_MLN)
        y.baddbmm_(r_MLN * chunk.pre, before).baddbmm_(r_MLN * chunk.post, after)
    return rearrange(y, "(x c) l n -> x c l n", x=X, c=C)


def _backward_slab(r: Tensor, k: Tensor, v: Tensor, a: Tensor, gy: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients with respect to r, k, v and a, without the bonus's part, each (X, C, L, N)."""
    X, C, _, _ = r.shape
    chunk = _open_chunks(a)
    P_LMLN = chunk.P[1:-1, :, 1:-1]
    r_MLN, k_MLN, v_MLN, gy_MLN = (x.flatten(0, 1) for x in (r, k, v, gy))

    scores_MLL = _scores(P_LMLN, r_MLN, k_MLN).transpose(0, 1)
    g_scores_MLL = gy_MLN @ v_MLN.mT
    gv = scores_MLL.mT @ gy_MLN
    gr = _row_sums(P_LMLN, k_MLN, g_scores_MLL.transpose(0, 1)).transpose(0, 1).contiguous()
    gk = _row_sums(P_LMLN, r_MLN, g_scores_MLL.permute(2, 0, 1)).transpose(0, 1).contiguous()
    g_pre, g_post, g_total = torch.zeros_like(r_MLN), torch.zeros_like(r_MLN), torch.zeros_like(r_MLN[:, 0])

    if C > 1:
        before, after = _states(chunk, k_MLN, v_MLN)
        g_after, g_before = _states(chunk, r_MLN, gy_MLN)  # gradients run against their states
        read_pre, read_post = gy_MLN @ before.mT, gy_MLN @ after.mT
        sent_post, sent_pre = v_MLN @ g_before.mT, v_MLN @ g_after.mT
        gv.baddbmm_(k_MLN * chunk.post, g_before).baddbmm_(k_MLN * chunk.pre, g_after)
        gr += read_pre * chunk.pre + read_post * chunk.post
        gk += sent_post * chunk.post + sent_pre * chunk.pre
        g_pre, g_post = read_pre * r_MLN + sent_pre * k_MLN, sent_post * k_MLN + read_post * r_MLN
        g_total = (before * g_before + after * g_after).sum(-1)

    ga = _decay_gradient(chunk, r_MLN, k_MLN, g_scores_MLL, (g_pre, g_post, g_total))
    shaped = (rearrange(g, "(x c) l n -> x c l n", x=X, c=C) for g in (gr, gk, gv, ga))
    return tuple(shaped)  # type: ignore[return-value]


def _decay_gradient(
    chunk: _Chunk, r_MLN: Tensor, k_MLN: Tensor, g_scores_MLL: Tensor, g_gates: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """(M, L, N): run the recursion ``P[t, s] = P[t-1, s] a_{t-1}`` (s < t-1) backwards, from the last row to the first.

    ``g`` holds the gradient of row t's entries before t. Every entry of P stands for two pairs, (t, s) and (s, t).
    """
    g_pre, g_post, g_total = g_gates
    L = r_MLN.shape[1]
    ga = torch.zeros_like(r_MLN)
    g = torch.cat([g_total.unsqueeze(1), g_post], dim=1)  # row L+1: columns 0..L
    for t in range(L, 0, -1):
        g = g[:, :t]  # a_t spans from column 0..t-1 to row t+1; the entry beside the diagonal is a constant
        ga[:, t - 1] = (g * chunk.P[t, :, :t]).sum(1)
        if t == 1:
            break
        g = g * chunk.a[t - 1].unsqueeze(1)
        g[:, 0] += g_pre[:, t - 1]
        row, column = g_scores_MLL[:, t - 1, : t - 1, None], g_scores_MLL[:, : t - 1, t - 1, None]
        g[:, 1:] += k_MLN[:, : t - 1] * (row * r_MLN[:, t - 1 : t])
        g[:, 1:] += r_MLN[:, : t - 1] * (column * k_MLN[:, t - 1 : t])
    return ga


def _slab_size(L: int, C: int, N: int) -> int:
    return max(1, SLAB_ELEMENTS // ((L + 2) ** 2 * C * N))


def wkv6_chunked(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
    """Return y (B, T, H, N) in the dtype of ``v``; inputs as in :func:`rwkv_clip.wkv.wkv6_bidirectional`.

    Computed in the widest input dtype, at least float32.
    """
    result_dtype, dtype = v.dtype, _compute_dtype(r, k, v, w, u)
    r, k, v, w, u = (x.to(dtype) for x in (r, k, v, w, u))
    L = chunk_length(r.shape[1])
    cut = [_cut(x, L) for x in (r, k, v, decay(w))]
    slab = _slab_size(L, cut[0].shape[1], r.shape[3])
    slabs = [_forward_slab(*parts) for parts in zip(*(torch.split(x, slab) for x in cut), strict=True)]
    bonus = (r * u * k).sum(-1, keepdim=True)
    return _join(torch.cat(slabs), v).addcmul_(bonus, v).to(result_dtype)


def wkv6_chunked_backward(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, gy: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of ``sum(gy * y)`` with respect to r, k, v, w, u, each of its input's shape and dtype."""
    dtypes = [x.dtype for x in (r, k, v, w, u)]
    dtype = _compute_dtype(r, k, v, w, u)
    r, k, v, w, u, gy = (x.to(dtype) for x in (r, k, v, w, u, gy))
    L = chunk_length(r.shape[1])
    cut = [_cut(x, L) for x in (r, k, v, decay(w), gy)]
    slab = _slab_size(L, cut[0].shape[1], r.shape[3])
    slabs = [_backward_slab(*parts) for parts in zip(*(torch.split(x, slab) for x in cut), strict=True)]
    gr, gk, gv, ga = (_join(torch.cat(parts), r) for parts in zip(*slabs, strict=True))

    gy_v, bonus = (gy * v).sum(-1, keepdim=True), (r * u * k).sum(-1, keepdim=True)
    gr, gk, gv = gr.addcmul_(gy_v, u * k), gk.addcmul_(gy_v, u * r), gv.addcmul_(bonus, gy)
    gradients = (gr, gk, gv, ga * decay_slope(w), (gy_v * r * k).sum((0, 1)))
    return tuple(g.to(dtype) for g, dtype in zip(gradients, dtypes, strict=True))  # type: ignore[return-value]
