"""What a checkpoint holds, tensor by tensor, what looks wrong first."""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tracehooks.checkpoint.measure import Measured, measure
from tracehooks.checkpoint.names import of_optimizer
from tracehooks.checkpoint.opened import Checkpoint, open_checkpoint
from tracehooks.checkpoint.stored import Kept
from tracehooks.core.records import Severity

LARGEST_HALF = 65504.0
"""The largest float16."""

OUTLIER = 30.0
"""A tensor whose rms is this many times its siblings' median, or this small a part of it, is told."""

SIBLINGS = 4
"""Tensors of one name but for its numbers, from which on one can stand out among them."""

_ORDER: Mapping[Severity, int] = {"error": 0, "warning": 1, "info": 2}


@dataclass(frozen=True)
class Concern:
    """Something about a tensor that looks wrong."""

    severity: Severity
    text: str


@dataclass(frozen=True)
class TensorReport:
    """One tensor of a checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    measured: Measured
    tied: tuple[str, ...] = ()
    """Other names of the same tensor."""
    concerns: tuple[Concern, ...] = ()

    @property
    def severity(self) -> Severity | None:
        """Of the worst concern; None when there is none."""
        return min((item.severity for item in self.concerns), key=_ORDER.__getitem__, default=None)

    def to_json(self) -> dict[str, Any]:
        """Plain values, the measurements beside the rest."""
        found = asdict(self)
        return {**found, **found.pop("measured"), "concerns": [item.text for item in self.concerns]}


@dataclass(frozen=True)
class Inspection:
    """A checkpoint at a glance."""

    path: str
    format: str
    tensors: tuple[TensorReport, ...]
    """What looks wrong first, then in the order of the file."""
    values: Mapping[str, Any]
    """Numbers and texts beside the tensors."""
    unknown: tuple[str, ...]
    """Classes in the file that were not run and not understood."""

    @property
    def suspects(self) -> tuple[TensorReport, ...]:
        """The tensors about which there is a concern."""
        return tuple(tensor for tensor in self.tensors if tensor.concerns)

    @property
    def healthy(self) -> bool:
        """Whether no concern is an error."""
        return not any(tensor.severity == "error" for tensor in self.tensors)

    def __str__(self) -> str:
        elements = sum(tensor.measured.count for tensor in self.tensors)
        lines = [f"{self.path}: {self.format}, {len(self.tensors)} tensors, {elements:,} elements"]
        lines += [
            f"  {tensor.severity}: {tensor.name}: {item.text}" for tensor in self.suspects for item in tensor.concerns
        ]
        if not self.suspects:
            lines.append("  nothing looks wrong")
        if self.unknown:
            lines.append(f"  left alone: {', '.join(self.unknown)}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "path": self.path,
            "format": self.format,
            "healthy": self.healthy,
            "tensors": [tensor.to_json() for tensor in self.tensors],
            "values": dict(self.values),
            "unknown": list(self.unknown),
        }


def inspect(path: str | os.PathLike[str]) -> Inspection:
    """Measure every tensor of a checkpoint, one stretch at a time, without running anything that is in it.

    Raises:
        CheckpointError: it is not there, damaged, or in no known format.
    """
    checkpoint = open_checkpoint(path)
    measured = {name: measure(tensor) for name, tensor in checkpoint.tensors.items()}
    reports = list(_reports(checkpoint, measured))
    reports.sort(key=lambda report: _ORDER[report.severity] if report.severity else len(_ORDER))
    return Inspection(str(path), checkpoint.format, tuple(reports), checkpoint.values, checkpoint.unknown)


def _reports(checkpoint: Checkpoint, measured: Mapping[str, Measured]) -> Iterable[TensorReport]:
    shared = {name: names for first, others in checkpoint.tied.items() for name, names in _each(first, others)}
    families = _families(checkpoint, measured)
    for name, tensor in checkpoint.tensors.items():
        found = [*_own_concerns(name, tensor.dtype, tensor.shape, measured[name])]
        found += _among(measured[name], families.get(_family(name, tensor), ()))
        yield TensorReport(name, tensor.dtype, tensor.shape, measured[name], shared.get(name, ()), tuple(found))


def _each(first: str, others: Sequence[str]) -> Iterable[tuple[str, tuple[str, ...]]]:
    names = (first, *others)
    return [(name, tuple(other for other in names if other != name)) for name in names]


def _own_concerns(name: str, dtype: str, shape: tuple[int, ...], seen: Measured) -> Iterable[Concern]:
    nonfinite = {"NaN": seen.nan, "+inf": seen.posinf, "-inf": seen.neginf}
    told = ", ".join(f"{number} {kind}" for kind, number in nonfinite.items() if number)
    mask = not seen.nan and not seen.posinf and seen.neginf and not seen.absmax  # zeros and -inf: an additive mask
    if told and not mask:
        yield Concern("error", f"{told} of {seen.count} elements")
    if name.endswith("running_var") and seen.min is not None and seen.min < 0:
        yield Concern("error", f"a variance of {seen.min:.4g}")
    if seen.absmax is None or seen.count < 2 or not dtype.startswith(("float", "bfloat")):
        return  # counters and masks may be of any size
    if dtype == "float16" and seen.absmax == LARGEST_HALF:
        yield Concern("warning", "reaches the largest float16, 65504")
    elif dtype != "float16" and seen.absmax > LARGEST_HALF:
        yield Concern("warning", f"absmax {seen.absmax:.4g} overflows in float16, which ends at 65504")
    if len(shape) > 1 and seen.constant and name.endswith("weight"):
        yield Concern("info", f"every element is {seen.min:.4g}")


Family = tuple[str, tuple[int, ...]]
"""A name but for its numbers, and a shape."""


def _family(name: str, tensor: Kept) -> Family:
    return re.sub(r"\d+", "*", name), tensor.shape


def _families(checkpoint: Checkpoint, measured: Mapping[str, Measured]) -> dict[Family, list[float]]:
    """The rms of weights of one family; an optimizer's state is left out."""
    families: dict[Family, list[float]] = {}
    for name, tensor in checkpoint.tensors.items():
        rms = measured[name].rms
        if rms and len(tensor.shape) > 1 and tensor.dtype.startswith(("float", "bfloat")) and not of_optimizer(name):
            families.setdefault(_family(name, tensor), []).append(rms)
    return {family: sizes for family, sizes in families.items() if len(sizes) >= SIBLINGS}


def _among(seen: Measured, siblings: Sequence[float]) -> Iterable[Concern]:
    if not siblings or not seen.rms:
        return
    median = statistics.median(siblings)
    ratio = seen.rms / median
    if ratio > OUTLIER or ratio < 1 / OUTLIER:
        yield Concern(
            "warning",
            f"rms {seen.rms:.4g}, {ratio:.3g} times the median of its {len(siblings)} siblings ({median:.4g})",
        )
