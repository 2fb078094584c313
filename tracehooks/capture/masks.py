"""Masks among the arguments of a module, found by name, and what True means in them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

TORCH_ATTENTION = (
    nn.MultiheadAttention,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)
"""torch's own attention modules, where True in a bool mask means dropped."""

PADDING = re.compile("pad|ignore")
NO_PADDING = re.compile("(no|non|not|un)_?(pad|ignore)")
"""Names after padding, and those of them that are after what is none."""


def masks_among(arguments: list[tuple[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """Arguments that are named like a mask and are tensors of at least one dimension; those of one mapping or named
    tuple down as well (a batch passed as a dict)."""
    for name, value in arguments:
        if isinstance(value, Tensor):
            if "mask" in name and value.ndim:
                yield name, value
        elif isinstance(value, dict) or hasattr(type(value), "_asdict"):
            inner = value if isinstance(value, dict) else value._asdict()
            yield from masks_among([(str(key), item) for key, item in inner.items() if isinstance(item, Tensor)])


def convention(name: str, mask: Tensor, module: nn.Module) -> str | None:
    """keep=True, keep=False or additive; None when only the values can tell.

    Floating masks are added to scores where attention takes them: torch's own modules and masks of three dimensions or
    more (batch, heads, queries, keys). Bool and integer masks keep what is True, as in transformers, except in torch's
    own attention modules and under the name key_padding_mask. Of other names after padding a bool mask drops what is
    True, as torch's attention takes it, and numbers keep what is 1, as those of transformers' audio models do.
    """
    if mask.is_floating_point():
        return "additive" if isinstance(module, TORCH_ATTENTION) or mask.ndim >= 3 or name == "attn_mask" else None
    drops = isinstance(module, TORCH_ATTENTION) or "key_padding_mask" in name
    marks_padding = mask.dtype is torch.bool and _means_either(name) and not NO_PADDING.search(name)
    return "keep=False" if drops or marks_padding else "keep=True"


def _means_either(name: str) -> bool:
    """Whether some models drop and others keep what is True in a mask of this name."""
    return "key_padding_mask" not in name and PADDING.search(name) is not None


def kept_of_padding(
    arguments: Sequence[tuple[str, Any]], root: nn.Module, padding: int
) -> Iterator[tuple[str, Tensor]]:
    """Of each mask that lies beside tokens of its shape: ``padding_kept/NAME`` and ``tokens_kept/NAME``, the shares of the
    padding and of the other tokens that it keeps, as 0-dim tensors. A name that means either says nothing of either."""
    ids = [x for _, x in arguments if isinstance(x, Tensor) and x.ndim == 2 and x.dtype in (torch.int64, torch.int32)]
    for name, mask in masks_among(list(arguments)):
        tokens = next((x for x in ids if x.shape == mask.shape and x is not mask), None)
        if tokens is None or mask.is_complex() or _means_either(name):
            continue
        with torch.no_grad():
            kept = mask.detach().float() > (-1.0 if (how := convention(name, mask, root)) == "additive" else 0.0)
            kept = ~kept if how == "keep=False" else kept
            pads = (tokens == padding).to(kept.device)
            for what, chosen in (("padding_kept", pads), ("tokens_kept", ~pads)):
                yield f"{what}/{name}", (kept & chosen).sum().double() / chosen.sum().clamp(min=1)
