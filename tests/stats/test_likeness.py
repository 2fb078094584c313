"""Nearly equal samples have nearly equal signs, unrelated ones differ in half of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tracehooks.stats import likeness


def differing(a: Tensor, b: Tensor) -> Tensor:
    """Of 64 signs of each sample, how many differ."""
    left, right = likeness(a), likeness(b)
    assert left is not None
    assert right is not None
    bits = (left ^ right).numpy().astype(np.uint64)
    return torch.tensor([int(value).bit_count() for value in bits])


@pytest.fixture
def noise() -> Tensor:
    """64 unrelated samples."""
    return torch.randn(64, 3, 40, 40, generator=torch.Generator().manual_seed(0))


def test_level_and_offset_do_not_matter(noise: Tensor) -> None:
    """A sample at another level, shifted by a constant, has the same signs but for rounding."""
    assert differing(noise, 0.3 * noise + 2.0).max() <= 1


def test_the_share_of_signs_is_the_angle(noise: Tensor) -> None:
    """64 · angle / π signs differ on average (Charikar, 2002), within three standard errors of the mean."""
    other = torch.randn(noise.shape, generator=torch.Generator().manual_seed(1))
    for angle in (0.1, 0.5, np.pi / 2):
        turned = np.cos(angle) * noise + np.sin(angle) * other
        share = angle / np.pi
        error = 64 * np.sqrt(share * (1 - share) / 64) / 8
        assert abs(differing(noise, turned).float().mean() - 64 * share) < 3 * error + 0.5


def test_unrelated_samples_are_far_apart(noise: Tensor) -> None:
    """No pair of 64 is within three of 64 signs."""
    signs = likeness(noise)
    assert signs is not None
    values = signs.tolist()
    apart = [((a ^ b) & (1 << 64) - 1).bit_count() for i, a in enumerate(values) for b in values[:i]]
    assert min(apart) > 10
    assert abs(float(np.mean(apart)) - 32) < 1


def test_tokens_are_known_by_their_runs() -> None:
    """A sequence with one token changed is near, one of other tokens is far, and their order matters."""
    ids = torch.randint(0, 1000, (32, 128), generator=torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[:, 60] = 7
    assert differing(ids, changed).float().mean() < 10
    assert differing(ids, ids.flip(1)).float().mean() > 24
    assert differing(ids, ids + 1000).float().mean() > 24


@pytest.mark.parametrize("x", [torch.randn(4, 255), torch.zeros(4, 8, dtype=torch.int64), torch.ones(4, 400).bool()])
def test_small_samples_and_flags_have_none(x: Tensor) -> None:
    """What says little beyond its kind is not compared."""
    assert likeness(x) is None


def test_what_is_not_finite_does_not_raise() -> None:
    """A sample with NaN has signs, if no meaning."""
    x = torch.randn(2, 300)
    x[0, 5] = torch.nan
    assert likeness(x) is not None
