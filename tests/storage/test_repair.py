"""Specification of `storage.repair`: what a dead process left is sealed, nothing that was not read is deleted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tracehooks.core.errors import NotARunError, RunBusyError, UnwritableError
from tracehooks.storage import RunWriter, open_run, repair
from tracehooks.storage import sealing as sealing_module

from .building import canonical, files, rows_of, step_batches, tensor_rows


@pytest.fixture
def dead(tmp_path: Path) -> Path:
    """A run of two ranks as killed processes leave it: three steps each, all in the journal."""
    writers = [RunWriter(tmp_path / "live", {}, rank=rank) for rank in range(2)]
    for writer in writers:
        for step in range(3):
            writer.write(step_batches(step))
    shutil.copytree(tmp_path / "live", tmp_path / "dead", ignore=shutil.ignore_patterns("lock", "owner"))
    for writer in writers:
        writer.close()
    return tmp_path / "dead"


def check(root: Path, steps: list[int], ranks: int = 2) -> None:
    expected = [canonical(row) for _ in range(ranks) for step in steps for row in tensor_rows(step)]
    assert rows_of(open_run(root).tensors()) == expected


def test_repair_seals_every_rank_and_says_what_it_did(dead: Path) -> None:
    """All segments become parts, the journal is gone, run.json says crashed; a second repair does nothing."""
    done = repair(dead)
    assert "sealed 12 rows of journal/rank=1/tensors-00000.arrows into tensors/rank=1/part-00000.parquet" in done
    assert done[-1] == "marked the run as crashed"
    assert len(done) == 5
    check(dead, [0, 1, 2])
    assert not (dead / "journal").exists()
    assert json.loads((dead / "run.json").read_text())["status"] == "crashed"
    assert repair(dead) == []


def test_repair_leaves_a_closed_run_alone(tmp_path: Path) -> None:
    """A run that was closed is as it was, to the byte."""
    writer = RunWriter(tmp_path, {})
    writer.write(step_batches(0))
    writer.close()
    before = {path: path.read_bytes() for path in files(tmp_path, "*")}
    assert repair(tmp_path) == []
    assert {path: path.read_bytes() for path in files(tmp_path, "*")} == before


def test_repair_refuses_while_a_writer_lives(tmp_path: Path) -> None:
    """While any rank is being written nothing is changed, and the writer goes on."""
    RunWriter(tmp_path, {}, rank=0).close()
    writer = RunWriter(tmp_path, {}, rank=1)
    writer.write(step_batches(0))
    before = files(tmp_path, "*")
    with pytest.raises(RunBusyError, match="rank 1"):
        repair(tmp_path)
    assert files(tmp_path, "*") == before
    writer.write(step_batches(1))
    writer.close()
    check(tmp_path, [0, 1], ranks=1)


def test_repair_keeps_what_it_could_not_read(dead: Path) -> None:
    """A torn segment is sealed as far as it goes and kept beside; the problem stays known to readers."""
    segment = files(dead / "journal/rank=0", "tensors-*.arrows")[0]
    torn = segment.read_bytes()[:-10]
    segment.write_bytes(torn)
    shutil.rmtree(dead / "journal/rank=1")
    done = repair(dead)
    kept = segment.with_name("tensors-00000.arrows.damaged")
    assert any(line.endswith("kept as journal/rank=0/tensors-00000.arrows.damaged") for line in done)
    assert kept.read_bytes() == torn
    check(dead, [0, 1], ranks=1)
    run = open_run(dead)
    run.tensors()
    (problem,) = run.problems
    assert problem.file == "journal/rank=0/tensors-00000.arrows.damaged"
    assert f"-{len(torn)}: torn" in problem.what
    assert repair(dead) == []
    assert kept.read_bytes() == torn


def test_repair_keeps_a_segment_of_which_nothing_can_be_read(dead: Path) -> None:
    """A segment without one intact batch makes no part and is kept; its number is not used again."""
    segment = files(dead / "journal/rank=0", "tensors-*.arrows")[0]
    segment.write_bytes(b"\0" * 500)
    repair(dead)
    assert segment.with_name(segment.name + ".damaged").read_bytes() == b"\0" * 500
    assert not files(dead / "tensors/rank=0", "*")
    writer = RunWriter(dead, {}, resume=True)
    writer.write(step_batches(9))
    writer.close()
    assert [path.name for path in files(dead / "tensors/rank=0", "*")] == ["part-00001.parquet"]


def test_repair_finishes_an_interrupted_sealing(dead: Path) -> None:
    """Part and segment both there: the part stays, the segment goes. A temporary file: it goes, the segment is sealed."""
    sealed = dead.parent / "live"
    shutil.copytree(sealed / "tensors", dead / "tensors")
    (dead / "scalars/rank=0").mkdir(parents=True)
    (dead / "scalars/rank=0/.part-00000.parquet.tmp").write_bytes(b"PAR1")
    part = files(dead / "tensors/rank=0", "*.parquet")[0].read_bytes()
    done = repair(dead)
    assert any("removed journal/rank=0/tensors-00000.arrows" in line for line in done)
    assert files(dead / "tensors/rank=0", "*.parquet")[0].read_bytes() == part
    assert not list(dead.rglob(".*"))
    check(dead, [0, 1, 2])


def test_repair_replaces_a_damaged_part_whose_segment_is_there(dead: Path) -> None:
    """A damaged part is sealed anew from its segment; the damaged one is kept where no tool takes it for a part."""
    shutil.copytree(dead.parent / "live/tensors", dead / "tensors")
    part = files(dead / "tensors/rank=0", "*.parquet")[0]
    part.write_bytes(b"PAR1" + b"\0" * 100)
    repair(dead)
    assert (dead / "journal/rank=0/tensors-00000.parquet.damaged").stat().st_size == 104
    assert pq.read_table(dead / "tensors").num_rows == 24
    check(dead, [0, 1, 2])
    assert not open_run(dead).problems


def test_repair_without_space_loses_nothing(dead: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a part cannot be written the error is one line, all rows stay readable, and a later repair succeeds."""

    def full(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(sealing_module, "write_part", full)
        with pytest.raises(UnwritableError, match="No space left on device"):
            repair(dead)
    check(dead, [0, 1, 2])
    repair(dead)
    check(dead, [0, 1, 2])


def test_repair_of_no_run_is_an_error(tmp_path: Path) -> None:
    """A path that holds no run is refused and stays as it is."""
    with pytest.raises(NotARunError):
        repair(tmp_path)
    assert not list(tmp_path.iterdir())
