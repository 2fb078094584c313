"""Small training steps that go wrong, one for each cause: what fails, where, and why.

Each builder returns (model, optimizer, step): ``step(i)`` trains once. The failure is in step 1; step 0 is healthy unless
said otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Built = tuple[nn.Module, torch.optim.Optimizer, Callable[[int], Any]]


@dataclass(frozen=True)
class Failure:
    """A builder and the truth about it."""

    name: str
    build: Callable[[], Built]
    phase: str
    module: str | None
    op: str | None
    value: str
    causes: tuple[str, ...]
    code: str = ""
    """A part of the guilty line."""
    step: int = 1


FAILURES: list[Failure] = []


def failure(phase: str, module: str | None, op: str | None, value: str, *causes: str, code: str = "", step: int = 1):
    def add(build: Callable[[], Built]) -> Callable[[], Built]:
        FAILURES.append(Failure(build.__name__, build, phase, module, op, value, causes, code, step))
        return build

    return add


class Apply(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.function(*args)


def trained(
    model: nn.Module, batch: Callable[[int], Any], loss: Callable[[Any], torch.Tensor], **options: Any
) -> Built:
    optimizer = options.pop("optimizer", torch.optim.SGD)(model.parameters(), options.pop("lr", 1e-3), **options)

    def step(i: int) -> None:
        optimizer.zero_grad()
        loss(model(*batch(i))).backward()
        optimizer.step()

    return model, optimizer, step


def squares(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def chain(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


def spoiled(i: int, value: float, shape: tuple[int, ...] = (4, 3)) -> tuple[torch.Tensor]:
    x = torch.ones(shape)
    if i == 1:
        x[2] = value
    return (x,)


@failure("forward", "1", "aten.log.default", "-inf", "log_of_zero", code="x.relu().log()")
def logarithm_of_zero() -> Built:
    model = chain(nn.Identity(), Apply(lambda x: x.relu().log() * x.relu()), nn.Linear(3, 2))
    return trained(model, lambda i: spoiled(i, 0.0), squares)


@failure("forward", "1", "aten.log.default", "nan", "log_of_negative", code="x.log()")
def logarithm_of_negative() -> Built:
    return trained(chain(nn.Identity(), Apply(lambda x: x.log()), nn.Linear(3, 2)), lambda i: spoiled(i, -1.0), squares)


@failure("forward", "0", "aten.reciprocal.default", "inf", "division_by_zero", code="1 / x")
def division_by_zero() -> Built:
    return trained(chain(Apply(lambda x: 1 / x), nn.Linear(3, 2)), lambda i: spoiled(i, 0.0), squares)


@failure("forward", "0", "aten.exp.default", "inf", "exp_overflow", code=".exp()")
def exponential_overflow() -> Built:
    return trained(chain(Apply(lambda x: x.exp()), nn.Linear(3, 2)), lambda i: spoiled(i, 200.0), squares)


@failure("forward", "1", "aten.addmm.default", "inf", "fp16_overflow")
def half_precision_overflow() -> Built:
    model = chain(nn.Identity(), nn.Linear(3, 2)).half()
    nn.init.constant_(model[1].weight, 30000.0)
    return trained(model, lambda i: (torch.full((4, 3), 2.0 if i == 1 else 1e-3).half(),), squares, lr=1e-9)


@failure("forward", "0", "aten._softmax.default", "nan", "fully_masked_row", code="softmax(-1)")
def fully_masked_row() -> Built:
    def attend(x: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(x == 0, -torch.inf).softmax(-1) @ x.T

    return trained(chain(Apply(attend), nn.Linear(4, 2)), lambda i: spoiled(i, 0.0), squares)


@failure("forward", "0", "aten.logsumexp.default", "-inf", "logsumexp_all_neg_inf", code="logsumexp")
def logsumexp_of_nothing() -> Built:
    def pool(x: torch.Tensor) -> torch.Tensor:
        masked = x.masked_fill(x == 0, -torch.inf)
        return x - masked.logsumexp(-1, keepdim=True) * 0

    return trained(chain(Apply(pool), nn.Linear(3, 2)), lambda i: spoiled(i, 0.0), squares)


@failure("forward", "0", "aten.std.correction", "nan", "std_of_single_element")
def deviation_of_one_element() -> Built:
    model = chain(Apply(lambda x: (x - x.mean(0)) / (x.std(0) + 1e-5)), nn.Linear(3, 2))
    return trained(model, lambda i: (torch.randn(1 if i == 1 else 4, 3),), squares)


@failure("forward", "0", "aten.div.Tensor", "nan", "division_by_zero_norm", "division_by_zero")
def zero_vector_normalised() -> Built:
    return trained(
        chain(Apply(lambda x: x / x.norm(dim=-1, keepdim=True)), nn.Linear(3, 2)), lambda i: spoiled(i, 0.0), squares
    )


@failure("data", "", None, "nan", "nonfinite_input")
def corrupt_sample() -> Built:
    return trained(chain(nn.Linear(3, 2)), lambda i: spoiled(i, torch.nan), squares)


@failure("param", "1", None, "nan", "uninitialised_parameter", step=0)
def uninitialised_parameter() -> Built:
    model = chain(nn.Identity(), nn.Linear(3, 2))
    nn.init.constant_(model[1].bias, torch.nan)
    return trained(model, lambda i: (torch.ones(4, 3),), squares)


@failure("backward", "0", "SqrtBackward0", "inf", "sqrt_at_zero", "masked_branch_gradient", code="x.sqrt()")
def root_at_zero() -> Built:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * self.scale
            return x.sqrt()

    return trained(chain(Root(), nn.Linear(3, 2)), lambda i: spoiled(i, 0.0), squares)


@failure("backward", "1", "SqrtBackward0", "nan", "masked_branch_gradient", code="torch.where")
def hidden_branch() -> Built:
    model = chain(nn.Linear(3, 3, bias=False), Apply(lambda x: torch.where(x > 0, x.sqrt(), 0.0)), nn.Linear(3, 2))
    nn.init.eye_(model[0].weight)
    return trained(model, lambda i: spoiled(i, -1.0), squares)


@failure("backward", "1", "PowBackward0", "inf", "pow_at_zero", code="** 0.3")
def power_at_zero() -> Built:
    model = chain(nn.Linear(3, 3, bias=False), Apply(lambda x: x.abs() ** 0.3), nn.Linear(3, 2))
    return trained(model, lambda i: spoiled(i, 0.0), squares)


@failure("backward", "1", "AcosBackward0", "inf", "acos_at_domain_edge", code="acos")
def angle_at_its_edge() -> Built:
    model = chain(nn.Linear(3, 3, bias=False), Apply(lambda x: x.clamp(-1, 1).acos()), nn.Linear(3, 2))
    nn.init.eye_(model[0].weight)
    return trained(model, lambda i: ((torch.full((4, 3), 1.0 if i == 1 else 0.5),)), squares, lr=0.0)


@failure("backward", "1", "LinalgSvdBackward0", "nan", "repeated_singular_values")
def repeated_singular_values() -> Built:
    def project(x: torch.Tensor) -> torch.Tensor:
        u, s, vh = torch.linalg.svd(x)
        return u @ torch.diag_embed(s) @ vh

    def batch(i: int) -> tuple[torch.Tensor]:
        return (torch.diag(torch.tensor([2.0, 0.0, 0.0])) if i == 1 else torch.diag(torch.tensor([1.0, 2.0, 3.0])),)

    model = chain(Apply(lambda x: x), Apply(project))
    model.register_parameter("scale", nn.Parameter(torch.ones(3, 3)))
    model[0].function = lambda x: x * model.scale
    return trained(model, batch, lambda y: (y * torch.arange(9.0).view(3, 3)).sum())


@failure("loss", None, "aten.div.Tensor", "nan", "empty_mask", "division_by_zero", code="mask.sum()")
def mean_over_an_empty_mask() -> Built:
    model = chain(nn.Linear(3, 2))
    masks = [torch.ones(4), torch.zeros(4)]
    step_number = [0]

    def loss(y: torch.Tensor) -> torch.Tensor:
        mask = masks[step_number[0] % 2]
        return (y.sum(-1) * mask).sum() / mask.sum()

    def batch(i: int) -> tuple[torch.Tensor]:
        step_number[0] = i
        return (torch.ones(4, 3),)

    return trained(model, batch, loss)


@failure("loss", None, "aten.nll_loss_forward.default", "nan", "empty_mask", code="cross_entropy")
def every_target_ignored() -> Built:
    model = chain(nn.Linear(3, 5))
    step_number = [0]

    def batch(i: int) -> tuple[torch.Tensor]:
        step_number[0] = i
        return (torch.ones(4, 3),)

    def loss(y: torch.Tensor) -> torch.Tensor:
        target = torch.full((4,), -100 if step_number[0] == 1 else 1)
        return functional.cross_entropy(y, target)

    return trained(model, batch, loss)


@failure("loss", None, "aten._ctc_loss.Tensor", "inf", "ctc_target_longer_than_input", code="ctc_loss")
def target_longer_than_input() -> Built:
    model = chain(nn.Linear(3, 5), nn.LogSoftmax(-1))
    step_number = [0]

    def batch(i: int) -> tuple[torch.Tensor]:
        step_number[0] = i
        return (torch.randn(4, 1, 3),)

    def loss(y: torch.Tensor) -> torch.Tensor:
        length = 6 if step_number[0] == 1 else 2
        target = torch.arange(length).remainder(4)[None] + 1
        return functional.ctc_loss(y, target, torch.tensor([4]), torch.tensor([length]), zero_infinity=False)

    return trained(model, batch, loss)


@failure("backward", None, "SqrtBackward0", "inf", "sqrt_at_zero", code=".sqrt()")
def distance_of_equal_embeddings() -> Built:
    model = chain(nn.Linear(3, 4))
    others = [torch.randn(4, 3), torch.ones(4, 3)]
    step_number = [0]

    def batch(i: int) -> tuple[torch.Tensor]:
        step_number[0] = i
        return (torch.ones(4, 3),)

    def loss(y: torch.Tensor) -> torch.Tensor:
        return (y - model(others[step_number[0] % 2])).pow(2).sum(-1).sqrt().mean()

    return trained(model, batch, loss)


@failure("buffer", "0", "aten.native_batch_norm.default", "inf", "variance_overflow")
def poisoned_running_statistics() -> Built:
    model = chain(nn.BatchNorm1d(3), nn.Linear(3, 2))
    return trained(model, lambda i: spoiled(i, 1e25), squares)


@failure("update", "0", None, "nan", "adam_eps_underflow")
def adams_epsilon_in_half_precision() -> Built:
    model = chain(nn.Linear(3, 2, bias=False)).half()

    def batch(i: int) -> tuple[torch.Tensor]:
        return (torch.full((4, 3), 1.0 if i == 0 else 0.0).half(),)

    optimizer = torch.optim.Adam(model.parameters(), 1e-3, eps=1e-8, betas=(0.0, 0.0))

    def step(i: int) -> None:
        optimizer.zero_grad()
        (model(*batch(i)).sum() * (1 if i == 0 else 1e-3)).backward()
        optimizer.step()

    return model, optimizer, step
