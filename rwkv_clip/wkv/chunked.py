"""The bidirectional WKV recurrence in matrix form: matrix products within chunks of time, states between chunks.

Legend, for tensors' shapes: B batch, T time, H heads, N channels of a head, X = B*H, C chunks, L positions of a chunk,
M = X*C; ``...`` further dimensions, over spans of the same length.

Within a chunk, the weight of position s on position t is the product of the decays strictly between them. A span of
positions is cut in two, and each half again, down to single positions. For two positions in different halves the product
is that of the decays after the one in its half times that of the decays before the other in its half. Both are products
of decays, at most 1; nothing is divided, and nothing is the difference of two logarithms, so an underflowing decay gives
an exact zero and not a NaN. The derivation is in docs/rwkv_clip.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from rwkv_clip.wkv.reference import decay, decay_slope

__all__ = ["wkv6_chunked", "wkv6_chunked_backward"]

SLAB_ELEMENTS = 1 << 18
"""About so many elements of r, k, v and w are worked on at once (1 MiB each in float32), to stay in a core's cache."""


def chunk_length(T: int, N: int) -> int:
    """Return the length of the chunks that T time steps are cut into: at most about 4 N, evenly filled, divisible by 4.

    Within a chunk the work per position grows with its length; between chunks it is that of 4 N positions.
    """
    chunks = math.ceil(T / (4 * N))
    length = math.ceil(T / chunks)
    return length if length < 4 else length + -length % 4


def _compute_dtype(*tensors: Tensor) -> torch.dtype:
    widest = tensors[0].dtype
    for tensor in tensors[1:]:
        widest = torch.promote_types(widest, tensor.dtype)
    return torch.promote_types(widest, torch.float32)


def _to_chunks(x: Tensor, L: int, beyond: float = 0.0) -> Tensor:
    """(B, T, H, N) -> (X, C, L, N) contiguous, with ``beyond`` in the missing end."""
    missing = -x.shape[1] % L
    if missing:
        x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, missing), value=beyond)
    return rearrange(x, "b (c l) h n -> (b h) c l n", l=L).contiguous()


def _from_chunks(x_XCLN: Tensor, like_BTHN: Tensor) -> Tensor:
    """Undo :func:`_to_chunks`: (X, C, L, N) -> (B, T, H, N) contiguous."""
    B, T, H, _ = like_BTHN.shape
    joined = rearrange(x_XCLN, "(b h) c l n -> b (c l) h n", b=B, h=H)
    return joined[:, :T].contiguous()


class _Span(NamedTuple):
    """Products of the decays in a span of positions, or their gradients."""

    before: Tensor  # (..., length, N), of those before each position
    after: Tensor  # (..., length, N), of those after it
    total: Tensor  # (..., N), of all
    inner: tuple[_Span, ...] = ()  # its halves, in one span with a dimension of 2 when they are equally long


def _cut(x: Tensor) -> tuple[Tensor, ...]:
    """The halves of (..., length, N): (..., 2, length / 2, N), or two tensors when the length is odd. Views."""
    half, odd = divmod(x.shape[-2], 2)
    return (x[..., :half, :], x[..., half:, :]) if odd else (x.view(*x.shape[:-2], 2, half, x.shape[-1]),)


def _cut_pairs(s: Tensor) -> tuple[Tensor, ...]:
    """The same for (..., length, length): the pairs within each half."""
    half, odd = divmod(s.shape[-1], 2)
    if odd:
        return s[..., :half, :half], s[..., half:, half:]
    return (s.view(*s.shape[:-2], 2, half, 2, half).diagonal(0, -4, -2).movedim(-1, -3),)


def _halves(inner: tuple[_Span, ...]) -> tuple[_Span, _Span]:
    if len(inner) == 1:
        both = inner[0]
        first, second = zip(both.before.unbind(-3), both.after.unbind(-3), both.total.unbind(-2), strict=True)
        return _Span(*first), _Span(*second)
    return inner[0], inner[1]


