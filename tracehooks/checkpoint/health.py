"""Whether a checkpoint is whole and healthy, and which of several is the first that is not."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from tracehooks.checkpoint.inspection import Inspection, inspect
from tracehooks.checkpoint.names import of_optimizer
from tracehooks.checkpoint.opened import Checkpoint, open_checkpoint
from tracehooks.checkpoint.stored import Stored
from tracehooks.core import arguments
from tracehooks.core.errors import CheckpointError, InvalidOptionError, shown

GREW = 100.0
"""A weight whose rms is this many times what it was in the first checkpoint has exploded."""

PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class Verification:
    """What is wrong with a checkpoint; nothing when it is whole and its numbers are healthy."""

    path: str
    tensors: int
    damage: tuple[str, ...]
    """What cannot be read, or is not what the file says."""
    unhealthy: tuple[str, ...]
    """Tensors with numbers that no healthy checkpoint has."""

    @property
    def fine(self) -> bool:
        """Whether nothing was found."""
        return not (self.damage or self.unhealthy)

    def __str__(self) -> str:
        if self.fine:
            return f"{self.path}: whole and healthy, {self.tensors} tensors read"
        found = [*(f"  damage: {text}" for text in self.damage), *(f"  unhealthy: {text}" for text in self.unhealthy)]
        return "\n".join([f"{self.path}: not fine", *found])

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "fine": self.fine}


def verify(path: PathLike) -> Verification:
    """Read every byte of a checkpoint: checksums of archives, ends of files, overlapping or missing pieces, and numbers.

    A checkpoint that cannot be opened at all is damage too, and no exception.
    """
    try:
        checkpoint = open_checkpoint(path)
    except CheckpointError as error:
        return Verification(str(path), 0, (str(error),), ())
    damage = [*_archives(checkpoint), *_overlaps(checkpoint)]
    try:
        seen = inspect(path)
    except CheckpointError as error:
        return Verification(str(path), len(checkpoint.tensors), (*damage, str(error)), ())
    return Verification(str(path), len(checkpoint.tensors), tuple(damage), _unhealthy(seen))


def _unhealthy(seen: Inspection) -> tuple[str, ...]:
    return tuple(
        f"{tensor.name}: {item.text}"
        for tensor in seen.suspects
        for item in tensor.concerns
        if item.severity == "error"
    )


def _files(checkpoint: Checkpoint) -> list[Path]:
    """The files that hold tensors."""
    stored = [kept for kept in checkpoint.tensors.values() if isinstance(kept, Stored)]
    return sorted({kept.region.path for kept in stored})


def _archives(checkpoint: Checkpoint) -> Iterator[str]:
    """Entries of zip archives that do not have the checksum that the archive says."""
    if checkpoint.format != "torch":
        return
    for path in _files(checkpoint):
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                try:
                    broken = archive.testzip()
                except (zipfile.BadZipFile, EOFError, OSError) as error:
                    yield f"{path}: {error}"
                    continue
            if broken is not None:
                yield f"{path}: {broken} does not have its checksum"


def _overlaps(checkpoint: Checkpoint) -> Iterator[str]:
    """Tensors of a safetensors file that share bytes or leave a gap, which the format forbids."""
    if checkpoint.format != "safetensors":
        return
    for path in _files(checkpoint):
        regions = sorted(
            (kept.region.start, kept.region.length, name)
            for name, kept in checkpoint.tensors.items()
            if isinstance(kept, Stored) and kept.region.path == path and kept.region.length
        )
        for (start, length, name), (after, _, other) in pairwise(regions):
            if start + length != after:
                yield f"{path}: {name} ends at byte {start + length}, {other} begins at {after}"
        if regions and regions[-1][0] + regions[-1][1] != path.stat().st_size:
            yield f"{path}: tensors end at byte {regions[-1][0] + regions[-1][1]}, the file at {path.stat().st_size}"


@dataclass(frozen=True)
class FirstBad:
    """The first unhealthy one of several checkpoints, found by halving."""

    path: str | None
    """None when the last one is healthy."""
    before: str | None
    """The last healthy one before it."""
    why: str
    tested: tuple[tuple[str, bool], ...]
    """Each checkpoint that was tested, in that order, and whether it is healthy."""

    def __str__(self) -> str:
        tested = f"{len(self.tested)} checkpoint{'' if len(self.tested) == 1 else 's'} tested"
        if self.path is None:
            return f"the last checkpoint is healthy ({tested})"
        before = f"; {self.before} is healthy" if self.before else "; none before it is healthy"
        return f"first bad: {self.path}: {self.why}{before} ({tested})"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def first_bad(paths: Iterable[PathLike], test: Callable[[Path], str] | None = None) -> FirstBad:
    """The first unhealthy checkpoint, by binary search: what is unhealthy is taken to stay so.

    Args:
        paths: in the order in which they were written.
        test: what is wrong with a checkpoint, nothing when it is healthy. By default its weights are looked at: what
            `verify` finds, and weights that have grown beyond 100 times their size in the first checkpoint.

    Raises:
        InvalidOptionError: no paths, or one path where a list of them is wanted.
    """
    if isinstance(paths, str | os.PathLike) or not isinstance(paths, Iterable):
        raise InvalidOptionError(
            "paths", shown(paths), "a list of checkpoints, in the order in which they were written"
        )
    paths = list(paths)
    if not paths:
        raise InvalidOptionError("paths", paths, "at least one checkpoint")
    for path in paths:
        arguments.path("paths", path, "paths of checkpoints")
    if test is not None:
        arguments.function("test", test, "the path of a checkpoint → what is wrong with it, nothing when it is healthy")
    chosen = [Path(path) for path in paths]
    ask = test or _by_weights(chosen[0])
    answers: dict[int, str] = {}

    def wrong(position: int) -> str:
        if position not in answers:
            answers[position] = ask(chosen[position])
        return answers[position]

    if not wrong(len(chosen) - 1):
        return FirstBad(None, str(chosen[-1]), "", _told(chosen, answers))
    low, high = -1, len(chosen) - 1  # low is healthy (or before the first), high is not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if wrong(middle) else (middle, high)
    before = str(chosen[low]) if low >= 0 else None
    return FirstBad(str(chosen[high]), before, answers[high], _told(chosen, answers))


def _told(paths: Sequence[Path], answers: dict[int, str]) -> tuple[tuple[str, bool], ...]:
    return tuple((str(paths[position]), not why) for position, why in answers.items())


def _by_weights(first: Path) -> Callable[[Path], str]:
    """What is wrong with a checkpoint's weights, measured beside those of the first."""
    sizes: dict[str, float] = {}

    def wrong(path: Path) -> str:
        found = verify(path)
        if not found.fine:
            return "; ".join((*found.damage, *found.unhealthy))
        if not sizes and path != first:
            sizes.update(_sizes(first))
        grown = [
            f"{name}: rms {rms:.4g}, {rms / sizes[name]:.3g} times that of the first checkpoint"
            for name, rms in _sizes(path).items()
            if rms > GREW * sizes.get(name, float("inf"))
        ]
        return "; ".join(grown)

    return wrong


def _sizes(path: Path) -> dict[str, float]:
    """The rms of the floating-point matrices of a checkpoint, outside the optimizer's state."""
    try:
        tensors = inspect(path).tensors
    except CheckpointError:
        return {}
    return {
        tensor.name: tensor.measured.rms
        for tensor in tensors
        if tensor.measured.rms and len(tensor.shape) > 1 and not of_optimizer(tensor.name)
    }
