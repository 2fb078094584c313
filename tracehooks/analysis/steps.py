"""Which steps, and under which names: the options that say what of two runs is compared."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tracehooks.analysis.window import Bools, Ints
from tracehooks.core.errors import InvalidOptionError, UnknownNameError, shown

Steps = int | range | slice | Iterable[int] | None
Rename = Mapping[str, str] | Sequence[str] | None


@dataclass(frozen=True)
class Chosen:
    """The steps from ``first`` to ``last``; with ``among`` (ascending) only those of them."""

    first: int
    last: int
    among: Ints | None = None

    def within(self, first: int, last: int) -> Chosen:
        """Those of them in a shorter stretch."""
        among = self.among
        if among is not None:
            among = among[(among >= first) & (among <= last)]
        return Chosen(max(first, self.first), min(last, self.last), among)

    def mask(self, steps: Ints) -> Bools:
        """Which of these steps are chosen."""
        if self.among is not None:
            return np.isin(steps, self.among)
        return (steps >= self.first) & (steps <= self.last)

    def overlaps(self, first: int, last: int) -> bool:
        """Whether any step from first to last is chosen."""
        if self.among is not None:
            return bool(np.searchsorted(self.among, first) < np.searchsorted(self.among, last, side="right"))
        return first <= self.last and last >= self.first

    def holds(self, first: int, last: int) -> bool:
        """Whether every step from first to last is chosen."""
        return self.among is None and self.first <= first and last <= self.last

    def sql(self) -> str:
        """As a condition on the column step."""
        if self.among is None:
            return f"step BETWEEN {self.first} AND {self.last}"
        return f"step IN ({', '.join(map(str, self.among.tolist()))})"


def chosen_steps(wanted: Steps, span: tuple[int, int], recorded: Callable[[int, int], Ints]) -> Chosen:
    """Those of the recorded steps that ``steps=`` asks for: one, a range, a slice of step numbers (``slice(10, 20)`` is
    10 … 19, negative ends count from the last step), or several.

    Args:
        span: the first and the last recorded step.
        recorded: gives the recorded steps from one to another, ascending.

    Raises:
        InvalidOptionError: a step by number that is not recorded, nothing that is, or not a choice of steps at all.
    """
    if wanted is None:
        return Chosen(*span)
    try:
        numbers = _numbers(wanted, span[1])
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidOptionError("steps", wanted, "a step, a range, a slice or a list of steps") from error
    there: Ints = np.empty(0, np.int64)
    if len(numbers):
        ends = numbers[[0, -1]] if isinstance(numbers, np.ndarray) else sorted((numbers[0], numbers[-1]))
        there = recorded(int(ends[0]), int(ends[1]))
    if isinstance(numbers, range):
        chosen, absent = there[[step in numbers for step in there.tolist()]], np.empty(0, np.int64)
    else:
        chosen, absent = there[np.isin(there, numbers)], np.setdiff1d(numbers, there)
    if len(absent) or not len(chosen):
        without = f", without {', '.join(map(str, absent.tolist()))}" if len(absent) else ""
        raise InvalidOptionError(
            "steps", _typed(wanted), f"recorded steps, which go from {span[0]} to {span[1]}{without}"
        )
    between = len(chosen) == ((there >= chosen[0]) & (there <= chosen[-1])).sum()
    return Chosen(int(chosen[0]), int(chosen[-1]), None if between else chosen)


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


def _numbers(wanted: int | range | slice | Iterable[int], last: int) -> range | Ints:
    if isinstance(wanted, slice):
        wanted = range(*wanted.indices(last + 1))
    if isinstance(wanted, range):
        return wanted
    if isinstance(wanted, str | bytes | bool):
        raise TypeError(wanted)
    if isinstance(wanted, int | np.integer):
        wanted = [int(wanted)]
    return np.unique(np.array([_whole(number) for number in wanted], np.int64))


def _typed(wanted: Steps) -> object:
    """A slice as people write it, ``first:end``; anything else as it is."""
    if not isinstance(wanted, slice):
        return wanted
    ends = [wanted.start, wanted.stop] if wanted.step is None else [wanted.start, wanted.stop, wanted.step]
    return ":".join("" if end is None else str(end) for end in ends)


def _whole(number: object) -> int:
    if isinstance(number, bool) or not isinstance(number, int | np.integer):
        raise TypeError(number)
    return int(number)


def _listed(rename: Sequence[str]) -> list[tuple[str, str]]:
    rules = list(rename) if isinstance(rename, list | tuple) else [rename]
    pairs = []
    for rule in rules:
        old, equals, new = rule.rpartition("=") if isinstance(rule, str) else ("", "", "")
        if not equals or not old:
            raise InvalidOptionError("rename", shown(rule), "'old=new', old being a regular expression on module paths")
        pairs.append((old, new))
    return pairs


def _rule(item: tuple[str, str]) -> tuple[re.Pattern[str], str]:
    try:
        return re.compile(item[0]), item[1]
    except (re.error, TypeError) as error:
        raise InvalidOptionError("rename", item[0], f"a regular expression ({error})") from error


def _try(renamed: Callable[[str], str], modules: Sequence[str], rename: object) -> None:
    try:
        for name in modules:
            renamed(name)
    except (re.error, IndexError) as error:
        raise InvalidOptionError("rename", rename, f"a replacement ({error})") from error
