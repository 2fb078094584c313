"""The public test doubles do what people who use them rely on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given

from tests.strategies import built, rows_in, traces
from tracehooks.core.errors import TracehooksError, UnknownNameError
from tracehooks.core.records import RunSource, Sink
from tracehooks.core.schema import TABLES
from tracehooks.storage.schemas import read_schema
from tracehooks.surface import offline
from tracehooks.testing import MemorySink, TraceBuilder, assert_same_trace


def everything() -> TraceBuilder:
    """A trace with a row in every table, of two ranks."""
    return (
        TraceBuilder({"notes": ["made"]})
        .step(0)
        .tensor("blocks.0.fc", mean=0.5, hash=2**64 - 1, sketch=[1.0] * 16)
        .tensor("blocks.0.fc", mean=None, min=None, max=None, std=None, nan=4)
        .scalar("loss", float("nan"))
        .mask("attn", empty_rows=1, first_empty=0)
        .sample(7, source_id="a.png")
        .event("note", "hello", {"text": "hello"})
        .rank(1)
        .step(3)
        .micro(2)
        .tensor("head", shape=(2, 0), recompute=True)
    )


def test_builder_fits_the_format() -> None:
    """Every table of a built trace has exactly the columns and types that readers give."""
    run = everything().run()
    for table in TABLES:
        rows = run.read(table)
        assert rows.schema.names == read_schema(table).names
        assert len(rows) > 0
    head = run.read("tensors", where="module = 'head'").to_pylist()[0]
    assert (head["rank"], head["step"], head["micro"], head["count"], head["seq"]) == (1, 3, 2, 0, 0)
    assert run.steps == [0, 3]


def test_memory_and_disk_are_the_same_trace(tmp_path: Path) -> None:
    """What write() puts into a directory is what run() holds in memory."""
    path = everything().write(tmp_path / "run")
    assert_same_trace(everything().run(), path)
    assert offline.open(path).info["notes"] == ["made"]
    assert TraceBuilder().write(tmp_path / "empty").joinpath("run.json").exists()


@given(traces)
def test_a_trace_is_the_same_as_itself(trace: dict[int, Any]) -> None:
    """assert_same_trace accepts equal traces, written in whatever order."""
    assert_same_trace(built(trace), built(trace, list(reversed(range(rows_in(trace))))))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.tensor("m", mean=2.0), "tensors row 1 (step 0, micro 0, phase forward, module m, slot output, call 0): "
                                            "only in b (1 and 2 rows)"),
        (lambda t: t.scalar("loss", 1.0), "scalars row 0 (step 0, micro 0, name loss): only in b (0 and 1 rows)"),
        (lambda t: t.rank(1).event("note", "x"), "events row 0 (rank 1, step 0, micro 0, module None, slot None, "
                                                 "kind note): only in b (0 and 1 rows)"),
    ],
)  # fmt: skip
def test_missing_row_is_named(change: Any, message: str) -> None:
    """The message names table, site and side of a row that has no counterpart."""
    with pytest.raises(AssertionError) as caught:
        assert_same_trace(TraceBuilder().tensor("m").run(), change(TraceBuilder().tensor("m")).run())
    assert str(caught.value) == message


def test_differing_column_is_named() -> None:
    """The message names the first row and column that differ, with both values."""
    a, b = TraceBuilder().tensor("m", mean=1.0), TraceBuilder().tensor("m", mean=2.0)
    with pytest.raises(AssertionError) as caught:
        assert_same_trace(a.run(), b.run())
    assert str(caught.value) == (
        "tensors row 0 (step 0, micro 0, phase forward, module m, slot output, call 0): min is 1.0 in a, 2.0 in b"
    )
    assert_same_trace(a.run(), b.run(), ignore=("min", "max", "mean", "rms", "absmax"))


def test_time_is_ignored_unless_asked_for() -> None:
    """Two recordings of one run differ in time only."""
    a, b = TraceBuilder().tensor("m", time_ns=1), TraceBuilder().tensor("m", time_ns=2)
    assert_same_trace(a.run(), b.run())
    with pytest.raises(AssertionError, match="time_ns is 1 in a, 2 in b"):
        assert_same_trace(a.run(), b.run(), ignore=())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda t: t.tensor("m", phase="forwrd"), "TraceBuilder: unknown phase 'forwrd'; did you mean 'forward'?"),
        (lambda t: t.tensor("m", men=1.0), "TraceBuilder: unknown column 'men'; did you mean 'mean'"),
        (lambda t: t.event("nonfinit"), "TraceBuilder: unknown event kind 'nonfinit'; did you mean 'nonfinite'"),
    ],
)
def test_wrong_names_are_refused(wrong: Any, message: str) -> None:
    """A builder takes the format's names only."""
    with pytest.raises(UnknownNameError) as caught:
        wrong(TraceBuilder())
    assert message in str(caught.value)


def test_memory_sink_is_a_sink() -> None:
    """What is written to the sink is what its run reads; closing marks it once."""
    sink = MemorySink()
    typed: Sink = sink
    built_run = everything().run()
    typed.write([])
    typed.update_info({"notes": ["later"]})
    typed.close("crashed")
    typed.close("closed")
    source: RunSource = sink.run()
    assert source.info["status"] == "crashed"
    assert source.info["notes"] == ["later"]
    assert source.read("tensors").schema.equals(built_run.read("tensors").schema)


def test_unknown_table() -> None:
    """A table that the format does not have is refused."""
    with pytest.raises(TracehooksError, match="unknown table 'tensor'; did you mean 'tensors'"):
        TraceBuilder().run().read("tensor")


def test_readme_example() -> None:
    """The example in TraceBuilder's docstring holds."""
    run = TraceBuilder().step(0).tensor("blocks.0.fc", mean=0.5).scalar("loss", 1.0).run()
    assert run.read("tensors", ["module", "mean"]).to_pylist() == [{"module": "blocks.0.fc", "mean": 0.5}]
    assert run.first_nonfinite is None
    assert isinstance(run.read("scalars"), pa.Table)


def test_needs_no_torch() -> None:
    """Importing tracehooks.testing does not import torch."""
    code = "import sys, tracehooks.testing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
