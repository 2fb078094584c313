"""Reading stretches of a run as numbers."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from tracehooks.analysis.window import Trace, Vocabulary, shape_digests, windows
from tracehooks.testing import TraceBuilder

shapes = st.none() | st.lists(st.integers(0, 3), max_size=3)


@given(st.lists(shapes, max_size=12), st.integers(0, 5))
def test_shape_digests_tell_shapes_apart(column: list[list[int] | None], cut: int) -> None:
    """Digests are equal exactly where shapes are, in columns that are sliced and chunked too."""
    kind = pa.list_(pa.int64())
    array = pa.array([[7, 7], *column], kind)[1:]
    digests = shape_digests(pa.chunked_array([array[:cut], array[cut:]], kind)).tolist()
    for shape, digest in zip(column, digests, strict=True):
        for other, other_digest in zip(column, digests, strict=True):
            assert (shape == other) == (digest == other_digest)


@given(st.lists(st.integers(1, 9), max_size=20), st.integers(1, 30))
def test_windows_cover_all_steps_once(counts: list[int], limit: int) -> None:
    """Windows are the steps in order, each under the limit unless it is a single step."""
    steps = np.arange(len(counts)) * 3
    found = list(windows(steps, np.array(counts, np.int64), limit))
    assert [step for window in found for step in window.tolist()] == steps.tolist()
    for window in found:
        assert len(window) == 1 or sum(counts[step // 3] for step in window.tolist()) <= limit


def test_names_share_numbers_between_runs() -> None:
    """The same name has the same number in both runs, also after a rename, and null is the empty name."""
    vocabulary = Vocabulary()
    plain = vocabulary.encode(pa.chunked_array([["a", None], ["b"]]))
    encoded = vocabulary.encode(pa.chunked_array([pa.array(["b", "c", None]).dictionary_encode()]), lambda name: name)
    renamed = vocabulary.encode(pa.chunked_array([["x"]]), {"x": "b", "": ""}.__getitem__)
    assert [vocabulary.names[code] for code in plain] == ["a", "", "b"]
    assert [vocabulary.names[code] for code in encoded] == ["b", "c", ""]
    assert renamed[0] == plain[2] == encoded[0]


def test_rows_come_in_execution_order() -> None:
    """By step, then seq, whatever the order in which they were written; wide columns follow."""
    run = (
        TraceBuilder()
        .step(1)
        .tensor("c", mean=3.0)
        .step(0)
        .tensor("b", seq=5, mean=2.0)
        .tensor("a", seq=1, mean=1.0)
        .run()
    )
    vocabulary = Vocabulary()
    window = Trace(run, vocabulary).window(None)
    assert [vocabulary.names[code] for code in window.columns["module"]] == ["a", "b", "c"]
    assert window.wide(np.arange(3))["mean"].tolist() == [1.0, 2.0, 3.0]
    assert window.wide(np.array([2]))["mean"].tolist() == [3.0]
    assert window.shape(0) == (4,)
