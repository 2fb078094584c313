"""The benchmark's yardsticks: another library's kernels in both directions, and the bytes that must move."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from benchmarks.wkv import flash_linear_attention, floor_bytes, main
from rwkv_clip.wkv.reference import wkv6_reference

from .cases import largest_error, random_inputs


def causal(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, scale: float) -> tuple[Tensor, None]:
    """RWKV-6 as published: ``y_t = r_t (S + diag(u) k_t v_t)``, then ``S = diag(exp(w_t)) S + k_t v_t``."""
    state, rows = torch.zeros_like(k[:, 0].unsqueeze(-1) * v[:, 0].unsqueeze(-2)), []
    for t in range(r.shape[1]):
        own = k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        rows.append(torch.einsum("bhj,bhji->bhi", scale * r[:, t], state + u.unsqueeze(-1) * own))
        state = w[:, t].exp().unsqueeze(-1) * state + own
    return torch.stack(rows, 1), None


def test_causal_kernels_both_ways_are_the_bidirectional_recurrence(monkeypatch):
    """A causal RWKV-6 run in both directions, as flash-linear-attention's is, gives the reference's output."""
    kernels = SimpleNamespace(chunk_rwkv6=causal, fused_recurrent_rwkv6=causal)
    monkeypatch.setitem(sys.modules, "fla.ops.rwkv6", kernels)
    monkeypatch.setitem(sys.modules, "fla.ops", SimpleNamespace(rwkv6=kernels))
    monkeypatch.setitem(sys.modules, "fla", SimpleNamespace(ops=sys.modules["fla.ops"]))
    *inputs, _ = random_inputs(2, 9, 2, 8, "mid", 0)
    for operator in flash_linear_attention().values():
        assert largest_error(operator(*inputs), wkv6_reference(*inputs)) < 1e-12


def test_the_floor_counts_every_tensor_once():
    """Forward reads five inputs and writes y; backward reads these and gy and writes five gradients."""
    leaves = [torch.zeros(2, 3, 1, 4), *(torch.zeros(2, 3, 1, 4) for _ in range(3)), torch.zeros(1, 4)]
    tensor, bonus = 2 * 3 * 4 * 4, 4 * 4
    assert floor_bytes(leaves, "forward") == 5 * tensor + bonus
    assert floor_bytes(leaves, "forward and backward") == (5 * tensor + bonus) + (5 * tensor + bonus) + (
        4 * tensor + bonus
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures a GPU's part as well")
def test_without_a_gpu_it_says_so_in_one_line(monkeypatch, capsys):
    """Without a GPU the CPU's part is measured and one line says what was not."""
    monkeypatch.setattr("benchmarks.wkv.SHAPES", {"small": (5, 1, 8)})
    monkeypatch.setattr(sys, "argv", ["wkv", "--batch", "1", "--rounds", "1"])
    assert main() == 0
    seen = capsys.readouterr()
    assert seen.err.strip() == "no GPU: the CUDA engine, flash-linear-attention and the memory's floor are not measured"
    assert len(seen.out.splitlines()) == 5
