"""The watch's question to a tensor: which non-finite values does it hold?"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tracehooks import stats
from tracehooks.stats import NAN, NEGINF, POSINF, cpu, reference

KERNEL = cpu.library()
LEVELS = range(len(KERNEL.levels)) if KERNEL else []
VALUES = {NAN: math.nan, POSINF: math.inf, NEGINF: -math.inf}
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@given(
    st.sampled_from(FLOATS),
    st.sampled_from([1, 7, 31, 4095, 4096, 4097, 40_000]),
    st.lists(st.tuples(st.sampled_from(list(VALUES)), st.integers(0, 10**6)), max_size=3),
)
def test_every_kernel_finds_what_was_put_in(dtype: torch.dtype, count: int, planted: list[tuple[int, int]]) -> None:
    """Wherever they lie, on every instruction set, as the reference does; the largest finite number is finite."""
    x = torch.full((count,), torch.finfo(dtype).max, dtype=dtype)
    x[::3] = -x[::3]
    places = {place % count: kind for kind, place in planted}
    for place, kind in places.items():
        x[place] = VALUES[kind]
    expected = 0
    for kind in places.values():
        expected |= kind
    assert reference.nonfinite(x) == expected
    assert stats.nonfinite([x]) == expected
    for level in LEVELS:
        assert cpu.nonfinite([x], level=level) == (expected, [])


def test_every_pattern_of_half_precision_is_told_as_torch_tells_it() -> None:
    """All 65,536 of each of the two halves, one by one where they are special."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        values = bits.view(dtype)
        special = values[~torch.isfinite(values)]
        assert stats.nonfinite([values[torch.isfinite(values)]]) == 0
        for x in special.split(1):
            assert stats.nonfinite([x]) == reference.nonfinite(x) != 0


def test_a_list_is_answered_as_one() -> None:
    """Small and large tensors (with threads), integers, views, complex and sparse ones, nothing at all."""
    large = torch.zeros(1 << 19)
    assert stats.nonfinite([]) == 0
    assert stats.nonfinite([large, torch.arange(5), torch.ones(3, 4).t()]) == 0
    large[-1] = math.inf
    strided = torch.tensor([[1.0, math.nan], [2.0, 3.0]])[:, 1]
    assert stats.nonfinite([torch.ones(3), large]) == POSINF
    assert stats.nonfinite([strided, large]) == NAN | POSINF
    assert stats.nonfinite([torch.tensor([complex(0, -math.inf)])]) == NEGINF
    assert stats.nonfinite([torch.tensor([0.0, math.nan]).to_sparse()]) == NAN


def test_without_a_kernel_the_reference_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits."""
    monkeypatch.setattr(cpu, "library", lambda: None)
    assert stats.nonfinite([torch.tensor([1.0]), torch.tensor([-math.inf, math.nan])]) == NAN | NEGINF
