"""What two run.json say differently: each difference once, those of settings before those of the model."""

from __future__ import annotations

from typing import Any

from tracehooks.analysis.changes import changes


def described(depth: int, seed: int = 0, lr: float = 0.1) -> dict[str, Any]:
    """A run.json of a model of some layers."""
    layers = [{"path": f"layers.{n}", "type": "Linear", "training": True} for n in range(depth)]
    weights = [{"name": f"layers.{n}.weight", "shape": [4, 4], "dtype": "float32"} for n in range(depth)]
    return {
        "flags": {"seed": seed},
        "model": {"class": "Net", "modules": layers, "parameters": weights},
        "optimizers": [{"class": "SGD", "groups": [{"lr": lr}]}],
        "created": f"{seed}",
    }


def told(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return [str(change) for change in changes(a, b)]


def test_a_module_that_one_side_has_is_one_difference() -> None:
    """Not one for each of its fields, and after what was set differently."""
    assert told(described(2), described(3, seed=1, lr=0.2)) == [
        "flags.seed: 0 → 1",
        "optimizers.0.groups.0.lr: 0.1 → 0.2",
        "model.modules.layers.2: absent → Linear",
        "model.parameters.layers.2.weight: absent → [4, 4]",
    ]
    assert told(described(1), {**described(1), "optimizers": []}) == ["optimizers.0: SGD → absent"]


def test_fields_of_what_both_have_differ_by_themselves() -> None:
    """A module's mode, a parameter's dtype and a field that one side lacks."""
    other = described(2)
    other["model"]["modules"][1]["training"] = False
    del other["model"]["parameters"][0]["dtype"]
    assert told(described(2), other) == [
        "model.modules.layers.1.training: True → False",
        "model.parameters.layers.0.weight.dtype: float32 → absent",
    ]
    assert told(described(2), described(2)) == []
