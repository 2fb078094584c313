"""The end of a loss's graph: loss functions with what they keep of their targets, and slips that leave no error behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tracehooks.capture import torch_internals
from tracehooks.capture.graph import Graph, children, leaf

NEAR = 64
"""Nodes below the loss among which its loss functions are looked for in every step."""

CLASSIFYING = ("NllLossBackward0", "NllLoss2DBackward0")
"""Nodes of cross-entropy over class numbers."""

DIFFERENCES = {
    "SubBackward0": "aten.sub.Tensor",
    "RsubBackward1": "aten.rsub.Tensor",
    "MseLossBackward0": "aten.mse_loss.default",
    "SmoothL1LossBackward0": "aten.smooth_l1_loss.default",
    "HuberLossBackward0": "aten.huber_loss.default",
}
"""Nodes that compare a prediction with a target element by element, and their ops."""

RESHAPING = frozenset(
    {"ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "TransposeBackward0", "TransposeBackward1",
     "PermuteBackward0", "SqueezeBackward0", "SqueezeBackward1", "UnsqueezeBackward0", "SelectBackward0",
     "SliceBackward0", "IndexBackward0", "AliasBackward0", "CloneBackward0", "ToCopyBackward0", "TBackward0",
     "ExpandBackward0"}
)  # fmt: skip
"""Nodes of ops that give on the same numbers in another shape, order or dtype."""

PROBABILITIES = {"SoftmaxBackward0": "softmax", "SigmoidBackward0": "sigmoid"}
"""Nodes whose results lie between 0 and 1."""


class Broadcast(NamedTuple):
    """A prediction that was stretched against a target of another shape."""

    op: str
    prediction: tuple[int, ...]
    target: tuple[int, ...]
    """Its shape where it is known, else the one that the result tells."""
    result: tuple[int, ...]


class Probabilities(NamedTuple):
    """Probabilities handed to a loss function that takes logits, or log-probabilities."""

    loss: str
    made_by: str
    node: Any


def broadcasts(graph: Graph, outside: set[Any]) -> Iterator[Broadcast]:
    """Differences of one prediction a sample with one target a sample that came out as all against all, among the nodes
    ``outside`` the modules of the model, or right in its root."""
    for node in graph.nodes:
        op = DIFFERENCES.get(node.name()) if node in outside else None
        if op is None or len(children(node)) != 1:  # both operands need gradients: all against all was meant
            continue
        (result, *_), child = torch_internals.result_shapes(node) or [()], children(node)[0]
        target: tuple[int, ...] | None = None
        if op.endswith("loss.default"):
            known = torch_internals.saved(node, "target")
            target = _before_expand(known) if isinstance(known, Tensor) else None
            if child.name() == "ExpandBackward0" and children(child):
                result, child = _shape(child), children(child)[0]
        prediction = _shape(child)
        if child.name() != "UnsqueezeBackward0" and _all_against_all(prediction, result):
            yield Broadcast(op, prediction, target or _counterpart(prediction), result)


def probabilities(graph: Graph) -> Iterator[Probabilities]:
    """Loss functions over logits that were given the result of a softmax or sigmoid."""
    for node in graph.nodes:
        name = node.name()
        if name in CLASSIFYING:
            source = _behind_reshaping(node)
            if source is not None and source.name() == "LogSoftmaxBackward0":
                source = _behind_reshaping(source)
            wanted = ("SoftmaxBackward0", "SigmoidBackward0")
        elif name == "BinaryCrossEntropyWithLogitsBackward0":
            source, wanted = _behind_reshaping(node), ("SigmoidBackward0", "SoftmaxBackward0")
        else:
            continue
        if source is not None and source.name() in wanted:
            loss = "cross_entropy" if name in CLASSIFYING else "binary_cross_entropy_with_logits"
            yield Probabilities(loss, PROBABILITIES[source.name()], source)


def classifying(graph: Graph) -> list[Any]:
    """The nodes of cross-entropy over class numbers."""
    return [node for node in graph.nodes if node.name() in CLASSIFYING]


def kept_share(node: Any) -> Tensor | float | None:
    """Share of the targets of a cross-entropy that are not ignored; a 0-dim tensor. None where it is not known."""
    target, ignored = torch_internals.saved(node, "target"), torch_internals.saved(node, "ignore_index")
    if not isinstance(target, Tensor) or not target.numel() or ignored is None:
        return None
    with torch.no_grad():
        return (target != signed(ignored)).double().mean()


def shift_matches(node: Any, tokens: Tensor, shifts: range) -> list[Tensor] | None:
    """For each shift, the share of kept targets of a cross-entropy that equal the token so many positions after the one
    that the prediction was made at. None where targets and tokens do not fit together.

    Args:
        node: of a cross-entropy whose predictions are (batch · length, classes), for all positions or a slice of them.
        tokens: (batch, length), what the model was given.
    """
    target, ignored = torch_internals.saved(node, "target"), torch_internals.saved(node, "ignore_index")
    if not isinstance(target, Tensor) or target.ndim != 1 or tokens.ndim != 2 or target.dtype != tokens.dtype:
        return None
    batch, length = tokens.shape
    if not batch or target.numel() % batch or not length - 4 <= target.numel() // batch <= length or length < 4:
        return None
    width = target.numel() // batch
    start = _slice_start(node, width, length)
    with torch.no_grad():
        rows = target.view(batch, width)
        kept = rows != signed(ignored)
        shares = []
        for shift in shifts:
            first, last = max(0, start + shift), min(length, start + shift + width)
            part = slice(first - start - shift, last - start - shift)
            right = (rows[:, part] == tokens[:, first:last].to(rows.device)) & kept[:, part]
            shares.append(right.sum().double() / kept[:, part].sum().clamp(min=1))
        return shares


def _slice_start(node: Any, width: int, length: int) -> int:
    """First position of the predictions that a cross-entropy compares, where they are a slice of all positions."""
    seen = node
    while (seen := next(iter(children(seen)), None)) is not None and (
        seen.name() in RESHAPING | {"LogSoftmaxBackward0"}
    ):
        if seen.name() == "SliceBackward0" and torch_internals.saved(seen, "dim") in (1, -2):
            start = signed(torch_internals.saved(seen, "start") or 0)
            if start:
                return start % length if start < 0 else start
    return 0


def _behind_reshaping(node: Any) -> Any:
    below = children(node)
    while len(below) == 1 and below[0].name() in RESHAPING:
        below = children(below[0])
    return below[0] if below else None


def _shape(node: Any) -> tuple[int, ...]:
    variable = leaf(node)
    if variable is not None:
        return tuple(variable.shape)
    return next(iter(torch_internals.result_shapes(node)), ())


def _all_against_all(prediction: tuple[int, ...], result: tuple[int, ...]) -> bool:
    """(N, 1, …) or (N, …) that became (N, N, …)."""
    many = prediction[0] if prediction else 0
    if many < 2 or result[:2] != (many, many):
        return False
    return prediction in ((many, 1, *result[2:]), (many, *result[2:]))


def _counterpart(prediction: tuple[int, ...]) -> tuple[int, ...]:
    many, rest = prediction[0], prediction[1:]
    return (many, *rest[1:]) if rest[:1] == (1,) else (many, 1, *rest)


def _before_expand(x: Tensor) -> tuple[int, ...]:
    """The shape that a tensor had before it was expanded: one in every dimension of stride 0, leading ones dropped."""
    sizes = [size if stride else 1 for size, stride in zip(x.shape, x.stride(), strict=True)]
    while sizes and sizes[0] == 1 and x.stride()[len(x.shape) - len(sizes)] == 0:
        sizes.pop(0)
    return tuple(sizes)


def signed(number: int) -> int:
    """Autograd shows negative numbers as unsigned ones of 64 bits."""
    return number - (1 << 64) if number >= 1 << 63 else number
