"""Checkpoints: written so that a crash never leaves half a file, read so that a misfit says what to change."""

from __future__ import annotations

import os
import pickle
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from torch import Tensor, nn

from rwkv_clip.errors import InputError

__all__ = ["checkpoint_path", "load_model_weight", "read_file", "save_atomically", "unwrap_model", "write_atomically"]

Model = TypeVar("Model", bound=nn.Module)
WRAPPER_PREFIXES = ("module.", "_orig_mod.")
SHOWN = 4


def checkpoint_path(output: str | Path, epoch: int | str) -> Path:
    """Return where the model state of an epoch (counted from 0) lies: ``<output>/RWKV_CLIP_model_<epoch>.pt``."""
    return Path(output) / f"RWKV_CLIP_model_{epoch}.pt"


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the model inside DistributedDataParallel (``.module``) and torch.compile (``._orig_mod``) wrappers."""
    children = dict(model.named_children())
    inner = next((children[prefix[:-1]] for prefix in WRAPPER_PREFIXES if prefix[:-1] in children), None)
    return model if inner is None else unwrap_model(inner)


def save_atomically(value: object, path: Path) -> None:
    """``torch.save``, but all of it or nothing."""
    write_atomically(path, lambda file: torch.save(value, file))


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, flush it to disk, then rename it: all of it or nothing."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    part = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        part.chmod(0o666 & ~_umask())
        part.replace(path)
    except BaseException:  # an interrupt, too, must not leave half a file behind
        part.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync_directory(directory: Path) -> None:
    """Make the rename itself durable, where the system lets a directory be opened."""
    if os.name == "posix":
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def load_model_weight(model: Model, path: str | Path) -> Model:
    """Load a checkpoint's state dict into ``model``, on whatever device and dtype the model has, and return it.

    ``module.`` and ``_orig_mod.`` are stripped from the front of the keys; values are converted to each parameter's
    dtype (published text towers store ``time_decay`` and ``time_faaaa`` in bfloat16).

    Raises:
        InputError: when the file cannot be read, holds no state dict, or does not fit the model: the message names
            missing, unexpected and reshaped keys and the likeliest cause.
    """
    state = {_strip(name): value for name, value in _read(Path(path)).items()}
    target = unwrap_model(model)
    problem = _misfit(state, target.state_dict())
    if problem:
        raise InputError(f"checkpoint {path} does not fit the model.\n{problem}")
    target.load_state_dict(state)
    return model


def _read(path: Path) -> dict[str, Tensor]:
    state = read_file(path)
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise InputError(f"checkpoint {path} holds no state dict of tensors, but {_describe(state)}")
    return state


def read_file(path: Path) -> Any:
    """Read what :func:`save_atomically` wrote: tensors and plain values, on the CPU; no code from the file is run.

    Raises:
        InputError: when there is no such file, or it is cut short or of another kind.
    """
    if not path.is_file():
        raise InputError(f"no checkpoint {path}: no such file")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, OSError, KeyError, ValueError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise InputError(
            f"checkpoint {path} cannot be read, it may be cut short or of another kind: {reason}"
        ) from error


def _describe(value: object) -> str:
    if isinstance(value, dict):
        return f"a dict with the keys {', '.join(map(str, list(value)[:SHOWN]))}"
    return f"a {type(value).__name__}"


def _strip(name: str) -> str:
    while True:
        bare = name
        for prefix in WRAPPER_PREFIXES:
            bare = bare.removeprefix(prefix)
        if bare == name:
            return name
        name = bare


def _misfit(state: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str:
    """Describe how ``state`` differs from ``wanted`` in keys and shapes; empty when it does not."""
    missing = [name for name in wanted if name not in state]
    unexpected = [name for name in state if name not in wanted]
    reshaped = [
        f"{name} {tuple(state[name].shape)} instead of {tuple(wanted[name].shape)}"
        for name in wanted
        if name in state and state[name].shape != wanted[name].shape
    ]
    found = (("missing", missing), ("unexpected", unexpected), ("of another shape", reshaped))
    lines = [f"  {len(names)} {what}: {_some(names)}" for what, names in found if names]
    return "\n".join([*lines, f"  likeliest cause: {_likeliest_cause(state, wanted)}"]) if lines else ""


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")


def _depth(state: Mapping[str, Tensor], stack: str) -> int:
    indices = (re.match(rf"{re.escape(stack)}\.(\d+)\.", name) for name in state)
    return 1 + max((int(found[1]) for found in indices if found), default=-1)


def _likeliest_cause(state: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str:
    for stack, flag in (("image_model.layers", "image-depth"), ("text_model.blocks", "n-layer")):
        seen, expected = _depth(state, stack), _depth(wanted, stack)
        if 0 < seen != expected:
            return f"depth: the checkpoint has {seen} {stack}, the model {expected} (--{flag})"
    if not set(state) & set(wanted):
        for name in state:
            for key in wanted:
                if name.endswith(f".{key}"):
                    return f"prefix: the checkpoint's keys start with {name.removesuffix(key)!r}"
        return "this is the checkpoint of another kind of model"
    for name, cause in (
        ("text_model.emb.weight", "vocabulary or width (--vocab-size, --n-embd)"),
        ("image_model.patch_embed.projection.weight", "patch size (--image-patch-size)"),
        ("image_model.pos_embed", "image size (--input-size)"),
        ("image_model.cls_token", "class token (--image-with-cls-token)"),
    ):
        if _shape(state, name) != _shape(wanted, name):
            return cause
    return "another configuration of the heads or hidden widths"


def _shape(state: Mapping[str, Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(state[name].shape) if name in state else None
