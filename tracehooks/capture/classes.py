"""What a classification was asked and what it said: shares of classes among targets and predictions, as 0-dim tensors.

Computed on the device, read by nobody here: they travel with the next flush.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tracehooks.capture import torch_internals
from tracehooks.capture.graph import Graph
from tracehooks.capture.objective import CLASSIFYING, DIFFERENCES, signed

PAIRS = 256
"""Classes up to which it is counted which is taken for which."""
FEW = 4
"""Targets that a class must have for its share of confusions to be told."""

Number = tuple[str, Tensor]


def of_targets(graph: Graph) -> Iterator[Number]:
    """Numbers of the targets of a loss, and of the predictions where they are classes."""
    for node in graph.nodes:
        if node.name() in CLASSIFYING:
            yield from _of_classes(node)
        elif node.name() in DIFFERENCES:
            yield from _of_numbers(node)


def _of_classes(node: Any) -> Iterator[Number]:
    """Of one cross-entropy over class numbers: ``classes``, ``distinct``, ``commonest``, ``largest_share`` of the targets
    that count; of the predictions ``right``, ``predicted_share``; of the class that is most often taken for another one
    ``confused``, the share, ``confused_class`` and ``taken_for``."""
    target, logits = torch_internals.saved(node, "target"), torch_internals.saved(node, "self")
    ignored = torch_internals.saved(node, "ignore_index")
    if not isinstance(target, Tensor) or not isinstance(logits, Tensor) or logits.ndim < 2 or not target.numel():
        return
    with torch.no_grad():
        classes = logits.shape[1]
        flat = target.reshape(-1)
        kept = flat != signed(ignored if ignored is not None else -100)
        right = torch.where(kept, flat, 0).clamp(0, classes - 1)
        weight = kept.to(torch.float64)
        total = weight.sum().clamp(min=1)
        counts = torch.zeros(classes, dtype=torch.float64, device=flat.device).scatter_add_(0, right, weight)
        yield "classes", torch.full((), float(classes))
        yield "distinct", (counts > 0).sum()
        yield "commonest", counts.argmax()
        yield "largest_share", counts.max() / total
        said = logits.argmax(1).reshape(-1)
        predicted = torch.zeros_like(counts).scatter_add_(0, said, weight)
        yield "right", ((said == flat) & kept).sum() / total
        yield "predicted_share", predicted.max() / total
        if classes <= PAIRS:
            yield from _confused(right * classes + said, weight, counts, classes)


def _of_numbers(node: Any) -> Iterator[Number]:
    """``mean`` and ``std`` of the targets of a loss that compares element by element."""
    target = torch_internals.saved(node, "target")
    if isinstance(target, Tensor) and target.is_floating_point() and target.numel() > 1 and not target.requires_grad:
        with torch.no_grad():
            std, mean = torch.std_mean(target.double(), correction=0)
            yield "std", std
            yield "mean", mean


def _confused(pairs: Tensor, weight: Tensor, counts: Tensor, classes: int) -> Iterator[Number]:
    matrix = torch.zeros(classes * classes, dtype=torch.float64, device=pairs.device).scatter_add_(0, pairs, weight)
    matrix = matrix.view(classes, classes)
    matrix.fill_diagonal_(0.0)
    shares = torch.where(counts.unsqueeze(1) >= FEW, matrix / counts.clamp(min=1).unsqueeze(1), 0.0)
    worst = shares.reshape(-1).argmax()
    yield "confused", shares.reshape(-1).max()
    yield "confused_class", worst // classes
    yield "taken_for", worst % classes
