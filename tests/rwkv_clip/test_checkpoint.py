"""Writing and loading checkpoints."""

from __future__ import annotations

import dataclasses
import stat

import pytest
import torch
from torch import nn

from rwkv_clip import InputError, create_RWKV_Model, load_model_weight, unwrap_model
from rwkv_clip.checkpoint import checkpoint_path, save_atomically


def same_state(a: nn.Module, b: nn.Module) -> bool:
    theirs = b.state_dict()
    return all(torch.equal(value, theirs[name]) for name, value in a.state_dict().items())


def test_loading_undoes_saving(small_config, tmp_path):
    """A saved model loads into a fresh one bit for bit, and the file holds the raw state dict under the known name."""
    model, fresh = create_RWKV_Model(small_config), create_RWKV_Model(small_config)
    assert not same_state(model, fresh)
    path = checkpoint_path(tmp_path, 3)
    assert path == tmp_path / "RWKV_CLIP_model_3.pt"
    save_atomically(model.state_dict(), path)
    assert load_model_weight(fresh, path) is fresh
    assert same_state(model, fresh)
    assert list(torch.load(path)) == list(model.state_dict())


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_wrapper_prefixes_are_stripped(small_config, tmp_path, prefix):
    """Checkpoints of wrapped models load: what DDP and torch.compile put before the names is taken away."""
    model, fresh = create_RWKV_Model(small_config), create_RWKV_Model(small_config)
    torch.save({prefix + name: value for name, value in model.state_dict().items()}, tmp_path / "wrapped.pt")
    assert same_state(model, load_model_weight(fresh, tmp_path / "wrapped.pt"))


def test_bfloat16_decays_are_accepted(small_config, tmp_path):
    """Published text towers keep decay and bonus in bfloat16; they load into float32 parameters exactly."""
    model = create_RWKV_Model(small_config)
    state = model.state_dict()
    for name in state:
        if name.startswith("text_model") and name.endswith((".time_decay", ".time_faaaa")):
            state[name] = state[name].bfloat16()
    torch.save(state, tmp_path / "published.pt")
    load_model_weight(model, tmp_path / "published.pt")
    decay = model.text_model.blocks[0].att.time_decay
    assert decay.dtype == torch.float32
    assert torch.equal(decay, state["text_model.blocks.0.att.time_decay"].float())


def test_unwrap_reaches_the_innermost_model(small_config):
    """Any nesting of DDP-like and compiled wrappers comes off; a bare model is returned as it is."""
    model = create_RWKV_Model(small_config)
    assert unwrap_model(model) is model
    wrapper = nn.Module()
    wrapper.module = torch.compile(model, backend="eager")
    assert unwrap_model(wrapper) is model


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"image_depth": 2}, "depth: the checkpoint has 2 image_model.layers, the model 1 (--image-depth)"),
        ({"n_layer": 3}, "depth: the checkpoint has 3 text_model.blocks, the model 1 (--n-layer)"),
        ({"image_patch_size": 2}, "patch size (--image-patch-size)"),
        ({"input_size": 16}, "image size (--input-size)"),
        ({"vocab_size": 50}, "vocabulary or width (--vocab-size, --n-embd)"),
        ({"image_with_cls_token": True}, "class token (--image-with-cls-token)"),
        ({"dim_ffn": 64}, "another configuration of the heads or hidden widths"),
    ],
)
def test_a_misfit_names_the_likeliest_cause(small_config, tmp_path, change, cause):
    """A checkpoint of another model is refused, with the likeliest difference; the model keeps its weights."""
    path = checkpoint_path(tmp_path, 0)
    save_atomically(create_RWKV_Model(dataclasses.replace(small_config, **change)).state_dict(), path)
    model = create_RWKV_Model(small_config)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(InputError) as caught:
        load_model_weight(model, path)
    assert f"likeliest cause: {cause}" in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_misfit_names_keys_and_shapes(small_config, tmp_path):
    """The message counts and names missing, unexpected and reshaped keys."""
    model = create_RWKV_Model(small_config)
    state = model.state_dict()
    del state["logit_scale"]
    state |= {"extra": torch.zeros(1), "text_model.ln_out.bias": torch.zeros(3)}
    torch.save(state, tmp_path / "odd.pt")
    with pytest.raises(InputError) as caught:
        load_model_weight(model, tmp_path / "odd.pt")
    message = str(caught.value)
    assert "1 missing: logit_scale" in message
    assert "1 unexpected: extra" in message
    assert "1 of another shape: text_model.ln_out.bias (3,) instead of (16,)" in message


def test_an_unknown_prefix_is_named(small_config, tmp_path):
    """When every name carries the same unknown prefix, that is the cause named."""
    model = create_RWKV_Model(small_config)
    torch.save({f"model.clip.{name}": value for name, value in model.state_dict().items()}, tmp_path / "odd.pt")
    with pytest.raises(InputError, match=r"prefix: the checkpoint's keys start with 'model\.clip\.'"):
        load_model_weight(model, tmp_path / "odd.pt")


def test_files_that_hold_no_weights_are_refused(small_config, tmp_path):
    """A missing file, a cut one, and one that holds something else are three clear errors."""
    model = create_RWKV_Model(small_config)
    with pytest.raises(InputError, match="no such file"):
        load_model_weight(model, tmp_path / "nothing.pt")
    path = checkpoint_path(tmp_path, 0)
    save_atomically(model.state_dict(), path)
    whole = path.read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="cannot be read, it may be cut short"):
        load_model_weight(model, tmp_path / "cut.pt")
    torch.save({"step": 3, "model": {}}, tmp_path / "other.pt")
    with pytest.raises(InputError, match="no state dict of tensors, but a dict with the keys step, model"):
        load_model_weight(model, tmp_path / "other.pt")


def test_a_failed_write_leaves_the_old_file(tmp_path):
    """When writing fails half-way the file that was there stays whole and no part is left behind."""
    path = tmp_path / "weights.pt"
    save_atomically({"a": torch.ones(2)}, path)

    class Broken:
        def __reduce__(self):
            raise RuntimeError("cannot be pickled")

    with pytest.raises(RuntimeError, match="cannot be pickled"):
        save_atomically({"a": torch.zeros(2), "b": Broken()}, path)
    assert [p.name for p in tmp_path.iterdir()] == ["weights.pt"]
    assert torch.equal(torch.load(path)["a"], torch.ones(2))


def test_checkpoints_have_ordinary_permissions(tmp_path):
    """A checkpoint is as readable as any file the user makes, not private like a temporary file."""
    save_atomically({}, tmp_path / "weights.pt")
    (tmp_path / "plain").touch()
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("weights.pt", "plain")]
    assert modes[0] == modes[1]
