"""Spark beside DuckDB: what it reads, what it refuses, and what is said where it is not there."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.storage.building import batch_of, tensor_rows
from tracehooks.analysis.engine import query
from tracehooks.core.errors import EngineError, InvalidOptionError, QueryError, TracehooksError
from tracehooks.storage import RunWriter
from tracehooks.surface import offline
from tracehooks.testing import TraceBuilder

ROWS = (
    "SELECT rank, step, seq, phase, module, hash, mean, shape, sketch, recompute FROM tensors ORDER BY rank, step, seq"
)


def recorded(path: Path, ranks: int = 2, rows: int = 200) -> Path:
    """A run of some ranks with a row in every column."""
    builder = TraceBuilder()
    for rank in range(ranks):
        builder.rank(rank)
        for number in range(rows):
            builder.tensor(f"m.{number}", mean=float(number), hash=2**64 - 1 - number, sketch=[float(number)] * 16)
    return builder.scalar("loss", 1.0).write(path)


def test_every_row_of_an_unsealed_run(tmp_path: Path, engine: str) -> None:
    """Rows that are still in the journal of a living writer are read along with sealed parts, each once."""
    path = tmp_path / "a run [1]"
    writer = RunWriter(path, {"status": "running"}, rows_per_part=8)
    for step in range(5):
        writer.write([batch_of("tensors", tensor_rows(step))])
    run = offline.open(path)
    assert run.dataset("tensors").children[1].count_rows() > 0
    found = query(run, "SELECT step, seq, mean FROM tensors ORDER BY step, seq", engine)
    expected = [{name: row[name] for name in ("step", "seq", "mean")} for n in range(5) for row in tensor_rows(n)]
    assert found.to_pylist() == expected
    writer.close()
    assert query(offline.open(path), "SELECT count(*) AS n FROM tensors", engine)["n"].to_pylist() == [20]


def test_the_readable_row_groups_of_a_damaged_part(tmp_path: Path, engine: str) -> None:
    """Of a part with a damaged row group the others are read, and what was not is named."""
    path = tmp_path / "run"
    writer = RunWriter(path, {"status": "running"})
    for first in range(0, 70_000, 10_000):
        writer.write([batch_of("tensors", tensor_rows(first, 10_000))])
    writer.close()
    part = next((path / "tensors").rglob("*.parquet"))
    footer = pq.ParquetFile(part).metadata
    assert footer.num_row_groups == 2
    columns = map(footer.row_group(1).column, range(footer.num_columns))
    column = next(column for column in columns if column.path_in_schema == "mean")
    content = bytearray(part.read_bytes())
    content[(column.dictionary_page_offset or column.data_page_offset) + column.total_compressed_size - 3] ^= 1
    part.write_bytes(content)
    run = offline.open(path)
    found = query(run, "SELECT count(*) AS n, max(mean) AS mean FROM tensors", engine).to_pylist()
    assert found[0]["n"] == footer.row_group(0).num_rows
    assert "row group 1" in str(run.problems[0])


def test_only_needed_columns_and_partitions_are_scanned(tmp_path: Path, engine: str) -> None:
    """The plan shows which columns and which ranks are read; damage elsewhere is never met."""
    run = offline.open(recorded(tmp_path / "run"))
    asked = "SELECT module, absmax FROM tensors WHERE step = 0 AND rank = 1"
    plan = "\n".join(str(cell) for row in query(run, f"EXPLAIN {asked}", engine).to_pylist() for cell in row.values())
    if engine == "duckdb":
        assert "Projections: module, absmax" in plan
        assert '"step" = 0' in plan
        assert '"rank" = 1' in plan
    else:
        assert "ReadSchema: struct<step:bigint,module:string,absmax:double>" in plan
        assert "PushedFilters: [IsNotNull(step), EqualTo(step,0)]" in plan
        assert "PartitionFilters: [isnotnull(rank" in plan
    for part in (tmp_path / "run/tensors").rglob("*.parquet"):
        group = pq.ParquetFile(part).metadata.row_group(0)
        content = bytearray(part.read_bytes())
        for column in map(group.column, range(group.num_columns)):
            if column.path_in_schema == "mean" or (column.path_in_schema == "absmax" and "rank=0" in str(part)):
                start = column.dictionary_page_offset or column.data_page_offset
                content[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
        part.write_bytes(content)
    run = offline.open(tmp_path / "run")
    assert query(run, asked, engine).num_rows == 200
    assert run.problems == ()


def test_an_engine_that_does_not_exist() -> None:
    """What is neither DuckDB nor a master or a session of Spark's is refused with what is."""
    for engine in ("sqlite", "", 5):
        with pytest.raises(InvalidOptionError, match="duckdb, Spark's master"):
            query(TraceBuilder().run(), "SELECT 1", engine)  # type: ignore[arg-type]


def test_no_pyspark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where pyspark is not installed the error says what to install."""
    monkeypatch.setattr("tracehooks.analysis.engine.find_spec", lambda name: None)
    with pytest.raises(
        EngineError, match=r"^engine local\[1\]: pyspark is missing: pip install 'tracehooks\[spark\]'$"
    ):
        query(TraceBuilder().run(), "SELECT 1", "local[1]")


@pytest.fixture
def no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process in which Spark was not used yet."""
    monkeypatch.setattr("tracehooks.analysis.spark_session.SparkSession.getActiveSession", lambda: None)


