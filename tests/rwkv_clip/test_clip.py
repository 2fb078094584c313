"""The whole model against the original: names, features, logits, loss and every gradient."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from rwkv_clip import create_RWKV_Model, get_model_RWKV_CLIP, load_model_configs
from rwkv_clip.clip import RWKVCLIP
from tests.rwkv_clip.originals import forward, gradient_digests


@pytest.mark.parametrize(
    ("keys", "config"), [("tiny", "tiny"), ("tiny_cls", "tiny_cls"), ("B16", "RWKV_CLIP_B16"), ("B32", "RWKV_CLIP_B32")]
)
def test_state_dict_has_the_originals_names_and_shapes(numbers, config_of, keys, config):
    """State-dict keys and shapes equal the original's, so published checkpoints fit."""
    with torch.device("meta"):
        model = RWKVCLIP(load_model_configs(config) if config.startswith("RWKV") else config_of(config))
    expected = {name: tuple(entry["shape"]) for name, entry in numbers(f"{keys}_keys.json").items()}
    assert {name: tuple(value.shape) for name, value in model.state_dict().items()} == expected


def test_generated_weights_are_the_recorded_ones(numbers, model_of, inputs_of):
    """The weights and inputs these tests make are bit for bit those that the original was run with."""
    recorded, state = numbers("tiny_f64.npz"), model_of("tiny", torch.float32).state_dict()
    for name, value in state.items():
        assert np.array_equal(value.numpy(), recorded[f"w/{name}"]), name
    image, tokens = inputs_of("tiny")
    assert np.array_equal(image.numpy(), recorded["image"])
    assert np.array_equal(tokens.numpy(), recorded["tokens"])


@pytest.mark.parametrize("engine", ["reference", "chunked"])
def test_tiny_agrees_in_double_precision(numbers, model_of, inputs_of, engine):
    """Features, logits, loss and every parameter's gradient equal the original's to 1e-12, with either engine."""
    expected, model = numbers("tiny_f64.npz"), model_of("tiny", wkv_engine=engine)
    image, tokens = inputs_of("tiny")
    seen = forward(model, image.double(), tokens)
    for name, value in seen.items():
        np.testing.assert_allclose(value.detach().numpy(), expected[name], rtol=0, atol=1e-12, err_msg=name)
    seen["loss"].backward()
    assert set(expected["grad_names"]) == {name for name, _ in model.named_parameters()}
    for name, value in gradient_digests(model, expected["grad_names"]).items():
        np.testing.assert_allclose(value, expected[name], rtol=0, atol=1e-12, err_msg=name)


def test_tiny_agrees_in_single_precision(numbers, model_of, inputs_of):
    """In float32, features and loss agree to 1e-5 and gradient norms to 2e-3 relative."""
    expected, model = numbers("tiny_f32.npz"), model_of("tiny", torch.float32)
    seen = forward(model, *inputs_of("tiny"))
    for name in ("image_features", "text_features", "loss"):
        np.testing.assert_allclose(seen[name].detach().numpy(), expected[name], rtol=0, atol=1e-5, err_msg=name)
    seen["loss"].backward()
    norms = gradient_digests(model, expected["grad_names"])["grad_l2"]
    np.testing.assert_allclose(norms, expected["grad_l2"], rtol=2e-3)


def test_b32_agrees_in_single_precision(numbers, model_of, inputs_of):
    """The published size in float32: features and loss agree to 1e-5, every gradient's norm to 2e-3 relative."""
    model = model_of("B32", torch.float32)
    assert sum(parameter.numel() for parameter in model.parameters()) == 149_561_601
    seen = forward(model, *inputs_of("B32"))
    for precision in ("f32", "f64"):
        expected = numbers(f"B32_{precision}.npz")
        for name in ("image_features", "text_features", "loss"):
            np.testing.assert_allclose(seen[name].detach().numpy(), expected[name], rtol=0, atol=1e-5, err_msg=name)
    seen["loss"].backward()
    norms = gradient_digests(model, expected["grad_names"])["grad_l2"]
    np.testing.assert_allclose(norms, expected["grad_l2"], rtol=2e-3)


def test_model_compiles_into_one_graph(small_config):
    """torch.compile(fullgraph=True) takes the whole model, forward and backward, and gives eager mode's numbers."""
    torch.manual_seed(0)
    model = RWKVCLIP(small_config)
    image, tokens = torch.randn(2, 3, 8, 8), torch.randint(0, 48, (2, 12))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    results = []
    for run in (model, compiled):
        model.zero_grad()
        image_features, text_features, scale = run(image, tokens)
        (scale * (image_features * text_features).sum()).backward()
        results.append([image_features.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
    for eager, other in zip(*results, strict=True):
        torch.testing.assert_close(other, eager, rtol=1e-5, atol=1e-6)


def test_ways_to_make_a_model_agree(config_of, tmp_path):
    """A configuration, its file, and an object with its fields give models of the same parameters."""
    config = config_of("tiny")
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps({"n_layer": 2, "image_depth": 3, "image_embed_dims": 64, "n_embd": 64, "ctx_len": 12,
                                "vocab_size": 96, "image_num_heads": 4, "image_hidden_rate": 3, "input_size": 32,
                                "image_patch_size": 8}))  # fmt: skip
    shapes = [
        {name: value.shape for name, value in model.state_dict().items()}
        for model in (create_RWKV_Model(config), create_RWKV_Model(path), get_model_RWKV_CLIP(config))
    ]
    assert shapes[0] == shapes[1] == shapes[2]


def test_weights_can_be_given(config_of, tmp_path):
    """create_RWKV_Model with a checkpoint's path returns a model with its weights."""
    first = create_RWKV_Model(config_of("tiny"))
    torch.save(first.state_dict(), tmp_path / "weights.pt")
    second = create_RWKV_Model(config_of("tiny"), model_weight_path=tmp_path / "weights.pt")
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
