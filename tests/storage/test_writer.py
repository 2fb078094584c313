"""Specification of `storage.writer`: rows survive, space is bounded, one process writes, errors are one line."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracehooks.core.errors import (
    ClosedTraceError,
    FormatVersionError,
    InvalidRowsError,
    RunBusyError,
    RunExistsError,
    UnknownNameError,
    UnreadableRunError,
    UnwritableError,
)
from tracehooks.core.schema import FORMAT_VERSION, TABLES, run_json_schema
from tracehooks.storage import RunWriter, open_run
from tracehooks.storage import sealing as sealing_module

from .building import batch_of, canonical, files, rows, rows_of, step_batches, tensor_rows


def run_json(root: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((root / "run.json").read_text())
    return content


def readable(root: Path) -> list[int]:
    """The steps that can be read, once for each time they can; every row of them is as it was written."""
    found = rows_of(open_run(root).tensors())
    steps = [row["step"] for row in found]
    expected = {step: [canonical(row) for row in tensor_rows(step)] for step in set(steps)}
    assert found == [row for step in dict.fromkeys(steps) for row in expected[step]]
    return list(dict.fromkeys(steps))


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No file can grow beyond this: the system takes what fits, then refuses, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def unordered(found: list[dict[str, Any]]) -> list[str]:
    return sorted(repr(sorted(row.items(), key=lambda item: item[0])) for row in found)


@pytest.mark.parametrize("table", TABLES)
@given(data=st.data())
def test_reading_is_the_inverse_of_writing(
    table: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """All rows of all flushes come back as they were, from the journal before close() and from parts after it. While parts
    are being sealed their order is not promised."""
    root = tmp_path_factory.mktemp("run")
    flushes = data.draw(st.lists(rows(table, 3), max_size=3))
    expected = [canonical(row) for flush in flushes for row in flush]
    writer = RunWriter(root, {}, rows_per_part=data.draw(st.sampled_from((2, 100))))
    try:
        for flush in flushes:
            writer.write([batch_of(table, flush)])
        assert unordered(rows_of(open_run(root).read(table))) == unordered(expected)
    finally:
        writer.close()
    run = open_run(root)
    assert rows_of(run.read(table)) == expected
    assert not run.problems
    assert not (root / "journal").exists()


def test_rows_are_on_disk_when_write_returns(tmp_path: Path) -> None:
    """A process killed right after write() leaves every row of it readable."""
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[2]); from storage.building import step_batches\n"
        "from tracehooks.storage import RunWriter\n"
        "writer = RunWriter(sys.argv[1], {}); writer.write(step_batches(0)); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path, Path(__file__).parents[1]], check=False, timeout=60)
    assert readable(tmp_path) == [0]
    assert open_run(tmp_path).status == "crashed"


def test_run_json_obeys_its_schema(tmp_path: Path) -> None:
    """run.json is valid while running and after close(), with the fields given and those that every run has."""
    writer = RunWriter(tmp_path, {"host": "here", "world_size": 2, "format_version": 99, "notes": ["é"]})
    running = run_json(tmp_path)
    writer.update_info({"optimizers": [{"class": "SGD"}]})
    writer.close()
    closed = run_json(tmp_path)
    for content in (running, closed):
        jsonschema.validate(content, run_json_schema())
        assert content["format_version"] == FORMAT_VERSION
        assert (content["host"], content["world_size"], content["notes"]) == ("here", 2, ["é"])
    assert (running["status"], running["closed"]) == ("running", None)
    assert (closed["status"], closed["optimizers"]) == ("closed", [{"class": "SGD"}])
    assert closed["closed"] >= closed["created"]
    assert running["run_id"][14] == "7"
    assert not list(tmp_path.glob(".*"))


def test_close_is_idempotent_and_final(tmp_path: Path) -> None:
    """A second close() does nothing, write() after it is an error, a status that does not exist is one."""
    writer = RunWriter(tmp_path, {})
    with pytest.raises(UnknownNameError, match=r"close\(\): unknown status 'done'"):
        writer.close("done")
    writer.close("crashed")
    writer.close()
    assert run_json(tmp_path)["status"] == "crashed"
    with pytest.raises(ClosedTraceError, match=r"write\(\): the trace .* is closed"):
        writer.write(step_batches(0))


def test_segments_are_sealed_as_they_fill(tmp_path: Path) -> None:
    """A segment that reaches its limit of rows or bytes becomes a part in the background, in order and sorted."""
    for name, limit in (("rows", {"rows_per_part": 8}), ("bytes", {"bytes_per_part": 6000})):
        root = tmp_path / name
        writer = RunWriter(root, {}, **limit)
        for step in range(6):
            writer.write(step_batches(step))
        deadline = time.monotonic() + 20
        while not files(root, "part-00002.parquet") and time.monotonic() < deadline:
            time.sleep(0.01)
        assert files(root, "part-00000.parquet"), name
        assert readable(root) == list(range(6))
        writer.close()
        parts = files(root / "tensors", "*.parquet")
        assert [pq.read_table(part)["step"][0].as_py() for part in parts] == [0, 2, 4]


def test_an_invalid_batch_writes_nothing(tmp_path: Path) -> None:
    """When one batch of a call does not fit its table, none of the call is written, and the next call works."""
    writer = RunWriter(tmp_path, {})
    bad = batch_of("scalars", [{"step": 0, "micro": 0, "time_ns": 0, "name": None, "value": 0.0}])
    with pytest.raises(InvalidRowsError):
        writer.write([*step_batches(0), bad])
    writer.write(step_batches(1))
    writer.close()
    assert readable(tmp_path) == [1]


def test_a_directory_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    """Without resume a second run cannot be written into a directory, whatever the rank; nothing there changes."""
    RunWriter(tmp_path, {}).close()
    other = RunWriter(tmp_path, {}, rank=1)
    other.write(step_batches(0))
    other.close()
    before = {path: path.read_bytes() for path in files(tmp_path, "*")}
    for rank in (0, 1):
        with pytest.raises(RunExistsError, match="holds a run already"):
            RunWriter(tmp_path, {}, rank=rank)
    assert {path: path.read_bytes() for path in files(tmp_path, "*")} == before
    assert not (tmp_path / "journal").exists()


def test_a_directory_with_other_files_is_fine(tmp_path: Path) -> None:
    """A directory that is not empty but holds no run can be recorded into; what is there stays."""
    (tmp_path / "model.pt").write_text("weights")
    RunWriter(tmp_path, {}).close()
    assert (tmp_path / "model.pt").read_text() == "weights"


def test_resume_adds_to_a_run(tmp_path: Path) -> None:
    """A resumed run keeps id, birth and notes, takes the new configuration, and goes on numbering its parts."""
    first = RunWriter(tmp_path, {"config": {"every": 1}, "notes": ["a"], "host": "old"}, resume=True)
    first.write(step_batches(0))
    first.close()
    before = run_json(tmp_path)
    second = RunWriter(tmp_path, {"config": {"every": 2}, "notes": ["b"]}, resume=True)
    during = run_json(tmp_path)
    second.write(step_batches(1))
    second.close()
    assert {name: during[name] for name in ("run_id", "created", "host")} == {
        name: before[name] for name in ("run_id", "created", "host")
    }
    assert (during["status"], during["closed"]) == ("running", None)
    assert (during["config"], during["notes"]) == ({"every": 2}, ["a", "b"])
    assert [path.name for path in files(tmp_path / "tensors", "*")] == ["part-00000.parquet", "part-00001.parquet"]
    assert readable(tmp_path) == [0, 1]


def test_a_run_that_cannot_be_understood_is_not_resumed(tmp_path: Path) -> None:
    """A damaged run.json or one of a newer version is one clear error, and stays as it is."""
    for content, error in (("{", UnreadableRunError), ('{"format_version": 2}', FormatVersionError)):
        (tmp_path / "run.json").write_text(content)
        with pytest.raises(error):
            RunWriter(tmp_path, {}, resume=True)
        assert (tmp_path / "run.json").read_text() == content
        assert not (tmp_path / "journal").exists()


def test_two_processes_cannot_write_one_run(tmp_path: Path) -> None:
    """While a process writes a rank, another one is refused with its id and host, and so is a second writer here."""
    code = "import sys; from tracehooks.storage import RunWriter; RunWriter(sys.argv[1], {}, resume=True)"
    writer = RunWriter(tmp_path, {})
    writer.write(step_batches(0))
    open_run(tmp_path).tensors()  # looking must not loosen the lock
    other = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=60)
    assert f"rank 0 of this run is being written by process {os.getpid()} on " in other.stderr
    with pytest.raises(RunBusyError, match=r"\(this process\)"):
        RunWriter(tmp_path, {}, resume=True)
    writer.write(step_batches(1))
    writer.close()
    assert subprocess.run([sys.executable, "-c", code, tmp_path], timeout=60).returncode == 0
    assert readable(tmp_path) == [0, 1]


def test_ranks_write_side_by_side(tmp_path: Path) -> None:
    """Several ranks write one run; run.json is rank 0's, the column rank tells rows apart."""
    writers = [RunWriter(tmp_path, {"host": f"h{rank}"}, rank=rank) for rank in range(3)]
    for rank, writer in enumerate(writers):
        writer.update_info({"devices": [str(rank)]})
        writer.write(step_batches(rank))
    for writer in writers:
        writer.close()
    run = open_run(tmp_path)
    assert (run.info["host"], run.info["devices"]) == ("h0", ["0"])
    assert (run.ranks, run.steps) == ([0, 1, 2], [0, 1, 2])
    table = run.tensors(["rank", "step"]).to_pydict()
    assert table["rank"] == table["step"]


