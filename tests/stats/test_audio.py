"""Specification of `stats.audio`: level, peak, clipping, silence and offset of signals that are known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tracehooks.stats.audio import FLOOR, summarize_audio

RATE = 16_000


def sine(amplitude: float = 1.0, seconds: float = 1.0, hertz: float = 440.0) -> Tensor:
    return amplitude * torch.sin(2 * math.pi * hertz * torch.arange(int(RATE * seconds)) / RATE)


def test_level_of_a_sine() -> None:
    """A sine of full scale has -3.01 dBFS, one of a tenth 20 dB less; its peak is its amplitude, its offset none."""
    found = summarize_audio(torch.stack([sine(), sine(0.1)]), RATE)
    assert found["rms_dbfs"].tolist() == pytest.approx([-3.0103, -23.0103], abs=1e-3)
    assert found["peak"].tolist() == pytest.approx([1.0, 0.1], abs=1e-3)
    assert found["dc_offset"].tolist() == pytest.approx([0, 0], abs=1e-4)
    assert found["silent"].tolist() == [0, 0]


def test_a_silent_channel() -> None:
    """Silence has the floor for a level and is silent throughout, though its neighbour plays."""
    found = summarize_audio(torch.stack([sine(0.5), torch.zeros(RATE)]), RATE)
    assert found["rms_dbfs"][1].item() == FLOOR
    assert found["silent"].tolist() == [0, 1]


def test_share_of_silent_frames() -> None:
    """Silence is counted in frames of 20 ms: a signal that pauses for a quarter of its time is silent for a quarter."""
    x = torch.cat(
        [
            sine(0.3, 0.6),
            torch.full((RATE // 5,), 1e-5),
        ]
    )
    assert summarize_audio(x, RATE)["silent"].item() == pytest.approx(0.25)


def test_zero_crossings_are_not_silence() -> None:
    """A low tone passes zero slowly; its frames are still not silent."""
    assert summarize_audio(sine(0.1, hertz=30), RATE)["silent"].item() == 0


def test_clipping_and_offset() -> None:
    """A sine driven four times over full scale is clipped for the share of time that it would be beyond."""
    found = summarize_audio(sine(4.0).clamp(-1, 1), RATE)
    assert found["clipped"].item() == pytest.approx(1 - 2 / math.pi * math.asin(0.25), abs=1e-2)
    assert summarize_audio(sine(0.2) + 0.25)["dc_offset"].item() == pytest.approx(0.25, abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.float16, torch.bfloat16, torch.float64])
def test_full_scale_is_the_dtypes(dtype: torch.dtype) -> None:
    """The same signal has the same level in every dtype."""
    x = sine(0.5)
    if dtype == torch.uint8:
        x = (x * 128 + 128).round()
    elif not dtype.is_floating_point:
        x = (x.double() * (torch.iinfo(dtype).max + 1)).round()
    assert summarize_audio(x.to(dtype))["rms_dbfs"].item() == pytest.approx(-9.0309, abs=0.05)


@pytest.mark.parametrize(
    ("shape", "channels"),
    [((64,), 1), ((2, 64), 2), ((9, 64), 1), ((9, 2, 64), 2), ((3, 2, 1, 64), 1), ((3, 1, 64), 1)],
)
def test_which_dimension_is_the_channel(shape: tuple[int, ...], channels: int) -> None:
    """The last but one is, where there are two, unless it is a batch of mono signals."""
    found = summarize_audio(torch.rand(shape))
    assert {len(value) for value in found.values()} == {channels}


def test_what_is_not_finite_counts_as_zero() -> None:
    """A NaN in a signal leaves every number finite; a signal of nothing has none."""
    x = sine(0.5)
    x[5], x[6] = math.nan, math.inf
    assert all(torch.isfinite(value).all() for value in summarize_audio(x).values())
    assert summarize_audio(torch.zeros(2, 0)) == {}
