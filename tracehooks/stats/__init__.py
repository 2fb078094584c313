"""The numbers of one tensor: their definition, and one door behind which faster kernels take over.

`summarize` measures a tensor and `fingerprints` hashes each sample of a batch. Both work on any device, read nothing
back to the host, draw no random numbers and leave no trace in autograd.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tracehooks.stats import reference
from tracehooks.stats.layout import Spec, unpack
from tracehooks.stats.plain import plain

__all__ = ["Spec", "fingerprints", "measurable", "summarize", "unpack"]


def measurable(x: Tensor) -> bool:
    """Whether a tensor has values to measure: not a meta tensor, and of a dtype that torch can convert."""
    return not x.is_meta and not str(x.dtype).startswith("torch.float4")


def summarize(x: Tensor, spec: Spec) -> Tensor:
    """Statistics of a tensor, packed.

    Args:
        x: any dense, sparse, quantised, complex or nested tensor of any dtype that `measurable` accepts. Complex
            tensors are measured by component, sparse ones by their stored (coalesced) values.
        spec: which optional statistics to compute.

    Returns:
        int64 of shape (spec.width,) on x's device, laid out as `layout.unpack` reads it.
    """
    with torch.no_grad():
        return reference.summarize(plain(x), spec)


def fingerprints(x: Tensor) -> Tensor:
    """Content hash of each sample: int64 of shape (batch,), the bits of a uint64, equal for bit-equal samples.

    Args:
        x: a dense tensor of at least one dimension; the first one is the batch.
    """
    with torch.no_grad():
        return reference.hash_rows(plain(x).reshape(x.shape[0], -1))
