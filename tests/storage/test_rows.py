"""Specification of `storage.rows`: what a sink takes, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracehooks.core.errors import InvalidRowsError, UnknownNameError
from tracehooks.core.records import Batch
from tracehooks.core.schema import HISTOGRAM_EXPONENTS, TABLES
from tracehooks.storage.rows import record_batch
from tracehooks.storage.schemas import journal_schema

from .building import Row, batch_of, canonical, rows, tensor_rows


@pytest.mark.parametrize("table", TABLES)
@given(data=st.data())
def test_lists_become_the_same_rows(table: str, data: st.DataObject) -> None:
    """Every row that the format allows is the same in Arrow: nulls, NaN, infinities, unicode, hashes above 2**63."""
    given_rows = data.draw(rows(table))
    batch = record_batch(batch_of(table, given_rows))
    batch.validate(full=True)
    assert batch.schema.equals(journal_schema(table), check_metadata=True)
    assert [canonical(row) for row in batch.to_pylist()] == [canonical(row) for row in given_rows]


def arrays(given_rows: list[Row]) -> dict[str, Any]:
    """The same rows as capture hands them over: NumPy arrays, None for columns that are null throughout."""
    columns = dict(batch_of("tensors", given_rows).columns)
    for name in ("step", "seq", "count", "nan", "time_ns"):
        columns[name] = np.array(columns[name], dtype=np.int64)
    for name in ("min", "max", "mean", "std", "rms", "absmax"):
        columns[name] = np.array([np.nan if value is None else value for value in columns[name]])
    return columns | {"sketch": None, "histogram": None}


def test_arrays_become_the_same_rows_as_lists() -> None:
    """NumPy columns mean what lists mean; NaN in a nullable float column is null."""
    given_rows = tensor_rows(7)
    batch = record_batch(Batch("tensors", arrays(given_rows)))
    assert batch.equals(record_batch(batch_of("tensors", given_rows)))
    assert batch["min"].null_count == 1


def test_sketches_and_histograms_come_as_matrices() -> None:
    """A float32 matrix of sketches and an int64 matrix of histograms become one list a row, strided or not."""
    sketch = np.arange(4 * 32, dtype=np.float32).reshape(4, 32)[:, ::2]
    histogram = np.arange(4 * len(HISTOGRAM_EXPONENTS)).reshape(4, -1)
    batch = record_batch(Batch("tensors", arrays(tensor_rows(0)) | {"sketch": sketch, "histogram": histogram}))
    assert batch["sketch"].to_pylist() == sketch.tolist()
    assert batch["histogram"].to_pylist() == histogram.tolist()


def test_text_that_is_no_utf8_is_escaped() -> None:
    """A lone surrogate, as in an undecodable file name, is written as its escape rather than refused."""
    event = {"step": 0, "micro": 0, "time_ns": 0, "seq": 0, "kind": "note", "severity": "info", "module": None}
    batch = batch_of("events", [event | {"slot": None, "message": "a\udce9", "details": "{}"}])
    assert record_batch(batch)["message"].to_pylist() == ["a\\udce9"]


def changed(**columns: Any) -> Batch:
    return Batch("tensors", dict(batch_of("tensors", tensor_rows(0)).columns) | columns)


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        (Batch("tensor", {}), UnknownNameError, "write(): unknown table 'tensor'; did you mean 'tensors'"),
        (changed(meen=[0.0] * 4), UnknownNameError, "write(tensors): unknown column 'meen'; did you mean 'mean'"),
        (changed(seq=None), InvalidRowsError, "write(tensors): column seq: 4 of 4 values are null"),
        (changed(module=["a", None, "b", "c"]), InvalidRowsError, "column module: 1 of 4 values are null"),
        (changed(zeros=[1]), InvalidRowsError, "column zeros: 1 values, other columns have 4"),
        (changed(count=["many"] * 4), InvalidRowsError, "column count: "),
        (changed(hash=[-1] * 4), InvalidRowsError, "column hash: "),
        (changed(shape=[3] * 4), InvalidRowsError, "column shape: "),
        (changed(sketch=np.zeros((4, 3))), InvalidRowsError, "column sketch: "),
    ],
)
def test_rows_that_do_not_fit_are_refused(batch: Batch, error: type[Exception], message: str) -> None:
    """A column that is unknown, missing, null, short or of another type is an error that names it."""
    with pytest.raises(error) as caught:
        record_batch(batch)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
