"""Tables and lines for a person: drawn with rich on a terminal, plain aligned columns when piped."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import click

from tracehooks.analysis.told import number


def line(text: str = "") -> None:
    """One line of text, as it is."""
    click.echo(text)


def table(title: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """A table with a title. Piped: aligned columns, every cell whole, also one of several lines, no colours and no rules."""
    cells = [[number(row.get(name)) for name in columns] for row in rows]
    right = [all(_is_number(row.get(name)) for row in rows) for name in columns]
    if sys.stdout.isatty():
        _drawn(title, columns, cells, right)
    else:
        _piped(title, columns, cells, right)


def _drawn(title: str, columns: Sequence[str], cells: Sequence[Sequence[str]], right: Sequence[bool]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name, is_number in zip(columns, right, strict=True):
        drawn.add_column(name, justify="right" if is_number else "left", overflow="fold")
    for row in cells:
        drawn.add_row(*(Text(cell) for cell in row))
    Console().print(drawn)


def _piped(title: str, columns: Sequence[str], cells: Sequence[Sequence[str]], right: Sequence[bool]) -> None:
    lines = [list(columns)]
    for row in cells:
        lines += [list(part) for part in zip_longest(*(cell.split("\n") for cell in row), fillvalue="")]
    widths = [max(len(row[position]) for row in lines) for position in range(len(columns))]
    if title:
        click.echo(title)
    for row in lines:
        padded = [
            cell.rjust(width) if is_number else cell.ljust(width)
            for cell, width, is_number in zip(row, widths, right, strict=True)
        ]
        click.echo("  ".join(padded).rstrip())


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
