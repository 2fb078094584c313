"""SQL over a run's tables, by the engine that is asked for: DuckDB, embedded, or Spark.

Both see the tables tensors, scalars, masks, samples and events; both read and do nothing else; both leave out a damaged part
and answer from the rest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol, TypeAlias

from tracehooks.analysis.duck import Duck
from tracehooks.analysis.sql import MaybeDamageError
from tracehooks.core.errors import EngineError, InvalidOptionError
from tracehooks.core.records import RunSource
from tracehooks.core.schema import TABLES

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.dataset as pa_dataset
    from pyspark.sql import SparkSession

EMBEDDED = "duckdb"
MASTERS = r"local(\[.*\])?|(spark|k8s)://.+|yarn"
"""What Spark takes for a master and we for an engine."""

Engine: TypeAlias = "str | SparkSession"
"""``duckdb``, the master of a Spark cluster (``spark://host:7077``, ``local[2]``, ``yarn``), or a session of Spark's."""


class Connection(Protocol):
    """A run's tables in an engine."""

    def __call__(self, sql: str) -> pa.Table:
        """The result of one SELECT or EXPLAIN.

        Raises:
            UnknownNameError: a column or table that does not exist; the nearest names are listed.
            QueryError: SQL that does not parse, is not a query, or touches anything but the tables.
            MaybeDamageError: it failed while it ran.
        """


class Queries:
    """Several queries over one run, for the price of one connection."""

    def __init__(self, run: RunSource, engine: Engine = EMBEDDED) -> None:
        self._run, self._engine = run, engine
        self._connection = self._connect()

    def __call__(self, sql: str) -> pa.Table:
        """The result of one SELECT over the run's tables; see `query`."""
        try:
            return self._connection(sql)
        except MaybeDamageError as error:
            if not self._healed(sql):
                raise error.explained from error
        self._connection = self._connect()
        try:
            return self._connection(sql)
        except MaybeDamageError as error:
            raise error.explained from error

    def _connect(self) -> Connection:
        return connect({name: self._run.dataset(name) for name in TABLES}, self._engine)

    def _healed(self, sql: str) -> bool:
        """Whether verifying the tables set something aside, so that the query is worth another try."""
        before = len(self._run.problems)
        for name in TABLES:
            if re.search(rf"\b{name}\b", sql, re.IGNORECASE):
                self._run.verify(name)
        return len(self._run.problems) > before


def query(run: RunSource, sql: str, engine: Engine = EMBEDDED) -> pa.Table:
    """The result of one SELECT (or EXPLAIN) over the run's tables. A damaged part is set aside and the rest answers.

    Raises:
        UnknownNameError: a column or table that does not exist; the nearest names are listed.
        QueryError: SQL that does not parse, is not a query, touches a file, or fails.
        InvalidOptionError: no such engine.
        EngineError: Spark, its Java or its master is not there.
    """
    return Queries(run, engine)(sql)


def connect(tables: Mapping[str, pa_dataset.Dataset], engine: Engine = EMBEDDED) -> Connection:
    """Tables in an engine, read only.

    Raises:
        InvalidOptionError: no such engine.
        EngineError: Spark, its Java or its master is not there.
    """
    if engine == EMBEDDED:
        return Duck(tables)
    if not (re.fullmatch(MASTERS, engine) if isinstance(engine, str) else hasattr(engine, "newSession")):
        raise InvalidOptionError(
            "engine", engine, "duckdb, Spark's master (spark://host:7077, local[2], yarn), or a session"
        )
    if find_spec("pyspark") is None:
        raise EngineError(str(engine), "pyspark is missing: pip install 'tracehooks[spark]'")
    from tracehooks.analysis.spark import Spark  # costs a second, and pyspark may not be there
    from tracehooks.analysis.spark_session import session_for

    return Spark(session_for(engine), tables)
