"""Every kind of tensor as a dense real one."""

from __future__ import annotations

import torch
from torch import Tensor


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
