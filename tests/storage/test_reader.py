"""Specification of `storage.reader`: every readable row once, what is damaged is named, nothing is wrong."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from tracehooks.core.errors import FormatVersionError, NotARunError, QueryError, UnknownNameError, UnreadableRunError
from tracehooks.core.records import FirstNonFinite, RunSource
from tracehooks.core.schema import TABLES
from tracehooks.storage import Run, RunWriter, open_run
from tracehooks.storage.parts import _footer  # the tests aim their damage with it
from tracehooks.storage.tables import TableReader

from .building import batch_of, canonical, files, flips, rows_of, step_batches, tensor_rows


def recorded(root: Path, steps: int = 6, **options: Any) -> Path:
    writer = RunWriter(root, {}, **options)
    for step in range(steps):
        writer.write(step_batches(step))
    writer.close()
    return root


def unsealed(root: Path, steps: int = 3) -> Path:
    """A run as a killed process leaves it: everything in the journal, nobody holding it."""
    writer = RunWriter(root / "live", {})
    for step in range(steps):
        writer.write(step_batches(step))
    shutil.copytree(root / "live", root / "dead", ignore=shutil.ignore_patterns("lock", "owner"))
    writer.close()
    return root / "dead"


def check(run: Run, expected: list[int]) -> None:
    """The run has exactly these steps, every row as it was written, in that order."""
    wanted = [canonical(row) for step in expected for row in tensor_rows(step)]
    assert rows_of(run.tensors()) == wanted


def test_a_run_is_a_run_source(tmp_path: Path) -> None:
    """What open_run gives has all that analysis asks of a run."""
    source: RunSource = open_run(recorded(tmp_path))
    assert source.path == tmp_path
    assert source.info["status"] == "closed"


@pytest.mark.parametrize("table", TABLES)
def test_tables_have_the_columns_of_the_format_and_rank(table: str, tmp_path: Path) -> None:
    """Every table can be read, also when it is empty: the columns in order, rank last, names as dictionaries."""
    run = open_run(recorded(tmp_path))
    for found in (run.read(table), getattr(run, table)(), run.dataset(table).to_table()):
        assert found.schema.names == [*TABLES[table].names, "rank"]
        for column in TABLES[table].columns:
            assert pa.types.is_dictionary(found.schema.field(column.name).type) == (column.type == "dictionary")
    assert run.read(table).schema.field("rank").type == pa.int32()


def test_columns_and_filters_are_pushed_down(tmp_path: Path) -> None:
    """read() gives the columns asked for, in that order, of the rows for which the expression holds."""
    run = open_run(recorded(tmp_path, rows_per_part=8))
    found = run.tensors(["seq", "module"], ds.field("step") == 3)
    assert found.to_pydict() == {"seq": [0, 1, 2, 3], "module": [f"blocks.{seq}" for seq in range(4)]}
    assert run.tensors(["rank"], ds.field("module") == "blocks.1").num_rows == 6


def test_sql_conditions_go_to_the_engine_given(tmp_path: Path) -> None:
    """A condition in SQL is evaluated by the callable that the run was opened with; without one it is an error."""

    def select(dataset: ds.Dataset, columns: Any, where: str) -> pa.Table:
        return duckdb.sql(f"select {', '.join(columns)} from dataset where {where}").to_arrow_table()

    run = open_run(recorded(tmp_path), select)
    found = run.tensors(["seq"], "step = 2 and module = 'blocks.1' and hash > 9223372036854775808")
    assert found.to_pydict() == {"seq": [1]}
    with pytest.raises(QueryError, match="without an SQL engine"):
        open_run(tmp_path).tensors(where="step = 2")


def test_duckdb_scans_sealed_and_unsealed_rows_alike(tmp_path: Path) -> None:
    """The dataset of a run being written answers SQL over parts and journal, with filters on names and rank."""
    writer = RunWriter(tmp_path, {}, rows_per_part=8)
    for step in range(5):
        writer.write(step_batches(step))
    tensors = open_run(tmp_path).dataset("tensors")
    query = "select count(*), count(distinct step) from tensors where module in ('blocks.0', 'blocks.3') and rank = 0"
    assert duckdb.sql(query).fetchall() == [(10, 5)]
    assert tensors.count_rows() == 20
    writer.close()


def test_unknown_names_list_the_nearest(tmp_path: Path) -> None:
    """A table or column that does not exist is an error with the nearest names, whatever the way to it."""
    run = open_run(recorded(tmp_path))
    for ask in (run.dataset, run.verify, run.read):
        with pytest.raises(UnknownNameError, match="unknown table 'tensor'; did you mean 'tensors'"):
            ask("tensor")
    with pytest.raises(UnknownNameError, match="tensors: unknown column 'modul'; did you mean 'module'"):
        run.tensors(["step", "modul"])


def test_paths_that_hold_no_run_say_so(tmp_path: Path) -> None:
    """A path that is not there, a file, and a directory without a run are each one clear line."""
    (tmp_path / "file").write_text("")
    for name, seen in (("absent", "no such directory"), ("file", "it is a file"), (".", "no run.json in it")):
        with pytest.raises(NotARunError, match=f"not a run .*{seen}"):
            open_run(tmp_path / name)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    """A run of a later format version is an error that says which versions can be read."""
    recorded(tmp_path)
    info = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps(info | {"format_version": 2}))
    with pytest.raises(FormatVersionError, match="version 2, this tracehooks reads versions 1 to 1"):
        open_run(tmp_path)


@pytest.mark.parametrize("content", [None, "", "{", "[]", "\xff"])
def test_a_lost_run_json_does_not_lose_the_tables(content: str | None, tmp_path: Path) -> None:
    """Without a legible run.json the tables are read and a problem says so; without tables it is an error."""
    recorded(tmp_path)
    (tmp_path / "run.json").unlink()
    if content is not None:
        (tmp_path / "run.json").write_text(content, encoding="latin-1")
    run = open_run(tmp_path)
    assert [problem.file for problem in run.problems] == ["run.json"]
    assert (run.info, run.status) == ({}, "crashed")
    check(run, list(range(6)))
    for table in ("tensors", "scalars"):
        shutil.rmtree(tmp_path / table)
    with pytest.raises(NotARunError if content is None else UnreadableRunError):
        open_run(tmp_path)


def test_status_tells_who_is_alive(tmp_path: Path) -> None:
    """running while the writer lives, closed after close(), crashed when run.json says running and nobody writes."""
    writer = RunWriter(tmp_path, {})
    run = open_run(tmp_path)
    assert run.status == "running"
    writer.close()
    assert open_run(tmp_path).status == "closed"
    assert run.status == "crashed"  # by the run.json it read: open again to see what became of it
    assert open_run(unsealed(tmp_path / "other")).status == "crashed"


def test_a_part_supersedes_its_segment(tmp_path: Path) -> None:
    """With part and segment of the same number both there, as a crash between rename and removal leaves them, each
    row is read once."""
    dead = unsealed(tmp_path)
    sealed = recorded(tmp_path / "sealed", steps=3)
    shutil.copytree(sealed / "tensors", dead / "tensors")
    run = open_run(dead)
    check(run, [0, 1, 2])
    assert not run.problems


def test_an_unfinished_part_is_no_part(tmp_path: Path) -> None:
    """A half-written part under its temporary name, as a crash while sealing leaves it, is ignored."""
    dead = unsealed(tmp_path)
    (dead / "tensors/rank=0").mkdir(parents=True)
    (dead / "tensors/rank=0/.part-00000.parquet.tmp").write_bytes(b"PAR1 half of it")
    run = open_run(dead)
    check(run, [0, 1, 2])
    assert not run.problems


def test_a_damaged_footer_is_replaced_by_the_segment(tmp_path: Path) -> None:
    """A part whose footer is damaged is named, and its rows are read from the journal segment if that is there."""
    dead = unsealed(tmp_path)
    sealed = recorded(tmp_path / "sealed", steps=3)
    shutil.copytree(sealed / "tensors", dead / "tensors")
    part = files(dead, "*.parquet")[0]
    part.write_bytes(part.read_bytes()[:-20])
    run = open_run(dead)
    check(run, [0, 1, 2])
    (problem,) = run.problems
    assert problem.file == "tensors/rank=0/part-00000.parquet"
    assert problem.what.startswith("footer: ")
    assert problem.what.endswith("; read from the journal")


def test_a_truncated_part_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    """A part cut at any of many places is one problem; the other parts' rows are all there."""
    root = recorded(tmp_path, rows_per_part=8)
    part = files(root / "tensors", "*.parquet")[1]
    whole = part.read_bytes()
    for cut in range(0, len(whole), 997):
        part.write_bytes(whole[:cut])
        run = open_run(root)
        check(run, [0, 1, 4, 5])
        (problem,) = run.problems
        assert problem.file == "tensors/rank=0/part-00001.parquet"
        assert problem.what.endswith("no row of it can be read")


