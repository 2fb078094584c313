"""Two checkpoints compared: names that do not meet and why, how far each tensor moved, which layers moved most."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from tracehooks.checkpoint.measure import Apart, apart
from tracehooks.checkpoint.names import of_optimizer, prefix, why_missing, why_reshaped
from tracehooks.checkpoint.opened import Checkpoint, open_checkpoint
from tracehooks.checkpoint.stored import Kept

LISTED = 10
TRANSPOSABLE = 1 << 26
"""Elements up to which a changed matrix is also compared with its transpose, which needs it in memory."""


@dataclass(frozen=True)
class TensorChange:
    """One tensor that both have."""

    name: str
    """As in a, without the prefix."""
    shape: tuple[int, ...]
    dtypes: tuple[str, str]
    apart: Apart
    transposed: bool = False
    """Whether b is a with its two dimensions exchanged."""

    @property
    def equal(self) -> bool:
        """Equal values in one dtype."""
        return self.apart.equal and self.dtypes[0] == self.dtypes[1]

    def __str__(self) -> str:
        angle = self.apart.angle
        turned = "" if angle is None else f", {angle:.3g}° apart"
        dtypes = "" if self.dtypes[0] == self.dtypes[1] else f", {self.dtypes[0]} → {self.dtypes[1]}"
        nonfinite = f", {self.apart.nonfinite} finite on one side only" if self.apart.nonfinite else ""
        how = ": b is a transposed" if self.transposed else ""
        return f"{self.name}: relative change {self.apart.relative:.3g}{turned}{dtypes}{nonfinite}{how}"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        found = asdict(self)
        return {**found, **found.pop("apart"), "relative": self.apart.relative, "angle": self.apart.angle}


@dataclass(frozen=True)
class LayerChange:
    """A module with all its tensors."""

    name: str
    relative: float
    """√Σ‖a − b‖² / √Σ‖a‖² over its floating-point tensors."""


@dataclass(frozen=True)
class CheckpointDiff:
    """What two checkpoints do not share."""

    a: str
    b: str
    missing: tuple[str, ...]
    """Names that b lacks."""
    unexpected: tuple[str, ...]
    """Names that only b has."""
    reshaped: Mapping[str, tuple[tuple[int, ...], tuple[int, ...], str]]
    """Shapes in a and b, and the likeliest reason."""
    tensors: tuple[TensorChange, ...]
    """Both have them in one shape; the largest change first, an optimizer's state last."""
    layers: tuple[LayerChange, ...]
    """The largest change first; an optimizer's state is left out."""
    prefixes: tuple[str, str] = ("", "")
    """What was taken off the names of a and of b so that they meet."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """The likeliest reason, for ``missing`` and ``unexpected``."""
    values: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """Numbers and texts beside the tensors that differ; None where a side lacks one."""

    @property
    def identical(self) -> bool:
        """Whether both hold the same tensors under the same names, apart from a prefix."""
        return not (self.missing or self.unexpected or self.reshaped) and all(tensor.equal for tensor in self.tensors)

    def __str__(self) -> str:
        lines = [f"{self.a} and {self.b}: {'the same tensors' if self.identical else 'differ'}"]
        if any(self.prefixes):
            shown = [
                f"{text!r} before the names of {side}" for text, side in zip(self.prefixes, "ab", strict=True) if text
            ]
            lines.append(f"prefix: {' and '.join(shown)}")
        for title, names in (("missing in b", self.missing), ("only in b", self.unexpected)):
            why = self.reasons.get("missing" if names is self.missing else "unexpected")
            lines += _listed(f"{title} ({len(names)}){f', {why}' if why else ''}", list(names))
        lines += _listed(
            f"reshaped ({len(self.reshaped)})",
            [f"{name}: {list(a)} → {list(b)}: {why}" for name, (a, b, why) in self.reshaped.items()],
        )
        changed = [str(tensor) for tensor in self.tensors if not tensor.equal]
        lines += _listed(f"changed ({len(changed)} of {len(self.tensors)} that both have)", changed)
        moved = [f"{layer.name or '(root)'}: {layer.relative:.3g}" for layer in self.layers if layer.relative]
        lines += _listed("layers by relative change", moved)
        lines += _listed("beside the tensors", [f"{name}: {a} → {b}" for name, (a, b) in self.values.items()])
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            **{name: getattr(self, name) for name in ("a", "b", "identical", "prefixes")},
            "missing": list(self.missing),
            "unexpected": list(self.unexpected),
            "reasons": dict(self.reasons),
            "reshaped": {name: {"a": a, "b": b, "why": why} for name, (a, b, why) in self.reshaped.items()},
            "tensors": [tensor.to_json() for tensor in self.tensors],
            "layers": [asdict(layer) for layer in self.layers],
            "values": {name: list(pair) for name, pair in self.values.items()},
        }


def diff(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> CheckpointDiff:
    """Compare two checkpoints of any of the known formats; the two need not have the same.

    Raises:
        CheckpointError: one is not there, damaged, or in no known format.
    """
    left, right = open_checkpoint(a), open_checkpoint(b)
    before, after = prefix(left.tensors, right.tensors)
    names_a = {name.removeprefix(before): name for name in left.tensors}
    names_b = {name.removeprefix(after): name for name in right.tensors}
    shared = [name for name in names_a if name in names_b]
    pairs = {name: (left.tensors[names_a[name]], right.tensors[names_b[name]]) for name in shared}
    reshaped = {
        name: (x.shape, y.shape, why_reshaped(x.shape, y.shape)) for name, (x, y) in pairs.items() if x.shape != y.shape
    }
    changes = [_change(name, x, y) for name, (x, y) in pairs.items() if name not in reshaped]
    missing = [names_a[name] for name in names_a if name not in names_b]
    unexpected = [names_b[name] for name in names_b if name not in names_a]
    reasons = {
        "missing": why_missing(missing, left, right.tensors) or ("prefix" if missing and not shared else ""),
        "unexpected": why_missing(unexpected, right, left.tensors),
    }
    return CheckpointDiff(
        str(a),
        str(b),
        tuple(missing),
        tuple(unexpected),
        reshaped,
        tuple(sorted(changes, key=lambda change: (of_optimizer(change.name), -_size(change.apart)))),
        _layers(changes, pairs),
        (before, after),
        {side: why for side, why in reasons.items() if why},
        _other_values(left, right),
    )


def _change(name: str, x: Kept, y: Kept) -> TensorChange:
    found = apart(x, y)
    turned = len(x.shape) == 2 and x.shape[0] == x.shape[1] > 1 and found.relative > 0 and x.count <= TRANSPOSABLE
    return TensorChange(
        name, x.shape, (x.dtype, y.dtype), found, turned and bool(np.array_equal(x.read().T, y.read(), equal_nan=True))
    )


def _size(found: Apart) -> float:
    return float("inf") if found.nonfinite else found.relative


def _layers(changes: list[TensorChange], pairs: Mapping[str, tuple[Kept, Kept]]) -> tuple[LayerChange, ...]:
    sums: dict[str, list[float]] = {}
    for change in changes:
        floating = pairs[change.name][0].dtype.startswith(("float", "bfloat", "complex"))
        if floating and not of_optimizer(change.name):
            layer = sums.setdefault(change.name.rpartition(".")[0], [0.0, 0.0])
            layer[0] += change.apart.across
            layer[1] += change.apart.square
    found = [
        LayerChange(name, float(np.sqrt(across / square)) if square else (np.inf if across else 0.0))
        for name, (across, square) in sums.items()
    ]
    return tuple(sorted(found, key=lambda layer: -layer.relative))


def _other_values(a: Checkpoint, b: Checkpoint) -> dict[str, tuple[Any, Any]]:
    names = dict.fromkeys((*a.values, *b.values))
    pairs = {name: (a.values.get(name), b.values.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _listed(title: str, items: list[str]) -> list[str]:
    if not items:
        return []
    more = [f"  and {len(items) - LISTED} more"] if len(items) > LISTED else []
    return [f"{title}:", *(f"  {item}" for item in items[:LISTED]), *more]
