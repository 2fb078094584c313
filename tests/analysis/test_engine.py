"""SQL over a run: what it answers and what it refuses, on every engine."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as pa_dataset
import pyarrow.fs as pa_fs
import pyarrow.parquet as pq
import pytest

from tracehooks.analysis.duck import select
from tracehooks.analysis.engine import query
from tracehooks.core.errors import QueryError, TracehooksError, UnknownNameError
from tracehooks.core.schema import TABLES
from tracehooks.surface import offline
from tracehooks.testing import MemoryRun, TraceBuilder


@pytest.fixture
def run() -> MemoryRun:
    """Three rows and a scalar."""
    return (
        TraceBuilder()
        .tensor("a", mean=1.0)
        .tensor("b", mean=2.0, hash=2**64 - 1)
        .tensor("b", call=1)
        .scalar("loss", 1.0)
        .run()
    )


def test_tables_are_views(run: MemoryRun, engine: str) -> None:
    """Every table of the format can be queried and joined, with the rank."""
    found = query(
        run, "SELECT module, count(*) AS n, max(hash) AS hash FROM tensors GROUP BY module ORDER BY module", engine
    )
    assert found.to_pylist() == [
        {"module": "a", "n": 1, "hash": None},
        {"module": "b", "n": 2, "hash": 2**64 - 1},
    ]
    joined = query(run, "SELECT t.rank FROM tensors t JOIN scalars s ON t.step = s.step LIMIT 1", engine)
    assert joined["rank"].to_pylist() == [0]
    for table in ("masks", "samples", "events"):
        assert query(run, f"SELECT count(*) AS n FROM {table}", engine)["n"].to_pylist() == [0]


def test_repeated_column_names_are_told_apart(run: MemoryRun, engine: str) -> None:
    """No column of a result is lost."""
    assert query(run, "SELECT 1 AS a, 2 AS a, 3 AS a", engine).to_pylist() == [{"a": 1, "a_1": 2, "a_2": 3}]


def test_names_that_are_words_of_sql(run: MemoryRun, engine: str) -> None:
    """Double quotes stand around names, single quotes around text, as the standard has it."""
    assert query(run, """SELECT 'b' AS "order", "count" FROM tensors LIMIT 1""", engine)["order"].to_pylist() == ["b"]


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM read_csv('{file}')",
        "SELECT * FROM read_text('{file}')",
        "SELECT * FROM '{file}'",
        "SELECT * FROM glob('/*')",
        "SELECT * FROM sniff_csv('{file}')",
        "COPY tensors TO '{file}'",
        "COPY (SELECT 1) TO '{file}'",
        "EXPORT DATABASE '{file}'",
        "ATTACH '{file}.db' AS other",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET enable_external_access=true",
        "SET lock_configuration=false",
        "RESET enable_external_access",
        "PRAGMA database_list",
        "CREATE TABLE t AS SELECT 1",
        "CREATE MACRO f() AS 1",
        "DROP VIEW tensors",
        "INSERT INTO tensors VALUES (1)",
        "DELETE FROM tensors",
        "CALL pragma_version()",
        "CHECKPOINT",
        "SELECT 1; DROP VIEW tensors",
        "SELECT 1; SELECT 2",
        "",
        "-- nothing",
        "SELECT * FROM secret_of_the_caller",
        "EXPLAIN ANALYZE COPY tensors TO '{file}'",
    ],
)
def test_refused(run: MemoryRun, tmp_path: Path, sql: str) -> None:
    """Whatever writes, reads a file, changes settings or reaches into Python is refused in one line."""
    secret_of_the_caller = pa.table({"a": [1]})
    file = tmp_path / "file"
    file.write_text("secret,text\n1,2\n")
    with pytest.raises(TracehooksError) as caught:
        query(run, sql.format(file=file))
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert file.read_text() == "secret,text\n1,2\n"
    assert len(secret_of_the_caller) == 1


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("SELECT modle FROM tensors", "query: unknown column 'modle'; did you mean 'module'"),
        ("SELECT t.men FROM tensors t", "query: unknown column 'men'; did you mean 'mean'"),
        ("SELECT valu FROM scalars", "query: unknown column 'valu'; did you mean 'value'"),
        ("SELECT * FROM tensor", "query: unknown table 'tensor'; did you mean 'tensors'"),
    ],
)
def test_nearest_names(run: MemoryRun, engine: str, sql: str, message: str) -> None:
    """A column or table that does not exist is named with those that do."""
    with pytest.raises(UnknownNameError) as caught:
        query(run, sql, engine)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("sql", "reasons"),
    [
        ("SELEC 1", ("Parser Error: syntax error", "Syntax error at or near 'SELEC'")),
        ("SELECT CAST(module AS INT) FROM tensors", ("Conversion Error", "[CAST_INVALID_INPUT]")),
        (
            "DROP VIEW tensors",
            ("DROP statement; a run is read only: give a SELECT", "not one query; a run is read only: give a SELECT"),
        ),
        ("SELECT 1; SELECT 2", ("2 statements; give exactly one SELECT", "extra input 'SELECT'")),
    ],
)
def test_reasons(run: MemoryRun, engine: str, sql: str, reasons: tuple[str, str]) -> None:
    """What the engine says against a query is passed on in one line."""
    with pytest.raises(QueryError) as caught:
        query(run, sql, engine)
    assert str(caught.value).startswith(f"query {sql!r}: ")
    assert "\n" not in str(caught.value)
    assert reasons[engine != "duckdb"] in str(caught.value)


def test_select(run: MemoryRun) -> None:
    """A condition chooses rows, in their order; columns may be any of the table's, whether it mentions them or not."""
    dataset = run.dataset("tensors")
    assert select(dataset, ["mean"], "module = 'b' OR mean > 0")["mean"].to_pylist() == [1.0, 2.0, 0.0]
    assert select(dataset, None, None).num_rows == 3
    assert select(dataset, None, "call = 1 -- only").num_rows == 1
    assert select(dataset, [], "true").num_rows == 3


