"""Zero-shot classification."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import normalize

from rwkv_clip import create_RWKV_Model
from rwkv_clip.data.digits import CAPTION_TEMPLATES, DIGIT_NAMES, digit_tokenizer
from rwkv_clip.zero_shot import class_embeddings, zero_shot_accuracy, zero_shot_logits


@pytest.fixture(scope="module")
def model(small_config):
    torch.manual_seed(0)
    model = create_RWKV_Model(small_config).eval()
    torch.nn.init.normal_(model.text_model.emb.weight)
    return model


def test_class_embeddings_are_means_of_unit_features(model):
    """Each class is the unit mean of its captions' unit features, in the order of the names."""
    tokenizer = digit_tokenizer()
    seen = class_embeddings(model, tokenizer, DIGIT_NAMES, CAPTION_TEMPLATES)
    assert seen.shape == (10, 16)
    assert seen.dtype == torch.float32
    assert not seen.requires_grad
    for i, name in enumerate(DIGIT_NAMES):
        mean = torch.zeros(16)
        for template in CAPTION_TEMPLATES:
            with torch.no_grad():
                mean += normalize(model.encode_text(tokenizer(template.format(name), 12))[0], dim=0)
        torch.testing.assert_close(seen[i], normalize(mean, dim=0))


def test_logits_are_float32_cosines():
    """Logits are 100 times the cosine in float32, also for half-precision features: near ties stay apart."""
    image = torch.tensor([[3.0, 0.0]], dtype=torch.bfloat16)
    classes = normalize(torch.tensor([[1.0, 0.010], [1.0, 0.011]]), dim=-1)
    logits = zero_shot_logits(image, classes)
    assert logits.dtype == torch.float32
    assert float(logits[0, 0]) > float(logits[0, 1]) > 99.99


def test_accuracy_counts_right_answers(model):
    """Accuracy is the share of images whose nearest class is their own, over batches of any size."""
    image = torch.randn(6, 3, 8, 8)
    with torch.no_grad():
        classes = normalize(model.encode_image(image), dim=-1)
    label = torch.tensor([0, 1, 2, 3, 0, 0])
    assert zero_shot_accuracy(model, classes, [(image[:5], label[:5]), (image[5:], label[5:])]) == pytest.approx(4 / 6)
    assert math.isnan(zero_shot_accuracy(model, classes, []))