def test_a_changed_bit_in_a_part_is_never_a_wrong_row(tmp_path: Path) -> None:
    """With one bit changed anywhere in a part, every row that is read is right, and rows that are missing have a
    problem that names the part."""
    root = recorded(tmp_path, steps=4, rows_per_part=8)
    part = files(root / "tensors", "*.parquet")[1]
    lost = 0
    for position, changed in flips(part.read_bytes(), start=4, stride=29):
        part.write_bytes(changed)
        run = open_run(root)
        found = sorted(set(run.tensors()["step"].to_pylist()))
        check(run, found)
        if found != [0, 1, 2, 3]:
            lost += 1
            assert found == [0, 1]
            assert [problem.file for problem in run.problems] == ["tensors/rank=0/part-00001.parquet"], position
    assert lost > 20


def test_every_changed_bit_in_a_footer_is_noticed(tmp_path: Path) -> None:
    """The footer, which Parquet itself does not protect, is trusted only when each of its bits is as it was written."""
    root = recorded(tmp_path, steps=2)
    part = files(root / "tensors", "*.parquet")[0]
    whole = part.read_bytes()
    with part.open("rb") as file:
        start = len(whole) - 8 - len(_footer(file.fileno()))
    for position, changed in flips(whole, start=start, stride=5):
        part.write_bytes(changed)
        run = open_run(root)
        assert run.dataset("tensors").count_rows() == 0, position
        assert len(run.problems) == 1


