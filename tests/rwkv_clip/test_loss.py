"""The contrastive loss."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import normalize

from rwkv_clip import ClipLoss


def unit_features(batch: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    image, text = torch.randn(2, batch, 8, generator=generator, dtype=torch.float64)
    return normalize(image, dim=-1), normalize(text, dim=-1)


@given(batch=st.integers(1, 6), seed=st.integers(0, 2**31))
def test_equals_its_definition(batch, seed):
    """The loss is the mean over pairs of -log softmax of the pair's own similarity, averaged over both directions."""
    image, text = unit_features(batch, seed)
    similarity = (7 * image @ text.T).exp()
    expected = 0.0
    for i in range(batch):
        expected -= math.log(similarity[i, i] / similarity[i].sum()) / (2 * batch)
        expected -= math.log(similarity[i, i] / similarity[:, i].sum()) / (2 * batch)
    assert math.isclose(float(ClipLoss()(image, text, torch.tensor(7.0))), expected, rel_tol=1e-9, abs_tol=1e-12)


@given(batch=st.integers(1, 6), seed=st.integers(0, 2**31))
def test_images_and_captions_are_treated_alike(batch, seed):
    """Swapping images and captions leaves the loss as it is."""
    image, text = unit_features(batch, seed)
    scale = torch.tensor(5.0)
    torch.testing.assert_close(ClipLoss()(image, text, scale), ClipLoss()(text, image, scale))


def test_indistinguishable_pairs_cost_the_logarithm_of_the_batch():
    """When all features are equal the loss is ln(batch), whatever the scale."""
    same = normalize(torch.ones(5, 8, dtype=torch.float64), dim=-1)
    assert math.isclose(float(ClipLoss()(same, same, torch.tensor(50.0))), math.log(5), rel_tol=1e-9)
