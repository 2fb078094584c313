"""Image-text retrieval, and its command line."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import top_k_accuracy_score
from torch.nn.functional import normalize

from rwkv_clip import create_RWKV_Model, retrieval
from rwkv_clip.checkpoint import save_atomically
from rwkv_clip.config import ModelConfig
from rwkv_clip.data import open_pairs
from rwkv_clip.retrieval import RANKS, recalls, retrieval_scores
from rwkv_clip.training.flags import parse_args


def unit(count: int, seed: int) -> torch.Tensor:
    return normalize(torch.randn(count, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64), dim=-1)


@given(count=st.integers(12, 300), seed=st.integers(0, 1000))
def test_with_one_caption_each_it_is_top_k_accuracy(count, seed):
    """With one caption an image, recall at k is scikit-learn's top-k accuracy of finding it."""
    image, text = unit(count, seed), unit(count, seed + 1)
    own = torch.arange(count)[:, None].expand(-1, 2)
    expected = [top_k_accuracy_score(np.arange(count), (image @ text.T).numpy(), k=k) for k in RANKS]
    assert recalls(image, text, own) == pytest.approx(expected)


def test_any_of_an_images_captions_counts():
    """A query is right when one of its own is near enough, whichever."""
    query, gallery = torch.eye(2), torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.0, 1.0]])
    own = torch.tensor([[0, 1], [0, 2], [1, 2]])
    assert recalls(query, gallery, own, (1, 2)) == [0.5, 1.0]
    assert all(math.isnan(share) for share in recalls(query[:0], gallery, own[:0]))


@pytest.fixture(scope="module")
def config(small_flags, picture_flags):
    return ModelConfig.from_namespace(parse_args([*small_flags, *picture_flags, "--output", "x"]))


@pytest.fixture(scope="module")
def model(config):
    torch.manual_seed(0)
    model = create_RWKV_Model(config).eval()
    torch.nn.init.normal_(model.text_model.emb.weight)
    return model


def test_scores_are_those_of_all_captions(model, config, pictures):
    """Scores are recalls over all images and all different captions, both ways, in batches of any size."""
    pairs = open_pairs(pictures / "pairs.csv", config, "held-out")
    texts = sorted({text for i in range(24) for text in pairs.captions(i)})
    assert len(texts) == 34  # 24 of their own, and 10 that several images share
    with torch.no_grad():
        image = normalize(model.encode_image(torch.stack([pairs[i].image for i in range(24)])), dim=-1)
        text = normalize(model.encode_text(pairs.tokenizer(texts, 12)), dim=-1)
    own = torch.tensor([[i, texts.index(caption)] for i in range(24) for caption in pairs.captions(i)])
    expected = [*recalls(image, text, own), *recalls(text, image, own.flip(1))]
    for batch_size in (5, 100):
        scores = retrieval_scores(model, pairs, batch_size=batch_size)
        assert list(scores.values()) == pytest.approx(expected)
        assert list(scores)[:2] == ["image_to_text_r1", "image_to_text_r5"]


def test_broken_images_are_left_out(model, config, pictures, tmp_path):
    """An image that cannot be read is told, and neither it nor its captions count."""
    rows = [f"{pictures / '001.png'},one", "missing.png,two", f"{pictures / '002.png'},three"]
    (tmp_path / "pairs.csv").write_text("\n".join(["image,caption", *rows]))
    (tmp_path / "whole.csv").write_text("\n".join(["image,caption", rows[0], rows[2]]))
    told = []
    seen, expected = (
        retrieval_scores(model, open_pairs(tmp_path / name, config, "held-out"), note=told.extend)
        for name in ("pairs.csv", "whole.csv")
    )
    assert seen == expected
    assert len(told) == 1
    assert "row 2, image missing.png" in told[0]


@pytest.fixture(scope="module")
def checkpoint(model, tmp_path_factory, small_flags, picture_flags):
    """A checkpoint, and the flags that name its configuration."""
    folder = tmp_path_factory.mktemp("checkpoint")
    save_atomically(model.state_dict(), folder / "model.pt")
    config = {name: getattr(model.config, name) for name in ModelConfig.__dataclass_fields__}
    (folder / "config.json").write_text(json.dumps(config))
    return [str(folder / "model.pt"), "--config", str(folder / "config.json")]


def test_the_command_prints_recalls(checkpoint, pictures, capsys):
    """On a manifest and on a shard it prints six shares, in float32 and in half precision."""
    for data in ("pairs.csv", "pairs-000.tar"):
        for precision in ("fp32", "bf16"):
            assert retrieval.main([*checkpoint, "--data", str(pictures / data), "--precision", precision]) == 0
            printed = capsys.readouterr().out
            assert re.findall(r"(\w+) to \w+ r(\d+): \d+\.\d%", printed) == [
                (side, str(k)) for side in ("image", "text") for k in RANKS
            ]


def test_the_command_says_what_is_broken(checkpoint, pictures, tmp_path, capsys):
    """Broken images and rows are said on stderr and left out, or with --on-broken stop end it with status 2."""
    (tmp_path / "pairs.csv").write_text(f"image,caption\nmissing.png,two\n{pictures / '002.png'},three\nx.png,\n")
    data = ["--data", str(tmp_path / "pairs.csv")]
    assert retrieval.main([*checkpoint, *data]) == 0
    errors = capsys.readouterr().err
    assert "row 1, image missing.png" in errors
    assert "row 3: no caption" in errors
    assert retrieval.main([*checkpoint, *data, "--on-broken", "stop"]) == 2
    assert capsys.readouterr().err.startswith("rwkv_clip.retrieval: broken: ")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["missing.pt"], "no checkpoint missing.pt: no such file"),
        (["CHECKPOINT"], "no training state beside it says how the model was built; give --config"),
        (["CHECKPOINT", "--config", "digits"], "does not fit the model"),
        (["CHECKPOINT", "--config", "CONFIG", "--data", "nothing.csv"], "cannot read the manifest nothing.csv"),
        (["CHECKPOINT", "--config", "CONFIG", "--device", "quantum"], "--device quantum: "),
    ],
)
def test_bad_input_is_explained(checkpoint, capsys, flags, message):
    """What cannot be evaluated ends with status 2 and one message."""
    known = {"CHECKPOINT": checkpoint[0], "CONFIG": checkpoint[2]}
    assert retrieval.main([known.get(flag, flag) for flag in flags]) == 2
    assert message in capsys.readouterr().err
