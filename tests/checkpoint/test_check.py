"""check(model, state) says what of a state dict is not in a model, and nothing of one that is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import tracehooks
from tracehooks.core.errors import InvalidOptionError


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


def copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_a_loaded_model_gives_nothing_even_after_training() -> None:
    """Loading and then a few steps of training is no finding."""
    torch.manual_seed(0)
    state, model = copied(net()), net()
    model.load_state_dict(state)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(16, 4)).square().mean().backward()
        optimizer.step()
    assert tracehooks.checkpoint.check(model, state) == []


@pytest.mark.parametrize("prefix", ["module.", "model.", "_orig_mod.", "net.encoder."])
def test_a_prefix_is_named(prefix: str) -> None:
    """Names that differ by what stands before them, on either side."""
    state, model = {prefix + name: value for name, value in copied(net()).items()}, net()
    model.load_state_dict(state, strict=False)
    (found,) = tracehooks.checkpoint.check(model, state)
    expected = {"loaded": 0, "missing": 9, "unexpected": 9, "prefix": prefix, "cause": "key_prefix"}
    assert {key: found.evidence[key] for key in expected} == expected
    assert (found.rule, found.severity) == ("checkpoint_not_loaded", "error")
    wrapped = nn.ModuleDict({"inner": net()})
    (found,) = tracehooks.checkpoint.check(wrapped, copied(net()))
    assert found.evidence["prefix"] == "inner."


class Words(nn.Module):
    def __init__(self, tie: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
        if tie:
            self.head.weight = self.embedding.weight


def without_head() -> tuple[nn.Module, dict[str, Tensor]]:
    state = copied(Words(True))
    del state["head.weight"]
    return Words(False), state


def other_width() -> tuple[nn.Module, dict[str, Tensor]]:
    return net(), {**copied(net()), "2.weight": torch.zeros(2, 8)}


def never_loaded() -> tuple[nn.Module, dict[str, Tensor]]:
    return net(), copied(net())


def renamed() -> tuple[nn.Module, dict[str, Tensor]]:
    state = copied(net())
    state["head.weight"] = state.pop("2.weight")
    return net(), state


@pytest.mark.parametrize(
    ("build", "cause", "params"),
    [
        (without_head, "tied_weight_missing", ["head.weight"]),
        (other_width, "shape_mismatch", ["2.weight"]),
        (never_loaded, "values_differ", ["0.weight", "2.weight"]),
        (renamed, "missing_keys", ["2.weight"]),
    ],
)
def test_what_is_missing_is_named(
    build: Callable[[], tuple[nn.Module, dict[str, Tensor]]], cause: str, params: list[str]
) -> None:
    """The cause, the parameters and the next check."""
    torch.manual_seed(0)
    model, state = build()
    model.load_state_dict({k: v for k, v in state.items() if k in model.state_dict() and cause != "values_differ"
                           and v.shape == model.state_dict()[k].shape}, strict=False)  # fmt: skip
    (found,) = tracehooks.checkpoint.check(model, state)
    assert (found.evidence["cause"], found.evidence["params"]) == (cause, params)
    assert found.next_check


def test_what_is_no_state_dict_is_refused() -> None:
    """The error says what was given and what was expected."""
    with pytest.raises(InvalidOptionError, match=r"model: got None, expected a torch\.nn\.Module"):
        tracehooks.checkpoint.check(None, {"weight": torch.ones(1)})
    with pytest.raises(InvalidOptionError, match="expected a state dict"):
        tracehooks.checkpoint.check(net(), {"epoch": 3})
