"""The bidirectional WKV operator: one signature, several engines, one ``torch.library`` operator.

Shapes: B batch, T time, H heads, N channels of a head.

``reference`` is the recurrence step by step in float64, the definition. ``chunked`` is the same function as matrix
products over chunks of time, in torch, and is what CPUs train with. ``cuda`` is our own kernel, compiled when first used.
All agree, values and gradients, to rounding.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from rwkv_clip.wkv import cuda
from rwkv_clip.wkv.chunked import wkv6_chunked, wkv6_chunked_backward
from rwkv_clip.wkv.cuda import wkv6_cuda, wkv6_cuda_backward
from rwkv_clip.wkv.nvrtc import EngineError
from rwkv_clip.wkv.reference import wkv6_reference, wkv6_reference_backward

Engine = Literal["auto", "reference", "chunked", "cuda"]

__all__ = ["Engine", "EngineError", "wkv6_bidirectional"]

FORWARD = {"reference": wkv6_reference, "chunked": wkv6_chunked, "cuda": wkv6_cuda}
BACKWARD = {"reference": wkv6_reference_backward, "chunked": wkv6_chunked_backward, "cuda": wkv6_cuda_backward}


def wkv6_bidirectional(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, engine: Engine = "auto") -> Tensor:
    """Mix values over time, forwards and backwards, with a learned decay for each channel and step.

    ``y_t[i] = sum_j r_t[j] (u[j] k_t[j] v_t[i] + sum_{s != t} P_ts[j] k_s[j] v_s[i])``, where ``P_ts[j]`` is the
    product of the decays ``exp(-exp(w[j]))`` strictly between s and t, 1 when they are neighbours. Source: Gu et al.,
    "RWKV-CLIP" (EMNLP 2024); see docs/rwkv_clip.md.

    Args:
        r, k, v: receptance, key and value, (B, T, H, N), floating point, T >= 1, N divisible by 4.
        w: raw decay, (B, T, H, N); any real number.
        u: bonus of a position's own value, (H, N).
        engine: ``reference`` (float64 inside), ``chunked`` (the widest input dtype inside, at least float32), ``cuda``
            (float32 inside; CUDA tensors of float32, bfloat16 or float16 with N <= 128), or ``auto``: ``cuda`` for
            tensors that it takes where it can be compiled, else ``chunked``. What was missing is warned of once.

    Returns:
        y, (B, T, H, N), in the dtype of ``v``. Differentiable once in r, k, v, w and u.

    Raises:
        ValueError: for shapes that do not fit, an unknown engine, or tensors that ``cuda`` does not take, with what was
            seen and expected.
        EngineError: when ``cuda`` was asked for and cannot be compiled or run, with what was missing.
    """
    _check(r, k, v, w, u)
    if engine not in get_args(Engine):
        raise ValueError(f"unknown WKV engine {engine!r}: expected one of {', '.join(get_args(Engine))}")
    result: Tensor = torch.ops.rwkv_clip.wkv6(r, k, v, w, u, engine)
    return result


def _check(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> None:
    if r.dim() != 4 or not r.shape == k.shape == v.shape == w.shape:
        seen = ", ".join(f"{name} {tuple(x.shape)}" for name, x in (("r", r), ("k", k), ("v", v), ("w", w)))
        raise ValueError(f"r, k, v and w must share one shape (B, T, H, N); seen {seen}")
    _, T, H, N = r.shape
    if T < 1 or N < 4 or N % 4:
        raise ValueError(f"expected T >= 1 and N a positive multiple of 4; seen (B, T, H, N) = {tuple(r.shape)}")
    if tuple(u.shape) != (H, N):
        raise ValueError(f"u must have shape (H, N) = {(H, N)}; seen {tuple(u.shape)}")


def _choose(engine: str, r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> str:
    """The engine to run. Asked inside the operator, where tensors are real also under torch.compile."""
    if engine not in ("auto", "cuda"):
        return engine
    problem = cuda.misfit(r, k, v, w, u)
    if engine == "cuda" and problem:
        raise ValueError(f"WKV engine 'cuda': {problem}")
    return "cuda" if engine == "cuda" or (not problem and cuda.ready(r, k, v, w)) else "chunked"


@torch.library.custom_op("rwkv_clip::wkv6", mutates_args=())
def _wkv6(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, engine: str) -> Tensor:
    return FORWARD[_choose(engine, r, k, v, w, u)](r, k, v, w, u)


@_wkv6.register_fake
def _(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, engine: str) -> Tensor:
    return torch.empty_like(v, memory_format=torch.contiguous_format)


@torch.library.custom_op("rwkv_clip::wkv6_backward", mutates_args=())
def _wkv6_backward(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, gy: Tensor, engine: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return BACKWARD[_choose(engine, r, k, v, w, u)](r, k, v, w, u, gy)


@_wkv6_backward.register_fake
def _(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, gy: Tensor, engine: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    like = torch.contiguous_format
    gr, gk, gv, gw = (torch.empty_like(x, memory_format=like) for x in (r, k, v, w))
    return gr, gk, gv, gw, torch.empty_like(u, memory_format=like)


def _save(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[object, ...], output: Tensor) -> None:
    *tensors, engine = inputs
    ctx.save_for_backward(*tensors)  # type: ignore[arg-type]
    ctx.engine = engine  # type: ignore[attr-defined]


def _differentiate(ctx: torch.autograd.function.FunctionCtx, gy: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # type: ignore[attr-defined]
    gradients = torch.ops.rwkv_clip.wkv6_backward(*saved, gy, ctx.engine)  # type: ignore[attr-defined]
    return (*gradients, None)


_wkv6.register_autograd(_differentiate, setup_context=_save)
