"""Laws of diff first, then the cases that it was made for."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.strategies import built, edited, rows_in, traces
from tracehooks.analysis import diff as diff_module
from tracehooks.analysis import tables
from tracehooks.analysis.diff import Diff, diff
from tracehooks.core.errors import InvalidOptionError, UnknownNameError
from tracehooks.surface import offline
from tracehooks.surface.plain import json_text
from tracehooks.testing import MemoryRun, TraceBuilder

MIRROR = {"only_a": "only_b", "only_b": "only_a"}
KEY = ("step", "micro", "phase", "module", "slot", "call", "recompute", "rank")


def training(
    steps: int = 3, *, change: Callable[[int, str, dict[str, Any]], None] | None = None, blocks: int = 3
) -> TraceBuilder:
    """A run of a few blocks whose numbers follow from step and site; ``change`` edits rows as they are made."""
    builder = TraceBuilder()
    for step in range(steps):
        builder.step(step)

        def row(module: str, slot: str, phase: str, step: int = step) -> None:
            seed = sum(ord(letter) for letter in f"{module}{slot}{phase}") + step
            columns: dict[str, Any] = {"mean": seed / 100, "std": 1.0, "min": -3.0, "max": 4.0, "hash": seed}
            if change is not None:
                change(step, f"{phase} {module}.{slot}", columns)
            builder.tensor(module, slot, phase, **columns)

        row("", "input.x", "input")
        for block in range(blocks):
            row(f"blocks.{block}.fc", "output", "forward")
        row("", "output", "forward")
        for block in range(blocks):
            row(f"blocks.{block}.fc", "weight", "parameter")
        for block in range(blocks):
            row(f"blocks.{block}.fc", "weight", "update")
        builder.scalar("loss", 1.0 / (step + 1)).scalar("lr/0", 0.1).scalar("time/step", step * 0.25)
    return builder


def test_a_run_is_identical_to_itself() -> None:
    """diff(a, a) finds every row equal, nothing missing, no first site and no culprit."""
    run = training().run()
    found = diff(run, run)
    assert found.identical
    assert found.within_tolerance
    assert found.first is None
    assert found.culprits == found.only_a == found.only_b == ()
    assert found.counts["equal"] == len(found.rows) == 3 * 11 + 3 * 2


@given(traces)
def test_every_run_is_identical_to_itself(trace: dict[int, Any]) -> None:
    """diff(a, a) is empty for whatever a holds: nulls, NaN, repeated keys, no rows."""
    found = diff(built(trace), built(trace))
    assert found.identical
    assert found.first is found.first_bits is None


@given(edited())
def test_diff_mirrors(pair: tuple[dict[int, Any], dict[int, Any]]) -> None:
    """diff(b, a) has the rows of diff(a, b) with the sides exchanged, and the same verdict."""
    a, b = built(pair[0]), built(pair[1])
    there, back = diff(a, b), diff(b, a)
    assume(not there.guessed)  # rows of renamed modules go by the name that the second run has
    assert _judged(there) == sorted((key, MIRROR.get(status, status), number) for key, status, number in _judged(back))
    assert there.identical == back.identical
    assert there.within_tolerance == back.within_tolerance
    assert [str(item) for item in there.only_a] == [str(item) for item in back.only_b]
    assert (there.first is None) == (back.first is None)


@given(edited(), st.data())
def test_order_of_rows_is_irrelevant(pair: tuple[dict[int, Any], dict[int, Any]], data: st.DataObject) -> None:
    """Rows that were written in another order say the same."""
    order = data.draw(st.permutations(range(rows_in(pair[0]))))
    shuffled, b = built(pair[0], order), built(pair[1])
    assert _judged(diff(built(pair[0]), b)) == _judged(diff(shuffled, b))


@given(edited())
def test_every_row_is_accounted_for_once(pair: tuple[dict[int, Any], dict[int, Any]]) -> None:
    """Aligned rows and missing rows together are the compared rows of both sides, however often a key repeats."""
    a, b = built(pair[0]), built(pair[1])
    found = diff(a, b)
    both = len(found.rows) - found.counts["only_a"] - found.counts["only_b"]
    compared = "name != 'time/step'"
    assert both + found.counts["only_a"] == len(a.read("tensors")) + len(a.read("scalars", where=compared))
    assert both + found.counts["only_b"] == len(b.read("tensors")) + len(b.read("scalars", where=compared))


@given(edited())
def test_first_is_the_first_of_the_differing_rows(pair: tuple[dict[int, Any], dict[int, Any]]) -> None:
    """`first` is the first row that is neither equal nor within tolerance, and there is a culprit with it."""
    found = diff(built(pair[0]), built(pair[1]))
    if found.first is None:
        assert found.within_tolerance
        assert not found.culprits
    else:
        row = found.differing.slice(0, 1).to_pylist()[0]
        assert (found.first.step, found.first.phase, found.first.slot) == (row["step"], row["phase"], row["slot"])
        assert found.first.module == row["module"]
        assert found.culprits


@given(edited(), st.integers(1, 8))
def test_windows_do_not_show(pair: tuple[dict[int, Any], dict[int, Any]], limit: int) -> None:
    """However few rows are held at a time, the diff is the same."""
    a, b = built(pair[0]), built(pair[1])
    whole = diff(a, b)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diff_module, "stretches", lambda extents, chosen: tables.stretches(extents, chosen, limit))
        parts = diff(a, b)
    assert _judged(parts) == _judged(whole)
    assert parts.first == whole.first
    assert [item.slot for item in parts.culprits] == [item.slot for item in whole.culprits]


@given(edited())
def test_a_diff_is_told_and_is_json(pair: tuple[dict[int, Any], dict[int, Any]]) -> None:
    """str() and to_json() work for every diff, and the JSON holds no bare NaN."""
    found = diff(built(pair[0]), built(pair[1]))
    assert str(found)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    json.loads(json_text(found.to_json()), parse_constant=refuse)


def test_changed_weight_is_found_at_its_module() -> None:
    """One weight that moved by 1e-3 of its rms makes its module the first to differ and its parameter a culprit, though
    the outputs hardly move."""

    def change(step: int, site: str, columns: dict[str, Any]) -> None:
        if site == "parameter blocks.1.fc.weight":
            columns.update(hash=7, mean=columns["mean"] + 1e-9)
        if site.startswith("forward") and "blocks.0" not in site:
            columns.update(hash=columns["hash"] + 1, mean=columns["mean"] * (1 + 1e-8))

    found = diff(training().run(), training(change=change).run())
    assert found.first is not None
    assert (found.first.module, found.first.slot, found.first.phase, found.first.step) == (
        "blocks.1.fc",
        "output",
        "forward",
        0,
    )
    assert [(item.cause, item.module, item.slot) for item in found.culprits] == [
        ("parameter", "blocks.1.fc", "weight"),
    ]


def test_changed_weight_on_another_machine_is_judged_by_tolerance() -> None:
    """Where host or packages differ, initial parameters may differ by rounding."""

    def change(step: int, site: str, columns: dict[str, Any]) -> None:
        columns.update(hash=columns["hash"] + 1, mean=columns["mean"] * (1 + 1e-8))

    other = training(change=change).info(host="elsewhere").run()
    assert diff(training().run(), other).within_tolerance
    assert not diff(training().run(), training(change=change).run()).within_tolerance


def test_cause_is_told_from_effect() -> None:
    """Of rows that differ from one block on, only the block where it began is a culprit."""

    def change(step: int, site: str, columns: dict[str, Any]) -> None:
        if step or ("blocks.0" not in site and "input" not in site and "parameter" not in site):
            columns.update(hash=columns["hash"] + 1, mean=columns["mean"] + 0.5)

    found = diff(training().run(), training(change=change).run())
    assert found.first is not None
    assert found.first.module == "blocks.1.fc"
    assert [str(item.module) for item in found.culprits] == ["blocks.1.fc"]
    assert "mean" in found.first.detail
    assert "relative difference" in found.first.detail


def test_changed_data_is_the_culprit() -> None:
    """Where the model's input differs, it is the culprit and no module is."""

    def change(step: int, site: str, columns: dict[str, Any]) -> None:
        columns.update(hash=columns["hash"] + 1, mean=columns["mean"] + 0.5 * ("parameter" not in site))
        if "parameter" in site:
            columns["hash"] -= 1

    found = diff(training(1).run(), training(1, change=change).run())
    assert [(item.phase, item.slot) for item in found.culprits] == [("input", "input.x")]


