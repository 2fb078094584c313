"""What is wrong with what an experiment was given, before it begins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from tracehooks.core.arguments import function, whole
from tracehooks.core.errors import InvalidOptionError, shown


def a_model(model: object, name: str = "model") -> None:
    """A module of torch's.

    Raises:
        InvalidOptionError: it is something else.
    """
    if not isinstance(model, nn.Module):
        raise InvalidOptionError(name, shown(model), "a torch.nn.Module")


def a_loss(model: object, loss_fn: object) -> None:
    """A model, and a function that makes a loss with it.

    Raises:
        InvalidOptionError: one of them is something else.
    """
    a_model(model)
    function("loss_fn", loss_fn, "(model, batch) → the loss")


def one_batch(model: object, loss_fn: object, batch: object) -> None:
    """A model, a loss, and one batch, not where batches are from.

    Raises:
        InvalidOptionError: one of them is something else.
    """
    a_loss(model, loss_fn)
    if gives_batches(batch):
        raise InvalidOptionError("batch", shown(batch), "one batch, such as next(iter(loader))")


def gives_batches(batches: object) -> bool:
    """Whether it is no batch but gives one after another."""
    return isinstance(batches, Iterator | DataLoader)


def a_seed(seed: object) -> None:
    """A seed that torch's, NumPy's and Python's generators take.

    Raises:
        InvalidOptionError: it is something else.
    """
    whole("seed", seed, "a whole number from 0 to 2**32 - 1", 0, 2**32 - 1)


def an_optimizer(optimizer: Any) -> None:
    """An optimizer of torch's, or None.

    Raises:
        InvalidOptionError: it is something else.
    """
    if optimizer is not None and not (hasattr(optimizer, "param_groups") and hasattr(optimizer, "step")):
        raise InvalidOptionError("optimizer", shown(optimizer), "an optimizer of torch.optim, or None")
