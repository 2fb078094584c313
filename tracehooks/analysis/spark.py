"""Spark: the one file that knows its SQL. For traces of thousands of ranks, read where they lie by a cluster.

Spark reads the sealed parts itself, with their checksums, so that every worker must see the run under the same path. Which
parts there are, rows that were not sealed yet, and the readable row groups of a damaged part come from the run's own reader:
Spark sees every row that the other engine sees, and no other.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

import pyarrow as pa
import pyarrow.dataset as pa_dataset
from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException, ParseException, PySparkException
from pyspark.sql import DataFrame, SparkSession

from tracehooks.analysis.spark_session import innermost, quiet
from tracehooks.analysis.sql import MaybeDamageError, first_line, told_apart, unknown_column
from tracehooks.core.errors import QueryError, UnknownNameError

HASH = pa.decimal128(20, 0)
"""Spark has no unsigned numbers: it reads them as these."""

_TYPES = {
    pa.int64(): "bigint",
    pa.int32(): "int",
    pa.uint64(): "decimal(20,0)",
    pa.float64(): "double",
    pa.float32(): "float",
    pa.bool_(): "boolean",
    pa.string(): "string",
}
_EXPLAIN = re.compile(r"\s*EXPLAIN\s+((EXTENDED|FORMATTED|COST|CODEGEN)\s+)?", re.IGNORECASE)
_REACHES_OUT = re.compile(r"\b(reflect|java_method|try_reflect)\b\W*\(", re.IGNORECASE)
"""Functions of Spark that call any code of Java's."""


class Spark:
    """Tables as temporary views of a session of their own; implements `tracehooks.analysis.engine.Connection`."""

    def __init__(self, session: SparkSession, tables: Mapping[str, pa_dataset.Dataset]) -> None:
        self._columns = {name: dataset.schema.names for name, dataset in tables.items()}
        self._session = session.newSession()
        for name, value in (
            ("spark.sql.ansi.enabled", "true"),
            ("spark.sql.ansi.doubleQuotedIdentifiers", "true"),
            ("spark.sql.runSQLOnFiles", "false"),
        ):
            self._session.conf.set(name, value)
        for name, dataset in tables.items():
            _frame(self._session, dataset).createOrReplaceTempView(name)

    def __call__(self, sql: str) -> pa.Table:
        """The result of one SELECT or EXPLAIN."""
        explain = _EXPLAIN.match(sql)
        with quiet():
            try:
                self._refuse_all_but_a_query(sql, sql[explain.end() :] if explain else sql)
                found = self._session.sql(sql)
            except (PySparkException, Py4JJavaError) as error:
                raise self._explained(sql, error) from error
            try:
                return _arrow(found)
            except (PySparkException, Py4JJavaError) as error:
                raise MaybeDamageError(self._explained(sql, error)) from error

    def _refuse_all_but_a_query(self, sql: str, query: str) -> None:
        """Nothing here is run. Only a query can stand in parentheses."""
        if _REACHES_OUT.search(query):
            raise QueryError(sql, "it calls code of Java's; a run is read only: give a SELECT over its tables")
        self._session.sql(f"EXPLAIN {query}")  # says what does not parse, in the words of the query itself
        try:
            self._session.sql(f"SELECT 1 FROM (\n{query}\n)")
        except ParseException as error:
            raise QueryError(sql, "not one query; a run is read only: give a SELECT") from error

    def _explained(self, sql: str, error: Exception) -> QueryError | UnknownNameError:
        if isinstance(error, AnalysisException):
            told, named = error.getCondition() or "", error.getMessageParameters() or {}
            if told.startswith("TABLE_OR_VIEW_NOT_FOUND"):
                return UnknownNameError("table", named["relationName"].strip("`"), self._columns, "query")
            if told.startswith("UNRESOLVED_COLUMN"):
                column = named["objectName"].rpartition(".")[2].strip("`")
                return unknown_column(column, sql, self._columns)
        return QueryError(sql, first_line(innermost(error)))


def _frame(session: SparkSession, dataset: pa_dataset.Dataset) -> DataFrame:
    """A dataset as Spark reads it: whole parts by path, everything else by value."""
    files, rest = _split(dataset)
    plain = _plain(rest)
    frames = []
    if files:
        reader = session.read.schema(", ".join(f"`{f.name}` {_spark_type(f.type)}" for f in dataset.schema))
        reader = reader.option("parquet.page.verify-checksum.enabled", "true").option("basePath", _base(files[0]))
        frames.append(reader.parquet(*(re.sub(r"([*?{}\[\]\\])", r"\\\1", path) for path in files)))
    if plain.num_rows or not frames:
        frames.append(session.createDataFrame(plain))
    first, *others = frames
    return first.unionByName(others[0]) if others else first


def _split(dataset: pa_dataset.Dataset) -> tuple[list[str], pa.Table]:
    """The paths of parts of which every row can be read, and the rows of everything else."""
    files, tables = [], []
    for child in dataset.children if isinstance(dataset, pa_dataset.UnionDataset) else [dataset]:
        if not isinstance(child, pa_dataset.FileSystemDataset):
            tables.append(child.to_table())
            continue
        for fragment in child.get_fragments():
            if fragment.num_row_groups == fragment.metadata.num_row_groups:
                files.append(f"file:{os.path.abspath(fragment.path)}")  # whatever file system the cluster begins from
            else:
                tables.append(fragment.to_table(schema=dataset.schema))
    return files, pa.concat_tables([dataset.schema.empty_table(), *tables])


def _base(file: str) -> str:
    """The table's directory: what comes below it, rank=N, is a column."""
    return file.rsplit("/", 2)[0]


def _plain(table: pa.Table) -> pa.Table:
    """Rows in types that Spark takes."""
    names = table.column_names
    columns = [column.combine_chunks().cast(_plain_type(column.type)) for column in table.columns]
    return pa.Table.from_arrays(columns, names=names)


def _plain_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return kind.value_type
    if pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind):
        return pa.list_(kind.value_type)
    return HASH if kind == pa.uint64() else kind


def _spark_type(kind: pa.DataType) -> str:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind):
        return f"array<{_TYPES[kind.value_type]}>"
    return _TYPES[kind]


def _arrow(found: DataFrame) -> pa.Table:
    """A result in the types that the other engine gives."""
    table = found.toArrow()
    columns = [column.cast(pa.uint64()) if column.type == HASH else column for column in table.columns]
    return pa.Table.from_arrays(columns, names=told_apart(table.column_names))
