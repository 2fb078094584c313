"""Specification of `storage.forms`: a message filled in is the message that would have been made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tracehooks.core.errors import InvalidRowsError, UnknownNameError
from tracehooks.core.records import Batch
from tracehooks.core.schema import TABLES
from tracehooks.storage import forms
from tracehooks.storage.forms import Forms
from tracehooks.storage.journal import batch_message
from tracehooks.storage.rows import record_batch

ROWS = 7
FLOATS = ("min", "max", "mean", "std", "rms", "absmax")
NAMES = tuple(f"blocks.{i}.é" for i in range(ROWS))
PHASES = ("forward",) * ROWS
SHAPES = tuple((i, 3) for i in range(ROWS))


def constant(*values: Any) -> np.ndarray:
    column = np.array(values)
    column.flags.writeable = False
    return column


RECOMPUTE, CALLS = constant(*[False, True] * 3, False), np.arange(ROWS, dtype=np.int32)


def step(seed: int, missing: tuple[int, ...] = (), **instead: Any) -> Batch:
    """A batch as capture makes it in every step: names that are the same objects, other numbers."""
    draw = np.random.default_rng(seed)
    columns: dict[str, Any] = {name: draw.integers(0, 1 << 62, ROWS) for name in ("step", "time_ns", "seq", "count")}
    columns |= {name: draw.integers(0, 9, (ROWS, 3))[:, 1] for name in ("nan", "posinf", "neginf", "zeros")}
    columns |= {name: draw.normal(size=ROWS) for name in FLOATS}
    columns["min"][list(missing)] = np.nan
    columns |= {"module": NAMES, "phase": PHASES, "type": NAMES, "slot": NAMES, "shape": SHAPES}
    columns |= {"dtype": NAMES, "device": NAMES, "call": CALLS, "micro": CALLS, "recompute": RECOMPUTE}
    columns |= {"hash": draw.integers(0, 1 << 63, ROWS, dtype=np.uint64), "sketch": None, "histogram": None}
    return Batch("tensors", columns | instead)


def anew(batch: Batch) -> bytes:
    return batch_message(record_batch(batch), batch.table)


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """The batches that were converted by Arrow."""
    seen: list[Batch] = []
    monkeypatch.setattr(forms, "record_batch", lambda batch: seen.append(batch) or record_batch(batch))
    return seen


def test_a_step_like_an_earlier_one_is_filled_in(converted: list[Batch]) -> None:
    """Other numbers in the same columns, the same nulls among them: the bytes that Arrow would have made, without it."""
    known = Forms()
    for seed in range(5):
        for missing in ((), (2, 4)):
            batch = step(seed, missing)
            assert known.message(batch) == anew(batch)
    assert len(converted) == 4  # two of each kind


@pytest.mark.parametrize(
    "other",
    [
        {"module": tuple(name + "x" for name in NAMES)},
        {"recompute": constant(*[True] * ROWS)},
        {"recompute": np.array([False] * ROWS)},
        {"step": list(range(ROWS))},
        {"step": np.arange(ROWS, dtype=np.int32)},
        {"hash": None},
        {"min": np.full(ROWS, np.nan)},
        {"sketch": np.ones((ROWS, 16), dtype=np.float32)},
    ],
    ids=lambda other: next(iter(other)),
)
def test_a_step_unlike_it_is_not(other: dict[str, Any], converted: list[Batch]) -> None:
    """Another object, kind or pattern of nulls in any column: made anew, and right, before and after."""
    known = Forms()
    for batch in (step(0), step(1), step(2, **other), step(3)):
        assert known.message(batch) == anew(batch)
    assert len(converted) == 3


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"step": np.arange(ROWS - 1)}, InvalidRowsError),
        ({"module": NAMES[1:]}, InvalidRowsError),
        ({"colour": NAMES}, UnknownNameError),
    ],
    ids=["short", "short names", "unknown"],
)
def test_what_does_not_fit_is_refused_as_ever(wrong: dict[str, Any], error: type[Exception]) -> None:
    """Also where the rest is like an earlier step."""
    known = Forms()
    known.message(step(0)), known.message(step(2))
    with pytest.raises(error):
        known.message(step(1, **wrong))


def test_forms_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that never come again are not collected for ever; long batches are not kept at all."""
    known = Forms()
    for seed in range(2 * forms.MAX_KINDS):
        names = tuple(f"{seed}.{name}" for name in NAMES)
        for batch in (step(seed, module=names), step(seed + 1, module=names)):
            assert known.message(batch) == anew(batch)
        assert len(known._forms) <= forms.MAX_FORMS
        assert len(known._seen) <= forms.MAX_KINDS
    monkeypatch.setattr(forms, "LONGEST", ROWS - 1)
    known = Forms()
    known.message(step(0)), known.message(step(1))
    assert not known._forms


def test_a_scalar_that_is_not_a_number_is_a_value() -> None:
    """NaN in a column that has no nulls: written as it is."""
    known, names = Forms(), ("loss", "lr/0")
    for value in (1.0, np.nan, 2.0):
        when = {"step": np.array([0, 0]), "micro": np.zeros(2, dtype=np.int32), "time_ns": np.array([1, 2])}
        batch = Batch("scalars", {**when, "name": names, "value": np.array([value, 0.1])})
        assert known.message(batch) == anew(batch)
    assert len(known._forms) == 1
    assert set(TABLES["scalars"].names) == set(batch.columns)
