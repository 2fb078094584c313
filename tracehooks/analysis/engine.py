"""SQL over a run's tables: the one file that knows DuckDB.

The engine reads, and nothing else: no file is touched, no statement but a query runs, and the configuration is locked
before the first query, so that SQL from a stranger is harmless.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import duckdb
import pyarrow as pa

from tracehooks.core.errors import QueryError, UnknownNameError
from tracehooks.core.records import RunSource
from tracehooks.core.schema import TABLES

if TYPE_CHECKING:
    import pyarrow.dataset as pa_dataset

_NOT_DAMAGE = (
    duckdb.BinderException,
    duckdb.CatalogException,
    duckdb.ConversionException,
    duckdb.ParserException,
    duckdb.PermissionException,
)
"""What only the query can cause."""

_DAMAGE = re.compile(r"IOError|OSError|ArrowInvalid|reading the stream", re.IGNORECASE)
"""How DuckDB words the error of a page that cannot be read."""

_COLUMN_PATTERNS = (
    re.compile(r'Referenced column "([^"]+)" not found'),
    re.compile(r'does not have a column named "([^"]+)"'),
)
_TABLE_PATTERN = re.compile(r"Table with name (\S+) does not exist")


def connect(run: RunSource) -> duckdb.DuckDBPyConnection:
    """A locked connection whose views are the run's tables: tensors, scalars, masks, samples, events."""
    return _locked({name: run.dataset(name) for name in TABLES})


def query(run: RunSource, sql: str) -> pa.Table:
    """The result of one SELECT (or EXPLAIN) over the run's tables. A damaged part is set aside and the rest answers.

    Raises:
        UnknownNameError: a column or table that does not exist; the nearest names are listed.
        QueryError: SQL that does not parse, is not a query, touches a file, or fails.
    """
    return Queries(run)(sql)


class Queries:
    """Several queries over one run, as `query`, for the price of one connection."""

    def __init__(self, run: RunSource) -> None:
        self._run, self._connection = run, connect(run)

    def __call__(self, sql: str) -> pa.Table:
        """The result of one SELECT over the run's tables."""
        _refuse_all_but_one_query(self._connection, sql)
        try:
            return _run(self._connection, sql)
        except duckdb.Error as error:
            if isinstance(error, _NOT_DAMAGE) or not _heal(self._run, sql):
                raise _explained(sql, error, _columns_of(self._run)) from error
        self._connection = connect(self._run)
        try:
            return _run(self._connection, sql)
        except duckdb.Error as error:
            raise _explained(sql, error, _columns_of(self._run)) from error


def select(dataset: pa_dataset.Dataset, columns: Sequence[str] | None, where: str | None) -> pa.Table:
    """Rows of a dataset: ``columns`` of those for which the SQL condition ``where`` holds, in the dataset's order.

    Raises:
        UnknownNameError: a column that does not exist.
        QueryError: a condition that does not parse or fails.
    """
    known = dataset.schema.names
    for name in columns or ():
        if name not in known:
            raise UnknownNameError("column", name, known, "columns")
    if where is None:
        return dataset.to_table(columns=None if columns is None else list(columns))
    connection = _locked({"rows": dataset})
    names = "*" if columns is None else ", ".join(f'"{name}"' for name in columns) or "NULL"
    sql = f"SELECT {names} FROM rows WHERE ({where}\n)"
    _refuse_all_but_one_query(connection, sql, shown=where)
    try:
        found = _run(connection, sql)
    except duckdb.Error as error:
        if not isinstance(error, _NOT_DAMAGE):
            _reraise_damage(error)
        raise _explained(where, error, {"rows": known}) from error
    return found


def _locked(tables: Mapping[str, pa_dataset.Dataset]) -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect(":memory:")
    connection.execute("SET python_enable_replacements=false")
    connection.execute("SET enable_external_access=false")
    for name, dataset in tables.items():
        connection.register(name, dataset)
    connection.execute("SET lock_configuration=true")
    return connection


def _run(connection: duckdb.DuckDBPyConnection, sql: str) -> pa.Table:
    found = connection.sql(sql).to_arrow_table()
    return found.rename_columns(_told_apart(found.column_names))


def _told_apart(names: Sequence[str]) -> list[str]:
    """The names, a repeated one numbered, so that a row is a mapping."""
    told: list[str] = []
    for name in names:
        fresh, number = name, 1
        while fresh in told:
            fresh, number = f"{name}_{number}", number + 1
        told.append(fresh)
    return told


def _refuse_all_but_one_query(connection: duckdb.DuckDBPyConnection, sql: str, shown: str | None = None) -> None:
    shown = sql if shown is None else shown
    try:
        statements = connection.extract_statements(sql)
    except duckdb.Error as error:
        raise QueryError(shown, _first_line(error)) from error
    if len(statements) != 1:
        raise QueryError(shown, f"{len(statements)} statements; give exactly one SELECT")
    kind = statements[0].type
    if kind not in (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN):
        raise QueryError(shown, f"{str(kind).rpartition('.')[2]} statement; a run is read only: give a SELECT")


def _heal(run: RunSource, sql: str) -> bool:
    """Whether verifying the tables set something aside, so that the query is worth another try."""
    before = len(run.problems)
    for name in TABLES:
        if re.search(rf"\b{name}\b", sql, re.IGNORECASE):
            run.verify(name)
    return len(run.problems) > before


def _reraise_damage(error: duckdb.Error) -> None:
    """DuckDB words the OSError of a damaged page as its own error; storage heals on OSError."""
    if _DAMAGE.search(str(error)):
        raise OSError(_first_line(error)) from error


def _columns_of(run: RunSource) -> dict[str, list[str]]:
    return {name: run.dataset(name).schema.names for name in TABLES}


def _explained(sql: str, error: duckdb.Error, columns: Mapping[str, Sequence[str]]) -> QueryError | UnknownNameError:
    text = str(error)
    table = _TABLE_PATTERN.search(text)
    if table:
        return UnknownNameError("table", table.group(1), columns, "query")
    for pattern in _COLUMN_PATTERNS:
        column = pattern.search(text)
        if column:
            mentioned = [names for name, names in columns.items() if re.search(rf"\b{name}\b", sql)]
            known = {name for names in mentioned or columns.values() for name in names}
            return UnknownNameError("column", column.group(1), known, "query")
    return QueryError(sql, _first_line(error))


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0].strip()
