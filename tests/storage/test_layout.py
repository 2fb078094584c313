"""Specification of `storage.layout`."""

from __future__ import annotations

from pathlib import Path

from tracehooks.storage.layout import Layout, Piece


def touched(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def test_paths_are_hive_partitions(tmp_path: Path) -> None:
    """A piece lies under its table and rank, in the journal under its rank."""
    layout, piece = Layout(tmp_path), Piece(3, 12, "tensors")
    assert layout.part(piece) == tmp_path / "tensors/rank=3/part-00012.parquet"
    assert layout.segment(piece) == tmp_path / "journal/rank=3/tensors-00012.arrows"
    assert layout.unfinished_part(piece) == tmp_path / "tensors/rank=3/.part-00012.parquet.tmp"


def test_pieces_are_found_by_rank_and_number(tmp_path: Path) -> None:
    """Listing gives pieces sorted as numbers, and nothing that is not a piece."""
    layout = Layout(tmp_path)
    pieces = [Piece(0, 2, "tensors"), Piece(0, 100_000, "tensors"), Piece(10, 0, "tensors"), Piece(2, 0, "tensors")]
    for piece in pieces:
        touched(layout.part(piece))
        touched(layout.segment(piece))
    touched(layout.unfinished_part(Piece(0, 7, "tensors")))
    touched(tmp_path / "journal/rank=0/tensors-00009.parquet.damaged")
    touched(tmp_path / "journal/rank=0/lock")
    touched(tmp_path / "journal/rank=0/unheard-00001.arrows")
    assert layout.parts("tensors") == layout.segments("tensors") == layout.segments() == sorted(pieces)
    assert layout.parts("scalars") == layout.segments("scalars") == []
    assert layout.ranks() == [0, 2, 10]


def test_numbers_are_never_used_twice(tmp_path: Path) -> None:
    """The next number is above every part, segment and file set aside of that table and rank."""
    layout = Layout(tmp_path)
    assert layout.next_number("tensors", 0) == 0
    touched(layout.part(Piece(0, 4, "tensors")))
    assert layout.next_number("tensors", 0) == 5
    touched(layout.segment(Piece(0, 6, "tensors")))
    assert layout.next_number("tensors", 0) == 7
    touched(tmp_path / "journal/rank=0/tensors-00009.arrows.damaged")
    assert layout.next_number("tensors", 0) == 10
    assert layout.next_number("tensors", 1) == layout.next_number("scalars", 0) == 0


def test_an_empty_directory_has_nothing(tmp_path: Path) -> None:
    """A directory that is empty, or not there, has no ranks, pieces or rows."""
    for layout in (Layout(tmp_path), Layout(tmp_path / "absent")):
        assert layout.ranks() == layout.segments() == layout.parts("tensors") == []
        assert not layout.holds_rows()
