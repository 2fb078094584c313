"""The CUDA engine: brings tensors into the form that wkv6.cu asks for and decides on memory and the number of blocks.

Shapes: B batch, T time, H heads, N channels of a head. The kernels compute in float32; r, k, v and y have one storage
dtype, w may have another. Each block works through heads of batch entries, one at a time, and keeps its states between
chunks of time in scratch memory of its own.
"""

from __future__ import annotations

import functools
import math
import warnings

import torch
from torch import Tensor

from rwkv_clip.wkv import nvrtc

__all__ = ["misfit", "ready", "wkv6_cuda", "wkv6_cuda_backward"]

LARGEST_HEAD = 128
FORWARD_STATES, BACKWARD_STATES = 2, 6
"""N x N matrices that a block keeps for each border between two chunks."""
MOST_SCRATCH = 1 << 28
"""Elements of all blocks' states together, 1 GiB: for very long sequences fewer blocks run at once."""


def misfit(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> str | None:
    """Say why the engine does not take these tensors, or None when it does."""
    tensors = {"r": r, "k": k, "v": v, "w": w, "u": u}
    for name, tensor in tensors.items():
        if not tensor.is_cuda or tensor.device != r.device:
            return f"all inputs must be on one CUDA device; seen {name} on {tensor.device}, r on {r.device}"
        if tensor.dtype not in nvrtc.STORAGE:
            return f"inputs must be float32, bfloat16 or float16; seen {name} of {tensor.dtype}"
    if r.shape[3] > LARGEST_HEAD:
        return f"heads may have at most {LARGEST_HEAD} channels; seen {r.shape[3]}"
    return None


def ready(r: Tensor, k: Tensor, v: Tensor, w: Tensor) -> bool:
    """Whether the kernels for tensors that fit can be had on their device; when not, warn once with the reason."""
    return _ready(_build(r, k, v, w), r.device)


@functools.cache
def _ready(build: nvrtc.Build, device: torch.device) -> bool:
    try:
        for name in ("wkv6_forward", "wkv6_backward"):
            nvrtc.load(name, build, device)
    except nvrtc.EngineError as error:
        warnings.warn(f"{error}. The chunked WKV engine is used instead.", RuntimeWarning, stacklevel=2)
        return False
    return True


def _build(r: Tensor, k: Tensor, v: Tensor, w: Tensor) -> nvrtc.Build:
    same = r.dtype == k.dtype == v.dtype
    return nvrtc.Build(head_size=r.shape[3], input=v.dtype if same else torch.float32, decay=w.dtype)


def _plain(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Contiguous, of that dtype, and at an address that four elements can be read from at once."""
    x = x.to(dtype).contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _scratch(kernel: nvrtc.Kernel, states: int, like: Tensor) -> tuple[int, Tensor]:
    """Number of blocks, and scratch memory for all of them."""
    B, T, H, N = like.shape
    borders = math.ceil(T / nvrtc.CHUNK) - 1
    of_a_block = states * borders * N * N
    affordable = MOST_SCRATCH // of_a_block if of_a_block else B * H
    blocks = min(B * H, kernel.resident, max(1, affordable))
    return blocks, torch.empty(blocks * of_a_block, dtype=torch.float32, device=like.device)


def wkv6_cuda(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
    """Return y (B, T, H, N) in the dtype of ``v``; inputs as in :func:`rwkv_clip.wkv.wkv6_bidirectional`.

    The inputs must not :func:`misfit`.

    Raises:
        EngineError: when the kernel cannot be had.
    """
    build = _build(r, k, v, w)
    B, T, H, _ = r.shape
    inputs = [*(_plain(x, build.input) for x in (r, k, v)), _plain(w, build.decay), _plain(u, torch.float32)]
    y = torch.empty_like(inputs[2])
    kernel = nvrtc.load("wkv6_forward", build, r.device)
    blocks, states = _scratch(kernel, FORWARD_STATES, r)
    if blocks:
        kernel(blocks, B, T, H, *inputs, y, states)
    return y.to(v.dtype)


def wkv6_cuda_backward(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, gy: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of ``sum(gy * y)`` with respect to r, k, v, w, u, each of its input's shape and dtype.

    The inputs must not :func:`misfit`; ``gy`` is (B, T, H, N) of any dtype. Raises as :func:`wkv6_cuda`.
    """
    build = _build(r, k, v, w)
    B, T, H, N = r.shape
    inputs = [*(_plain(x, build.input) for x in (r, k, v)), _plain(w, build.decay), _plain(u, torch.float32)]
    gr, gk, gv, gw = (torch.empty_like(x) for x in inputs[:4])
    gu = torch.empty(B, H, N, dtype=torch.float32, device=r.device)
    kernel = nvrtc.load("wkv6_backward", build, r.device)
    blocks, states = _scratch(kernel, BACKWARD_STATES, r)
    if blocks:
        kernel(blocks, B, T, H, *inputs, _plain(gy, build.input), gr, gk, gv, gw, gu, states)
    return gr.to(r.dtype), gk.to(k.dtype), gv.to(v.dtype), gw.to(w.dtype), gu.sum(0).to(u.dtype)
