"""What the engines share: how results and errors look, whichever engine gave them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tracehooks.core.errors import QueryError, UnknownNameError


class MaybeDamageError(Exception):
    """A query failed while it ran: the query's fault, or that of a page that cannot be read. Never leaves analysis."""

    def __init__(self, explained: QueryError | UnknownNameError, *, certain: bool = False) -> None:
        super().__init__(str(explained))
        self.explained = explained
        """What to say where nothing is damaged."""
        self.certain = certain
        """Whether the engine says that it could not read."""


def told_apart(names: Sequence[str]) -> list[str]:
    """The names, a repeated one numbered, so that a row is a mapping."""
    told: list[str] = []
    for name in names:
        fresh, number = name, 1
        while fresh in told:
            fresh, number = f"{name}_{number}", number + 1
        told.append(fresh)
    return told


def unknown_column(name: str, sql: str, columns: Mapping[str, Sequence[str]]) -> UnknownNameError:
    """A column that no table of the query has; the nearest of those that they have are listed."""
    mentioned = [names for table, names in columns.items() if re.search(rf"\b{table}\b", sql)]
    known = {column for names in mentioned or columns.values() for column in names}
    return UnknownNameError("column", name, known, "query")


def quoted(text: str) -> str:
    """A text as a literal."""
    return "'" + text.replace("'", "''") + "'"


def first_line(error: Exception) -> str:
    """An error in one line."""
    return str(error).strip().split("\n", 1)[0].strip()
