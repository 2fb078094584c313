"""Everything random in a run: seeds, the states of all generators, and deterministic kernels."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

__all__ = ["deterministic", "generator_states", "restore_generators", "seed_everything"]

CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seed Python's, NumPy's and torch's global generators (all devices); every rank gets numbers of its own."""
    random.seed(f"{seed}/{rank}")
    np.random.seed((seed * 1_000_003 + rank) % 2**32)
    torch.manual_seed(seed * 1_000_003 + rank)


def generator_states() -> dict[str, Any]:
    """The states of all global generators of this process, as plain values and tensors."""
    state: Any = np.random.get_state()
    kind, keys, *rest = state
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def restore_generators(states: dict[str, Any]) -> None:
    """Put all global generators into ``states``, as :func:`generator_states` returned them."""
    random.setstate(states["python"])
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """If wanted, kernels that always give the same bits, and an error from those that cannot; undone afterwards."""
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    workspace = os.environ.get(CUBLAS_WORKSPACE)
    if wanted:
        os.environ.setdefault(CUBLAS_WORKSPACE, ":4096:8")  # what cuBLAS needs to be deterministic
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]
        if workspace is None:
            os.environ.pop(CUBLAS_WORKSPACE, None)
