"""Zero-shot classification."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch
from torch.nn.functional import normalize

from rwkv_clip import create_RWKV_Model, train, zero_shot
from rwkv_clip.data.digits import CAPTION_TEMPLATES, DIGIT_NAMES, digit_tokenizer
from rwkv_clip.data.loading import Batch
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
    """Accuracy is the share of whole images whose nearest class is their own, over batches of any size."""
    image = torch.randn(7, 3, 8, 8)
    with torch.no_grad():
        classes = normalize(model.encode_image(image), dim=-1)
    label, index = torch.tensor([0, 1, 2, 3, 0, 0, 6]), torch.arange(7)
    batches = [
        Batch(image[part], torch.empty(0), label[part], index[part], index[part] < 6, [])
        for part in (slice(0, 5), slice(5, 7))
    ]
    assert zero_shot_accuracy(model, classes, batches) == pytest.approx(4 / 6)
    assert math.isnan(zero_shot_accuracy(model, classes, []))


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory, small_flags):
    """A run of one epoch on the digits, and the accuracy it printed."""
    output = tmp_path_factory.mktemp("zero_shot") / "run"
    assert train.main([*small_flags, "--epochs", "1", "--output", str(output)]) == 0
    accuracy = re.search(r"zero-shot-accuracy:(\S+)", (output / "training.log").read_text())[1]
    return output / "RWKV_CLIP_model_0.pt", accuracy


def test_the_command_finds_what_training_found(digits_run, capsys):
    """From a checkpoint alone it prints the accuracy that the run had at that epoch."""
    path, accuracy = digits_run
    assert zero_shot.main([str(path)]) == 0
    assert capsys.readouterr().out == f"zero-shot accuracy on 359 images of 10 classes: {accuracy}\n"


@pytest.fixture(scope="module")
def pictures_run(tmp_path_factory, small_flags, picture_flags):
    """The checkpoint of a run of one epoch on the manifest."""
    output = tmp_path_factory.mktemp("zero_shot") / "run"
    assert train.main([*small_flags, *picture_flags, "--epochs", "1", "--output", str(output)]) == 0
    return str(output / "RWKV_CLIP_model_0.pt")


def classes(folder, **content):
    path = folder / "classes.json"
    path.write_text(json.dumps(content))
    return ["--classes", str(path)]


def test_the_command_takes_any_labelled_data(pictures_run, pictures, tmp_path, capsys):
    """With a file of classes it classifies a manifest or a shard by its labels."""
    flags = classes(tmp_path, classes=DIGIT_NAMES, templates=["a {}"])
    for data in ("pairs.parquet", "pairs-000.tar"):
        assert zero_shot.main([pictures_run, "--data", str(pictures / data), *flags]) == 0
        assert re.match(r"zero-shot accuracy on 24 images of 10 classes: \d+\.\d%", capsys.readouterr().out)


def test_classes_that_do_not_fit_are_explained(pictures_run, pictures, tmp_path, capsys):
    """No file of classes, a malformed one, templates without a place for the name, and labels without class are errors."""
    data = ["--data", str(pictures / "pairs.csv")]
    for content, message in (
        (None, "--classes is needed"),
        ({"names": ["a"]}, "expected JSON"),
        ({"classes": ["a"], "templates": ["photo"]}, "templates that each hold {} for the name"),
        ({"classes": ["a", "b"]}, "labels must be 0 to 1"),
    ):
        flags = [] if content is None else classes(tmp_path, **content)
        assert zero_shot.main([pictures_run, *data, *flags]) == 2
        assert message in capsys.readouterr().err
