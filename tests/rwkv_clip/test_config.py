"""Reading model configurations."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest

from rwkv_clip import InputError, ModelConfig, load_model_configs
from rwkv_clip.config import config_names


@pytest.mark.parametrize("name", ["B16", "B32", "tiny", "tiny_cls"])
def test_the_originals_files_are_read(numbers, config_of, name):
    """Every key of the original's JSON that shapes the model arrives in the field of that name."""
    values, config = numbers(f"configs/{name}.json"), config_of(name)
    for field in dataclasses.fields(config):
        if field.name != "wkv_engine":
            assert getattr(config, field.name) == values[field.name], field.name


@pytest.mark.parametrize(("packaged", "recorded"), [("RWKV_CLIP_B16", "B16"), ("RWKV_CLIP_B32.json", "B32")])
def test_packaged_configurations_are_the_originals(config_of, packaged, recorded):
    """The packaged files, with or without their ending, differ from the original's only in how weights start."""
    assert load_model_configs(packaged) == dataclasses.replace(config_of(recorded), text_initialization=True)


def test_packaged_names():
    """Three configurations come with the package."""
    assert config_names() == ["RWKV_CLIP_B16", "RWKV_CLIP_B32", "digits"]


def test_a_configuration_cannot_be_changed():
    """Configurations are values: setting a field is an error."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        ModelConfig().n_layer = 3


def test_zero_stands_for_the_usual_width():
    """A dim_ffn of 0 means 3.5 times the width, rounded down to a multiple of 32; text heads follow from head_size."""
    config = ModelConfig(n_embd=72, image_embed_dims=72, image_num_heads=9, head_size=8)
    assert (config.text_hidden, config.text_heads) == (224, 9)
    assert dataclasses.replace(config, dim_ffn=40, text_num_head=18).text_hidden == 40


def test_words_count_as_booleans():
    """The strings True and False, which command lines leave in saved files, are booleans."""
    assert ModelConfig.from_mapping({"text_initialization": "False"}).text_initialization is False


def test_missing_attributes_keep_their_defaults():
    """An object with a few of the fields gives a configuration with the other defaults."""
    assert ModelConfig.from_namespace(SimpleNamespace(ctx_len=5, other=1)) == ModelConfig(ctx_len=5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n_layers": 2}, "unknown key 'n_layers'; did you mean 'n_layer'?"),
        ({"n_layer": "2"}, "n_layer = '2': expected int"),
        ({"n_layer": True}, "n_layer = True: expected int"),
        ({"pos_emb": 1}, "pos_emb = 1 is not supported, only 0"),
        ({"n_embd": 128}, "image_embed_dims 384 and n_embd 128 must be equal"),
        ({"dim_att": 64}, "dim_att 64 must be 0 or n_embd 384"),
        ({"image_num_heads": 5}, "5 image heads: the width 384 must be a multiple of 4 channels per head"),
        ({"head_size": 7}, "n_embd 384 is not a multiple of head_size 7"),
        ({"image_depth": 0}, "image_depth 0 must be at least 1"),
        ({"dropout": 1.0}, r"dropout 1.0 must be in [0, 1)"),
        ({"image_output_cls_token": True}, "image_output_cls_token needs image_with_cls_token"),
        ({"wkv_engine": "fast"}, "wkv_engine 'fast' must be one of auto, reference, chunked, cuda"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, values, message):
    """A value that cannot be used is an error that names it."""
    path = tmp_path / "model.json"
    path.write_text(json.dumps(values))
    with pytest.raises(InputError) as caught:
        load_model_configs(path)
    assert message in str(caught.value)


def test_unknown_name_lists_the_known_ones():
    """An unknown name is an error with the nearest packaged one, or all of them."""
    with pytest.raises(InputError, match="no such file; did you mean 'RWKV_CLIP_B32'"):
        load_model_configs("RWKV_CLIP_B23")
    with pytest.raises(InputError, match="known: RWKV_CLIP_B16, RWKV_CLIP_B32, digits"):
        load_model_configs("elsewhere/nothing.json")


@pytest.mark.parametrize(("text", "message"), [("{", "not JSON"), ("[1]", "expected a JSON object of settings")])
def test_broken_files_are_named(tmp_path, text, message):
    """A file that is no JSON object is an error that says so."""
    path = tmp_path / "model.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        load_model_configs(path)
