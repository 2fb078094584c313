"""What two run.json say differently: packages, flags, commit, hyper-parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

COMPARED = ("git", "packages", "devices", "world_size", "model", "flags", "optimizers", "config", "format_version")
"""Fields that say how a run came to its numbers; names, times and process ids differ in any two runs."""


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
    """The differences of two run.json, in the order of `COMPARED`."""
    left = {path: value for name in COMPARED for path, value in _leaves(name, a.get(name))}
    right = {path: value for name in COMPARED for path, value in _leaves(name, b.get(name))}
    paths = sorted({*left, *right}, key=lambda path: (COMPARED.index(path.split(".")[0]), path))
    return tuple(Change(path, left.get(path), right.get(path)) for path in paths if left.get(path) != right.get(path))


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(f"{path}.{name}", inner)
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for number, inner in enumerate(value):
            yield from _leaves(f"{path}.{_label(inner, number)}", inner)
    elif value is not None:
        yield path, value


def _label(item: Any, number: int) -> str:
    """A module's path or a parameter's name, which stay when others are added before it, else the number."""
    named = item if isinstance(item, Mapping) else {}
    return str(named.get("name") or named.get("path") or number)


def _short(value: Any) -> str:
    text = "absent" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "…"
