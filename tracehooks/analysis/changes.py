"""What two run.json say differently: packages, flags, commit, hyper-parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

COMPARED = ("git", "packages", "devices", "world_size", "flags", "optimizers", "config", "format_version", "model")
"""Fields that say how a run came to its numbers, the shortest first; names, times and process ids differ in any two runs."""


@dataclass(frozen=True)
class Change:
    """One field of run.json, by its dotted name, that the two runs do not share; None where a side lacks it."""

    field: str
    a: Any
    b: Any

    def __str__(self) -> str:
        return f"{self.field}: {_short(self.a)} → {_short(self.b)}"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[Change, ...]:
    """The differences of two run.json, in the order of `COMPARED`. A module, parameter or optimizer that one side alone has
    is one difference."""
    left = {leaf.path: leaf for name in COMPARED for leaf in _leaves(name, a.get(name))}
    right = {leaf.path: leaf for name in COMPARED for leaf in _leaves(name, b.get(name))}
    leaves = {**right, **left}
    found = []
    for path in sorted(leaves, key=lambda path: (COMPARED.index(path.split(".")[0]), path)):
        here, there = left.get(path), right.get(path)
        if here and there:
            differ = here.value != there.value and not here.whole
        else:
            item = leaves[path].item
            differ = (item in left) == (item in right)  # else the item as a whole is told
        if differ:
            found.append(Change(path, here and here.value, there and there.value))
    return tuple(found)


class _Leaf(NamedTuple):
    path: str
    value: Any
    item: str | None = None
    """The item of a list that it belongs to."""
    whole: bool = False
    """Whether it stands for an item as a whole."""


def _leaves(path: str, value: Any, item: str | None = None) -> Iterator[_Leaf]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(f"{path}.{name}", inner, item)
    elif isinstance(value, list) and any(isinstance(inner, Mapping) for inner in value):
        for number, inner in enumerate(value):
            place = f"{path}.{_label(inner, number)}"
            yield _Leaf(place, _summary(inner), item, whole=True)
            yield from _leaves(place, inner, place)
    elif value is not None and value != []:
        yield _Leaf(path, value, item)


def _summary(item: Any) -> str:
    """An item in a word: what is in it is compared by itself."""
    named = item if isinstance(item, Mapping) else {}
    return str(next((named[name] for name in ("type", "class", "shape") if name in named), item))


def _label(item: Any, number: int) -> str:
    """A module's path or a parameter's name, which stay when others are added before it, else the number."""
    named = item if isinstance(item, Mapping) else {}
    return str(named.get("name") or named.get("path") or number)


def _short(value: Any) -> str:
    text = "absent" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "…"
