"""Masks, samples, events, damage and world sizes: what a diff says beyond tensors and scalars."""

from __future__ import annotations

from pathlib import Path

import pytest

from tracehooks.analysis.diff import diff
from tracehooks.core.records import Problem
from tracehooks.surface import offline
from tracehooks.testing import TraceBuilder

MODEL = {"modules": [{"path": ""}, {"path": "one"}, {"path": "two"}]}


def test_masks_that_differ_are_a_difference() -> None:
    """A mask that keeps fewer elements is told with both numbers, and the runs are not equal within tolerance."""
    a = TraceBuilder().step(1).mask("attn").mask("other")
    b = TraceBuilder().step(1).mask("attn", kept=6, min_kept=2).mask("other", convention="additive")
    found = diff(a.run(), b.run())
    assert [str(item) for item in found.beside] == [
        "masks: step 1: attn input.mask: kept 8 → 6, min_kept 4 → 2 (2 rows in all)"
    ]
    assert not found.within_tolerance
    assert not found.identical
    assert diff(a.run(), a.run()).identical


def test_mask_that_one_side_lacks() -> None:
    """A mask without counterpart is told."""
    found = diff(TraceBuilder().tensor("m").mask("attn").run(), TraceBuilder().tensor("m").run())
    assert [str(item) for item in found.beside] == ["masks: step 0: attn input.mask: only in a"]


@pytest.mark.parametrize(
    ("hashes", "told"),
    [
        ([3, 1, 2], "the same 3 samples in another order"),
        ([1, 2, 9], "3 samples → 3, 2 of them in both"),
        ([1, 2], "3 samples → 2, 2 of them in both"),
    ],
)
def test_samples(hashes: list[int], told: str) -> None:
    """Batches are compared by their samples: another order, other samples, another number of them."""
    a, b = TraceBuilder(), TraceBuilder()
    for builder, batch in ((a, [1, 2, 3]), (b, hashes)):
        for step in range(2):
            builder.step(step).tensor("m")
            for index, value in enumerate(batch if step else [5, 6]):
                builder.sample(value, index)
    found = diff(a.run(), b.run())
    assert [str(item) for item in found.beside] == [f"samples: step 1: train input: {told}"]
    assert found.within_tolerance
    assert not found.identical
    assert diff(a.run(), b.run(), steps=0).identical


def test_events_of_training_are_compared() -> None:
    """A skipped step or a non-finite value on one side is told; notes and errors of the recording are not."""
    nan = {"step": 3, "phase": "forward", "module": "m", "value": "nan", "message": "", "op": "aten.log.default"}
    a = TraceBuilder().step(3).event("nonfinite", details=nan).event("note")
    b = TraceBuilder().step(3).event("nonfinite", details={**nan, "value": "inf"}).event("optimizer_step_skipped")
    assert [str(item) for item in diff(a.run(), b.run()).beside] == [
        "events: step 3: nonfinite: nan forward aten.log.default → inf forward aten.log.default (2 rows in all)"
    ]


def test_rows_of_an_unreadable_part_are_not_missing(tmp_path: Path) -> None:
    """Rows that damage may have taken are unread: no difference of the runs, but no agreement either (see problems)."""
    a = TraceBuilder({"model": MODEL})
    for step in range(4):
        a.step(step).tensor("one", mean=1.0).tensor("two", mean=2.0)
    whole, damaged = a.write(tmp_path / "a"), a.write(tmp_path / "b")
    part = next((damaged / "tensors").rglob("*.parquet"))
    part.write_bytes(part.read_bytes()[:-40])
    found = offline.diff(whole, damaged)
    assert found.counts["unread"] == 8
    assert found.only_a == found.only_b == ()
    assert found.first is None
    assert found.problems


def test_damage_does_not_hide_a_removed_module() -> None:
    """A module that run.json does not list on the damaged side is missing, whatever else cannot be read."""
    a = TraceBuilder({"model": MODEL}).tensor("one").tensor("two").tensor("three").run()
    b = TraceBuilder({"model": MODEL}).tensor("one").run()
    b.problems = (Problem("tensors/rank=0/part-00000.parquet", "row group 0"),)
    found = diff(a, b)
    assert (found.counts["unread"], found.counts["only_a"]) == (1, 1)
    assert [item.module for item in found.only_a] == ["three"]
