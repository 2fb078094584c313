"""Both towers: the modules' own outputs against the original's, initial weights, other image sizes, drop path."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from rwkv_clip import create_RWKV_Model
from rwkv_clip.towers import DropPath, ImageTower, TextTower
from tests.rwkv_clip.originals import module_outputs

BFLOAT16_STORED = (".time_decay", ".time_faaaa")


def test_every_module_returns_what_the_originals_did(numbers, model_of, inputs_of):
    """Each layer, branch and norm of the tiny model returns the original's output to 1e-12, in float64."""
    expected = numbers("tiny_intermediate.npz")
    model, (image, tokens) = model_of("tiny"), inputs_of("tiny")
    seen = module_outputs(model, image.double(), tokens, list(expected))
    assert set(seen) == set(expected)
    for name, value in seen.items():
        np.testing.assert_allclose(value.numpy(), expected[name], rtol=0, atol=1e-12, err_msg=name)


def test_initial_weights_are_the_originals(numbers, config_of):
    """Weights that no random number enters equal the original's (to bfloat16 where it stored that)."""
    config = dataclasses.replace(config_of("tiny"), text_initialization=True)
    state = create_RWKV_Model(config).state_dict()
    for name, expected in numbers("init_tiny_fp32_det.npz").items():
        rounded = name.startswith("text_model") and name.endswith(BFLOAT16_STORED)
        tolerance = {"rtol": 2**-8, "atol": 1e-7} if rounded else {"rtol": 0, "atol": 1e-6}
        np.testing.assert_allclose(state[name].numpy(), expected, err_msg=name, **tolerance)


def test_initial_weights_are_distributed_as_the_originals(numbers, config_of):
    """Random weights have the original's deviation to 15 % (5 standard errors at worst) and its zeros."""
    torch.manual_seed(0)
    config = dataclasses.replace(config_of("tiny"), text_initialization=True)
    state = create_RWKV_Model(config).state_dict()
    statistics = numbers("init_tiny_fp32.json")
    assert set(statistics) == set(state)
    for name, expected in statistics.items():
        deviation = float(state[name].std(unbiased=False))
        assert abs(deviation - expected["std"]) <= 0.15 * expected["std"] + 1e-7, name
        assert (expected["l2"] == 0) == (not bool(state[name].any())), name


@pytest.mark.parametrize("size", [(32, 32), (40, 32), (30, 17)])
def test_other_image_sizes_give_features(model_of, size):
    """The image tower takes any size: partial patches are padded, positions resized."""
    tower = model_of("tiny").image_model
    features = tower(torch.randn(2, 3, *size, dtype=torch.float64))
    assert features.shape == (2, 64)
    assert bool(torch.isfinite(features).all())


def test_partial_patches_are_padded_with_zeros(model_of):
    """An image whose side is no multiple of the patch equals the same image with a black right and lower border."""
    tower, image = model_of("tiny").image_model, torch.randn(2, 3, 30, 31, dtype=torch.float64)
    padded = torch.nn.functional.pad(image, (0, 1, 0, 2))
    assert torch.equal(tower(image), tower(padded))


def test_class_token_is_the_last_row(config_of):
    """With a class token as output, the feature is the last row: the mean plays no part, and it has a gradient."""
    tower = ImageTower(config_of("tiny_cls"))
    rows = []
    tower.ln1.register_forward_hook(lambda _, __, output: rows.append(output))
    feature = tower(torch.randn(2, 3, 32, 32))
    assert rows[0].shape == (2, 17, 64)
    assert torch.equal(feature, rows[0][:, -1])
    (feature * torch.randn_like(feature)).sum().backward()
    assert tower.cls_token.grad is not None
    assert bool(tower.cls_token.grad.any())


def test_recomputing_layers_changes_nothing(model_of):
    """With ``with_cp`` the image layers are run again in backward and the gradients stay bit for bit the same."""
    image = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    gradients = []
    for recompute in (False, True):
        tower = model_of("tiny", with_cp=recompute).image_model.train()
        calls = []
        tower.layers[0].register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        tower(image).square().sum().backward()
        gradients.append([parameter.grad for parameter in tower.parameters()])
        assert len(calls) == (2 if recompute else 1)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_drop_path_keeps_the_mean_and_drops_whole_samples():
    """In training, samples are zero or scaled by 1 / (1 - rate), dropped at the rate; in eval nothing happens."""
    torch.manual_seed(0)
    drop, x = DropPath(0.25), torch.ones(4000, 2, 3)
    y = drop(x)
    per_sample = y.flatten(1)
    assert bool((per_sample == per_sample[:, :1]).all())
    assert per_sample.unique().tolist() == pytest.approx([0, 4 / 3])
    assert float(y.mean()) == pytest.approx(1.0, abs=0.05)
    assert drop.eval()(x) is x


def test_drop_path_rates_rise_with_depth(config_of):
    """The rate is zero in the first layer and the configured one in the last, evenly spaced."""
    tower = ImageTower(dataclasses.replace(config_of("tiny"), drop_path_rate=0.3))
    assert [layer.drop_path.rate for layer in tower.layers] == pytest.approx([0.0, 0.15, 0.3])


def test_text_dropout_acts_in_training_only(small_config):
    """With dropout two training passes differ and two evaluation passes agree."""
    tower, tokens = TextTower(dataclasses.replace(small_config, dropout=0.5)), torch.arange(12).unsqueeze(0)
    assert not torch.equal(tower(tokens), tower(tokens))
    tower.eval()
    assert torch.equal(tower(tokens), tower(tokens))


@pytest.mark.parametrize("tower", ["image_model", "text_model"])
def test_compiles_into_one_graph(small_config, tower):
    """Under torch.compile(fullgraph=True) a tower has the features and gradients of eager mode."""
    model = getattr(create_RWKV_Model(small_config), tower)
    x = torch.randn(2, 3, 8, 8) if tower == "image_model" else torch.randint(0, 48, (2, 12))
    features, weights = model(x), torch.randn(2, small_config.n_embd)
    expected = torch.autograd.grad(features, model.parameters(), weights)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    assert torch.allclose(compiled, features, atol=1e-6)
    for seen, value in zip(torch.autograd.grad(compiled, model.parameters(), weights), expected, strict=True):
        assert torch.allclose(seen, value, rtol=1e-4, atol=1e-6)