@pytest.mark.parametrize(
    ("columns", "where", "message"),
    [
        (["men"], None, "columns: unknown column 'men'; did you mean 'mean'"),
        (["mean"], "stp = 1", "unknown column 'stp'; did you mean 'step'"),
        (["mean"], "step = ", "query 'step = ': Parser Error"),
        (["mean"], "true); DROP VIEW rows; --", "query 'true); DROP VIEW rows; --': "),
    ],
)
def test_select_errors(run: MemoryRun, columns: list[str], where: str | None, message: str) -> None:
    """Columns and conditions that are wrong are refused in one line that shows the condition as it was given."""
    with pytest.raises(TracehooksError) as caught:
        select(run.dataset("tensors"), columns, where)
    assert message in str(caught.value)


def damaged(path: Path) -> Path:
    """Overwrite the pages of two columns in the first part of a run's tensors; its footer stays whole."""
    part = next((path / "tensors").rglob("*.parquet"))
    group = pq.ParquetFile(part).metadata.row_group(0)
    content = bytearray(part.read_bytes())
    for column in map(group.column, range(group.num_columns)):
        if column.path_in_schema in ("nan", "mean"):
            start = column.dictionary_page_offset or column.data_page_offset
            content[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    part.write_bytes(content)
    return path


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A run of two ranks, one of whose parts is damaged."""
    builder = TraceBuilder()
    for rank in (0, 1):
        builder.rank(rank)
        for number in range(200):
            builder.tensor(f"m.{number}", mean=float(number))
    return damaged(builder.scalar("loss", 1.0).write(tmp_path / "run"))


def test_query_heals(broken: Path, engine: str) -> None:
    """A damaged part is set aside and named, and the query answers from the rest."""
    run = offline.open(broken)
    assert offline.query(run, "SELECT count(*) AS n, sum(mean) AS s FROM tensors", engine=engine).to_pylist() == [
        {"n": 200, "s": 19900.0}
    ]
    assert len(run.problems) == 1
    assert "tensors" in str(run.problems[0])


def test_where_heals(broken: Path) -> None:
    """The same with a condition."""
    run = offline.open(broken)
    assert len(run.tensors(["mean"], where="mean >= 100")) == 100
    assert len(run.problems) == 1


def test_diff_first_and_show_heal(broken: Path) -> None:
    """diff, first and the summary read what is left."""
    from tracehooks.analysis.summary import summarize

    found = offline.diff(broken, broken)
    assert found.identical
    assert found.counts["equal"] == 201
    assert "could not be read, not compared" in str(found)
    assert offline.first(broken) is None
    assert summarize(offline.open(broken)).rows["tensors"] == 200


def test_damage_that_cannot_be_set_aside_is_an_error() -> None:
    """An error that healing does not cure is reported as it is."""

    class Failing(MemoryRun):
        def dataset(self, table: str) -> pa_dataset.Dataset:
            schema = super().dataset(table).schema
            missing = pa_dataset.ParquetFileFormat().make_fragment(
                "/nowhere/part.parquet", filesystem=pa_fs.LocalFileSystem()
            )
            return pa_dataset.FileSystemDataset(
                [missing], schema, pa_dataset.ParquetFileFormat(), pa_fs.LocalFileSystem()
            )

    run = TraceBuilder().tensor("a").run()
    failing = Failing({name: run.read(name) for name in TABLES}, {})
    with pytest.raises(QueryError, match=r"part\.parquet"):
        query(failing, "FROM tensors")


def test_first_heals(tmp_path: Path) -> None:
    """Where the part with the first non-finite row is damaged, the first of the rest is found, and the part is named."""
    builder = TraceBuilder()
    for rank in (0, 1):
        builder.rank(rank)
        for number in range(200):
            builder.tensor(f"m.{number}", mean=float(number), nan=int(number == 50 + rank))
    run = offline.open(damaged(builder.write(tmp_path / "run")))
    found = offline.first(run)
    assert found is not None
    assert found.module == "m.51"
    assert len(run.problems) == 1
