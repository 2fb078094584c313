"""The tables of one run as a diff reads them: a stretch of steps at a time, and of that only what holds it.

`LocalTables` reads the run's own files. It looks at the footers of the tensors table once: each row group says from which
step to which it goes, so that one step of a hundred million rows costs the row groups that hold it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pa_dataset
import pyarrow.fs as pa_fs

from tracehooks.analysis.steps import Chosen
from tracehooks.analysis.window import Ints, Reader
from tracehooks.core.records import RunSource


@dataclass(frozen=True)
class Extent:
    """Where the rows of a tensors table lie: runs of rows, each with its first and last step."""

    first: Ints
    last: Ints
    rows: Ints
    ranks: list[int]

    def rows_up_to(self, step: int) -> float:
        """About how many rows there are up to a step, those of a run being spread evenly over its steps."""
        share = (step + 1 - self.first) / (self.last + 1 - self.first)
        return float(np.clip(share, 0, 1) @ self.rows)


class Tables(Protocol):
    """A run's tables. Any read may raise at a damaged page."""

    def extent(self) -> Extent:
        """What the tensors table holds."""

    def recorded(self, first: int, last: int) -> Ints:
        """The steps from first to last that have rows in the tensors table, ascending."""

    def modules(self) -> list[str]:
        """Paths of all modules that have rows in the tensors table, sorted."""

    def tensors(self, chosen: Chosen) -> Reader:
        """The rows of some steps of the tensors table."""

    def beside(self, table: str, columns: Sequence[str], chosen: Chosen | None = None) -> pa.Table:
        """Rows of another table, of all steps or of some."""


WINDOW_ROWS = 1 << 18
"""Rows of one side that are held at a time with all their statistics; a step is never split."""


def stretches(extents: Sequence[Extent], chosen: Chosen, limit: int = WINDOW_ROWS) -> Iterator[Chosen]:
    """The chosen steps in stretches, each of about ``limit`` rows of the side that has more, and of at least one step."""
    start = chosen.first
    while start <= chosen.last:
        least, most = start, chosen.last
        before = [extent.rows_up_to(start - 1) for extent in extents]
        while least < most:
            middle = (least + most + 1) // 2
            held = max(extent.rows_up_to(middle) - told for extent, told in zip(extents, before, strict=True))
            least, most = (middle, most) if held <= limit else (least, middle - 1)
        part = chosen.within(start, least)
        if part.among is None or len(part.among):
            yield part
        start = least + 1


@dataclass(frozen=True)
class _Piece:
    """Some rows of a dataset that are read at once: a row group of a part, or what is in memory."""

    source: pa_dataset.Fragment | pa_dataset.Dataset
    group: int | None
    first: int
    last: int
    rows: int


class LocalTables:
    """The tables of a run on this machine; implements `Tables`."""

    def __init__(self, run: RunSource) -> None:
        self._run = run
        self._dataset = run.dataset("tensors")

    def extent(self) -> Extent:
        """See `Tables.extent`."""
        first, last, rows = (
            np.array([getattr(piece, name) for piece in self._pieces], np.int64) for name in ("first", "last", "rows")
        )
        return Extent(first, last, rows, self._ranks())

    def recorded(self, first: int, last: int) -> Ints:
        """See `Tables.recorded`."""
        step = self.tensors(Chosen(first, last))(["step"])["step"]
        found: Ints = np.unique(step.to_numpy())
        return found

    def modules(self) -> list[str]:
        """See `Tables.modules`."""
        found: set[str] = set()
        for batch in self._dataset.to_batches(columns=["module"]):
            found.update(pc.unique(batch["module"]).to_pylist())
        return sorted(found)

    def tensors(self, chosen: Chosen) -> Reader:
        """See `Tables.tensors`."""
        pieces = [piece for piece in self._pieces if chosen.overlaps(piece.first, piece.last)]
        return _Stretch(self._dataset.schema, pieces, chosen).read

    def beside(self, table: str, columns: Sequence[str], chosen: Chosen | None = None) -> pa.Table:
        """See `Tables.beside`."""
        return self._run.read(table, columns, None if chosen is None else chosen.sql())

    @cached_property
    def _pieces(self) -> list[_Piece]:
        dataset = self._dataset
        found: list[_Piece] = []
        for child in dataset.children if isinstance(dataset, pa_dataset.UnionDataset) else [dataset]:
            if isinstance(child, pa_dataset.FileSystemDataset):
                found += (piece for fragment in child.get_fragments() for piece in _groups(fragment))
            elif rows := child.count_rows():
                steps = pc.min_max(child.to_table(columns=["step"])["step"])
                found.append(_Piece(child, None, steps["min"].as_py(), steps["max"].as_py(), rows))
        return found

    def _ranks(self) -> list[int]:
        found: set[int] = set()
        for piece in self._pieces:
            if isinstance(piece.source, pa_dataset.Fragment):
                found.add(pa_dataset.get_partition_keys(piece.source.partition_expression)["rank"])
            else:
                found.update(pc.unique(piece.source.to_table(columns=["rank"])["rank"]).to_pylist())
        return sorted(found)


def _groups(fragment: Any) -> list[_Piece]:
    """The row groups of a part, by the steps that its footer says they hold."""
    chosen = {group.id for group in fragment.row_groups}
    footer = fragment.metadata
    column = footer.schema.names.index("step")
    found = []
    for number in sorted(chosen):
        group = footer.row_group(number)
        steps = group.column(column).statistics
        found.append(_Piece(fragment, number, steps.min, steps.max, group.num_rows))
    return found


class _Stretch:
    """The rows of some steps, from the pieces that may hold them."""

    def __init__(self, schema: pa.Schema, pieces: Sequence[_Piece], chosen: Chosen) -> None:
        self._schema, self._pieces, self._chosen = schema, pieces, chosen

    def read(self, columns: Sequence[str]) -> pa.Table:
        """Columns of them, in the order of the pieces."""
        table = self._whole(columns)
        rows = self._rows
        return table if rows is None else table.slice(*rows) if isinstance(rows, tuple) else table.filter(rows)

    @cached_property
    def _rows(self) -> tuple[int, int] | pa.Array | None:
        """Which rows of the pieces are of the steps: all, a run of them (offset, length), or those of a mask."""
        if all(self._chosen.holds(piece.first, piece.last) for piece in self._pieces):
            return None
        kept = self._chosen.mask(self._whole(["step"])["step"].to_numpy())
        edges = np.flatnonzero(np.diff(kept, prepend=False, append=False))
        if not len(edges):
            return 0, 0
        return (int(edges[0]), int(edges[1] - edges[0])) if len(edges) == 2 else pa.array(kept)

    def _whole(self, columns: Sequence[str]) -> pa.Table:
        groups: dict[int, tuple[Any, list[int]]] = {}
        tables = []
        for piece in self._pieces:
            if piece.group is None:
                tables.append(piece.source.to_table(columns=list(columns)))
            else:
                groups.setdefault(id(piece.source), (piece.source, []))[1].append(piece.group)
        if groups:
            parts = [fragment.subset(row_group_ids=numbers) for fragment, numbers in groups.values()]
            sealed = pa_dataset.FileSystemDataset(parts, self._schema, parts[0].format, pa_fs.LocalFileSystem())
            tables.insert(0, sealed.to_table(columns=list(columns)))
        names = pa.schema([self._schema.field(name) for name in columns])
        return pa.concat_tables([names.empty_table(), *tables])
