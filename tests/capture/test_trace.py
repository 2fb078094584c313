"""What the handle of a recording is told: wrong arguments are refused at the call, and the step is recorded all the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import tracehooks

X = torch.arange(6.0).reshape(2, 3)

WRONG = {
    "note of a number": (lambda trace: trace.note(5), r"note\(text\): got 5, expected a text"),
    "note of nothing": (lambda trace: trace.note(None), r"note\(text\): got None, expected a text"),
    "scalar without a name": (lambda trace: trace.scalar(5, 1.0), r"scalar\(name\): got 5, expected a text"),
    "scalar of a text": (lambda trace: trace.scalar("a", "x"), r"scalar\('a'\): got 'x', expected one real number"),
    "scalar of nothing": (lambda trace: trace.scalar("a", None), r"scalar\('a'\): got None, expected one real number"),
    "complex scalar": (lambda trace: trace.scalar("a", 1j), r"scalar\('a'\): got 1j, expected one real number"),
    "complex tensor": (lambda trace: trace.scalar("a", torch.tensor(1j)), r"complex64 tensor of shape \(\)"),
    "several numbers": (lambda trace: trace.scalar("a", X), r"float32 tensor of shape \(2, 3\)', expected one real"),
    "array of numbers": (lambda trace: trace.scalar("a", X.numpy()), r"got 'ndarray', expected one real number"),
    "too large an int": (lambda trace: trace.scalar("a", 10**400), "expected one real number"),
    "split of a number": (lambda trace: trace.samples(X, split=5), r"samples\(split\): got 5, expected a text"),
    "samples of nothing": (lambda trace: trace.samples(None), r"samples\(batch\): got None, expected tensors"),
    "samples of a number": (lambda trace: trace.samples(7), r"samples\(batch\): got 7, expected tensors"),
    "ids that are none": (lambda trace: trace.samples(X, source_id=object()), r"source_id: got 'object', expected one"),
    "an id that is none": (
        lambda trace: trace.samples(X, source_id=["a", {}]),
        r"'dict among the ids', expected texts",
    ),
    "checkpoint of nothing": (lambda trace: trace.checkpoint("a", None), r"checkpoint\(state\): got None, expected a"),
    "verdict of nothing": (lambda trace: trace.verdict(None), r"verdict\(found\): got None, expected a Verdict"),
    "verdict of a text": (lambda trace: trace.verdict("x"), r"verdict\(found\): got 'x', expected a Verdict"),
}


@pytest.mark.parametrize(("call", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_refused_and_its_step_is_kept(record, call, message) -> None:
    """One clear line at the call; loss, tensors and what else was told of that step are all in the trace."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def work(trace) -> None:
        for number in range(2):
            loss = model(X).square().mean()
            trace.scalar("told", number)
            if number == 1:
                with pytest.raises(tracehooks.TracehooksError, match=message) as caught:
                    call(trace)
                assert "\n" not in str(caught.value)
            trace.note("after")
            loss.backward()
            optimizer.step()

    recorded = record(model, work)
    assert [step for step, _ in recorded.values("loss")] == [0, 1]
    assert recorded.values("told") == [(0, 0.0), (1, 1.0)]
    assert list(recorded.events.query("kind == 'note'")["step"]) == [0, 1]
    assert recorded.sites(step=0) == recorded.sites(step=1) != []
    assert len(recorded.rows(phase="gradient", step=1)) == 2


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ([1, None], ["1", None]),
        (["a", 2.5], ["a", "2.5"]),
        (torch.tensor([3, 4]), ["3", "4"]),
        (np.array([5, 6]), ["5", "6"]),
        (iter("xy"), ["x", "y"]),
        (7, ["7", "7"]),
    ],
)
def test_source_ids_are_texts_numbers_or_not_known(record, given, kept) -> None:
    """A number is kept as its text, an id that is not known as null."""
    recorded = record(nn.Linear(3, 2), lambda trace: trace.samples(X, "test", given))
    ids = recorded.samples["source_id"].astype(object)
    assert list(ids.where(ids.notna(), None)) == kept


@pytest.mark.parametrize("value", [True, np.float32(0.5), np.array(2), torch.tensor([[3.0]]), torch.tensor(4)])
def test_a_scalar_is_any_real_number(record, value) -> None:
    """Of Python, NumPy or torch, with any number of dimensions that hold one element."""
    assert record(nn.Linear(3, 2), lambda trace: trace.scalar("a", value)).values("a") == [(0, float(value))]
