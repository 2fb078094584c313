"""In which arithmetic a step is computed. Parameters and optimiser state are float32 in all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

__all__ = ["AUTOCAST_DTYPES", "Precision", "autocast", "make_scaler", "matrix_products"]

Precision = Literal["fp32", "tf32", "bf16", "fp16"]
AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@contextmanager
def matrix_products(precision: Precision) -> Iterator[None]:
    """Compute float32 products and convolutions in TF32 for ``tf32``, and for nothing else; undone afterwards.

    torch lets cuDNN use TF32 unless told otherwise, so float32 has to be asked for. Devices without TF32 units, such
    as most CPUs, compute in float32 either way.
    """
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def autocast(precision: Precision, device: torch.device) -> torch.autocast:
    """A block in which matrix products are bfloat16 for ``bf16``, float16 for ``fp16``; no change otherwise."""
    dtype = AUTOCAST_DTYPES.get(precision)
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def make_scaler(
    precision: Precision, device: torch.device, *, init_scale: float, growth_interval: int
) -> torch.amp.GradScaler:
    """The gradient scaler, at work for ``fp16`` alone: it keeps small gradients above float16's smallest number.

    It doubles the scale after ``growth_interval`` steps without infinities, and halves it, skipping the step, after
    one with. Source: Micikevicius et al., "Mixed Precision Training" (2018), section 3.2.
    """
    return torch.amp.GradScaler(
        device.type, init_scale=init_scale, growth_interval=growth_interval, enabled=precision == "fp16"
    )