def test_a_damaged_row_group_is_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """verify() leaves a damaged row group out, says which and which rows, and everything else is read; read() heals by
    itself."""
    monkeypatch.setattr("tracehooks.storage.parts.ROWS_PER_GROUP", 4)
    root = recorded(tmp_path, steps=5)
    part = files(root / "tensors", "*.parquet")[0]
    data = bytearray(part.read_bytes())
    chunk = pq.read_metadata(part).row_group(2).column(19)
    data[chunk.data_page_offset + chunk.total_compressed_size - 2] ^= 1
    part.write_bytes(data)
    run = open_run(root)
    with pytest.raises(OSError, match=r"CRC|crc"):
        run.dataset("tensors").to_table()
    run.verify("tensors")
    check(run, [0, 1, 3, 4])
    (problem,) = run.problems
    assert problem.what.startswith("row group 2 (rows 8-12): ")
    assert "\n" not in str(problem)
    healed = open_run(root)
    check(healed, [0, 1, 3, 4])
    assert healed.problems == run.problems


def test_a_damaged_row_group_is_replaced_by_the_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the segment of a part with a damaged row group is still there, all rows are read from it, each once."""
    monkeypatch.setattr("tracehooks.storage.parts.ROWS_PER_GROUP", 4)
    dead = unsealed(tmp_path)
    shutil.copytree(recorded(tmp_path / "sealed", steps=3) / "tensors", dead / "tensors")
    part = files(dead, "*.parquet")[0]
    data = bytearray(part.read_bytes())
    chunk = pq.read_metadata(part).row_group(1).column(19)
    data[chunk.data_page_offset + chunk.total_compressed_size - 2] ^= 1
    part.write_bytes(data)
    run = open_run(dead)
    check(run, [0, 1, 2])
    assert [problem.what.partition(":")[0] for problem in run.problems] == ["row group 1 (rows 4-8)"]


def test_an_error_that_is_no_damage_is_raised(tmp_path: Path) -> None:
    """What fails for another reason than damage is not swallowed by healing."""

    def select(dataset: ds.Dataset, columns: Any, where: str) -> pa.Table:
        raise RuntimeError("the engine's own trouble")

    with pytest.raises(RuntimeError, match="own trouble"):
        open_run(recorded(tmp_path), select).tensors(where="true")


def test_a_torn_journal_is_named_when_its_writer_is_dead(tmp_path: Path) -> None:
    """The torn end of a dead process's journal is a problem with its byte range; the rows before it are read."""
    dead = unsealed(tmp_path)
    segment = files(dead, "tensors-*.arrows")[0]
    whole = segment.read_bytes()
    segment.write_bytes(whole[:-10])
    run = open_run(dead)
    check(run, [0, 1])
    (problem,) = run.problems
    assert problem.file == "journal/rank=0/tensors-00000.arrows"
    assert problem.what.startswith("bytes ")
    assert f"-{len(whole) - 10}: torn" in problem.what


