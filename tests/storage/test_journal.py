"""Specification of `storage.journal`: what is in a segment comes back, what is damaged is named, nothing is wrong."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracehooks.core.records import Batch
from tracehooks.core.schema import TABLES
from tracehooks.storage.journal import Damage, Segment, batch_message, read_segment
from tracehooks.storage.rows import record_batch
from tracehooks.storage.schemas import journal_schema

from .building import Row, batch_of, canonical, flips, rows, tensor_rows


def append(segment: Segment, batch: Batch) -> None:
    segment.append(batch_message(record_batch(batch), batch.table), len(batch))


def written(path: Path, table: str, flushes: list[list[Row]]) -> list[int]:
    """Write one batch a flush; returns the size of the segment after each."""
    path.unlink(missing_ok=True)
    segment = Segment(path, table)
    sizes = []
    for flush in flushes:
        append(segment, batch_of(table, flush))
        sizes.append(segment.size)
    segment.close()
    assert path.stat().st_size == segment.size
    return sizes


def read(path: Path, table: str = "tensors") -> tuple[list[Row], list[Damage]]:
    found = list(read_segment(path, table))
    damage = [item for item in found if isinstance(item, Damage)]
    return [row for item in found if not isinstance(item, Damage) for row in item.to_pylist()], damage


def steps(found: list[Row]) -> list[int]:
    """The steps of which all four rows are there; any wrong or half step fails."""
    by_step = [found[at : at + 4] for at in range(0, len(found), 4)]
    for group in by_step:
        expected = [canonical(row) for row in tensor_rows(group[0]["step"])]
        assert [canonical(row) for row in group] == expected
    return [group[0]["step"] for group in by_step]


@pytest.mark.parametrize("table", TABLES)
@given(flushes=st.data())
def test_reading_is_the_inverse_of_writing(
    table: str, flushes: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever rows are appended come back in order, by our reader and by a plain Arrow stream reader."""
    path = tmp_path_factory.getbasetemp() / "segment.arrows"
    given_flushes = flushes.draw(st.lists(rows(table, 4), min_size=1, max_size=3))
    written(path, table, given_flushes)
    expected = [canonical(row) for flush in given_flushes for row in flush]
    found, damage = read(path, table)
    assert not damage
    assert [canonical(row) for row in found] == expected
    with pa.ipc.open_stream(path.read_bytes()) as stream:
        assert [canonical(row) for row in stream.read_all().to_pylist()] == expected


def test_a_segment_cut_at_any_byte_keeps_the_batches_before_the_cut(tmp_path: Path) -> None:
    """Cut inside the last batch, the reader returns all earlier batches and names the torn byte range."""
    path = tmp_path / "segment.arrows"
    sizes = written(path, "tensors", [tensor_rows(step) for step in range(3)])
    whole = path.read_bytes()
    for cut in range(sizes[1], sizes[2]):
        path.write_bytes(whole[:cut])
        found, damage = read(path)
        assert steps(found) == [0, 1]
        assert [(item.start, item.end, item.at_end) for item in damage] == (
            [(sizes[1], cut, True)] if cut > sizes[1] else []
        )


def test_a_segment_cut_in_its_schema_is_one_damage(tmp_path: Path) -> None:
    """Cut before the first batch is whole, nothing is read and the range is named."""
    path = tmp_path / "segment.arrows"
    written(path, "tensors", [tensor_rows(0)])
    whole = path.read_bytes()
    for cut in range(1, len(whole), 61):
        path.write_bytes(whole[:cut])
        found, damage = read(path)
        assert not found
        assert damage[-1].end == cut


def test_a_changed_bit_loses_its_batch_and_no_other(tmp_path: Path) -> None:
    """With one bit changed anywhere in the middle batch, the others are read and the byte range is that batch."""
    path = tmp_path / "segment.arrows"
    sizes = written(path, "tensors", [tensor_rows(step) for step in range(3)])
    whole = path.read_bytes()
    for position, changed in flips(whole[: sizes[1]], start=sizes[0], stride=3):
        path.write_bytes(changed + whole[sizes[1] :])
        found, damage = read(path)
        assert steps(found) == [0, 2], position
        assert [(item.start, item.end) for item in damage] == [(sizes[0], sizes[1])]


def test_a_changed_bit_in_the_schema_loses_nothing(tmp_path: Path) -> None:
    """The schema message can be damaged: batches say which schema they were written with, and this version knows it."""
    path = tmp_path / "segment.arrows"
    written(path, "tensors", [tensor_rows(step) for step in range(2)])
    whole = path.read_bytes()
    schema = len(journal_schema("tensors").serialize())
    for _, changed in flips(whole[:schema], stride=11):
        path.write_bytes(changed + whole[schema:])
        found, damage = read(path)
        assert steps(found) == [0, 1]
        assert [(item.start, item.end) for item in damage] == [(0, schema)]


def test_batches_of_a_schema_that_is_lost_and_unknown_are_left_out(tmp_path: Path) -> None:
    """A batch whose schema cannot be known is damage, not rows that are guessed."""
    path = tmp_path / "segment.arrows"
    written(path, "scalars", [[{"step": 1, "micro": 0, "time_ns": 0, "name": "loss", "value": 1.0}]])
    schema = len(journal_schema("scalars").serialize())
    path.write_bytes(path.read_bytes()[schema:])
    found, damage = read(path, "samples")
    assert not found
    assert len(damage) == 1


def test_a_zeroed_block_is_one_damage(tmp_path: Path) -> None:
    """A block of zeros over several batches, as a power cut leaves, is one range; what follows it is read."""
    path = tmp_path / "segment.arrows"
    sizes = written(path, "tensors", [tensor_rows(step) for step in range(6)])
    data = bytearray(path.read_bytes())
    data[sizes[1] + 5 : sizes[3] + 9] = bytes(sizes[3] + 9 - sizes[1] - 5)
    path.write_bytes(data)
    found, damage = read(path)
    assert steps(found) == [0, 1, 5]
    assert [(item.start, item.end) for item in damage] == [(sizes[1], sizes[4])]


def test_a_failed_append_leaves_nothing_and_the_next_one_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a write fails half way its bytes are taken back, and the segment can be appended to again."""
    path = tmp_path / "segment.arrows"
    segment = Segment(path, "tensors")
    append(segment, batch_of("tensors", tensor_rows(0)))
    size = segment.size

    def half(descriptor: int, data: bytes, offset: int) -> None:
        import os

        os.pwrite(descriptor, data[: len(data) // 2], offset)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("tracehooks.storage.journal.write_all", half)
        with pytest.raises(OSError, match="No space"):
            append(segment, batch_of("tensors", tensor_rows(1)))
    assert path.stat().st_size == segment.size == size
    append(segment, batch_of("tensors", tensor_rows(2)))
    segment.close()
    found, damage = read(path)
    assert steps(found) == [0, 2]
    assert not damage


def test_text_that_looks_like_a_mark_is_only_text(tmp_path: Path) -> None:
    """Names that contain what a checksum looks like do not confuse the reader."""
    path = tmp_path / "segment.arrows"
    names = ["crc32:00000000:000000000000", "\xff\xff\xff\xff", "crc32:"]
    flush = [{"step": 0, "micro": 0, "time_ns": 0, "name": name, "value": 0.0} for name in names]
    written(path, "scalars", [flush, flush])
    found, damage = read(path, "scalars")
    assert [row["name"] for row in found] == names * 2
    assert not damage
