"""Sealing: a journal segment becomes a part, in an order that leaves every row readable exactly once at any instant.

The part appears under its name by a rename, when it is whole and on disk; only then is the segment removed. Readers
ignore a segment whose part is there, so between the two nothing is read twice.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import pyarrow as pa

from tracehooks.core.records import Problem
from tracehooks.storage.journal import Damage, read_segment
from tracehooks.storage.layout import DAMAGED, Layout, Piece
from tracehooks.storage.parts import DamagedPartError, check_footer, write_part


@dataclass
class Sealed:
    """What sealing one piece did."""

    piece: Piece
    rows: int = 0
    damage: list[Damage] = field(default_factory=list)


def seal(layout: Layout, piece: Piece) -> Sealed:
    """Turn a segment into its part and remove the segment.

    A segment with damage is set aside (``.damaged``), not removed: its intact rows are in the part, the rest may still
    be of use to somebody. A damaged part that a kept segment replaces is set aside in the same way.

    Raises:
        OSError: the part cannot be written; the segment stays as it is.
    """
    part, segment = layout.part(piece), layout.segment(piece)
    sealed = Sealed(piece)
    if _is_whole(layout, piece):
        sealed.damage = [found for found in read_segment(segment, piece.table) if isinstance(found, Damage)]
    else:
        if part.exists():
            # Out of the table's directory, where other tools would take it for a part.
            os.replace(part, segment.with_name(segment.stem + part.suffix + DAMAGED))
        sealed.rows = write_part(
            layout.unfinished_part(piece), part, piece.table, _intact(layout, piece, sealed.damage)
        )
    if sealed.damage:
        os.replace(segment, segment.with_name(segment.name + DAMAGED))
    else:
        segment.unlink()
    return sealed


def seal_all(layout: Layout, rank: int) -> list[Sealed]:
    """Seal everything in a rank's journal. The caller holds the rank's lock, and no segment is open.

    A temporary file of a process that died while sealing is overwritten: its segment is still there.

    Raises:
        OSError: a part cannot be written; what was sealed before stays sealed, the rest stays in the journal.
    """
    return [seal(layout, piece) for piece in layout.segments() if piece.rank == rank]


def set_aside(layout: Layout, table: str) -> list[Problem]:
    """What earlier sealing could not read of a table, as problems."""
    problems = []
    for piece in layout.segments(table, DAMAGED):
        path = layout.segment(piece)
        path = path.with_name(path.name + DAMAGED)
        name = str(path.relative_to(layout.root))
        try:
            damage = [found for found in read_segment(path, table) if isinstance(found, Damage)]
        except OSError as error:
            problems.append(Problem(name, f"cannot be read: {error.strerror or error}"))
            continue
        problems += [Problem(name, f"{found}; set aside when its other rows were sealed") for found in damage]
    return problems


def _is_whole(layout: Layout, piece: Piece) -> bool:
    try:
        check_footer(layout.part(piece))
    except DamagedPartError:
        return False
    return True


def _intact(layout: Layout, piece: Piece, damage: list[Damage]) -> Iterator[pa.RecordBatch]:
    for found in read_segment(layout.segment(piece), piece.table):
        if isinstance(found, Damage):
            damage.append(found)
        else:
            yield found