def test_changed_learning_rate_is_the_culprit() -> None:
    """Updates that differ along with the learning rate are its effect."""

    def change(step: int, site: str, columns: dict[str, Any]) -> None:
        if "update" in site or (step and "parameter" in site):
            columns.update(hash=columns["hash"] + 1, mean=columns["mean"] + 0.5)

    faster = training(change=change)
    rows = faster._rows[0]["scalars"]
    for row in rows:
        row["value"] *= 2 if row["name"] == "lr/0" else 1
    found = diff(training().run(), faster.run())
    assert found.first is not None
    assert found.first.phase == "update"
    assert [(item.module, item.slot, item.detail) for item in found.culprits] == [
        (None, "lr/0", "0.1 → 0.2 (relative difference 0.5, tolerance 8.9e-16)")
    ]


def test_buffers_are_culprits_only_of_their_own_module() -> None:
    """A buffer that changed because its module's input did is an effect; one whose module began it is a culprit."""

    def run(changed: tuple[str, ...]) -> MemoryRun:
        builder = TraceBuilder()
        for module in ("conv", "bn"):
            builder.tensor(module, mean=1.0 + (module in changed))
        return builder.tensor("bn", "running_mean", "buffer", mean=1.0 + ("bn" in changed)).run()

    began = diff(run(()), run(("bn",)))
    assert [item.slot for item in began.culprits] == ["running_mean"]
    passed_on = diff(run(()), run(("conv", "bn")))
    assert [(item.module, item.slot) for item in passed_on.culprits] == [("conv", "output")]


