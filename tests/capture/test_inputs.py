"""Root inputs, the masks among them, and the fingerprints of samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import tracehooks


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x, attention_mask=None, *more, **named):
        return self.layer(x)


def test_root_inputs_by_name(record) -> None:
    """Root inputs are named as forward() names them, by index beyond that, by key inside mappings."""
    model = Takes()

    def work(trace):
        model(torch.ones(2, 3), None, torch.ones(1), labels={"ids": torch.ones(2)}, flag=True)

    slots = [slot for _, slot, _ in record(model, work).sites("input")]
    assert slots == ["input.x", "input.2", "input.labels.ids"]


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (torch.tensor([[1, 1, 0], [0, 0, 0]]), (2, 6, 2, 1, 0, 2, 1, "keep=True")),
        (torch.tensor([[True, False]]), (1, 2, 1, 0, 1, 1, None, "keep=True")),
        (torch.tensor([[0.0, -torch.inf], [-torch.inf, -torch.inf]]), (1, 4, 2, 1, 0, 1, 1, "additive")),
        (torch.tensor([[0.0, torch.finfo(torch.float32).min]]), (1, 2, 1, 0, 1, 1, None, "additive")),
        (torch.tensor([[0.0, -10000.0]]), (1, 2, 1, 0, 1, 1, None, "additive")),
        (torch.tensor([[1.0, 0.0]]), (1, 2, 1, 0, 1, 1, None, "keep=True")),
        (torch.zeros(2, 1, 3, 3), (18, 18, 6, 0, 3, 3, None, "additive")),
        (torch.zeros(0, 4, dtype=torch.bool), (0, 0, 0, 0, None, None, None, "keep=True")),
    ],
)
def test_masks_among_root_inputs(record, mask, expected) -> None:
    """A mask found by its name says how much it keeps and which rows keep nothing, whatever its convention."""
    model = Takes()
    (row,) = record(model, lambda trace: model(torch.ones(2, 3), attention_mask=mask)).masks.to_dict("records")
    names = ("kept", "count", "rows", "empty_rows", "min_kept", "max_kept", "first_empty", "convention")
    found = tuple(None if isinstance(row[n], float) and np.isnan(row[n]) else row[n] for n in names)
    assert found == expected
    assert (row["module"], row["slot"]) == ("", "attention_mask")


def test_masks_of_torchs_attention_drop_what_is_true(record) -> None:
    """In nn.MultiheadAttention True means dropped; masks of inner modules are seen where forward() names them."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x):
            padding = torch.tensor([[False, True], [True, True]])
            return self.attention(x, x, x, key_padding_mask=padding)[0]

    model = Model()
    (row,) = record(model, lambda trace: model(torch.ones(2, 2, 4))).masks.to_dict("records")
    assert (row["module"], row["slot"], row["convention"]) == ("attention", "key_padding_mask", "keep=False")
    assert (row["kept"], row["empty_rows"], row["first_empty"]) == (1, 1, 1)


@pytest.mark.parametrize("name", ["padding_mask", "pad_mask", "ignore_mask"])
def test_a_mask_of_padding_drops_as_a_bool_and_keeps_as_numbers(record, name: str) -> None:
    """torch's attention takes True for padding, transformers' audio models take 1 for sound, under the same name."""
    model = Takes()
    padding = torch.tensor([[False, False, True], [False, False, False]])

    def work(trace):
        model(torch.ones(2, 3), **{name: padding})
        model(torch.ones(2, 3), **{name: (~padding).long()})
        model(torch.ones(2, 3), **{name: (~padding).float()})
        model(torch.ones(2, 3), **{f"non_{name}": ~padding})

    masks = record(model, work).masks
    assert list(masks["kept"]) == [5] * 4
    assert list(masks["convention"]) == ["keep=False", "keep=True", "keep=True", "keep=True"]


def test_samples_are_fingerprinted(record) -> None:
    """Each sample of each batched root input has a hash; equal samples equal hashes; no_grad passes are validation."""
    model = Takes()
    x = torch.randn(3, 3)

    def work(trace):
        model(x)
        with torch.no_grad():
            model(x.flip(0))

    samples = record(model, work).samples
    train, validation = samples[samples["split"] == "train"], samples[samples["split"] == "validation"]
    assert list(train["index"]) == [0, 1, 2]
    assert set(train["name"]) == {"x"}
    assert len(set(train["hash"])) == 3
    assert list(validation["hash"]) == list(train["hash"])[::-1]


def test_own_samples(record) -> None:
    """The user can fingerprint batches the model does not see, with a split and source ids of their own."""
    model = Takes()
    x = torch.randn(2, 3)

    def work(trace):
        model(x)
        trace.samples({"audio": x}, split="test", source_id=["a", "b"])
        with pytest.raises(tracehooks.TracehooksError, match="one for each of the 2 samples"):
            trace.samples(x, source_id=["a"])

    samples = record(model, work).samples
    own = samples[samples["split"] == "test"]
    assert list(own["source_id"]) == ["a", "b"]
    assert list(own["name"]) == ["batch.audio"] * 2
    assert list(own["hash"]) == list(samples[samples["split"] == "train"]["hash"])
