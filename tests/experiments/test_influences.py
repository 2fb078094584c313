"""Which inputs reach the output: where the change ends, and where gradients do, is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.experiments.training import own_loss, state_of, texts, translator
from tracehooks import experiments
from tracehooks.core.errors import UnknownNameError


class Conditioned(nn.Module):
    """Music under a caption.

    Args:
        fault: what is wrong with the path of the caption.
    """

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.encoder = nn.Embedding(16, 8), nn.Linear(8, 8)
        self.music, self.fuse, self.head = nn.Linear(4, 8), nn.Linear(16, 8), nn.Linear(8, 4)
        self.fault = fault

    def forward(self, music: Tensor, caption: Tensor | None = None, level: Tensor | None = None) -> Tensor:
        h = self.music(music)
        condition = torch.zeros(len(music), 8)
        if caption is not None and self.fault != "dropped":
            condition = self.encoder(self.words(caption).mean(1))
        if self.fault == "detached":
            condition = condition.detach()
        if self.fault == "unused":
            condition = condition * 0
        if level is not None:
            h = h * level[:, None]
        return self.head(self.fuse(torch.cat([h, condition], 1)).relu())


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "music": torch.randn(4, 4, generator=generator),
        "caption": torch.randint(0, 16, (4, 5), generator=generator),
        "level": torch.rand(4, generator=generator),
    }


def about(found: experiments.influences.Influence, name: str) -> list[bool | None]:  # type: ignore[name-defined]
    return [check.passed for check in found.checks if f" {name}" in check.question]


def test_every_input_of_a_healthy_model_counts() -> None:
    """Permuted, zeroed and left out each input moves the output, by a number, and gradients come back to its path."""
    found = experiments.influence(Conditioned(), batch())
    assert found.passed, str(found)
    rows = found.table.to_pylist()
    assert [(row["input"], row["change"]) for row in rows] == [
        (name, change) for name in batch() for change in ("permuted", "zeroed", "dropped")
    ]
    for row in rows:
        if (row["input"], row["change"]) == ("music", "dropped"):
            assert "TypeError" in row["error"]
        else:
            assert row["output"] > 1e-3
            assert row["gradient"] > 0
    assert {row["first"] for row in rows if row["input"] == "caption" and row["change"] == "permuted"} == {"words"}


def test_a_caption_that_is_dropped_on_the_way() -> None:
    """No module returns anything else when it changes."""
    found = experiments.influence(Conditioned("dropped"), batch(), ["caption"])
    assert about(found, "caption") == [False, None]
    assert "no module returns anything else" in found.checks[0].answer


def test_a_fusion_that_does_not_use_it() -> None:
    """The encoder's output changes, and there the change ends."""
    found = experiments.influence(Conditioned("unused"), batch(), "caption")
    assert about(found, "caption")[0] is False
    assert "the change ends in encoder" in found.checks[0].answer


def test_a_path_without_gradients() -> None:
    """A detached condition moves the output, but no gradient comes back: up to where is named."""
    found = experiments.influence(Conditioned("detached"), batch(), "caption")
    assert about(found, "caption") == [True, False]
    assert "none comes back to encoder" in found.checks[1].answer


def test_a_model_of_transformers() -> None:
    """Ids, mask and labels of a T5 all count; what it cannot do without is said, not raised."""
    found = experiments.influence(translator(), texts(), loss_fn=own_loss)
    assert found.passed, str(found)
    first = {row["input"]: row["first"] for row in found.table.to_pylist() if row["change"] == "permuted"}
    assert first["input_ids"] == "encoder.embed_tokens"
    assert first["labels"] == "decoder.embed_tokens"
    errors = [
        row["error"] for row in found.table.to_pylist() if row["input"] == "input_ids" and row["change"] == "dropped"
    ]
    assert "ValueError" in errors[0]


def test_batches_of_other_kinds() -> None:
    """Arguments by position go by forward's names, tensors further in by their path."""
    given = batch()
    found = experiments.influence(Conditioned(), (given["music"], given["caption"]))
    assert set(found.table["input"].to_pylist()) == {"music", "caption"}

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Conditioned()

        def forward(self, batch: Any) -> Tensor:
            out: Tensor = self.inner(batch["x"][0], batch["x"][1])
            return out

    nested = {"batch": {"x": (given["music"], given["caption"])}}
    assert experiments.influence(Nested(), nested, "batch.x.1").passed
    (alone,) = {row["input"] for row in experiments.influence(nn.Linear(4, 2), given["music"]).table.to_pylist()}
    assert alone == "input"


def test_left_as_it_was() -> None:
    """Parameters, gradients, buffers, modes, hooks and generators are put back; an input that is not there is refused."""
    model = Conditioned()
    model(**batch()).sum().backward()
    before = state_of(model)
    experiments.influence(model, batch())
    assert state_of(model) == before
    with pytest.raises(UnknownNameError, match="did you mean 'caption'"):
        experiments.influence(model, batch(), "captions")
    assert state_of(model) == before


def test_one_sample_cannot_be_permuted() -> None:
    """With a single sample the permutation is said to change nothing, and the answer rests on the others."""
    single = {name: tensor[:1] for name, tensor in batch().items()}
    found = experiments.influence(Conditioned(), single, "caption")
    assert found.passed
    assert found.table.to_pylist()[0]["error"] == "permuted it is what it was"