def test_a_forked_child_is_inert(tmp_path: Path) -> None:
    """In a forked child (a DataLoader worker) nothing is written, sealed, removed or released."""
    writer = RunWriter(tmp_path, {})
    writer.write(step_batches(0))
    child = os.fork()
    if child == 0:
        try:
            writer.write(step_batches(1))
            writer.update_info({"host": "child"})
            writer.close()
            del writer
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert readable(tmp_path) == [0]
    assert open_run(tmp_path).status == "running"
    assert "host" not in run_json(tmp_path)
    writer.write(step_batches(2))
    writer.close()
    assert readable(tmp_path) == [0, 2]


def test_a_writer_that_is_dropped_gives_the_run_back(tmp_path: Path) -> None:
    """A writer that is collected without close() leaves its rows and no lock; the run counts as crashed."""
    writer = RunWriter(tmp_path, {}, rows_per_part=4)
    writer.write(step_batches(0))
    del writer
    run = open_run(tmp_path)
    assert run.status == "crashed"
    assert readable(tmp_path) == [0]
    RunWriter(tmp_path, {}, resume=True).close()
    assert open_run(tmp_path).status == "closed"


def test_a_process_that_forgets_to_close_ends_cleanly(tmp_path: Path) -> None:
    """The interpreter ends without error or delay while segments are being sealed; every row stays."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[2]); from storage.building import step_batches\n"
        "from tracehooks.storage import RunWriter\n"
        "writer = RunWriter(sys.argv[1], {}, rows_per_part=4)\n"
        "for step in range(40): writer.write(step_batches(step))"
    )
    command = [sys.executable, "-c", code, tmp_path, Path(__file__).parents[1]]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert readable(tmp_path) == list(range(40))


def test_places_that_cannot_be_written_are_one_line(tmp_path: Path) -> None:
    """A path below a file, or one that is a file, is an UnwritableError that names it."""
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UnwritableError, match=r"cannot be written \(.+\); free space") as caught:
            RunWriter(path, {})
        assert "\n" not in str(caught.value)


def test_an_unknown_durability_is_refused(tmp_path: Path) -> None:
    """Durability is process or fsync; anything else lists them, before anything is written."""
    with pytest.raises(UnknownNameError, match=r"unknown durability 'sync'.*'fsync'"):
        RunWriter(tmp_path / "run", {}, durability="sync")
    assert not (tmp_path / "run").exists()


def test_fsync_durability_syncs_every_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With durability="fsync" each table of each flush is synced before write() returns; otherwise none is."""
    synced: list[int] = []
    real = os.fsync
    writers = {name: RunWriter(tmp_path / name, {}, durability=name) for name in ("process", "fsync")}
    for name, writer in writers.items():
        writer.write(step_batches(0))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", lambda descriptor: (synced.append(descriptor), real(descriptor))[1])
            writer.write(step_batches(1))
        assert len(synced) == (2 if name == "fsync" else 0)
        writer.close()


