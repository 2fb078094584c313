"""One table of a run: which pieces there are, which of them can be read, and a dataset over those."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from tracehooks.core.records import Problem
from tracehooks.storage.journal import Damage, read_segment
from tracehooks.storage.layout import Layout, Piece
from tracehooks.storage.lock import is_held
from tracehooks.storage.parts import DamagedPartError, check_footer
from tracehooks.storage.schemas import RANK, journal_schema, read_schema
from tracehooks.storage.sealing import set_aside


@dataclass
class Part:
    """What is known of a sealed part."""

    damaged: str = ""
    """What is wrong with its footer; then nothing of the part is read."""
    groups: list[int] | None = None
    """The readable row groups, None before the part was verified (then all of them)."""
    whole: bool = True
    """Whether, as far as is known, every row of it can be read."""


class TableReader:
    """Reads one table. ``note`` is called with each problem, again on every reading."""

    def __init__(self, layout: Layout, table: str, note: Callable[[Problem], None]) -> None:
        self._layout = layout
        self._table = table
        self._note = note
        self._schema = read_schema(table)
        self._parts: dict[Piece, Part] = {}
        self._segments: dict[Piece, tuple[int, pa.Table, list[Damage]]] = {}

    def dataset(self) -> ds.Dataset:
        """Every readable row exactly once; see `Run.dataset`."""
        for problem in set_aside(self._layout, self._table):
            self._note(problem)
        # The journal first: a segment that is sealed meanwhile is then in both lists, not in neither.
        segments = self._layout.segments(self._table)
        parts = {piece: self._part(piece) for piece in self._layout.parts(self._table)}
        unsealed = {piece: self._unsealed(piece) for piece in segments if piece not in parts or not parts[piece].whole}
        self._segments = {piece: read for piece, read in self._segments.items() if piece in unsealed}
        for piece in [piece for piece, rows in unsealed.items() if rows is None]:
            del unsealed[piece]
            if self._layout.part(piece).exists():
                parts[piece] = self._part(piece)
        for piece, part in parts.items():
            self._note_footer(piece, part, "read from the journal" if piece in unsealed else "no row of it can be read")
        sealed = self._sealed([(piece, parts[piece]) for piece in sorted(parts) if piece not in unsealed])
        rows = pa.concat_tables([self._schema.empty_table(), *unsealed.values()])
        return ds.UnionDataset(self._schema, [sealed, ds.InMemoryDataset(rows, schema=self._schema)])

    def verify(self) -> bool:
        """Read every part whole; whether that found damage not known before."""
        found = False
        for piece in self._layout.parts(self._table):
            part = self._part(piece)
            if not part.damaged and part.groups is None:
                self._read_groups(piece, part)
                found = found or not part.whole
        return found

    def _part(self, piece: Piece) -> Part:
        if piece not in self._parts:
            self._parts[piece] = Part()
            try:
                check_footer(self._layout.part(piece))
            except DamagedPartError as error:
                self._parts[piece] = Part(damaged=str(error), whole=False)
        return self._parts[piece]

    def _note_footer(self, piece: Piece, part: Part, outcome: str) -> None:
        if part.damaged:
            self._note(Problem(self._name(self._layout.part(piece)), f"{part.damaged}; {outcome}"))

    def _read_groups(self, piece: Piece, part: Part) -> None:
        path = self._layout.part(piece)
        part.groups, first = [], 0
        footer = pq.read_metadata(path)
        for group in range(footer.num_row_groups):
            rows = footer.row_group(group).num_rows
            try:
                with pq.ParquetFile(path, metadata=footer, page_checksum_verification=True) as file:
                    file.read_row_group(group)
                part.groups.append(group)
            except (OSError, pa.ArrowException) as error:
                part.whole = False
                what = f"row group {group} (rows {first}-{first + rows}): {str(error).splitlines()[0]}"
                self._note(Problem(self._name(path), what))
            first += rows

    def _sealed(self, parts: Sequence[tuple[Piece, Part]]) -> ds.Dataset:
        options = ds.ParquetFragmentScanOptions(page_checksum_verification=True)
        parquet = ds.ParquetFileFormat(default_fragment_scan_options=options)
        local = pafs.LocalFileSystem()
        fragments = [
            parquet.make_fragment(
                str(self._layout.part(piece)),
                filesystem=local,
                partition_expression=ds.field(RANK.name) == pa.scalar(piece.rank, RANK.type),
                row_groups=part.groups,
            )
            for piece, part in parts
            if not part.damaged and part.groups != []
        ]
        return ds.FileSystemDataset(fragments, self._schema, parquet, local)

    def _unsealed(self, piece: Piece) -> pa.Table | None:
        """The rows of a segment; None when it is not there (it was sealed just now) or cannot be opened."""
        path = self._layout.segment(piece)
        try:
            size = path.stat().st_size
            if piece not in self._segments or self._segments[piece][0] != size:
                self._segments[piece] = (size, *self._read(piece, path))
        except FileNotFoundError:
            return None
        except OSError as error:
            self._note(Problem(self._name(path), f"cannot be read: {error.strerror or error}"))
            return None
        _, rows, damage = self._segments[piece]
        for item in damage:
            self._note(Problem(self._name(path), str(item)))
        return rows

    def _read(self, piece: Piece, path: Path) -> tuple[pa.Table, list[Damage]]:
        # Asked before reading: while its writer lives, a torn end is a write in progress.
        alive = is_held(self._layout.journal_of(piece.rank))
        batches: list[pa.RecordBatch] = []
        damage: list[Damage] = []
        for found in read_segment(path, self._table):
            if not isinstance(found, Damage):
                batches.append(found)
            elif not (alive and found.at_end):
                damage.append(found)
        return self._table_of(batches, piece.rank), damage

    def _table_of(self, batches: list[pa.RecordBatch], rank: int) -> pa.Table:
        plain = pa.Table.from_batches(batches, journal_schema(self._table)).combine_chunks()
        columns = [
            column.dictionary_encode() if pa.types.is_dictionary(self._schema.field(name).type) else column
            for name, column in zip(plain.column_names, plain.columns, strict=True)
        ]
        columns.append(pa.repeat(pa.scalar(rank, RANK.type), plain.num_rows))
        return pa.Table.from_arrays(columns, schema=self._schema)

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self._layout.root))