@pytest.mark.usefixtures("no_session")
def test_no_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where Java is not installed the error says so, and where it was looked for."""
    monkeypatch.setattr("pyspark.sql.SparkSession.getActiveSession", lambda: None)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineError, match=r"Java is missing: there is no java on the PATH; Spark needs Java 17"):
        query(TraceBuilder().run(), "SELECT 1", "spark://localhost:1")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(EngineError, match=f"JAVA_HOME is {tmp_path}"):
        query(TraceBuilder().run(), "SELECT 1", "spark://localhost:1")


@pytest.mark.usefixtures("no_session")
def test_no_master(monkeypatch: pytest.MonkeyPatch) -> None:
    """A master that takes no connection is named at once."""
    monkeypatch.setattr("tracehooks.analysis.spark_session._look_for_java", lambda master: None)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with pytest.raises(EngineError, match=f"the master cannot be reached .127.0.0.1:{port}: .*refused"):
        query(TraceBuilder().run(), "SELECT 1", f"spark://127.0.0.1:{port}")
    with pytest.raises(EngineError, match="expected spark://host:port"):
        query(TraceBuilder().run(), "SELECT 1", "spark://nowhere")


@pytest.mark.spark
def test_all_types_come_back(tmp_path: Path, spark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unsigned hashes, lists and nulls are what DuckDB gives of the same rows, also of a run that is named from here."""
    recorded(tmp_path / "run", rows=3)
    monkeypatch.chdir(tmp_path)
    run = offline.open("run")
    on_spark, on_duck = query(run, ROWS, spark), query(run, ROWS)
    assert on_spark.to_pylist() == on_duck.to_pylist()
    assert on_spark.schema.field("hash").type == on_duck.schema.field("hash").type


@pytest.mark.spark
@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM parquet.`{file}`",
        "SELECT * FROM text.`{file}`",
        "INSERT OVERWRITE DIRECTORY '{file}.out' USING parquet SELECT 1",
        "CREATE TABLE t AS SELECT 1",
        "CREATE TEMPORARY VIEW tensors AS SELECT 1",
        "DROP VIEW tensors",
        "SET spark.sql.runSQLOnFiles=true",
        "ADD FILE '{file}'",
        "BEGIN SELECT 1; END",
        "WITH t AS (SELECT 1) INSERT OVERWRITE DIRECTORY '{file}.out' USING parquet SELECT * FROM t",
        "SELECT reflect('java.lang.System', 'getenv', 'PATH')",
        "SELECT `java_method`('java.lang.System', 'getenv', 'PATH')",
        "SELECT 1) UNION (DROP VIEW tensors",
        "EXPLAIN DROP VIEW tensors",
        "",
    ],
)
def test_refused(tmp_path: Path, spark: str, sql: str) -> None:
    """Whatever writes, reads a file, changes settings or reaches into Java is refused in one line."""
    file = tmp_path / "file"
    file.write_text("secret")
    run = TraceBuilder().tensor("a").run()
    with pytest.raises(TracehooksError) as caught:
        query(run, sql.format(file=file), spark)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.spark
def test_the_session_of_the_user_is_left_alone(spark: str) -> None:
    """A session that is passed in keeps its settings and its views, and has none of ours."""
    from pyspark.sql import SparkSession

    run = TraceBuilder().tensor("a").run()
    query(run, "SELECT 1", spark)
    mine = SparkSession.getActiveSession()
    assert mine is not None
    mine = mine.newSession()
    mine.sql("SELECT 42 AS x").createOrReplaceTempView("tensors")
    before = mine.conf.get("spark.sql.runSQLOnFiles", "true")
    assert query(run, "SELECT count(*) AS n FROM tensors", mine)["n"].to_pylist() == [1]
    assert [tuple(row) for row in mine.sql("SELECT x FROM tensors").collect()] == [(42,)]
    assert mine.conf.get("spark.sql.runSQLOnFiles", "true") == before
    with pytest.raises(EngineError, match=r"has a session at local\[2\] already"):
        query(run, "SELECT 1", "local[7]")


@pytest.mark.spark
def test_errors_while_it_runs_are_one_line(spark: str) -> None:
    """What fails on a worker is told without Java's stack."""
    with pytest.raises(QueryError, match=r"^query .*: \[USER_RAISED_EXCEPTION\] enough"):
        query(TraceBuilder().tensor("a").run(), "SELECT raise_error('enough') FROM tensors", spark)


@pytest.mark.spark
def test_a_session_that_does_not_begin_is_one_line(tmp_path: Path, spark: str) -> None:
    """What Java says against a master is told, and nothing else: not its warnings, not its stack."""
    run = TraceBuilder().tensor("a").write(tmp_path / "run")
    command = [sys.executable, "-m", "tracehooks", "query", str(run), "SELECT 1", "--engine", "local[0]"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "tracehooks: engine local[0]: Asked to run locally with 0 threads\n"
