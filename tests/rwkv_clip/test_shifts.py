"""Token shifts, against a position-by-position definition."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from rwkv_clip.shifts import b_shift, q_shift


@given(B=st.integers(1, 2), T=st.integers(1, 7), H=st.integers(1, 3), half=st.integers(1, 3))
def test_b_shift_takes_halves_from_before_and_after(B, T, H, half):
    """In each head the first half of the channels comes from t-1 and the rest from t+1, zeros beyond the ends."""
    x = torch.randn(B, T, 2 * half * H)
    expected = torch.zeros_like(x)
    for t in range(T):
        for channel in range(2 * half * H):
            source = t - 1 if channel % (2 * half) < half else t + 1
            if 0 <= source < T:
                expected[:, t, channel] = x[:, source, channel]
    assert torch.equal(b_shift(x, H), expected)


@given(
    rows=st.integers(1, 4), columns=st.integers(1, 4), H=st.integers(1, 2), quarter=st.integers(1, 2),
    extra=st.integers(0, 2),
)  # fmt: skip
def test_q_shift_takes_quarters_from_four_neighbours(rows, columns, H, quarter, extra):
    """The quarters of each head come from left, right, above and below; rows after the grid stay as they are."""
    N = 4 * quarter
    x = torch.randn(2, rows * columns + extra, N * H)
    expected = torch.zeros_like(x)
    expected[:, rows * columns :] = x[:, rows * columns :]
    for y in range(rows):
        for column in range(columns):
            for channel in range(N * H):
                dy, dx = ((0, -1), (0, 1), (-1, 0), (1, 0))[channel % N // quarter]
                if 0 <= y + dy < rows and 0 <= column + dx < columns:
                    source = (y + dy) * columns + column + dx
                    expected[:, y * columns + column, channel] = x[:, source, channel]
    assert torch.equal(q_shift(x, H, (rows, columns)), expected)
