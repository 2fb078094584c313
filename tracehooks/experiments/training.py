"""A few steps of training on purpose, after which model and optimizer are as they were."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from tracehooks.core.errors import InvalidOptionError
from tracehooks.experiments.recording import LossFn, untouched


@contextlib.contextmanager
def as_it_was(model: nn.Module, optimizer: Optimizer | None = None) -> Iterator[None]:
    """Put back parameters, the optimizer's state and settings, and what `untouched` puts back, when the block is left."""
    parameters = [(parameter, parameter.detach().clone()) for parameter in model.parameters()]
    kept = None if optimizer is None else KeptOptimizer(optimizer)
    with untouched(model):
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, before in parameters:
                    parameter.copy_(before)
            if kept is not None:
                kept.restore()


class KeptOptimizer:
    """Copies of an optimizer's state and settings. What it holds is put back into the same tensors."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._groups = [_copied(group, without=("params",)) for group in optimizer.param_groups]
        self._states = [(parameter, held, _copied(held)) for parameter, held in optimizer.state.items()]

    def restore(self) -> None:
        """As it was when this was made."""
        for group, kept in zip(self.optimizer.param_groups, self._groups, strict=True):
            _put_back(group, kept, without=("params",))
        self.optimizer.state.clear()
        for parameter, held, kept in self._states:
            _put_back(held, kept)
            self.optimizer.state[parameter] = held


Copied = dict[Any, tuple[Any, Any]]
"""Of each entry of a dict, what it is and a copy of it."""


def _copied(held: dict[Any, Any], without: tuple[str, ...] = ()) -> Copied:
    return {name: (value, copy.deepcopy(value)) for name, value in held.items() if name not in without}


def _put_back(held: dict[Any, Any], kept: Copied, without: tuple[str, ...] = ()) -> None:
    for name in [name for name in held if name not in kept and name not in without]:
        del held[name]
    with torch.no_grad():
        for name, (value, before) in kept.items():
            held[name] = value.copy_(before) if isinstance(value, Tensor) else before


@contextlib.contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """A block in which modules that drop things at random do not. `untouched` puts their mode back."""
    for module in model.modules():
        if "drop" in type(module).__name__.lower():
            module.eval()
    yield


def loss_of(model: nn.Module, loss_fn: LossFn, batch: Any) -> Tensor:
    """The loss of a batch: a tensor of one element.

    Raises:
        InvalidOptionError: ``loss_fn`` returns something else.
    """
    loss = loss_fn(model, batch)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        seen = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise InvalidOptionError("loss_fn", seen, "(model, batch) → a loss, a tensor of one element")
    return loss.reshape(())


def step(model: nn.Module, loss_fn: LossFn, batch: Any, optimizer: Optimizer) -> float:
    """One step; the loss before it. Where the loss needs no gradient there is no backward pass, gradients are None."""
    optimizer.zero_grad(set_to_none=True)
    for parameter in model.parameters():
        parameter.grad = None
    loss = loss_of(model, loss_fn, batch)
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return float(loss.detach())


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that require a gradient, by name.

    Raises:
        InvalidOptionError: there is none.
    """
    found = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not found:
        raise InvalidOptionError("model", "a model without trainable parameters", "parameters that require a gradient")
    return found


def norm(tensors: list[Tensor]) -> float:
    """L2 norm over all of these tensors; 0 when there are none."""
    norms = [torch.linalg.vector_norm(tensor.detach().double()) for tensor in tensors]
    return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0