@pytest.mark.parametrize("steps", [1, range(1, 2), slice(1, 2), [1], np.array([1]), slice(-2, -1)])
def test_steps_choose(steps: Any) -> None:
    """`steps=` takes a number, a range, a slice and several numbers; other steps are not looked at."""

    def change(step: int, site: str, columns: dict[str, Any]) -> None:
        columns["hash"] += step

    a, b = training().run(), training(change=change).run()
    found = diff(a, b, steps=steps)
    assert set(found.rows["step"].to_pylist()) == {1}
    assert diff(a, b, steps=0).identical


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (9, "recorded steps, which go from 0 to 2, without 9"),
        ([0, 99, 7], "recorded steps, which go from 0 to 2, without 7, 99"),
        (slice(5, 9), "recorded steps, which go from 0 to 2"),
        ("1", "a step, a range, a slice or a list"),
        (1.5, "a step, a range"),
    ],
)
def test_steps_that_choose_nothing_are_refused(steps: Any, expected: str) -> None:
    """Comparing nothing is not equality: a choice without steps, or that is none, is an error."""
    run = training().run()
    with pytest.raises(InvalidOptionError, match=expected):
        diff(run, run, steps=steps)


@pytest.mark.parametrize("rename", [{r"^layers\.": "blocks."}, [r"^layers\.=blocks."]])
def test_rename_aligns_modules(rename: Any) -> None:
    """Regular expressions on a's paths let renamed modules align."""
    old, new = TraceBuilder(), TraceBuilder()
    for number in range(12):
        old.tensor(f"layers.{number}", mean=number, type="Block")
        new.tensor(f"blocks.{number}", mean=number, type="Layer")  # another class: nothing to be guessed
    assert diff(old.run(), new.run()).counts["only_a"] == 12
    assert diff(old.run(), new.run(), rename=rename).identical


def test_rename_errors() -> None:
    """A rename that matches nothing, is no expression or has no equals sign is refused with a reason."""
    run = training().run()
    with pytest.raises(UnknownNameError, match=r"option rename: unknown module pattern 'block\.0'; did you mean"):
        diff(run, run, rename={r"block.0": "x"})
    with pytest.raises(InvalidOptionError, match="a regular expression"):
        diff(run, run, rename=["(=x"])
    with pytest.raises(InvalidOptionError, match="'old=new'"):
        diff(run, run, rename=["blocks"])
    with pytest.raises(InvalidOptionError, match="a replacement"):
        diff(run, run, rename={"blocks": r"\2"})


@pytest.mark.parametrize("tolerance", ["exact", -1, math.nan, math.inf, True, None])
def test_tolerance_errors(tolerance: Any) -> None:
    """A tolerance is "auto" or a relative difference from 0 up."""
    run = training().run()
    with pytest.raises(InvalidOptionError, match="'auto' or a relative difference from 0 up"):
        diff(run, run, tolerance=tolerance)


def test_missing_is_named_once() -> None:
    """A module that was added is named by its topmost path, steps by their range, a slot by its site."""
    a = training(2).run()
    b = training(4)
    b.step(0).tensor("adapter.up", mean=1.0).tensor("adapter.down", mean=1.0).tensor("blocks.0.fc", "bias", "parameter")
    found = diff(a, b.run())
    assert [str(item) for item in found.only_b] == [
        "steps 2 to 3 (26 rows)",
        "module adapter (2 rows, step 0)",
        "blocks.0.fc bias (parameter) (1 row, step 0)",
    ]
    assert found.only_a == ()
    assert not found.within_tolerance


def test_row_only_in_b_comes_where_b_saw_it() -> None:
    """A site that only b has stands after the site that precedes it in b, and is the first divergence from there."""
    a = TraceBuilder().tensor("one").tensor("three").tensor("four", mean=1.0).run()
    b = TraceBuilder().tensor("one").tensor("two").tensor("three").tensor("four", mean=2.0).run()
    found = diff(a, b)
    assert found.rows["module"].to_pylist() == ["one", "two", "three", "four"]
    assert found.first is not None
    assert (found.first.module, found.first.kind) == ("two", "only_b")
    assert found.first.detail == "only in b: float32[4]"


