"""What several cases are built from."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.rules.cases import batches


def regression(model: nn.Module, number: int) -> Tensor:
    x = batches(16, 6)[number % 8]
    return (model(x) - x.sum(-1, keepdim=True)).square().mean()


def mlp(*widths: int, activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), activation()]
    return nn.Sequential(*layers[:-1])


class Composed(nn.Module):
    """A front, something in between, a head."""

    def __init__(self, between: Callable[[Tensor], Tensor], width: int = 8) -> None:
        super().__init__()
        self.front, self.head = nn.Linear(6, width), nn.Linear(width, 1)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.between(self.front(x)))


def classes(number: int) -> Tensor:
    return (batches(16, 6)[number][:, 0] > 0).long()


def tokens(number: int, length: int = 12) -> Tensor:
    return torch.randint(0, 20, (8, length), generator=torch.Generator().manual_seed(number))


class Words(nn.Module):
    """Logits of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids))
