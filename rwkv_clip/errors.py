"""The errors a user can cause and mend: every message says what was seen, what was expected and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["InputError", "nearest"]


class InputError(ValueError):
    """Something given from outside (a file, a name, a flag) does not fit. The command line ends with status 2."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest known name, or the list of all when none is close."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(names)}"
