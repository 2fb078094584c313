"""Which steps, and under which names: the options that say what of two runs is compared."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import pyarrow.dataset as pa_dataset

from tracehooks.analysis.window import Ints
from tracehooks.core.errors import InvalidOptionError, UnknownNameError

Steps = int | range | slice | Iterable[int] | None
Rename = Mapping[str, str] | Sequence[str] | None


def chosen_steps(recorded: Ints, wanted: Steps) -> Ints:
    """Those of the recorded steps (ascending) that ``steps=`` asks for: one, a range, a slice of step numbers
    (``slice(10, 20)`` is 10 … 19, negative ends count from the last step), or several.

    Raises:
        InvalidOptionError: a step by number that is not recorded, nothing that is, or not a choice of steps at all.
    """
    if wanted is None or not len(recorded):
        return recorded
    try:
        numbers = _numbers(wanted, recorded)
        chosen = recorded[np.isin(recorded, numbers)]
    except (TypeError, ValueError) as error:
        raise InvalidOptionError("steps", wanted, "a step, a range, a slice or a list of steps") from error
    absent = np.setdiff1d(numbers, recorded)
    if len(absent) or not len(chosen):
        without = f", without {', '.join(map(str, absent.tolist()))}" if len(absent) else ""
        raise InvalidOptionError(
            "steps", wanted, f"recorded steps, which go from {recorded[0]} to {recorded[-1]}{without}"
        )
    return chosen


def condition(window: Ints, recorded: Ints) -> pa_dataset.Expression | None:
    """The filter that reads the steps of a window; None where it is all that is recorded."""
    if len(window) == len(recorded):
        return None
    step = pa_dataset.field("step")
    between = recorded[(recorded >= window[0]) & (recorded <= window[-1])]
    if len(between) == len(window):
        return (step >= int(window[0])) & (step <= int(window[-1]))
    return step.isin(window.tolist())


def renaming(rename: Rename, modules: Sequence[str]) -> Callable[[str], str] | None:
    """The function that a mapping or a list of ``old=new`` regular expressions makes on module paths, in order.

    Raises:
        InvalidOptionError: not of that form, or not a regular expression.
        UnknownNameError: an expression that matches none of the modules; the nearest are listed.
    """
    if not rename:
        return None
    rules = [_rule(item) for item in (rename.items() if isinstance(rename, Mapping) else _listed(rename))]
    for pattern, _ in rules:
        if not any(pattern.search(name) for name in modules):
            raise UnknownNameError("module pattern", pattern.pattern, modules, "option rename")

    def renamed(name: str) -> str:
        for pattern, replacement in rules:
            name = pattern.sub(replacement, name)
        return name

    _try(renamed, modules, rename)
    return renamed


def _numbers(wanted: int | range | slice | Iterable[int], recorded: Ints) -> Ints:
    if isinstance(wanted, slice):
        wanted = range(*wanted.indices(int(recorded[-1]) + 1))
    if isinstance(wanted, range):
        return recorded[[step in wanted for step in recorded.tolist()]]
    if isinstance(wanted, str | bytes | bool):
        raise TypeError(wanted)
    if isinstance(wanted, int | np.integer):
        wanted = [int(wanted)]
    return np.array([_whole(number) for number in wanted], np.int64)


def _whole(number: object) -> int:
    if isinstance(number, bool) or not isinstance(number, int | np.integer):
        raise TypeError(number)
    return int(number)


def _listed(rename: Sequence[str]) -> list[tuple[str, str]]:
    rules = [rename] if isinstance(rename, str) else list(rename)
    pairs = []
    for rule in rules:
        old, equals, new = rule.rpartition("=")
        if not equals or not old:
            raise InvalidOptionError("rename", rule, "'old=new', old being a regular expression on module paths")
        pairs.append((old, new))
    return pairs


def _rule(item: tuple[str, str]) -> tuple[re.Pattern[str], str]:
    try:
        return re.compile(item[0]), item[1]
    except re.error as error:
        raise InvalidOptionError("rename", item[0], f"a regular expression ({error})") from error


def _try(renamed: Callable[[str], str], modules: Sequence[str], rename: object) -> None:
    try:
        for name in modules:
            renamed(name)
    except (re.error, IndexError) as error:
        raise InvalidOptionError("rename", rename, f"a replacement ({error})") from error
