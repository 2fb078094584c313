"""What a diff reads of a run: the stretch of steps that it compares, and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.storage.building import batch_of, tensor_rows
from tracehooks.analysis.ahead import ahead
from tracehooks.analysis.queried import queried_tables
from tracehooks.analysis.steps import Chosen
from tracehooks.analysis.tables import Extent, LocalTables, stretches
from tracehooks.storage import RunWriter
from tracehooks.surface import offline

STEPS = 40


def recorded(path: Path) -> Path:
    """A run of several parts, of which the last rows are still in the journal."""
    writer = RunWriter(path, {"status": "running"}, rows_per_part=32)
    for step in range(STEPS):
        writer.write([batch_of("tensors", tensor_rows(step, 3))])
    writer.close()
    return path


def damage(path: Path, first_kept: int, last_kept: int) -> int:
    """Overwrite all pages of the parts that hold none of these steps; how many parts that were."""
    parts = 0
    for part in (path / "tensors").rglob("*.parquet"):
        steps = pq.read_table(part, columns=["step"])["step"].to_numpy()
        if steps.max() >= first_kept and steps.min() <= last_kept:
            continue
        group = pq.ParquetFile(part).metadata.row_group(0)
        content = bytearray(part.read_bytes())
        for column in map(group.column, range(group.num_columns)):
            start = column.dictionary_page_offset or column.data_page_offset
            content[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
        part.write_bytes(content)
        parts += 1
    return parts


def test_a_diff_of_some_steps_reads_the_parts_that_hold_them(tmp_path: Path) -> None:
    """Damage in parts of other steps is never met: not a page of them was read."""
    path = recorded(tmp_path / "run")
    assert damage(path, 0, 0) >= 2
    found = offline.diff(path, path, steps=0)
    assert found.identical
    assert found.counts["equal"] == 3
    assert found.problems == ()
    assert offline.diff(path, path).problems != ()


def test_stretches_without_a_chosen_step_are_left_out() -> None:
    """A few steps far apart are a few stretches, however many rows lie between them."""
    steps = np.arange(1000)
    extent = Extent(steps, steps, np.full(1000, 50), [0])
    found = list(stretches([extent], Chosen(0, 999, np.array([0, 1, 999])), limit=200))
    assert [part.among.tolist() for part in found if part.among is not None] == [[0, 1], [999]]


def test_one_changed_bit_is_noticed(tmp_path: Path) -> None:
    """A bit of a page that still decodes is found by its checksum: the part is left out and named."""
    path = recorded(tmp_path / "run")
    part = min((path / "tensors").rglob("*.parquet"))
    group = pq.ParquetFile(part).metadata.row_group(0)
    column = next(group.column(n) for n in range(group.num_columns) if group.column(n).path_in_schema == "hash")
    content = bytearray(part.read_bytes())
    content[column.data_page_offset + column.total_compressed_size - 9] ^= 1
    part.write_bytes(content)
    found = offline.diff(path, path)
    assert found.within_tolerance
    assert sum(found.counts.values()) < 3 * STEPS
    assert part.name in str(found.problems[0])


def test_stretches_of_steps_are_what_a_filter_gives(tmp_path: Path) -> None:
    """Rows of any choice of steps are those that the dataset's own filter selects, in the same order."""
    run = offline.open(recorded(tmp_path / "run"))
    whole = run.tensors(["step", "seq", "mean"])
    for chosen in (Chosen(0, STEPS), Chosen(3, 3), Chosen(9, 30), Chosen(2, 38, np.array([2, 11, 38])), Chosen(90, 99)):
        kept = whole.filter(pa.array(chosen.mask(whole["step"].to_numpy())))
        assert LocalTables(run).tensors(chosen)(["step", "seq", "mean"]).to_pylist() == kept.to_pylist()


def test_tables_read_by_an_engine_are_those_read_here(tmp_path: Path, engine: str) -> None:
    """Extent, steps, modules and rows, in the same types, whether files are read here or by SQL."""
    run = offline.open(recorded(tmp_path / "run"))
    here, [there] = LocalTables(run), queried_tables([run], engine)
    chosen = Chosen(2, 38, np.array([2, 11, 38]))
    assert there.modules() == here.modules()
    assert there.recorded(5, 9).tolist() == here.recorded(5, 9).tolist() == [5, 6, 7, 8, 9]
    assert there.extent().ranks == here.extent().ranks
    assert sum(there.extent().rows) == sum(here.extent().rows) == 3 * STEPS
    names = run.dataset("tensors").schema.names
    rows_there, rows_here = there.tensors(chosen)(names), here.tensors(chosen)(names)
    for kind, expected in zip(rows_there.schema.types, rows_here.schema.types, strict=True):
        assert kind == expected or pa.types.is_nested(expected)
    assert rows_there.to_pylist() == rows_here.to_pylist()
    assert there.beside("scalars", ["step", "value"]).num_rows == 0


def test_work_ahead_keeps_its_order_and_its_errors() -> None:
    """Results come in the order of the items; an error is raised where its result would come."""
    assert list(ahead(lambda number: number * 2, range(20))) == list(range(0, 40, 2))
    results = ahead(lambda number: 1 // (3 - number), range(9))
    assert [next(results) for _ in range(3)] == [0, 0, 1]
    with pytest.raises(ZeroDivisionError):
        next(results)
