"""Tensors in a GPU's memory: kernel.py, compiled and started by Triton, which is imported when it is first needed.

Where Triton is missing or cannot start a kernel, every function here returns what it could not do, the reference takes
over, and a warning says so once.
"""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tracehooks.stats.layout import Spec
from tracehooks.stats.plain import address, has_memory, plain

SIGNED, UNSIGNED, FLOAT, BRAIN = range(4)

KINDS = {
    dtype: 4 * (dtype.itemsize.bit_length() - 1) + sort
    for dtype, sort in {
        torch.float32: FLOAT, torch.float64: FLOAT, torch.bfloat16: BRAIN, torch.float16: FLOAT,
        torch.bool: UNSIGNED, torch.uint8: UNSIGNED, torch.int8: SIGNED, torch.uint16: UNSIGNED, torch.int16: SIGNED,
        torch.uint32: UNSIGNED, torch.int32: SIGNED, torch.uint64: UNSIGNED, torch.int64: SIGNED,
    }.items()
}  # fmt: skip
"""As kernel.py numbers them."""

CHUNK = 1 << 14
"""Bytes that a part has at least."""

PARTS = 512
"""Parts of a tensor at most."""

WARPS, REGISTERS = 4, 96
"""Of a program. With fewer registers the compiler spills what an inner loop needs; with more, fewer programs fit in."""


@cache
def kernels(device: torch.device) -> ModuleType | None:
    """kernel.py, if Triton can start it on this device, or None after a warning."""
    try:
        from tracehooks.stats import kernel

        _launch(
            kernel, torch.ones(1, device=device), Spec(), torch.empty(Spec().width, dtype=torch.int64, device=device)
        )
    except Exception as reason:  # no Triton, no C compiler for its launcher, a processor that it does not know …
        warnings.warn(
            f"tracehooks measures tensors on {device} without its kernel, several times slower and, with histograms, "
            f"waiting for the device: {type(reason).__name__}: {reason}".splitlines()[0]
            + ". The Triton that torch asks for and a C compiler make it work.",
            RuntimeWarning,
            stacklevel=3,
        )
        return None
    return kernel


def summarize(x: Tensor, spec: Spec, out: Tensor) -> bool:
    """Packed statistics of a tensor into ``out``, in one launch. Whether this kernel could measure it."""
    dense = _dense(x)
    module = kernels(x.device) if dense is not None else None
    if dense is None or module is None:
        return False
    _launch(module, dense, spec, out)
    return True


def summarize_many(tensors: Sequence[Tensor], spec: Spec, out: Tensor) -> list[int]:
    """Packed statistics of many tensors of ``out``'s device in one launch, tensor i's in row i of ``out``.

    Returns:
        The indices of those that it does not measure, whose rows it leaves as they are. While a CUDA graph is captured
        that is all: the graph would read the list of tensors again at each replay, from memory that is not there.
    """
    module = None if _capturing(out.device) else kernels(out.device)
    if module is None:
        return list(range(len(tensors)))
    table, others, kept = array("q"), [], []
    programs = present = 0
    row, stride = out.data_ptr(), out.stride(0) * out.itemsize
    for i, x in enumerate(tensors):
        dense = _dense(x) if x.device == out.device else None
        if dense is None:
            others.append(i)
            continue
        kept.append(dense)  # copies must live until the kernel is started
        kind, parts = KINDS[dense.dtype], _parts(dense)
        table.extend((dense.data_ptr(), dense.numel(), kind, programs, parts, row + i * stride))
        present |= 1 << kind
        programs += parts
    if kept:
        with _current(out.device):
            on_device = torch.frombuffer(table, dtype=torch.int64)
            if out.is_cuda:  # pinned memory: the copy waits for nothing
                on_device = on_device.pin_memory().to(out.device, non_blocking=True)
            module.summarize_list[(programs,)](
                on_device, len(kept), programs, *_workspace(out.device, programs * spec.width, len(kept)), present,
                spec.flags, **_limits(),
            )  # fmt: skip
    return others


def _launch(module: ModuleType, x: Tensor, spec: Spec, out: Tensor) -> None:
    parts = _parts(x)
    with _current(x.device):
        module.summarize_one[(parts,)](
            x.data_ptr(), x.numel(), out.data_ptr(), parts, *_workspace(x.device, parts * spec.width, 1),
            KINDS[x.dtype], spec.flags,
            **_limits(),
        )  # fmt: skip


def _parts(x: Tensor) -> int:
    """How many programs measure a tensor. Its size alone decides, so that its row is the same every time."""
    return max(1, min(PARTS, -(-x.numel() * x.itemsize // CHUNK)))


def _limits() -> dict[str, int]:
    """Of a program, to the compiler."""
    return {"num_warps": WARPS} if torch.version.hip else {"num_warps": WARPS, "maxnreg": REGISTERS}


def _dense(x: Tensor) -> Tensor | None:
    """A tensor of the same values whose elements lie in order from a multiple of eight on: x itself, if it does."""
    start = address(x, KINDS)
    if start is None:
        with torch.no_grad():
            x = plain(x)
            if not has_memory(x) or x.dtype not in KINDS:
                return None
            x = x.contiguous().as_subclass(Tensor)
            start = x.data_ptr()
    return x if start % 8 == 0 else x.detach().clone()


class Workspace:
    """Where the programs of a launch meet: records, and a counter for each tensor, zero whenever no launch is under way.
    Launches of one stream run one after another, so that they can share one."""

    def __init__(self, device: torch.device) -> None:
        self.records = torch.empty(0, dtype=torch.int64, device=device)
        self.counters = torch.zeros(0, dtype=torch.int32, device=device)

    def of(self, words: int, tensors: int) -> tuple[Tensor, Tensor]:
        """Records and counters of at least these sizes."""
        if len(self.records) < words:
            self.records = self.records.new_empty(2 * words)
        if len(self.counters) < tensors:
            self.counters = self.counters.new_zeros(2 * tensors)
        return self.records, self.counters


@cache
def _of_stream(device: torch.device, stream: int) -> Workspace:
    return Workspace(device)


def _workspace(device: torch.device, words: int, tensors: int) -> tuple[Tensor, Tensor]:
    """A record is as long as a row. A graph that is captured has memory of its own, which it sets to zero itself."""
    if _capturing(device):
        return Workspace(device).of(words, tensors)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _of_stream(device, stream).of(words, tensors)


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Make a GPU the one that Triton starts kernels on. Without one Triton interprets them, on the CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