def test_tied_modules_align_by_call() -> None:
    """Two calls of one module are two sites."""
    a = TraceBuilder().tensor("tied", mean=1.0).tensor("tied", call=1, mean=2.0).run()
    b = TraceBuilder().tensor("tied", call=1, mean=2.0).tensor("tied", mean=1.0).run()
    assert diff(a, b).identical


def test_repeated_keys_do_not_explode() -> None:
    """Rows that share a key pair off one to one, in the order they were seen."""
    a, b = TraceBuilder(), TraceBuilder()
    for number in range(300):
        a.tensor("same", mean=float(number))
        b.tensor("same", mean=float(number))
    found = diff(a.run(), b.tensor("same").run())
    assert found.counts["equal"] == 300
    assert found.counts["only_b"] == 1


def test_ranks_align_with_their_own() -> None:
    """With several ranks a row's rank belongs to its key; with one on each side its number does not matter."""
    a = TraceBuilder().rank(0).tensor("m", mean=1.0).rank(1).tensor("m", mean=2.0)
    b = TraceBuilder().rank(1).tensor("m", mean=2.0).rank(0).tensor("m", mean=1.0)
    assert diff(a.run(), b.run()).identical
    assert diff(TraceBuilder().rank(3).tensor("m").run(), TraceBuilder().tensor("m").run()).identical
    assert [str(item) for item in diff(a.run(), TraceBuilder().tensor("m", mean=1.0).run()).only_a] == [
        "m output (forward) (1 row, step 0)"
    ]


def test_environment_is_told_but_does_not_count() -> None:
    """Differences of run.json are named, and equal rows stay equal."""
    a = training().info(packages={"torch": "2.9"}, optimizers=[{"class": "AdamW", "lr": 0.1}], git={"commit": "abc"})
    b = training().info(packages={"torch": "2.10"}, optimizers=[{"class": "AdamW", "lr": 0.2}], run_id="other")
    found = diff(a.run(), b.run())
    assert found.identical
    assert [str(change) for change in found.changes] == [
        "git.commit: abc → absent",
        "packages.torch: 2.9 → 2.10",
        "optimizers.0.lr: 0.1 → 0.2",
    ]
    assert "run.json:\n  git.commit: abc → absent" in str(found)


def _other_weight(step: int, site: str, columns: dict[str, Any]) -> None:
    if step == 1 and site == "parameter blocks.1.fc.weight":
        columns |= {"hash": 7, "mean": 9.0}


def _numbers_of_repeated_steps(step: int, site: str, columns: dict[str, Any]) -> None:
    if step == 2:
        columns["hash"] = None


@pytest.mark.parametrize(
    ("change", "fetched"), [(None, [3]), (_other_weight, [1, 3]), (_numbers_of_repeated_steps, [2, 3])]
)
def test_an_engine_finds_the_same(
    change: Any, fetched: list[int], engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs read and compared by SQL have the same diff; steps in which all is equal are counted and not fetched."""
    monkeypatch.setattr(diff_module, "EMBEDDED", "")  # so that DuckDB goes the same way as Spark
    a, b = training().write(tmp_path / "a"), training(4, change=change).write(tmp_path / "b")
    here = diff(offline.open(a), offline.open(b), engine="")
    there = diff(offline.open(a), offline.open(b), engine=engine)
    assert there.to_json() == here.to_json()
    assert str(there) == str(here)
    assert pc.unique(there.rows["step"]).to_pylist() == fetched
    assert there.rows.equals(here.rows.filter(pc.is_in(here.rows["step"], pa.array(fetched))))


def test_an_engine_knows_renamed_modules(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Module paths that are renamed meet inside the engine, whatever characters are in them."""
    monkeypatch.setattr(diff_module, "EMBEDDED", "")
    a = TraceBuilder().tensor("x.fc", hash=3).tensor("x", hash=4).run()
    b = TraceBuilder().tensor("o'r.fc", hash=3).tensor("o'r", hash=4).run()
    found = diff(a, b, rename=["^x=o'r"], engine=engine)
    assert found.identical
    assert found.counts["equal"] == 2
    assert found.rows.num_rows == 0


def test_runs_on_disk(tmp_path: Path) -> None:
    """Runs that went through a directory compare like those in memory."""

    def change(step: int, site: str, columns: dict[str, Any]) -> None:
        columns["hash"] += "forward" in site and step == 2

    from tracehooks.surface import offline

    a = training().write(tmp_path / "a")
    b = training(change=change).write(tmp_path / "b")
    assert offline.diff(a, training().write(tmp_path / "again")).identical
    found, memory = offline.diff(a, b), diff(training().run(), training(change=change).run())
    assert _judged(found) == _judged(memory)
    assert found.counts["within"] == 4


def _judged(found: Diff) -> list[tuple[str, str, str]]:
    rows = found.rows.to_pylist()
    return sorted((repr([row[name] for name in KEY]), row["status"], repr(row["difference"])) for row in rows)
