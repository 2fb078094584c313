"""Parameter groups."""

from __future__ import annotations

from rwkv_clip import create_RWKV_Model
from rwkv_clip.training.optimizer import parameter_groups


def test_only_matrices_decay(small_config):
    """Biases, norms, mixing weights, decays, bonuses, positions and the logit scale are kept from decaying."""
    model = create_RWKV_Model(small_config)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, kept = ({names[id(p)] for p in group["params"]} for group in parameter_groups(model, 0.1))
    assert decayed | kept == set(names.values())
    assert not decayed & kept
    low_rank = ("time_maa_w1", "time_maa_w2", "time_decay_w1", "time_decay_w2")
    for name in names.values():
        matrix = name.endswith(low_rank) or (name.endswith(".weight") and ".ln" not in name)
        assert (name in decayed) == matrix, name


def test_decay_all_makes_one_group(small_config):
    """With decay_all every parameter decays, as in the original."""
    model = create_RWKV_Model(small_config)
    (group,) = parameter_groups(model, 0.1, decay_all=True)
    assert len(group["params"]) == len(list(model.parameters()))
    assert group["weight_decay"] == 0.1
