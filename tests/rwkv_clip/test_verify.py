"""Looking at checkpoints in isolation."""

from __future__ import annotations

import math
import re

import pytest
import torch

from rwkv_clip import train, verify
from rwkv_clip.verify import rms


@pytest.fixture(scope="module")
def run(tmp_path_factory, small_flags):
    """The directory of a run of two epochs."""
    output = tmp_path_factory.mktemp("verify") / "run"
    assert train.main([*small_flags, "--output", str(output)]) == 0
    return output


def changed(run, name, change):
    """A copy of the last checkpoint, with its training state, in which a tensor is changed."""
    state = torch.load(run / "RWKV_CLIP_model_1.pt")
    state[name] = change(state[name])
    path = run / "RWKV_CLIP_model_7.pt"
    torch.save(state, path)
    (run / "training_state_7.pt").write_bytes((run / "training_state_1.pt").read_bytes())
    return str(path)


def test_a_sound_checkpoint_is_sound(run, capsys):
    """A checkpoint of a run needs no configuration; it is sound, and its largest weights are listed."""
    assert verify.main([str(run / "RWKV_CLIP_model_1.pt")]) == 0
    printed = capsys.readouterr().out
    assert "RWKV_CLIP_model_1.pt: sound" in printed
    assert "69 tensors, 22,481 values; keys and shapes are the model's" in printed
    state = torch.load(run / "RWKV_CLIP_model_1.pt")
    decay = state["text_model.blocks.0.att.time_decay"]
    assert (
        f"largest {float(decay.abs().max()):10.4g}  rms {rms(decay):10.4g}  text_model.blocks.0.att.time_decay"
        in printed
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_named(run, capsys, value):
    """A weight that is NaN or infinite is named with how many, and so are the features it spoils; status 1."""

    def spoil(weight):
        weight[0, :3] = value
        return weight

    path = changed(run, "image_model.layers.0.ffn.key.weight", spoil)
    assert verify.main([path]) == 1
    printed = capsys.readouterr().out
    assert "damaged" in printed
    counts = "3 NaN, 0 infinite" if math.isnan(value) else "0 NaN, 3 infinite"
    assert re.search(rf"image_model\.layers\.0\.ffn\.key\.weight \(\d+, 16\): {counts}", printed)
    assert "image features of a dummy batch: 32 of 32 not finite" in printed
    assert "text features" not in printed


def test_finite_weights_can_be_too_large(run, capsys):
    """Weights that are finite but whose features overflow are found by the dummy batch."""
    path = changed(run, "image_model.layers.0.ffn.key.weight", lambda weight: weight * 1e30)
    assert verify.main([path]) == 1
    assert "image features of a dummy batch" in capsys.readouterr().out


def test_several_are_compared(run, capsys):
    """With several checkpoints the weights that changed most by a factor are listed, those that a pattern matches."""
    path = changed(run, "text_model.ln_out.weight", lambda weight: weight * 10)
    first = str(run / "RWKV_CLIP_model_0.pt")
    assert verify.main([first, path, "--weights", "text_model.ln_out.weight"]) == 0
    lines = (
        capsys.readouterr().out.split("root mean square in each checkpoint, what changed most first\n")[1].splitlines()
    )
    before, after, name = lines[0].split()
    assert name == "text_model.ln_out.weight"
    assert float(after) / float(before) == pytest.approx(10, rel=0.05)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.write_bytes(b"nothing"), "cannot be read, it may be cut short"),
        (lambda path: torch.save([1, 2], path), "holds no state dict of tensors, but a list"),
        (lambda path: torch.save({"logit_scale": torch.zeros(())}, path), "does not fit the model"),
    ],
)
def test_what_is_no_checkpoint_is_explained(run, capsys, tmp_path, make, message):
    """A damaged file, one of another kind and one of another model end with status 2 and say so."""
    path = tmp_path / "RWKV_CLIP_model_0.pt"
    make(path)
    assert verify.main([str(path), "--config", "digits"]) == 2
    assert message in capsys.readouterr().err
