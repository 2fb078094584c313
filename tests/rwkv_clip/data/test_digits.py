"""The handwritten digits as image-text pairs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from sklearn.datasets import load_digits

from rwkv_clip import InputError, load_model_configs
from rwkv_clip.data import open_pairs
from rwkv_clip.data.digits import CAPTION_TEMPLATES, DIGIT_NAMES, DigitPairs, digit_tokenizer


@pytest.fixture(scope="module")
def pairs():
    return DigitPairs(load_model_configs("digits"), seed=3)


def test_shapes_and_dtypes(pairs):
    """An item is a float32 image of the model's size, int64 tokens of its length, the digit, and its number."""
    image, tokens, label, number, broken = pairs[7]
    assert (image.shape, image.dtype) == ((3, 16, 16), torch.float32)
    assert (tokens.shape, tokens.dtype) == ((12,), torch.int64)
    assert label in range(10)
    assert (number, broken) == (7, ())


def test_images_are_the_real_ones(small_config):
    """At 8x8 pixels, both splits together hold every real digit exactly once, with its label."""
    splits = [DigitPairs(small_config, split) for split in ("train", "held-out")]
    assert [len(split) for split in splits] == [1438, 359]
    seen = sorted(
        (label, *((image[0] * 0.3760 + 0.3053) * 16).round().int().flatten().tolist())
        for split in splits
        for image, label in zip(split.images, split.labels, strict=True)
    )
    real = load_digits()
    expected = sorted(
        (int(label), *image.astype(int).flatten().tolist())
        for image, label in zip(real.images, real.target, strict=True)
    )
    assert seen == expected


def test_the_split_does_not_depend_on_the_seed(small_config):
    """The same digits are held out whatever the seed, so that no run trains on another's test."""
    first, second = (DigitPairs(small_config, "held-out", seed=seed) for seed in (0, 1))
    assert torch.equal(first.images, second.images)


def test_images_are_centred(pairs):
    """Pixels have a mean near 0 and a deviation near 1."""
    assert abs(float(pairs.images.mean())) < 0.1
    assert 0.8 < float(pairs.images.std()) < 1.1


def test_captions_name_the_digit(pairs):
    """Each caption is one of the templates filled with the digit's own name, and all templates occur."""
    tokenizer = digit_tokenizer()
    used = set()
    for index in range(200):
        _, tokens, label, *_ = pairs[index]
        options = tokenizer([template.format(DIGIT_NAMES[label]) for template in CAPTION_TEMPLATES], 12)
        matches = [i for i, option in enumerate(options) if torch.equal(option, tokens)]
        assert len(matches) == 1
        used.add(matches[0])
    assert used == set(range(len(CAPTION_TEMPLATES)))


def test_captions_follow_from_seed_epoch_and_index(pairs):
    """The same seed and epoch give the same captions in any order of access; another epoch or seed gives others."""

    def captions(dataset, order):
        read = {index: dataset[index][1] for index in order}
        return torch.stack([read[index] for index in range(50)])

    again = DigitPairs(load_model_configs("digits"), seed=3)
    first = captions(pairs, range(50))
    assert torch.equal(first, captions(again, reversed(range(50))))
    again.set_epoch(1)
    assert not torch.equal(first, captions(again, range(50)))
    assert not torch.equal(first, captions(DigitPairs(load_model_configs("digits"), seed=4), range(50)))


def test_all_captions_fit_the_packaged_model():
    """No caption is cut by the digits configuration's context, and its vocabulary holds every word."""
    config, tokenizer = load_model_configs("digits"), digit_tokenizer()
    assert tokenizer.vocab_size <= config.vocab_size
    captions = [template.format(name) for template in CAPTION_TEMPLATES for name in DIGIT_NAMES]
    assert torch.equal(tokenizer(captions, config.ctx_len), tokenizer(captions, 100)[:, : config.ctx_len])


def test_limit_keeps_the_first_pairs(pairs, small_config):
    """A limit keeps the first pairs and no more."""
    limited = open_pairs("digits", small_config, limit=5)
    assert len(limited) == 5
    assert limited.labels == pairs.labels[:5]


def test_what_does_not_fit_is_named(small_config):
    """An unknown data set, and a model with too few token ids, are errors that say so."""
    with pytest.raises(InputError, match="no data 'digit': expected digits, a manifest"):
        open_pairs("digit", small_config)
    with pytest.raises(InputError, match=r"vocab_size 20: digits needs at least \d+"):
        open_pairs("digits", dataclasses.replace(small_config, vocab_size=20))
