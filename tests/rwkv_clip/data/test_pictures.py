"""Encoded images: what the model sees of them, and those that cannot be decoded."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
import torch
from PIL import Image

from rwkv_clip import InputError
from rwkv_clip.data import open_pairs
from rwkv_clip.data.pictures import DEVIATION, MEAN, evaluation_view, training_view


@pytest.fixture
def config(small_config):
    return dataclasses.replace(small_config, vocab_size=49408)


def constant(color: tuple[int, int, int], size: tuple[int, int] = (20, 10)) -> Image.Image:
    return Image.new("RGB", size, color)


@pytest.mark.parametrize(
    "view", [lambda i: evaluation_view(i, 8), lambda i: training_view(i, 8, np.random.default_rng(0))]
)
def test_a_view_is_normalised(view):
    """Pixels are scaled to [0, 1], then by CLIP's mean and deviation of each channel: (3, S, S) float32."""
    seen = view(constant((255, 0, 51)))
    assert (seen.shape, seen.dtype) == ((3, 8, 8), torch.float32)
    expected = [(value - m) / d for value, m, d in zip((1.0, 0.0, 0.2), MEAN, DEVIATION, strict=True)]
    torch.testing.assert_close(seen[:, 3, 3], torch.tensor(expected))


def test_the_evaluation_view_is_the_middle():
    """Of a wide image the middle square is seen, all of it and nothing else."""
    image = constant((0, 0, 0), (30, 10))
    image.paste((255, 255, 255), (10, 0, 20, 10))
    assert float(evaluation_view(image, 10).std(dim=(1, 2)).max()) < 1e-5
    assert float(evaluation_view(image, 10)[0, 0, 0]) > 0


def test_training_views_cover_what_they_should():
    """Crops have 70 to 100 % of the area and mirror about half of the images."""
    ramp = Image.fromarray(np.tile(np.arange(256, dtype=np.uint8), (256, 1))).convert("RGB")
    spans, mirrored, random = [], 0, np.random.default_rng(1)
    for _ in range(300):
        row = training_view(ramp, 64, random)[0, 0] * DEVIATION[0] + MEAN[0]
        spans.append(float(abs(row[-1] - row[0])) * 64 / 63)
        mirrored += bool(row[-1] < row[0])
    assert 120 < mirrored < 180
    assert min(spans) > 0.7 / np.sqrt(0.7 * 1.25) - 0.05
    assert max(spans) <= 1.01
    assert np.std(spans) > 0.03


def test_the_same_seed_epoch_and_index_give_the_same_sample(pictures, config):
    """A sample follows from seed, epoch and index; each of them changes it."""

    def sample(seed, epoch, index):
        pairs = open_pairs(pictures / "pairs.csv", config, seed=seed)
        pairs.set_epoch(epoch)
        return pairs[index].image

    assert torch.equal(sample(1, 2, 3), sample(1, 2, 3))
    others = [sample(1, 2, 4), sample(1, 3, 3), sample(2, 2, 3)]
    assert not any(torch.equal(sample(1, 2, 3), other) for other in others)


def test_every_caption_gets_its_turn(pictures, config):
    """In training each of an image's captions is drawn in some epoch; held out it is always the first."""
    training, held_out = (open_pairs(pictures / "pairs.csv", config, split) for split in ("train", "held-out"))
    seen = {}
    for pairs in (training, held_out):
        tokens = set()
        for epoch in range(12):
            pairs.set_epoch(epoch)
            tokens.add(tuple(pairs[0].tokens.tolist()))
        seen[pairs] = tokens
    assert len(seen[training]) == 2
    assert seen[held_out] == {tuple(held_out.tokenizer(held_out.captions(0)[0], 12)[0].tolist())}


def test_held_out_images_are_not_augmented(pictures, config):
    """Held-out images, and training images with augment=False, are the same in every epoch."""
    for options in ({"split": "held-out"}, {"augment": False}):
        pairs = open_pairs(pictures / "pairs.csv", config, **options)
        first = pairs[5].image
        pairs.set_epoch(1)
        assert torch.equal(pairs[5].image, first)


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "I;16", "1", "CMYK"])
def test_every_kind_of_image_is_read(tmp_path, config, mode):
    """Grey, palette, transparent, 16-bit, two-coloured and CMYK images become three channels."""
    image = Image.new(mode, (9, 9)) if mode == "I;16" else constant((90, 90, 90)).convert(mode)
    image.save(tmp_path / ("a.tif" if mode == "CMYK" else "a.png"))
    name = next(path.name for path in tmp_path.iterdir())
    (tmp_path / "pairs.csv").write_text(f"image,caption\n{name},one\n")
    sample = open_pairs(tmp_path / "pairs.csv", config)[0]
    assert sample.image.shape == (3, 8, 8)
    assert sample.broken == ()


@pytest.fixture
def half_broken(tmp_path, pictures):
    """Four rows: an image that is cut short, a whole one, a missing one, one that is no image."""
    whole = (pictures / "001.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "whole.png").write_bytes(whole)
    (tmp_path / "text.png").write_text("no image")
    rows = ["cut.png,a", "whole.png,b", "missing.png,c", "text.png,d"]
    (tmp_path / "pairs.csv").write_text("\n".join(["image,caption", *rows]))
    return tmp_path / "pairs.csv"


def test_a_broken_image_is_stood_in_for(half_broken, config):
    """The next whole sample takes a broken one's place, and says which are broken, where and why."""
    pairs = open_pairs(half_broken, config, augment=False)
    whole = pairs[1]
    assert whole.broken == ()
    for index, broken in ((0, ["cut.png"]), (2, ["missing.png", "text.png", "cut.png"]), (3, ["text.png", "cut.png"])):
        sample = pairs[index]
        assert torch.equal(sample.image, whole.image)
        assert [place.split("image ")[1].split(":")[0] for place in sample.broken] == broken
    assert f"{half_broken} row 3, image missing.png: " in pairs[2].broken[0]
    assert re.search(r"row 4, image text\.png: no image of a known kind, \d+ bytes$", pairs[3].broken[0])


def test_when_nothing_is_whole_it_ends(half_broken, config):
    """A set without a single whole image is an error that says where the first one is."""
    half_broken.with_name("whole.png").unlink()
    with pytest.raises(InputError, match=r"4 samples in a row are broken, the first: .* row 1, image cut\.png"):
        _ = open_pairs(half_broken, config)[0]


def test_a_vocabulary_that_does_not_fit_is_named(pictures, small_config):
    """A model with fewer token ids than the byte-pair encoding has is an error."""
    with pytest.raises(InputError, match=r"vocab_size 48: .*pairs\.csv needs at least 49408"):
        open_pairs(pictures / "pairs.csv", small_config)
