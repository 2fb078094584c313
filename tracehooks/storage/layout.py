"""Where things lie in a run directory, and what lies there now."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tracehooks.core.schema import TABLES

DAMAGED = ".damaged"
"""Suffix of files set aside because some of them could not be read. Nothing reads them, nothing deletes them."""

_RANK = re.compile(r"rank=(\d+)")
_PART = re.compile(r"part-(\d+)\.parquet")
_SEGMENT = re.compile(r"([a-z]+)-(\d+)\.arrows")


@dataclass(frozen=True, order=True)
class Piece:
    """Number ``number`` of one rank's rows of one table: in the journal a segment, once sealed a part."""

    rank: int
    number: int
    table: str


@dataclass(frozen=True)
class Layout:
    """The paths of one run."""

    root: Path

    @property
    def run_json(self) -> Path:
        """The run's description."""
        return self.root / "run.json"

    @property
    def journal(self) -> Path:
        """The directory of unsealed rows; absent once every rank has closed."""
        return self.root / "journal"

    def journal_of(self, rank: int) -> Path:
        """One rank's journal, with its lock."""
        return self.journal / f"rank={rank}"

    def parts_of(self, table: str, rank: int) -> Path:
        """The directory of one rank's parts of a table."""
        return self.root / table / f"rank={rank}"

    def part(self, piece: Piece) -> Path:
        """The sealed piece."""
        return self.parts_of(piece.table, piece.rank) / f"part-{piece.number:05d}.parquet"

    def unfinished_part(self, piece: Piece) -> Path:
        """The piece while it is being sealed; hidden, and no ``.parquet``, so that no reader takes it for a part."""
        return self.parts_of(piece.table, piece.rank) / f".part-{piece.number:05d}.parquet.tmp"

    def segment(self, piece: Piece) -> Path:
        """The piece in the journal."""
        return self.journal_of(piece.rank) / f"{piece.table}-{piece.number:05d}.arrows"

    def parts(self, table: str) -> list[Piece]:
        """Sealed pieces of a table, by rank and number."""
        found = []
        for rank in _ranks(self.root / table):
            for name in _names(self.parts_of(table, rank)):
                if match := _PART.fullmatch(name):
                    found.append(Piece(rank, int(match[1]), table))  # noqa: PERF401 - reads as its twin below
        return sorted(found)

    def segments(self, table: str | None = None, suffix: str = "") -> list[Piece]:
        """Pieces in the journal, of one table or of all, by rank and number."""
        found = []
        for rank in _ranks(self.journal):
            for name in _names(self.journal_of(rank), suffix):
                match = _SEGMENT.fullmatch(name)
                if match and match[1] in TABLES and table in (None, match[1]):
                    found.append(Piece(rank, int(match[2]), match[1]))
        return sorted(found)

    def ranks(self) -> list[int]:
        """Every rank that has written something."""
        directories = [self.journal, *(self.root / table for table in TABLES)]
        return sorted({rank for directory in directories for rank in _ranks(directory)})

    def journal_ranks(self) -> list[int]:
        """Ranks that have a journal."""
        return sorted(_ranks(self.journal))

    def next_number(self, table: str, rank: int) -> int:
        """The first number that no piece of this table and rank has had."""
        pieces = [
            piece
            for piece in (*self.parts(table), *self.segments(table), *self.segments(table, DAMAGED))
            if piece.rank == rank
        ]
        return max((piece.number + 1 for piece in pieces), default=0)

    def holds_rows(self, rank: int | None = None) -> bool:
        """Whether there are rows: of one rank, or of any."""
        pieces = [*self.segments(), *(piece for table in TABLES for piece in self.parts(table))]
        return any(rank in (None, piece.rank) for piece in pieces)


def _ranks(directory: Path) -> Iterator[int]:
    for name in _names(directory):
        if match := _RANK.fullmatch(name):
            yield int(match[1])


def _names(directory: Path, suffix: str = "") -> list[str]:
    """Names in a directory that end with a suffix, without it."""
    try:
        return [name.removesuffix(suffix) for name in os.listdir(directory) if name.endswith(suffix)]
    except (FileNotFoundError, NotADirectoryError):
        return []
