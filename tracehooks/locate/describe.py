"""A tensor in numbers, for an answer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tracehooks import stats


def describe_tensor(x: Tensor, batch: int | None = None) -> dict[str, Any]:
    """A tensor in numbers: dtype, shape, statistics, the first elements that are not finite and their samples."""
    columns = stats.unpack(stats.summarize(x, stats.Spec(hash=False)).cpu().numpy()[None], stats.Spec(hash=False))
    numbers: dict[str, Any] = {name: column[0].item() for name, column in columns.items() if column is not None}
    numbers = {name: None if value != value else value for name, value in numbers.items()}
    bad = (
        torch.nonzero(~torch.isfinite(x.detach()))
        if x.is_floating_point() and x.element_size() > 1
        else torch.zeros(0, 1)
    )
    described = {
        "dtype": str(x.dtype).removeprefix("torch."),
        "shape": list(x.shape),
        **numbers,
        "first_bad": bad[:8].tolist(),
    }
    if batch is not None and x.ndim and x.shape[0] == batch:
        described["samples"] = sorted({int(i) for i in bad[:, 0].tolist()})[:32]
    return described
