"""Reading stretches of a run as numbers."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from tracehooks.analysis.steps import Chosen
from tracehooks.analysis.tables import Extent, LocalTables, stretches
from tracehooks.analysis.window import Vocabulary, shape_digests, window_of
from tracehooks.testing import TraceBuilder

shapes = st.none() | st.lists(st.integers(0, 3), max_size=3)


@given(st.lists(shapes, max_size=12), st.integers(0, 5))
def test_shape_digests_tell_shapes_apart(column: list[list[int] | None], cut: int) -> None:
    """Digests are equal exactly where shapes are, in columns that are sliced and chunked too."""
    kind = pa.list_(pa.int64())
    array = pa.array([[7, 7], *column], kind)[1:]
    digests = [*shape_digests(array[:cut]).tolist(), *shape_digests(array[cut:]).tolist()]
    for shape, digest in zip(column, digests, strict=True):
        for other, other_digest in zip(column, digests, strict=True):
            assert (shape == other) == (digest == other_digest)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), min_size=1, max_size=20), st.integers(1, 30))
def test_stretches_cover_all_steps_once(runs: list[tuple[int, int]], limit: int) -> None:
    """Stretches are the steps in order; each is under the limit, as far as runs of rows tell, or a single step."""
    lengths, rows = (np.array(column, np.int64) for column in zip(*runs, strict=True))
    last = np.cumsum(lengths + 1) - 1
    extent = Extent(last - lengths, last, rows, [0])
    chosen = Chosen(0, int(last[-1]))
    found = list(stretches([extent], chosen, limit))
    assert [step for part in found for step in range(part.first, part.last + 1)] == list(range(chosen.last + 1))
    for part in found:
        held = extent.rows_up_to(part.last) - extent.rows_up_to(part.first - 1)
        assert part.first == part.last or held <= limit + 1e-9


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
    window = window_of(LocalTables(run).tensors(Chosen(0, 1)), vocabulary, str)
    assert [vocabulary.names[code] for code in window.columns["module"]] == ["a", "b", "c"]
    assert window.wide(np.arange(3))["mean"].tolist() == [1.0, 2.0, 3.0]
    assert window.wide(np.array([2]))["mean"].tolist() == [3.0]
    assert window.shape(0) == (4,)
