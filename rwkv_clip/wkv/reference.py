"""The bidirectional WKV recurrence, one time step at a time: the definition every other engine is held to.

Shapes: B batch, T time, H heads, N channels of a head (key side j, value side i). Matrices of a head are (j, i).

For every batch entry and head, with the decay ``a_t = exp(-exp(w_t))`` in (0, 1) and the bonus ``u``::

    F_0     = 0,  F_{t+1} = diag(a_t) F_t + k_t v_t^T        (what lies before t)
    R_{T-1} = 0,  R_{t-1} = diag(a_t) R_t + k_t v_t^T        (what lies after t)
    y_t     = (F_t + R_t + diag(u) k_t v_t^T)^T r_t

Source: Gu et al., "RWKV-CLIP" (EMNLP 2024), section 3; the derivation of the gradients is in docs/rwkv_clip.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["decay", "decay_slope", "wkv6_reference", "wkv6_reference_backward"]


def decay(w: Tensor) -> Tensor:
    """Return ``a = exp(-exp(w))``, the share of the state kept in one step; same shape and dtype as ``w``."""
    return torch.exp(-torch.exp(w))


def decay_slope(w: Tensor) -> Tensor:
    """Return ``da/dw = -exp(w - exp(w))``, same shape and dtype as ``w``.

    Written with one exponential so that it goes to zero, never to ``0 * inf``, when ``exp(w)`` overflows.
    """
    return -torch.exp(w - torch.exp(w))


def _outer(left_BHN: Tensor, right_BHN: Tensor) -> Tensor:
    return left_BHN.unsqueeze(-1) * right_BHN.unsqueeze(-2)


def _state_before(a: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """F_t for every t, each (B, H, N, N); (B, T, H, N) inputs. Reverse time on the way in and out to get R_t."""
    states = [_outer(torch.zeros_like(k[:, 0]), v[:, 0])]
    for t in range(k.shape[1] - 1):
        states.append(a[:, t].unsqueeze(-1) * states[t] + _outer(k[:, t], v[:, t]))
    return states


def _state_after(a: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    return _state_before(a.flip(1), k.flip(1), v.flip(1))[::-1]


def wkv6_reference(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
    """Return y, shape (B, T, H, N), from r, k, v, w (raw decay), each (B, T, H, N), and u (H, N).

    Computed in float64 whatever the inputs are, on their device, and returned in the dtype of ``v``.
    """
    dtype = v.dtype
    r, k, v, w, u = (x.to(torch.float64) for x in (r, k, v, w, u))
    a = decay(w)
    before, after = _state_before(a, k, v), _state_after(a, k, v)
    rows = []
    for t in range(r.shape[1]):
        seen = before[t] + after[t] + _outer(u * k[:, t], v[:, t])
        rows.append(torch.einsum("bhj,bhji->bhi", r[:, t], seen))
    return torch.stack(rows, dim=1).to(dtype)


def wkv6_reference_backward(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, gy: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of ``sum(gy * y)`` with respect to r, k, v, w, u, each of its input's shape and dtype.

    ``GF_t`` and ``GR_t`` are the gradients that reach the states F_t and R_t. They obey the same recurrence as the
    states, run the other way, so the gradient of a_t is ``sum_i F_t * GF_{t+1} + R_t * GR_{t-1}``: no difference of
    two running sums, hence right also where the decay has underflowed.
    """
    dtypes = [x.dtype for x in (r, k, v, w, u)]
    r, k, v, w, u, gy = (x.to(torch.float64) for x in (r, k, v, w, u, gy))
    a = decay(w)
    before, after = _state_before(a, k, v), _state_after(a, k, v)
    # _state_after(a, r, gy)[t] collects r_s gy_s^T over s > t: what flows into F_{t+1}; likewise for R_{t-1}.
    g_before_next, g_after_next = _state_after(a, r, gy), _state_before(a, r, gy)
    gr, gk, gv, gw = (torch.empty_like(r) for _ in range(4))
    slope = decay_slope(w)
    for t in range(r.shape[1]):
        seen = before[t] + after[t] + _outer(u * k[:, t], v[:, t])
        sent = g_before_next[t] + g_after_next[t] + _outer(u * r[:, t], gy[:, t])
        gr[:, t] = torch.einsum("bhji,bhi->bhj", seen, gy[:, t])
        gk[:, t] = torch.einsum("bhji,bhi->bhj", sent, v[:, t])
        gv[:, t] = torch.einsum("bhj,bhji->bhi", k[:, t], sent)
        ga = (before[t] * g_before_next[t] + after[t] * g_after_next[t]).sum(-1)
        gw[:, t] = ga * slope[:, t]
    gu = torch.einsum("bthj,bthj,bthi,bthi->hj", r, k, v, gy)
    gradients = (gr, gk, gv, gw, gu)
    return tuple(g.to(dtype) for g, dtype in zip(gradients, dtypes, strict=True))  # type: ignore[return-value]
