"""Modules that were renamed or moved: what only one run has, matched by type, shapes and order of execution."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any


@dataclass(frozen=True)
class Look:
    """A module by what can be seen of it whatever its name: class, and the shapes of its outputs and parameters."""

    path: str
    kind: tuple[Any, ...]


def guess(a: Sequence[Look], b: Sequence[Look]) -> dict[str, str]:
    """Paths of a's modules that b lacks, each with the path under which b has a module that looks alike.

    Both are in execution order, which the pairs keep: they are the longest runs of modules that look alike one after
    the other.
    """
    paths_a, paths_b = {look.path for look in a}, {look.path for look in b}
    only_a = [look for look in a if look.path not in paths_b]
    only_b = [look for look in b if look.path not in paths_a]
    matcher = SequenceMatcher(None, [look.kind for look in only_a], [look.kind for look in only_b], autojunk=False)
    return {
        only_a[block.a + offset].path: only_b[block.b + offset].path
        for block in matcher.get_matching_blocks()
        for offset in range(block.size)
    }


def in_words(guessed: Mapping[str, str]) -> list[str]:
    """The guesses, those that differ only in equal numbers told once: ``layers.*.fc → blocks.*.fc (12 modules)``."""
    groups: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for old, new in guessed.items():
        alike = re.findall(r"\d+", old) == re.findall(r"\d+", new)
        key = (re.sub(r"\d+", "*", old), re.sub(r"\d+", "*", new)) if alike else (old, new)
        groups.setdefault(key, []).append((old, new))
    told = []
    for patterns, pairs in groups.items():
        old, new = pairs[0] if len(pairs) == 1 else patterns
        told.append(f"{old} → {new}" + (f" ({len(pairs)} modules)" if len(pairs) > 1 else ""))
    return told
