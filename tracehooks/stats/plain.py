"""Every kind of tensor as a dense real one, and where its elements lie."""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor
from torch.nn import Parameter


def plain(x: Tensor) -> Tensor:
    """The values of a tensor as a dense, detached tensor of a real dtype.

    Sparse COO tensors give their coalesced values, other sparse layouts their values, quantised tensors their
    dequantised values, nested tensors the concatenation of their parts, complex tensors a trailing dimension of two.
    """
    x = x.detach()
    if x.is_nested:
        x = _values_of_nested(x)
    elif x.layout == torch.sparse_coo:
        x = x.coalesce().values()
    elif x.layout != torch.strided:
        x = x.values() if x.layout in _COMPRESSED else x.to_dense()
    if x.is_quantized:
        x = x.dequantize()
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    return x.resolve_neg()


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def _values_of_nested(x: Tensor) -> Tensor:
    if x.layout == torch.jagged:
        return x.values()
    parts = x.unbind()
    return torch.cat([part.reshape(-1) for part in parts]) if parts else torch.empty(0, dtype=x.dtype, device=x.device)


def address(x: Tensor, dtypes: Container[torch.dtype]) -> int | None:
    """Where the elements of a tensor of one of these dtypes lie, if they do as they are and in order."""
    kind = type(x)
    try:
        if x.dtype in dtypes and (kind is Tensor or kind is Parameter) and x.is_contiguous() and not x.is_neg():
            return x.data_ptr()
    except RuntimeError:  # no memory of its own: sparse, or wrapped by torch.func
        pass
    return None


def has_memory(x: Tensor) -> bool:
    """Whether a tensor is more than a shell around others (a DTensor, a fake tensor, one that torch.func wraps …)."""
    if type(x).__torch_dispatch__ != Tensor.__torch_dispatch__ or x.layout is not torch.strided:
        return False
    try:
        return bool(x.data_ptr() or not x.numel())
    except RuntimeError:
        return False