def test_a_full_disk_costs_the_rows_of_its_own_flush_only(tmp_path: Path) -> None:
    """A flush that does not fit is one clear error; earlier rows stay, and once there is space later ones are kept."""
    writer = RunWriter(tmp_path, {})
    writer.write(step_batches(0))
    size = files(tmp_path, "tensors-*.arrows")[0].stat().st_size
    with file_size_limit(size + 100), pytest.raises(UnwritableError, match="cannot be written"):
        writer.write(step_batches(1))
    assert files(tmp_path, "tensors-*.arrows")[0].stat().st_size == size
    assert readable(tmp_path) == [0]
    writer.write(step_batches(2))
    assert readable(tmp_path) == [0, 2]
    writer.close()
    assert readable(tmp_path) == [0, 2]
    assert not open_run(tmp_path).problems


def test_a_segment_that_cannot_be_mended_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a torn write cannot be taken back either, writing goes on in a new segment and only the torn rows are lost."""
    writer = RunWriter(tmp_path, {})
    writer.write(step_batches(0))

    def refuse(descriptor: int, size: int) -> None:
        raise OSError(5, "Input/output error")

    size = files(tmp_path, "tensors-*.arrows")[0].stat().st_size
    with monkeypatch.context() as patch, file_size_limit(size + 100):
        patch.setattr(os, "ftruncate", refuse)
        with pytest.raises(UnwritableError):
            writer.write(step_batches(1))
    try:
        writer.write(step_batches(2))
    except (
        UnwritableError
    ) as error:  # sealing, which goes on beside, may have met the limit as well; rows are kept then
        if "sealing" not in str(error):
            raise
    writer.close()
    assert readable(tmp_path) == [0, 2]
    (problem,) = {problem.file: problem for problem in _problems(tmp_path)}.values()
    assert f"bytes {size}-{size + 100}: torn" in problem.what


def _problems(root: Path) -> list[Any]:
    run = open_run(root)
    run.tensors()
    return list(run.problems)


def test_a_part_that_cannot_be_sealed_stays_in_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure in the background loses no row, is raised once by the next call, and sealing is tried again at close."""
    real, calls, returned = sealing_module.write_part, [], threading.Event()

    def full(*arguments: Any) -> int:
        calls.append(arguments)
        if len(calls) == 1:
            returned.wait()
            raise OSError(28, "No space left on device")
        return real(*arguments)

    monkeypatch.setattr(sealing_module, "write_part", full)
    writer = RunWriter(tmp_path, {}, rows_per_part=4)
    writer.write([step_batches(0)[0]])
    returned.set()
    while writer._sealer._failure is None:
        time.sleep(0.01)
    with pytest.raises(UnwritableError, match="sealing: No space left on device; its rows are in the journal"):
        writer.write([step_batches(1)[0]])
    assert sorted(readable(tmp_path)) == [0, 1]
    writer.write([step_batches(2)[0]])
    writer.close()
    assert readable(tmp_path) == [0, 1, 2]
    assert not (tmp_path / "journal").exists()


