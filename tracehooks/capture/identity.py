"""Who makes this run: what run.json says of code, machine, model and settings."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import subprocess
import sys
from typing import Any

import numpy as np
import torch
from torch import nn

from tracehooks.capture.parameters import Held, held_buffers, held_parameters
from tracehooks.capture.select import named_modules, unwrap, wrappers
from tracehooks.core.config import Config

GIT_TIMEOUT_S = 10


def describe_run(model: nn.Module, config: Config) -> dict[str, Any]:
    """The fields of run.json that are known at attach."""
    return {
        "command": [sys.executable, *sys.argv],
        "git": _git(),
        "packages": _packages(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "devices": _devices(),
        "world_size": world()[1],
        "model": {**describe_model(unwrap(model)), "wrappers": wrappers(model)},
        "flags": _flags(),
        "optimizers": [],
        "config": config.to_json(),
        "notes": [],
    }


def world() -> tuple[int, int]:
    """(rank, world size) of this process, from torch.distributed or from the launcher's environment."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if rank.isdigit() and size.isdigit() and int(rank) < int(size):
        return int(rank), int(size)
    return 0, 1


def describe_model(root: nn.Module) -> dict[str, Any]:
    """Class, module tree (with modes) and its digest, parameters with shape, dtype, requires_grad and aliases, buffers."""
    modules = [
        {"path": path, "type": type(module).__name__, "training": module.training}
        for path, module in named_modules(root).items()
    ]
    parameters = [_held(held) for held in held_parameters(root)]
    tree = repr([(m["path"], m["type"]) for m in modules] + [(p["name"], p["shape"]) for p in parameters])
    return {
        "class": type(root).__name__,
        "digest": hashlib.sha256(tree.encode()).hexdigest(),
        "parameter_count": sum(held.tensor.numel() for held in held_parameters(root)),
        "modules": modules,
        "parameters": parameters,
        "buffers": [_held(held) for held in held_buffers(root)],
    }


def _held(held: Held) -> dict[str, Any]:
    tensor = held.tensor
    described = {
        "name": held.name,
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "requires_grad": tensor.requires_grad,
    }
    return described | ({"aliases": list(held.aliases)} if held.aliases else {})


def _packages() -> dict[str, str | None]:
    from tracehooks import __version__

    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": str(cudnn) if cudnn else None,
        "numpy": np.__version__,
        "tracehooks": __version__,
    }


def _devices() -> list[str]:
    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    return [*gpus, platform.processor() or platform.machine()]


def _flags() -> dict[str, Any]:
    return {
        "seed": torch.initial_seed(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cudnn_allow_tf32": torch.backends.cudnn.allow_tf32,
        "autocast_dtype": str(torch.get_autocast_dtype("cpu")).removeprefix("torch.")
        if torch.is_autocast_enabled("cpu")
        else None,
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "threads": torch.get_num_threads(),
    }


def _git() -> dict[str, Any] | None:
    """Commit, branch, whether anything is uncommitted, and the digest of `git diff HEAD`; None outside a repository."""
    status = _run_git("status", "--porcelain=v2", "--branch", "--no-ahead-behind")
    if status is None:
        return None
    lines = status.decode(errors="replace").splitlines()
    heads = dict(line.removeprefix("# branch.").split(" ", 1) for line in lines if line.startswith("# branch."))
    if heads["oid"] == "(initial)":
        return None
    dirty = any(not line.startswith("# ") for line in lines)
    difference = _run_git("diff", "HEAD") if dirty else None
    return {
        "commit": heads["oid"],
        "branch": "HEAD" if heads["head"] == "(detached)" else heads["head"],
        "dirty": dirty,
        "diff_sha256": hashlib.sha256(difference).hexdigest() if difference else None,
    }


def _run_git(*arguments: str) -> bytes | None:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, timeout=GIT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
