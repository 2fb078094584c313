"""DuckDB, embedded: the one file that knows it.

It reads, and nothing else: no file is touched, no statement but a query runs, and the configuration is locked before the
first query, so that SQL from a stranger is harmless.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import duckdb
import pyarrow as pa

from tracehooks.analysis.sql import MaybeDamageError, first_line, told_apart, unknown_column
from tracehooks.core.errors import QueryError, UnknownNameError

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


class Duck:
    """Tables in a locked connection; implements `tracehooks.analysis.engine.Connection`."""

    def __init__(self, tables: Mapping[str, pa_dataset.Dataset]) -> None:
        self._columns = {name: dataset.schema.names for name, dataset in tables.items()}
        self._connection = duckdb.connect(":memory:")
        self._connection.execute("SET python_enable_replacements=false")
        self._connection.execute("SET enable_external_access=false")
        for name, dataset in tables.items():
            self._connection.register(name, dataset)
        self._connection.execute("SET lock_configuration=true")

    def __call__(self, sql: str, shown: str | None = None) -> pa.Table:
        """The result of one SELECT or EXPLAIN; errors show it as ``shown``."""
        shown = sql if shown is None else shown
        self._refuse_all_but_one_query(sql, shown)
        try:
            found = self._connection.sql(sql).to_arrow_table()
        except _NOT_DAMAGE as error:
            raise self._explained(sql, shown, error) from error
        except duckdb.Error as error:
            raise MaybeDamageError(
                self._explained(sql, shown, error), certain=bool(_DAMAGE.search(str(error)))
            ) from error
        return found.rename_columns(told_apart(found.column_names))

    def _refuse_all_but_one_query(self, sql: str, shown: str) -> None:
        try:
            statements = self._connection.extract_statements(sql)
        except duckdb.Error as error:
            raise QueryError(shown, first_line(error)) from error
        if len(statements) != 1:
            raise QueryError(shown, f"{len(statements)} statements; give exactly one SELECT")
        kind = statements[0].type
        if kind not in (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN):
            raise QueryError(shown, f"{str(kind).rpartition('.')[2]} statement; a run is read only: give a SELECT")

    def _explained(self, sql: str, shown: str, error: duckdb.Error) -> QueryError | UnknownNameError:
        text = str(error)
        if table := _TABLE_PATTERN.search(text):
            return UnknownNameError("table", table.group(1), self._columns, "query")
        for pattern in _COLUMN_PATTERNS:
            if column := pattern.search(text):
                return unknown_column(column.group(1), sql, self._columns)
        return QueryError(shown, first_line(error))


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
    names = "*" if columns is None else ", ".join(f'"{name}"' for name in columns) or "NULL"
    try:
        return Duck({"rows": dataset})(f"SELECT {names} FROM rows WHERE ({where}\n)", shown=where)
    except MaybeDamageError as error:
        if error.certain:  # DuckDB words the OSError of a damaged page as its own error; storage heals on OSError
            raise OSError(first_line(error.explained)) from error
        raise error.explained from error
