"""Golden batches: a small saved set of examples, what a healthy version makes of it, and whether another does the same.

A golden batch is a directory: ``golden.json`` (how the batch is put together, and metadata), ``batch.safetensors`` (its
tensors) and, once recorded, ``expected/``, a run. Nothing in it is a pickle.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tracehooks.analysis.diff import Diff, diff
from tracehooks.analysis.steps import Rename
from tracehooks.core import arguments
from tracehooks.core.errors import GoldenError, InvalidOptionError
from tracehooks.experiments.recording import LossFn, record_step
from tracehooks.storage import open_run

PathLike = str | os.PathLike[str]
DESCRIPTION, TENSORS, EXPECTED = "golden.json", "batch.safetensors", "expected"
VERSION = 1


@dataclass(frozen=True)
class Golden:
    """A golden batch as it was saved."""

    path: Path
    batch: Any
    metadata: Mapping[str, Any] = field(default_factory=dict)
    expected: Path | None = None
    """The run that says what a healthy version makes of it; None before one was recorded."""


def save(
    path: PathLike, batch: Any, expected: PathLike | None = None, *, metadata: Mapping[str, Any] | None = None
) -> Path:
    """Save a batch: tensors, NumPy arrays, numbers, texts, None, in nested mappings, lists and tuples.

    Args:
        path: a directory that holds no golden batch yet.
        expected: a run that a healthy version made of this batch; it is copied. `record` makes one.
        metadata: what else is to be known, such as crop bounds, a sample rate or a caption: anything JSON takes.

    Raises:
        GoldenError: the directory holds a golden batch already.
        InvalidOptionError: something in the batch or the metadata that cannot be saved; where it is, is said.
    """
    folder = _folder(path)
    if (folder / DESCRIPTION).exists():
        raise GoldenError(folder, "holds a golden batch already; choose another directory, or delete it")
    tensors: dict[str, Tensor] = {}
    tree = _packed(batch, "batch", tensors)
    try:
        described = json.dumps({"version": VERSION, "batch": tree, "metadata": dict(metadata or {})}, indent=1)
    except (TypeError, ValueError) as error:
        raise InvalidOptionError("metadata", metadata, f"what JSON takes ({error})") from error
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / TENSORS)
    if expected is not None:
        shutil.copytree(open_run(expected).path or expected, folder / EXPECTED)
    (folder / DESCRIPTION).write_text(described + "\n")
    return folder


def load(path: PathLike) -> Golden:
    """Read a golden batch.

    Raises:
        GoldenError: there is none, or it is damaged.
    """
    folder = _folder(path)
    try:
        described = json.loads((folder / DESCRIPTION).read_text())
        if described["version"] > VERSION:
            raise GoldenError(folder, f"format version {described['version']}, this tracehooks reads up to {VERSION}")
        tensors = load_file(folder / TENSORS)
        batch = _unpacked(described["batch"], tensors)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        if isinstance(error, GoldenError):
            raise
        raise GoldenError(folder, f"cannot be read ({type(error).__name__}: {error})") from error
    expected = folder / EXPECTED
    return Golden(folder, batch, described.get("metadata", {}), expected if expected.exists() else None)


def record(
    path: PathLike,
    out: PathLike | None,
    model: nn.Module,
    loss_fn: LossFn,
    *,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
) -> Path:
    """Record what a model makes of a golden batch: every intermediate value's statistics and sketch, gradients, loss.

    Args:
        out: the run directory; None for the batch's own ``expected``.
        loss_fn: (model, batch) → the loss.
        seed: of every generator, so that dropout is the same each time.
        options: of the recording, as attach() takes them.

    Raises:
        GoldenError: there is no such batch.
        RunExistsError: ``out`` holds a run.
    """
    golden = load(path)
    if out is not None:
        arguments.path("out", out, "the path of a run directory, or None")
    run = golden.path / EXPECTED if out is None else Path(out)
    notes = (f"golden batch {golden.path.name}, seed {seed}",)
    return record_step(model, loss_fn, golden.batch, run, seed=seed, notes=notes, options=options)


def check(
    path: PathLike,
    model: nn.Module,
    loss_fn: LossFn,
    against: PathLike | None = None,
    *,
    seed: int = 0,
    tolerance: float | str = "auto",
    rename: Rename = None,
) -> Diff:
    """Compare what a model makes of a golden batch with what was recorded: ``against``, or else the batch's ``expected``.

    Raises:
        GoldenError: there is no such batch, or nothing to compare with.
    """
    golden = load(path)
    if against is not None:
        arguments.path("against", against, "the path of a run, or None")
    reference = golden.expected if against is None else Path(against)
    if reference is None:
        raise GoldenError(golden.path, "nothing was recorded of it yet; record() a healthy version first")
    options = {name: open_run(reference).info["config"][name] for name in ("record", "sketch", "hash")}
    with tempfile.TemporaryDirectory() as folder:
        run = record(path, Path(folder) / "checked", model, loss_fn, seed=seed, options=options)
        return diff(open_run(reference), open_run(run), tolerance=tolerance, rename=rename)


def _folder(path: PathLike) -> Path:
    arguments.path("path", path, "the path of a golden batch's directory")
    return Path(path)


def _packed(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """As JSON; tensors and arrays are put aside by name."""
    if isinstance(value, Tensor | np.ndarray):
        kind = "tensor" if isinstance(value, Tensor) else "array"
        tensors[where] = torch.as_tensor(value).detach().cpu().contiguous().clone()
        return {f"${kind}": where}
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_packed(item, f"{where}.{number}", tensors) for number, item in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": _packed(list(value), where, tensors)}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"$dict": {key: _packed(item, f"{where}.{key}", tensors) for key, item in value.items()}}
    raise InvalidOptionError(
        where, type(value).__name__, "tensors, arrays, numbers, texts, None, lists, tuples, mappings"
    )


def _unpacked(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpacked(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    if kind == "$tensor":
        return tensors[held]
    if kind == "$array":
        return tensors[held].numpy()
    if kind == "$float":
        return float(held)
    if kind == "$tuple":
        return tuple(_unpacked(held, tensors))
    return {key: _unpacked(item, tensors) for key, item in held.items()}
