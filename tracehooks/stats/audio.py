"""What an audio signal holds: level, peak, clipping, silence, offset."""

from __future__ import annotations

import torch
from torch import Tensor

FLOOR = -200.0
"""dBFS of what is silent: a number in place of minus infinity."""

SILENT_DBFS = -60.0
"""A frame quieter than this is silent."""

FRAME_SECONDS, FRAME_SAMPLES = 0.02, 1024
"""Length of a frame; in samples where the sample rate is not known."""

FULL_SCALE = 1 - 2.0**-15
"""Magnitudes from here on are clipped: the largest one that 16 bits hold."""

MOST_CHANNELS = 8
"""A tensor of two dimensions with more rows than this is a batch of mono signals, not a signal of many channels."""


def summarize_audio(x: Tensor, sample_rate: float | None = None) -> dict[str, Tensor]:
    """Level and damage of each channel, over a batch.

    Args:
        x: (samples,), (channels, samples) with up to 8 channels, (batch, samples) with more rows than that, or
            (…, channels, samples). Full scale is 1 for floating dtypes, the dtype's range for integers (uint8 is centred
            at 128).
        sample_rate: in hertz; frames are of 20 ms, of 1024 samples where it is None.

    Returns:
        float64 of shape (channels,) on x's device, empty where x has no elements: ``rms_dbfs`` (20·log10 of the root mean
        square over full scale, at least -200), ``peak`` (largest magnitude), ``clipped`` (share of samples at full
        scale), ``silent`` (share of frames below -60 dBFS; a rest shorter than a frame counts only where there is no
        other) and ``dc_offset`` (mean). Elements that are not finite count as 0.
    """
    if not x.numel():
        return {}
    with torch.no_grad():
        signal = _channels(_scaled(x.detach()))
        level = signal.square().mean((0, 2), dtype=torch.float64).sqrt()
        magnitude = signal.abs()
        return {
            "rms_dbfs": (20 * level.log10()).clamp_min(FLOOR),
            "peak": magnitude.amax((0, 2)).to(torch.float64),
            "clipped": (magnitude >= FULL_SCALE).to(torch.float64).mean((0, 2)),
            "silent": (_frames(signal, sample_rate) < 10 ** (SILENT_DBFS / 10)).to(torch.float64).mean((0, 2)),
            "dc_offset": signal.mean((0, 2), dtype=torch.float64),
        }


def _scaled(x: Tensor) -> Tensor:
    if x.is_floating_point():
        x = x if x.dtype == torch.float64 else x.to(torch.float32)
        return torch.where(torch.isfinite(x), x, 0.0)
    if x.dtype == torch.uint8:
        return (x.to(torch.float32) - 128) / 128
    return x.to(torch.float64) / (torch.iinfo(x.dtype).max + 1)


def _channels(x: Tensor) -> Tensor:
    """As (batch, channels, samples)."""
    if x.ndim < 2:
        return x.reshape(1, 1, -1)
    if x.ndim == 2:
        return x[None] if x.shape[0] <= MOST_CHANNELS else x[:, None]
    return x.reshape(-1, *x.shape[-2:])


def _frames(signal: Tensor, sample_rate: float | None) -> Tensor:
    """Mean square of each frame: (batch, channels, frames)."""
    wanted = FRAME_SAMPLES if sample_rate is None else max(1, round(FRAME_SECONDS * sample_rate))
    length = min(wanted, signal.shape[-1])
    whole = signal[..., : signal.shape[-1] // length * length]
    return whole.reshape(*whole.shape[:-1], -1, length).square().mean(-1, dtype=torch.float64)
