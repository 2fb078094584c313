"""What a loss is made from: which tensors of a batch are targets, and whether the loss hangs on the predictions."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tracehooks import stats
from tracehooks.capture.leaves import leaves
from tracehooks.capture.select import unwrap
from tracehooks.core.records import Check
from tracehooks.experiments.recording import LossFn
from tracehooks.experiments.training import loss_of, norm
from tracehooks.locate.replay import Randomness

IGNORED = -100
"""Targets that torch's losses leave out."""

TARGET_NAMES = ("label", "target", "tgt")
"""A tensor of the batch that is named so is a target, even if the model is given it."""


@dataclass
class Target:
    """What one tensor of targets holds."""

    name: str
    valid: int
    """Elements that count: not -100, and finite."""
    distinct: int
    """Different values among them."""
    information: float
    """Entropy in nats of whole numbers, standard deviation of others."""
    conflicts: int
    """Samples whose input is that of an earlier one while their target is another."""


@dataclass
class Objective:
    """Answers about a loss."""

    targets: list[Target] = field(default_factory=list)
    gradient: float | None = None
    """L2 norm of d loss / d predictions; None where no gradient comes back."""
    change: float = 0.0
    """How much the loss changes when the predictions are others."""

    def checks(self) -> tuple[Check, Check]:
        """The two questions."""
        depends: bool | None = bool(self.gradient or self.change)
        if not math.isfinite(self.gradient or self.change):
            depends, how = None, "it is not finite; record it, and see where that begins"
        elif self.gradient:
            how = f"d loss / d predictions has norm {self.gradient:.3g}"
        elif self.change:
            how = f"other predictions change it by {self.change:.3g}, but no gradient comes back to them"
        else:
            how = "other predictions leave it as it is, and no gradient comes back to them"
        return (
            Check("Do the targets hold something to learn?", self._learnable(), "; ".join(map(_said, self.targets))),
            Check("Does the loss depend on the predictions?", depends, how),
        )

    def evidence(self) -> dict[str, Any]:
        """The numbers."""
        return {
            "targets": [vars(target) for target in self.targets],
            "prediction_gradient": self.gradient,
            "prediction_change": self.change,
        }

    def _learnable(self) -> bool | None:
        if not self.targets or any(target.valid == 1 for target in self.targets):
            return None
        return all(target.distinct > 1 and not target.conflicts for target in self.targets)


def look_at(model: nn.Module, loss_fn: LossFn, batch: Any) -> Objective:
    """Run the loss of a batch twice, the second time with other predictions."""
    root, given, predictions = unwrap(model), set[int](), list[Tensor]()

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        given.update(id(tensor) for _, tensor in leaves((args, kwargs), ""))

    def after(module: nn.Module, args: Any, output: Any) -> None:
        predictions.extend(tensor for _, tensor in leaves(output, "") if tensor.is_floating_point())

    handles = [root.register_forward_pre_hook(before, with_kwargs=True), root.register_forward_hook(after)]
    try:
        randomness = Randomness()
        loss = loss_of(model, loss_fn, batch)
    finally:
        for handle in handles:
            handle.remove()
    found = Objective(_targets(batch, given))
    wanted = [tensor for tensor in predictions if tensor.requires_grad and tensor.numel() > 1]
    if loss.requires_grad and wanted:
        gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
        found.gradient = norm([gradient for gradient in gradients if gradient is not None])
    if not found.gradient:
        randomness.restore()
        found.change = abs(_loss_of_others(model, loss_fn, batch) - float(loss.detach()))
    return found


def _loss_of_others(model: nn.Module, loss_fn: LossFn, batch: Any) -> float:
    """The loss when what the root returns is moved by its own spread."""
    held = [*model.parameters(), *model.buffers(), *(tensor for _, tensor in leaves(batch, ""))]
    memory = {tensor.untyped_storage().data_ptr() for tensor in held}

    def move(module: nn.Module, args: Any, output: Any) -> None:
        for _, tensor in leaves(output, ""):
            if tensor.is_floating_point() and tensor.untyped_storage().data_ptr() not in memory:
                spread = tensor.std() if tensor.numel() > 1 else torch.ones((), device=tensor.device)
                tensor.add_(torch.randn_like(tensor) * torch.where(spread > 0, spread, 1.0))

    handle = unwrap(model).register_forward_hook(move)
    try:
        with torch.no_grad():
            return float(loss_of(model, loss_fn, batch))
    finally:
        handle.remove()


def _targets(batch: Any, given: set[int]) -> list[Target]:
    """Tensors of the batch that the model was not given, or that are named like targets."""
    tensors = dict(leaves(batch, ""))
    names = [
        name
        for name, tensor in tensors.items()
        if id(tensor) not in given or any(word in name.rpartition(".")[2].lower() for word in TARGET_NAMES)
    ]
    inputs = [tensor for name, tensor in tensors.items() if name not in names]
    return [_target(name.lstrip(".") or "batch", tensors[name], inputs) for name in names if tensors[name].numel()]


def _target(name: str, x: Tensor, inputs: list[Tensor]) -> Target:
    whole = not (x.is_floating_point() or x.is_complex())
    valid = x[x != IGNORED] if whole else x[torch.isfinite(x)]
    _, counts = torch.unique(valid, return_counts=True)
    if whole:
        shares = counts.double() / max(1, len(valid))
        information = float(-(shares * shares.log()).sum()) if len(valid) else 0.0
    else:
        information = float(valid.double().std(correction=0)) if len(valid) else 0.0
    return Target(name, len(valid), len(counts), information, _conflicts(x, inputs))


def _conflicts(x: Tensor, inputs: list[Tensor]) -> int:
    count = x.size(0) if x.ndim else 0
    batched = [tensor for tensor in inputs if tensor.ndim and tensor.size(0) == count]
    if not batched:
        return 0
    seen: dict[tuple[int, ...], int] = {}
    samples = zip(*(stats.fingerprints(tensor).tolist() for tensor in batched), strict=True)
    wanted = stats.fingerprints(x).tolist()
    return sum(seen.setdefault(sample, target) != target for sample, target in zip(samples, wanted, strict=True))


def _said(target: Target) -> str:
    what = f"{target.name}: {target.valid} values count, {target.distinct} of them distinct"
    spread = "" if math.isnan(target.information) else f" (information {target.information:.3g})"
    return what + spread + (f", {target.conflicts} samples contradict an equal one" if target.conflicts else "")
