"""The tables of runs as a diff reads them, through SQL: an engine reads them where they lie.

Every question is one query of standard SQL over all runs of a diff at once. Steps in which two runs agree row for row are
settled by the engine; only rows of the others are fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import pyarrow as pa

from tracehooks.analysis.engine import Connection, Engine, connect
from tracehooks.analysis.sql import MaybeDamageError, quoted
from tracehooks.analysis.steps import Chosen
from tracehooks.analysis.tables import Extent
from tracehooks.analysis.window import KEY, Ints, Reader
from tracehooks.core.records import RunSource
from tracehooks.core.schema import TABLES

_ORDERS = {"tensors": "step, seq, rank, micro, phase, module, slot, call"}
_ALIKE = """
SELECT step, count(*) AS n FROM (
    SELECT step, count(*) AS n, sum(side) AS of_b, count(hash) AS hashed, min(hash) AS hash_from, max(hash) AS hash_to,
           min(dtype) AS dtype_from, max(dtype) AS dtype_to, min(shape) AS shape_from, max(shape) AS shape_to
    FROM (SELECT {columns}, {module} AS module, 0 AS side FROM {a} WHERE {steps}
          UNION ALL SELECT {columns}, module, 1 AS side FROM {b} WHERE {steps}) AS rows_of_both
    GROUP BY {key}) AS pairs
GROUP BY step
HAVING min(CASE WHEN n = 2 AND of_b = 1 AND hashed = 2 AND hash_from = hash_to AND dtype_from = dtype_to
                     AND shape_from = shape_to THEN 1 ELSE 0 END) = 1
ORDER BY step
"""
"""Steps of which every key has one row on each side, equal in hash, dtype and shape; and their keys, counted."""


class QueriedTables:
    """One run's; implements `tracehooks.analysis.tables.Tables`."""

    def __init__(self, connection: Connection, names: Mapping[str, str], schemas: Mapping[str, pa.Schema]) -> None:
        self._connection, self.names, self._schemas = connection, names, schemas

    def extent(self) -> Extent:
        """See `Tables.extent`: here each step is a run of rows."""
        ranks = self._query("SELECT DISTINCT rank FROM {tensors} ORDER BY rank")["rank"].to_pylist()
        steps, rows = self._steps
        return Extent(steps, steps, rows, ranks)

    def recorded(self, first: int, last: int) -> Ints:
        """See `Tables.recorded`."""
        steps, _ = self._steps
        return steps[(steps >= first) & (steps <= last)]

    def modules(self) -> list[str]:
        """See `Tables.modules`."""
        found = self._query("SELECT DISTINCT module FROM {tensors} ORDER BY module")["module"]
        return [str(name) for name in found.to_pylist()]

    def tensors(self, chosen: Chosen) -> Reader:
        """See `Tables.tensors`. All columns at once: an engine need not give rows in the same order twice."""
        rows = self.beside("tensors", self._schemas["tensors"].names, chosen)
        return lambda columns: rows.select(columns)

    def beside(self, table: str, columns: Sequence[str], chosen: Chosen | None = None) -> pa.Table:
        """See `Tables.beside`."""
        names, where = ", ".join(f'"{name}"' for name in columns), "" if chosen is None else f"WHERE {chosen.sql()}"
        order = _ORDERS.get(table, "step, rank, time_ns")
        found = self._query(f"SELECT {names} FROM {{{table}}} {where} ORDER BY {order}")
        kinds = [self._schemas[table].field(name).type for name in columns]
        return pa.Table.from_arrays(
            [_as(*pair) for pair in zip(found.columns, kinds, strict=True)], names=list(columns)
        )

    def alike(
        self, other: QueriedTables, chosen: Chosen, named: Callable[[str], str], *, by_rank: bool
    ) -> dict[int, int]:
        """Steps in which this run and another have the same rows, bit for bit, and how many. ``named`` makes module paths
        of this run those of the other."""
        key = ", ".join(name for name in KEY if by_rank or name != "rank")
        renamed = {path: named(path) for path in self.modules()}
        cases = " ".join(f"WHEN {quoted(old)} THEN {quoted(new)}" for old, new in renamed.items() if old != new)
        sql = _ALIKE.format(
            columns=", ".join(name for name in (*KEY, "dtype", "shape", "hash") if name != "module"),
            module=f"CASE module {cases} ELSE module END" if cases else "module",
            a=self.names["tensors"],
            b=other.names["tensors"],
            steps=chosen.sql(),
            key=key,
        )
        found = _answered(self._connection, sql)
        return dict(zip(found["step"].to_pylist(), found["n"].to_pylist(), strict=True))

    @cached_property
    def _steps(self) -> tuple[Ints, Ints]:
        found = self._query("SELECT step, count(*) AS n FROM {tensors} GROUP BY step ORDER BY step")
        return found["step"].to_numpy(), found["n"].to_numpy()

    def _query(self, sql: str) -> pa.Table:
        return _answered(self._connection, sql.format(**self.names))


def queried_tables(runs: Sequence[RunSource], engine: Engine) -> list[QueriedTables]:
    """The tables of runs in one connection."""
    datasets = [{table: run.dataset(table) for table in TABLES} for run in runs]
    names = [{table: f"{table}_{number}" for table in TABLES} for number in range(len(runs))]
    connection = connect(
        {names[n][table]: dataset for n, tables in enumerate(datasets) for table, dataset in tables.items()}, engine
    )
    return [
        QueriedTables(connection, named, {table: dataset.schema for table, dataset in tables.items()})
        for named, tables in zip(names, datasets, strict=True)
    ]


def _answered(connection: Connection, sql: str) -> pa.Table:
    """The answer; what cannot be read is an OSError, as from a run on this machine."""
    try:
        return connection(sql)
    except MaybeDamageError as error:
        raise OSError(str(error.explained)) from error


def _as(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """A column in the type of the run's own table; lists as they come."""
    if pa.types.is_dictionary(kind):
        return column.dictionary_encode()
    return column if pa.types.is_nested(kind) else column.cast(kind)
