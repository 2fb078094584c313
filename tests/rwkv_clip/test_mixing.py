"""The two branches of a layer, and their initial weights."""

from __future__ import annotations

import torch

from rwkv_clip.mixing import ChannelMix, TimeMix


def test_time_mix_ignores_a_shift_that_equals_the_input():
    """When the neighbours equal the position itself, no mixing weight matters."""
    torch.manual_seed(0)
    mix = TimeMix(16, 2, layer=0, depth=2)
    x = torch.randn(2, 5, 16)
    before = mix(x, x)
    with torch.no_grad():
        for name in "xwkvrg":
            getattr(mix, f"time_maa_{name}").add_(torch.randn(16))
    assert torch.equal(mix(x, x), before)


def test_channel_mix_weighs_in_opposite_ways():
    """``own`` with weight m equals ``shift`` with weight 1 - m, everything else the same."""
    torch.manual_seed(0)
    own = ChannelMix(8, 12, layer=0, depth=2, weighs="own").double()
    shift = ChannelMix(8, 12, layer=0, depth=2, weighs="shift").double()
    with torch.no_grad():
        own.spatial_mix_k.uniform_()
        own.spatial_mix_r.uniform_()
        shift.time_maa_k.copy_(1 - own.spatial_mix_k)
        shift.time_maa_r.copy_(1 - own.spatial_mix_r)
        for name in ("key", "receptance", "value"):
            getattr(shift, name).load_state_dict(getattr(own, name).state_dict())
    x, shifted = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    torch.testing.assert_close(own(x, shifted), shift(x, shifted), rtol=0, atol=1e-14)


def test_a_single_layer_has_finite_initial_weights():
    """A tower of one layer, where (layer / (depth - 1)) is 0 / 0, starts from finite weights."""
    for module in (TimeMix(16, 2, layer=0, depth=1), ChannelMix(16, 32, layer=0, depth=1)):
        assert all(bool(torch.isfinite(parameter).all()) for parameter in module.parameters())
