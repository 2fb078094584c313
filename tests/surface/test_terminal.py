"""Tables for a person: drawn on a terminal, plain when piped."""

from __future__ import annotations

import io

import pytest

from tracehooks.surface import terminal

ROWS = [{"name": "x" * 200, "value": 0.1234567, "yes": True}, {"name": "[b]y[/b]", "value": None, "yes": False}]


def test_piped(capsys: pytest.CaptureFixture[str]) -> None:
    """Piped, every cell is whole, columns are aligned, and there is nothing but text."""
    terminal.table("title", ["name", "value", "yes"], ROWS)
    assert capsys.readouterr().out.splitlines() == [
        "title",
        "name" + " " * 196 + "     value  yes",
        "x" * 200 + "  0.123457  yes",
        "[b]y[/b]" + " " * 192 + "            no",
    ]


def test_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal the table is drawn, folded rather than cut, and cells are text, not markup."""

    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Screen()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("COLUMNS", "60")
    terminal.table("title", ["name", "value", "yes"], ROWS)
    drawn = screen.getvalue()
    assert drawn.count("x") == 200
    assert "─" in drawn
    assert "[b]y[/b]" in drawn


def test_cells_of_several_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Piped, each of their lines stands in its column."""
    terminal.table("", ["name", "message", "n"], [{"name": "a", "message": "one\n  two", "n": 1}])
    assert capsys.readouterr().out.splitlines() == ["name  message  n", "a     one      1", "        two"]


def test_empty(capsys: pytest.CaptureFixture[str]) -> None:
    """A table without rows has its header."""
    terminal.table("", ["a", "b"], [])
    assert capsys.readouterr().out == "a  b\n"
