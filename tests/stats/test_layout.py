"""Specification of the packed row: what `unpack` reads back is what was packed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from tracehooks.core.schema import HISTOGRAM_EXPONENTS, SKETCH_SIZE
from tracehooks.stats.layout import BASE_WIDTH, FLOATS, INTEGERS, Spec, unpack

SPECS = [
    Spec(hash, sketch, histogram) for hash in (False, True) for sketch in (False, True) for histogram in (False, True)
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@given(data=st.data())
def test_columns_are_what_was_packed(spec: Spec, data: st.DataObject) -> None:
    """Integers, the bits of floats, sketch and histogram come back from a matrix of rows, column by column."""
    rows = data.draw(st.integers(0, 4))
    integers = data.draw(arrays(np.int64, (rows, len(INTEGERS))))
    floats = data.draw(arrays(np.float64, (rows, len(FLOATS))))
    sketch = data.draw(arrays(np.float64, (rows, SKETCH_SIZE)))
    histogram = data.draw(arrays(np.int64, (rows, len(HISTOGRAM_EXPONENTS))))
    parts: list[NDArray[np.int64]] = [integers, floats.view(np.int64)]
    parts += [sketch.view(np.int64)] * spec.sketch + [histogram] * spec.histogram
    packed = np.concatenate(parts, axis=1)
    assert packed.shape == (rows, spec.width)
    columns = unpack(packed, spec)
    for i, name in enumerate(INTEGERS[:-1]):
        assert np.array_equal(columns[name], integers[:, i])
    for i, name in enumerate(FLOATS):
        assert np.array_equal(columns[name], floats[:, i], equal_nan=True)
    assert (columns["hash"] is None) == (not spec.hash)
    if spec.hash:
        assert columns["hash"].tolist() == [value % 2**64 for value in integers[:, -1].tolist()]
    assert (columns["sketch"] is None) == (not spec.sketch)
    if spec.sketch:
        with np.errstate(over="ignore"):
            assert np.array_equal(columns["sketch"], sketch.astype(np.float32), equal_nan=True)
    assert (columns["histogram"] is None) == (not spec.histogram)
    if spec.histogram:
        assert np.array_equal(columns["histogram"], histogram)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_flags_and_width_follow_the_spec(spec: Spec) -> None:
    """The flags are one bit for each choice; the width grows by what is chosen."""
    assert spec.flags == spec.hash | spec.sketch << 1 | spec.histogram << 2
    assert spec.width == BASE_WIDTH + 16 * spec.sketch + 64 * spec.histogram
