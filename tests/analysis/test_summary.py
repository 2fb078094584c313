"""What show tells of a run."""

from __future__ import annotations

import pytest

from tracehooks.analysis.summary import sites, summarize
from tracehooks.core.errors import InvalidOptionError, UnknownNameError
from tracehooks.testing import MemoryRun, TraceBuilder


@pytest.fixture
def run() -> MemoryRun:
    """Two steps of two modules."""
    builder = TraceBuilder({"model": {"class": "Net"}})
    for step in (0, 5):
        builder.step(step).tensor("a", mean=1.0 + step, zeros=3).tensor("b's", mean=100.0, nan=step)
        builder.scalar("loss", 2.0 - step).scalar("time/step", 1.0).event("note", "hello")
    return builder.run()


def test_summary(run: MemoryRun, engine: str) -> None:
    """Steps, rows, sites, events, scalars and worst values are counted and named."""
    found = summarize(run, engine)
    assert found.steps == {"count": 2, "first": 0, "last": 5}
    assert found.rows == {"tensors": 4, "scalars": 4, "masks": 0, "samples": 0, "events": 2}
    assert found.sites == 2
    assert found.run["model"] == {"class": "Net"}
    assert [dict(event) for event in found.events] == [
        {"kind": "note", "severity": "info", "count": 2, "first_step": 0, "message": "hello"}
    ]
    assert [dict(scalar) for scalar in found.scalars] == [
        {"name": "loss", "first": 2.0, "last": -3.0, "min": -3.0, "max": 2.0, "rows": 2}
    ]
    assert [site["module"] for site in found.largest] == ["b's", "a"]
    assert [(site["module"], site["zeros"]) for site in found.emptiest] == [("a", 0.75)]
    assert [(site["module"], site["nonfinite"]) for site in found.nonfinite] == [("b's", 5)]


def test_empty_run() -> None:
    """A run without rows has a summary too."""
    found = summarize(TraceBuilder().run())
    assert found.steps == {"count": 0, "first": None, "last": None}
    assert found.sites == 0


def test_sites_narrow_and_sort(run: MemoryRun) -> None:
    """Sites of a step, a pattern or a phase, in execution order or by a statistic."""
    assert sites(run)["module"].to_pylist() == ["a", "b's"]
    assert sites(run, sort="absmax")["module"].to_pylist() == ["b's", "a"]
    assert sites(run, module="b*")["module"].to_pylist() == ["b's"]
    assert sites(run, step=5)["rms"].to_pylist() == [6.0, 100.0]
    assert sites(run, phase="forward")["rows"].to_pylist() == [2, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"module": "aa"}, r"option module: unknown module pattern 'aa'; did you mean 'a'\?"),
        ({"phase": "forwrd"}, r"option phase: unknown phase 'forwrd'; did you mean 'forward'\?"),
        ({"sort": "absmx"}, r"option sort: unknown order 'absmx'; did you mean 'absmax'\?"),
    ],
)
def test_unknown_names(run: MemoryRun, options: dict[str, object], message: str) -> None:
    """What nothing answers to is refused, with the nearest names."""
    with pytest.raises(UnknownNameError, match=message):
        sites(run, **options)  # type: ignore[arg-type]


def test_a_step_without_tensors(run: MemoryRun) -> None:
    """It is said which steps there are."""
    with pytest.raises(InvalidOptionError, match="step: got 4, expected a step with tensors; they go from 0 to 5"):
        sites(run, step=4)
    with pytest.raises(InvalidOptionError, match="step: got 4, expected a step with tensors; there are none"):
        sites(TraceBuilder().scalar("loss", 1.0).run(), step=4)