def test_close_on_a_full_disk_keeps_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When nothing can be sealed at close(), it says so, the rows are in the journal and the run is given back."""
    writer = RunWriter(tmp_path, {})
    writer.write(step_batches(0))
    size = files(tmp_path, "scalars-*.arrows")[0].stat().st_size
    with file_size_limit(size), pytest.raises(UnwritableError, match="sealing"):
        writer.close()
    writer.close()
    assert readable(tmp_path) == [0]
    assert open_run(tmp_path).status == "closed"
    RunWriter(tmp_path, {}, resume=True).close()
    assert readable(tmp_path) == [0]
    assert not (tmp_path / "journal").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_disk_that_really_fills_up(tmp_path: Path) -> None:
    """On a file system without space left every flush that was accepted is readable."""
    mounted = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)]
    if subprocess.run(mounted, capture_output=True, check=False).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        writer = RunWriter(tmp_path / "run", {}, rows_per_part=16)
        accepted = []
        for step in range(400):
            try:
                writer.write([step_batches(step)[0]])
                accepted.append(step)
            except UnwritableError as error:
                if "in the journal" in str(error):
                    accepted.append(step)
        assert 0 < len(accepted) < 400
        with suppress(UnwritableError):
            writer.close()
        assert sorted(readable(tmp_path / "run")) == accepted
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)
