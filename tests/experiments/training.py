"""Models that are trained on purpose, and what an experiment must leave as it was."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from tests.models import exact, hooks_of, random_states


def classifier() -> nn.Sequential:
    """A small classifier with dropout and running statistics."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 5))


def samples() -> tuple[Tensor, Tensor]:
    """Eight samples of five classes."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 8, generator=generator), torch.randint(0, 5, (8,), generator=generator)


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    """The loss of a classifier."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def translator() -> Any:
    """A T5 from a small configuration."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0, dropout_rate=0.1
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def texts() -> dict[str, Tensor]:
    """Four texts with their translations, one of them padded."""
    generator = torch.Generator().manual_seed(1)
    mask = torch.ones(4, 6, dtype=torch.int64)
    mask[0, 4:] = 0
    return {
        "input_ids": torch.randint(1, 32, (4, 6), generator=generator),
        "attention_mask": mask,
        "labels": torch.randint(1, 32, (4, 5), generator=generator),
    }


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss that a model of transformers computes itself."""
    loss: Tensor = model(**batch).loss
    return loss


def state_of(model: nn.Module, *optimizers: Optimizer) -> dict[str, object]:
    """Everything that an experiment puts back, bit for bit."""
    return {
        "parameters": [exact(parameter) for parameter in model.parameters()],
        "gradients": [(id(parameter.grad), exact(parameter.grad)) for parameter in model.parameters()],
        "buffers": [exact(buffer) for buffer in model.buffers()],
        "modes": [module.training for module in model.modules()],
        "hooks": hooks_of(model),
        "optimizers": [_of_optimizer(optimizer) for optimizer in optimizers],
        "generators": random_states(),
    }


def _of_optimizer(optimizer: Optimizer) -> object:
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    held = [(name, value) for state in optimizer.state.values() for name, value in state.items()]
    return groups, [
        (name, id(value), exact(value)) if isinstance(value, Tensor) else (name, value) for name, value in held
    ]