def _together(first: _Span, second: _Span) -> _Span:
    """Undo :func:`_halves` for halves of the same length."""
    return _Span(
        torch.stack([first.before, second.before], -3),
        torch.stack([first.after, second.after], -3),
        torch.stack([first.total, second.total], -2),
    )


def _products(a: Tensor) -> _Span:
    """The products of the decays ``a``, (..., length, N), in the whole span and in all spans within it."""
    if a.shape[-2] == 1:
        ones = torch.ones_like(a)
        return _Span(ones, ones, a.squeeze(-2))
    inner = tuple(_products(half) for half in _cut(a))
    first, second = _halves(inner)
    return _Span(
        torch.cat([first.before, second.before * first.total.unsqueeze(-2)], -2),
        torch.cat([first.after * second.total.unsqueeze(-2), second.after], -2),
        first.total * second.total,
        inner,
    )


def _fill_scores(scores: Tensor, span: _Span, r: Tensor, k: Tensor) -> None:
    """Write ``sum_j r_t[j] P_ts[j] k_s[j]`` for all t != s into (..., length, length); r and k are (..., length, N)."""
    if not span.inner:
        return
    for parts in zip(_cut_pairs(scores), span.inner, _cut(r), _cut(k), strict=True):
        _fill_scores(*parts)
    first, second = _halves(span.inner)
    one, two = slice(None, r.shape[-2] // 2), slice(r.shape[-2] // 2, None)
    scores[..., two, one] = (r[..., two, :] * second.before) @ (k[..., one, :] * first.after).mT
    scores[..., one, two] = (r[..., one, :] * first.after) @ (k[..., two, :] * second.before).mT


class _Sides(NamedTuple):
    """What the gradients of a span's scores are made of and added to, (..., length, N)."""

    r: Tensor
    k: Tensor
    g_r: Tensor
    g_k: Tensor
    g_a: Tensor

    def cut(self) -> list[_Sides]:
        """Of the halves, as :func:`_cut`."""
        return [_Sides(*parts) for parts in zip(*(_cut(x) for x in self), strict=True)]

    def part(self, positions: slice) -> _Sides:
        """Of some positions."""
        return _Sides(*(x[..., positions, :] for x in self))


def _add_gradients(sides: _Sides, span: _Span, g_scores: Tensor, g: _Span) -> None:
    """The gradients of :func:`_fill_scores` and :func:`_products`: adds those of r and k, writes that of the decays.

    ``g`` holds the gradients of the span's own products.
    """
    if not span.inner:
        sides.g_a.copy_(g.total.unsqueeze(-2))
        return
    first, second = _halves(span.inner)
    half = sides.r.shape[-2] // 2
    one, two = slice(None, half), slice(half, None)
    to_first, to_second = g_scores[..., one, two], g_scores[..., two, one]
    g_after = _across(sides.part(one), first.after, sides.part(two), second.before, to_first, to_second)
    g_before = _across(sides.part(two), second.before, sides.part(one), first.after, to_second, to_first)

    g_first = _Span(
        g.before[..., one, :],
        g_after.addcmul_(g.after[..., one, :], second.total.unsqueeze(-2)),
        (g.before[..., two, :] * second.before).sum(-2).addcmul_(g.total, second.total),
    )
    g_second = _Span(
        g_before.addcmul_(g.before[..., two, :], first.total.unsqueeze(-2)),
        g.after[..., two, :],
        (g.after[..., one, :] * first.after).sum(-2).addcmul_(g.total, first.total),
    )
    g_inner = (g_first, g_second) if len(span.inner) == 2 else (_together(g_first, g_second),)
    for parts in zip(sides.cut(), span.inner, _cut_pairs(g_scores), g_inner, strict=True):
        _add_gradients(*parts)


def _across(own: _Sides, e: Tensor, other: _Sides, e_other: Tensor, read: Tensor, sent: Tensor) -> Tensor:
    """Add the gradients of one half's r and k, and return that of its weights ``e``.

    ``read`` holds the gradients of the scores of its positions on the other's, ``sent`` of the other's on its own.
    """
    g_weighed_r = read @ (other.k * e_other)
    g_weighed_k = sent.mT @ (other.r * e_other)
    own.g_r.addcmul_(e, g_weighed_r)
    own.g_k.addcmul_(e, g_weighed_k)
    return (own.r * g_weighed_r).addcmul_(own.k, g_weighed_k)


def _scan(total_XCN: Tensor, step_XCNN: Tensor, *, reverse: bool) -> Tensor:
    """State at the near edge of every chunk: S_0 = 0, S_{c+1} = diag(total_c) S_c + step_c, or the same backwards."""
    states = torch.zeros_like(step_XCNN)
    C = step_XCNN.shape[1]
    order = range(C - 1, 0, -1) if reverse else range(C - 1)
    for c in order:
        nearer = c - 1 if reverse else c + 1
        torch.addcmul(step_XCNN[:, c], total_XCN[:, c].unsqueeze(-1), states[:, c], out=states[:, nearer])
    return states


def _states(span: _Span, x_MLN: Tensor, z_MLN: Tensor, C: int) -> tuple[Tensor, Tensor]:
    """States (M, N, N) that enter each chunk from before and from after, when position s adds x_s z_s^T."""
    per_chunk = "(x c) j i -> x c j i"
    steps_on = rearrange((x_MLN * span.after).mT @ z_MLN, per_chunk, c=C)
    steps_back = rearrange((x_MLN * span.before).mT @ z_MLN, per_chunk, c=C)
    total = rearrange(span.total, "(x c) n -> x c n", c=C)
    before = _scan(total, steps_on, reverse=False)
    after = _scan(total, steps_back, reverse=True)
    return before.flatten(0, 1), after.flatten(0, 1)


def _scores(span: _Span, r_MLN: Tensor, k_MLN: Tensor, u_MN: Tensor) -> Tensor:
    """Weights of all values on all outputs of a chunk, (M, L, L); on the diagonal the bonus."""
    M, L, _ = r_MLN.shape
    scores = r_MLN.new_empty(M, L, L)
    _fill_scores(scores, span, r_MLN, k_MLN)
    scores.diagonal(0, -2, -1).copy_(((r_MLN * k_MLN) @ u_MN.unsqueeze(-1)).squeeze(-1))
    return scores


def _forward_slab(r: Tensor, k: Tensor, v: Tensor, a: Tensor, u: Tensor) -> Tensor:
    """y (X, C, L, N) for one slab of r, k, v and decays of that shape, and u (X, C, N)."""
    C = r.shape[1]
    r_MLN, k_MLN, v_MLN, a_MLN, u_MN = (x.flatten(0, 1) for x in (r, k, v, a, u))
    span = _products(a_MLN)
    y = _scores(span, r_MLN, k_MLN, u_MN) @ v_MLN
    if C > 1:
        before, after = _states(span, k_MLN, v_MLN, C)
        y.baddbmm_(r_MLN * span.before, before).baddbmm_(r_MLN * span.after, after)
    return rearrange(y, "(x c) l n -> x c l n", c=C)


def _backward_slab(r: Tensor, k: Tensor, v: Tensor, a: Tensor, u: Tensor, gy: Tensor) -> tuple[Tensor, ...]:
    """Gradients with respect to r, k, v and the decays, each (X, C, L, N), and u, (X, C, N)."""
    C = r.shape[1]
    r_MLN, k_MLN, v_MLN, a_MLN, gy_MLN, u_MN = (x.flatten(0, 1) for x in (r, k, v, a, gy, u))
    span = _products(a_MLN)
    gv = _scores(span, r_MLN, k_MLN, u_MN).mT @ gy_MLN
    g_scores = gy_MLN @ v_MLN.mT
    own = g_scores.diagonal(0, -2, -1).unsqueeze(-1)
    gr, gk = (k_MLN * u_MN.unsqueeze(-2)).mul_(own), (r_MLN * u_MN.unsqueeze(-2)).mul_(own)
    gu = (r_MLN * k_MLN).mul_(own).sum(-2)
    g = _Span(torch.zeros_like(r_MLN), torch.zeros_like(r_MLN), torch.zeros_like(u_MN))
    if C > 1:
        before, after = _states(span, k_MLN, v_MLN, C)
        g_after, g_before = _states(span, r_MLN, gy_MLN, C)  # gradients run against their states
        read_before, read_after = gy_MLN @ before.mT, gy_MLN @ after.mT
        sent_after, sent_before = v_MLN @ g_before.mT, v_MLN @ g_after.mT
        gv.baddbmm_(k_MLN * span.after, g_before).baddbmm_(k_MLN * span.before, g_after)
        gr.addcmul_(read_before, span.before).addcmul_(read_after, span.after)
        gk.addcmul_(sent_after, span.after).addcmul_(sent_before, span.before)
        g = _Span(
            read_before * r_MLN + sent_before * k_MLN,
            read_after * r_MLN + sent_after * k_MLN,
            (before * g_before + after * g_after).sum(-1),
        )
    ga = torch.empty_like(a_MLN)
    _add_gradients(_Sides(r_MLN, k_MLN, gr, gk, ga), span, g_scores, g)
    return tuple(rearrange(x, "(x c) ... -> x c ...", c=C) for x in (gr, gk, gv, ga, gu))


def _slabs(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, *gy: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cut r, k, v, the decays, u and perhaps gy into chunks of time, and these into slabs of some heads each."""
    B, T, _, N = r.shape
    L = chunk_length(T, N)
    r, k, v, *gy_XCLN = (_to_chunks(x, L) for x in (r, k, v, *gy))
    a = _to_chunks(decay(w), L, beyond=1.0)
    C = a.shape[1]
    u_XCN = u.repeat(B, 1).unsqueeze(1).expand(-1, C, -1)
    heads = max(1, SLAB_ELEMENTS // (C * L * N))
    return zip(*(torch.split(x, heads) for x in (r, k, v, a, u_XCN, *gy_XCLN)), strict=True)


def wkv6_chunked(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
    """Return y (B, T, H, N) in the dtype of ``v``; inputs as in :func:`rwkv_clip.wkv.wkv6_bidirectional`.

    Computed in the widest input dtype, at least float32.
    """
    result_dtype, dtype = v.dtype, _compute_dtype(r, k, v, w, u)
    r, k, v, w, u = (x.to(dtype) for x in (r, k, v, w, u))
    slabs = [_forward_slab(*parts) for parts in _slabs(r, k, v, w, u)]
    return _from_chunks(torch.cat(slabs), v).to(result_dtype)


def wkv6_chunked_backward(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, gy: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of ``sum(gy * y)`` with respect to r, k, v, w, u, each of its input's shape and dtype."""
    dtypes = [x.dtype for x in (r, k, v, w, u)]
    dtype = _compute_dtype(r, k, v, w, u)
    r, k, v, w, u, gy = (x.to(dtype) for x in (r, k, v, w, u, gy))
    slabs = [_backward_slab(*parts) for parts in _slabs(r, k, v, w, u, gy)]
    *along_time, gu_XCN = (torch.cat(parts) for parts in zip(*slabs, strict=True))
    gr, gk, gv, ga = (_from_chunks(x, r) for x in along_time)
    gu = rearrange(gu_XCN.sum(1), "(b h) n -> b h n", h=u.shape[0]).sum(0)
    gradients = (gr, gk, gv, ga.mul_(decay_slope(w)), gu)
    return tuple(g.to(dtype) for g, dtype in zip(gradients, dtypes, strict=True))  # type: ignore[return-value]
