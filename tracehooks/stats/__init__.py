"""The numbers of one tensor: their definition, and one door behind which faster kernels take over.

`summarize` measures a tensor, `summarize_many` a list of them at once, `fingerprints` hashes each sample of a batch, and
`likeness` gives nearly equal samples nearly equal signs.
They work on any device, read nothing back to the host, draw no random numbers and leave no trace in autograd.
`kernel_name` says what does the work.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tracehooks.stats import cpu, gpu, reference
from tracehooks.stats.layout import NAN, NEGINF, POSINF, Spec, nonfinite_rows, unpack
from tracehooks.stats.likeness import likeness
from tracehooks.stats.plain import plain

__all__ = [
    "NAN", "NEGINF", "POSINF", "Spec", "entries", "fingerprints", "kernel_name", "likeness", "measurable", "nonfinite",
    "nonfinite_at_hand", "nonfinite_rows", "summarize", "summarize_many", "unpack",
]  # fmt: skip


def measurable(x: Tensor) -> bool:
    """Whether a tensor has values to measure: not a meta tensor, and of a dtype that torch can convert."""
    return not x.is_meta and x.dtype not in _UNCONVERTIBLE


_UNCONVERTIBLE = {dtype for name, dtype in vars(torch).items() if name.startswith("float4")}


def summarize(x: Tensor, spec: Spec, out: Tensor | None = None) -> Tensor:
    """Statistics of a tensor, packed.

    Args:
        x: any dense, sparse, quantised, complex or nested tensor of any dtype that `measurable` accepts. Complex
            tensors are measured by component, sparse ones by their stored (coalesced) values.
        spec: which optional statistics to compute.
        out: contiguous int64 tensor of shape (spec.width,) on x's device to write to, instead of a new one.

    Returns:
        int64 of shape (spec.width,) on x's device, laid out as `layout.unpack` reads it: ``out`` where given.
    """
    if out is not None and cpu.measured(x, spec, out):
        return out
    if out is not None and not (out.nbytes == 8 * spec.width and out.dtype is torch.int64 and out.is_contiguous()):
        raise ValueError(f"out must be a contiguous int64 tensor of shape ({spec.width},)")
    if x.is_cpu and (out is None or out.is_cpu):
        row = cpu.summarize(x, spec, out)
        if row is not None:
            return row
    elif x.is_cuda and (out is None or out.device == x.device):
        row = torch.empty(spec.width, dtype=torch.int64, device=x.device) if out is None else out
        if gpu.summarize(x, spec, row):
            return row
    with torch.no_grad():
        row = reference.summarize(plain(x), spec)
        return row if out is None else out.copy_(row)


def summarize_many(tensors: Sequence[Tensor], spec: Spec, out: Tensor) -> Tensor:
    """Statistics of many tensors of one device, packed: one call of its kernel for all that it takes as they are.

    Args:
        tensors: as `summarize` takes them.
        spec: which optional statistics to compute, of each.
        out: contiguous int64 tensor of shape (len(tensors), spec.width) on their device; tensor i's row is row i.

    Returns:
        ``out``.
    """
    if not (out.shape == (len(tensors), spec.width) and out.dtype is torch.int64 and out.is_contiguous()):
        raise ValueError(f"out must be a contiguous int64 tensor of shape ({len(tensors)}, {spec.width})")
    kernel = cpu if out.is_cpu else gpu if out.is_cuda else None
    for i in range(len(tensors)) if kernel is None else kernel.summarize_many(tensors, spec, out):
        summarize(tensors[i], spec, out[i])
    return out


def nonfinite(tensors: Sequence[Tensor]) -> int:
    """Which non-finite values tensors in the processor's memory hold together: the bits NAN, POSINF and NEGINF, 0 where
    every element is finite. It costs one reading of them.
    """
    found, others = nonfinite_at_hand(tensors)
    if others:
        with torch.no_grad():
            for x in others:
                found |= reference.nonfinite(plain(x))
    return found


def nonfinite_at_hand(tensors: Sequence[Tensor]) -> tuple[int, list[Tensor]]:
    """The same of those that the native kernel takes as they are, and the others, which nobody has looked at."""
    return cpu.nonfinite(tensors)


def fingerprints(x: Tensor) -> Tensor:
    """Content hash of each sample: int64 of shape (batch,), the bits of a uint64, equal for bit-equal samples.

    Args:
        x: a dense tensor of at least one dimension; the first one is the batch.
    """
    with torch.no_grad():
        rows = plain(x).flatten(1) if x.dim() > 1 else plain(x).reshape(x.shape[0], -1 if x.numel() else 1)
        native = cpu.hash_rows(rows) if rows.is_cpu else None
        return reference.hash_rows(rows) if native is None else native


def entries() -> tuple[int, int, int] | None:
    """Addresses of the native kernel's functions for one tensor, for many, and for what is not finite, where it is there.
    All take their arguments as one record of numbers, as cpu.cpp says."""
    kernel = cpu.library()
    return None if kernel is None else kernel.addresses


def kernel_name(device: torch.device | str) -> str:
    """What measures the tensors of a device: ``native`` and an instruction set, ``triton``, or ``reference``."""
    device = torch.device(device)
    if device.type == "cuda":
        return "reference" if gpu.kernels(device) is None else "triton"
    kernel = cpu.library() if device.type == "cpu" else None
    return "reference" if kernel is None else f"native {kernel.levels[-1]}"
