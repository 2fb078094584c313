"""Why the names of two checkpoints do not meet: a prefix, another depth, a tied weight."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from tracehooks.checkpoint.opened import Checkpoint


def of_optimizer(name: str) -> bool:
    """Whether a tensor belongs to an optimizer's state, whose sizes follow the gradients'."""
    return ".state." in name or name.startswith("state.")


def prefix(a: Iterable[str], b: Iterable[str]) -> tuple[str, str]:
    """What stands before the names of a, and of b, and keeps them from meeting; two empty texts where nothing does.

    At least half of the shorter side's weights must meet once it is off, and more than meet with it. An optimizer's state is
    numbered, and meets whatever the weights are called.
    """
    names_a, names_b = ({name for name in names if not of_optimizer(name)} for names in (a, b))
    least = min(len(names_a), len(names_b)) / 2
    best, met = ("", ""), len(names_a & names_b)
    off_b = {text: {name.removeprefix(text) for name in names_b} for text in _leading(names_b, least)}
    for before in _leading(names_a, least):
        off_a = {name.removeprefix(before) for name in names_a}
        for after, others in off_b.items():
            meeting = len(off_a & others)
            if meeting > met and meeting >= least:
                best, met = (before, after), meeting
    return best


def _leading(names: Iterable[str], least: float) -> list[str]:
    """The texts up to a dot with which at least so many names begin, the shortest first."""
    found: Counter[str] = Counter()
    for name in names:
        parts = name.split(".")
        found.update(".".join(parts[:length]) + "." for length in range(1, min(len(parts), 5)))
    return ["", *sorted((text for text, count in found.items() if count >= least), key=lambda text: (len(text), text))]


def why_missing(names: list[str], present: Checkpoint, absent: Mapping[str, object]) -> str:
    """The likeliest reason that one side lacks ``names``, which the other, ``present``, has."""
    tied = {other for first, others in present.tied.items() for other in (first, *others)}
    partners = {name: _partner(name, present, absent) for name in names if name in tied}
    if names and all(partners.get(name) for name in names):
        return f"tied: {names[0]} is the same tensor as {partners[names[0]]}, which both have"
    deeper = _depths(names)
    shared = _depths(absent)
    for stem, numbers in deeper.items():
        there = shared.get(stem)
        if there and min(numbers) > max(there):
            return f"depth: {stem}{min(numbers)} to {stem}{max(numbers)}; the other side ends at {stem}{max(there)}"
    return ""


def _partner(name: str, present: Checkpoint, absent: Mapping[str, object]) -> str:
    for first, others in present.tied.items():
        group = (first, *others)
        if name in group:
            return next((other for other in group if other in absent), "")
    return ""


def _depths(names: Iterable[str]) -> dict[str, set[int]]:
    """The numbers of repeated parts, by what stands before them: ``blocks.11.fc.weight`` → ``{"blocks.": {11}}``."""
    found: dict[str, set[int]] = {}
    for name in names:
        numbered = re.match(r"(.*?\.?)(\d+)\.", name)
        if numbered:
            found.setdefault(numbered.group(1), set()).add(int(numbered.group(2)))
    return found


def why_reshaped(a: tuple[int, ...], b: tuple[int, ...]) -> str:
    """The likeliest reason that one tensor has two shapes."""
    if len(a) == len(b) == 2 and a == b[::-1]:
        return "transposed"
    if len(a) == len(b) and a[1:] == b[1:]:
        return "another number of rows (vocabulary, classes, positions)"
    if _product(a) == _product(b):
        return "the same elements in another shape"
    return "another width" if len(a) == len(b) else "another number of dimensions"


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