def test_a_file_that_cannot_be_opened_is_a_problem(tmp_path: Path) -> None:
    """A segment, or a file set aside, that the system does not let us read is named, and the rest is read."""
    dead = unsealed(tmp_path)
    shutil.copytree(recorded(tmp_path / "sealed", steps=2) / "tensors", dead / "tensors")
    for name in ("tensors-00001.arrows", "tensors-00002.arrows.damaged"):
        (dead / "journal/rank=0" / name).mkdir()  # root may read any file, but nobody a directory
    run = open_run(dead)
    check(run, [0, 1])
    assert [problem.what for problem in run.problems] == ["cannot be read: Is a directory"] * 2


def test_a_write_in_progress_is_no_problem(tmp_path: Path) -> None:
    """While the writer lives, a half-written end of its journal is not reported; what was flushed is read."""
    writer = RunWriter(tmp_path, {})
    writer.write(step_batches(0))
    with files(tmp_path, "tensors-*.arrows")[0].open("ab") as file:
        file.write(b"\xff\xff\xff\xff\x10")
    run = open_run(tmp_path)
    check(run, [0])
    assert not run.problems
    writer.close()


def test_a_run_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    """A reader beside a writer that seals all the time sees every flushed step exactly once, at any moment."""
    writer = RunWriter(tmp_path, {}, rows_per_part=8)
    flushed = [-1]
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            writer.write(step_batches(flushed[0] + 1))
            flushed[0] += 1
            time.sleep(0.004)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        kept = open_run(tmp_path)
        for attempt in range(12):
            before = flushed[0]
            run = kept if attempt % 2 else open_run(tmp_path)
            steps = run.tensors(["step"])["step"].to_pylist()
            assert sorted(steps) == [step for step in range(len(steps) // 4) for _ in range(4)]
            assert len(steps) // 4 > before
            assert not run.problems
    finally:
        stop.set()
        thread.join()
        writer.close()
    check(open_run(tmp_path), list(range(flushed[0] + 1)))


def test_a_segment_sealed_while_listing_is_found_as_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a listed segment is gone before it is read, the reader looks again and finds its part."""
    dead = unsealed(tmp_path)
    sealed = recorded(tmp_path / "sealed", steps=3)
    run = open_run(dead)
    real = run._layout.parts

    def seal_just_now(table: str) -> Any:
        found = real(table)
        if (dead / "journal").exists():
            shutil.copytree(sealed / "tensors", dead / "tensors")
            shutil.rmtree(dead / "journal")
        return found

    monkeypatch.setattr(type(run._layout), "parts", lambda layout, table: seal_just_now(table))
    check(run, [0, 1, 2])


def test_the_first_nonfinite_is_the_earliest(tmp_path: Path) -> None:
    """first_nonfinite is the earliest nonfinite event by step and seq, None without one; unreadable details are a
    problem."""
    writer = RunWriter(tmp_path, {})
    assert open_run(tmp_path).first_nonfinite is None
    found = {seq: FirstNonFinite(3, "forward", "a", "nan", f"seq {seq}", params=("a.weight",)) for seq in (9, 4)}
    event = {"micro": 0, "time_ns": 0, "severity": "error", "module": "a", "slot": "output", "message": "m"}
    details = [json.dumps(found[9].to_details()), json.dumps(found[4].to_details()), "{"]
    rows = [
        event | {"step": step, "seq": seq, "kind": "nonfinite", "details": text}
        for step, seq, text in zip((3, 3, 2), (9, 4, 0), details, strict=True)
    ]
    writer.write([batch_of("events", [*rows, event | {"step": 0, "seq": 0, "kind": "note", "details": "{}"}])])
    writer.close()
    run = open_run(tmp_path)
    assert run.first_nonfinite == found[4]
    assert [problem.file for problem in run.problems] == ["events"]


def test_steps_come_from_every_table(tmp_path: Path) -> None:
    """steps lists each step that has a row in any table once, sorted."""
    writer = RunWriter(tmp_path, {})
    for table, step in (("tensors", 4), ("scalars", 1)):
        writer.write([batch for batch in step_batches(step) if batch.table == table])
    writer.close()
    assert open_run(tmp_path).steps == [1, 4]
    assert open_run(tmp_path).ranks == [0]


def test_a_run_says_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its repr is one line, made without reading a tensor: path, model, status, steps, ranks, first non-finite value,
    problems."""
    model = {"class": "Net", "modules": [{"path": path} for path in ("", "a", "b")]}
    for rank in (0, 1):
        writer = RunWriter(tmp_path, {"model": model}, rank=rank)
        for step in range(3):
            writer.write(step_batches(step))
        if rank:
            found = FirstNonFinite(2, "forward", "a", "nan", "first non-finite value, step 2, module a\n  and more")
            event = {"step": 2, "seq": 1, "kind": "nonfinite", "details": json.dumps(found.to_details())}
            event |= {"micro": 0, "time_ns": 0, "severity": "error", "module": "a", "slot": "output", "message": "m"}
            writer.write([batch_of("events", [event])])
        writer.close()
    read = TableReader.dataset
    asked: list[str] = []
    monkeypatch.setattr(TableReader, "dataset", lambda table: asked.append(table._table) or read(table))
    assert repr(open_run(tmp_path)) == (
        f"<Run {tmp_path}: Net, 3 modules, closed, 3 steps (0 to 2), 2 ranks, first non-finite value, step 2, module a>"
    )
    assert "tensors" not in asked


def test_a_run_without_steps_or_description_says_so(tmp_path: Path) -> None:
    """What is not known is left out of its repr; what cannot be read is counted."""
    RunWriter(tmp_path / "a", {}).close()
    assert repr(open_run(tmp_path / "a")) == f"<Run {tmp_path / 'a'}: closed, no steps>"
    (recorded(tmp_path / "b") / "run.json").unlink()
    assert repr(open_run(tmp_path / "b")) == f"<Run {tmp_path / 'b'}: crashed, 6 steps (0 to 5), 1 problem>"
