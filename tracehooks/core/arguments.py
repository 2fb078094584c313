"""What is wrong with an argument that somebody gave, said where it was given."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from numbers import Integral, Real

from tracehooks.core.errors import InvalidOptionError, shown


def whole(name: str, value: object, expected: str, least: int, most: float = math.inf) -> None:
    """A whole number from ``least`` to ``most``; a bool is none.

    Raises:
        InvalidOptionError: it is something else.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or not least <= int(value) <= most:
        raise InvalidOptionError(name, shown(value), expected)


def number(name: str, value: object, expected: str, fits: Callable[[float], bool] = math.isfinite) -> None:
    """A real number that ``fits``; a bool is none.

    Raises:
        InvalidOptionError: it is something else.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not fits(float(value)):
        raise InvalidOptionError(name, shown(value), expected)


def function(name: str, value: object, takes: str) -> None:
    """Something that can be called.

    Raises:
        InvalidOptionError: it is something else.
    """
    if not callable(value):
        raise InvalidOptionError(name, shown(value), f"a function: {takes}")


def path(name: str, value: object, expected: str) -> None:
    """A path, as a text or a path object.

    Raises:
        InvalidOptionError: it is something else.
    """
    if not isinstance(value, str | os.PathLike):
        raise InvalidOptionError(name, shown(value), expected)
