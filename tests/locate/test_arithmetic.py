"""What sums and products make of large and of infinite operands: the cause of each form that is no number."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tracehooks
from tracehooks.core.records import FirstNonFinite
from tracehooks.locate.case import case_of
from tracehooks.locate.causes import cause_of

Op = Callable[[Tensor, Tensor], Tensor]

DTYPES = (torch.float32, torch.bfloat16)
LARGE = 2e38
INF = torch.inf

CANCELS: dict[str, tuple[str, Op]] = {
    "matmul": ("aten.mm.default", lambda x, w: x @ w),
    "linear": ("aten.addmm.default", lambda x, w: functional.linear(x, w.T, w[0] * 1e-30)),
    "addmm": ("aten.addmm.default", lambda x, w: torch.addmm(w[:1] * 1e-30, x, w)),
    "mv": ("aten.mv.default", lambda x, w: x @ w[:, 0]),
    "dot": ("aten.dot.default", lambda x, w: x[2] @ w[:, 0]),
    "bmm": ("aten.bmm.default", lambda x, w: torch.bmm(x.expand(2, -1, -1), w.expand(2, -1, -1))),
    "baddbmm": ("aten.baddbmm.default", lambda x, w: torch.baddbmm(w[:1, None] * 1e-30, x[None], w[None])),
    "einsum": ("aten.bmm.default", lambda x, w: torch.einsum("nk,ko->no", x, w)),
    "conv": ("aten.convolution.default", lambda x, w: functional.conv1d(x[..., None], w.T[..., None])),
    "attention": (
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        lambda x, w: functional.scaled_dot_product_attention(*(x[None, None],) * 3),
    ),
    "sum": ("aten.sum.dim_IntList", lambda x, w: torch.stack([x, -x], -1).repeat(1, 1, 64).sum(-1)),
}
"""Ops on x (4, 3) and w (3, 2) whose terms are beyond any float, of both signs."""

MEETS: dict[str, tuple[str, Op]] = {
    "multiplied by a mask": ("zero_times_inf", lambda x, bad: (x != 3) * bad),
    "multiplied by a number": ("zero_times_inf", lambda x, bad: (x - 1) * bad.detach().max().item()),
    "multiplied in place": ("zero_times_inf", lambda x, bad: (x * 0).mul_(bad)),
    "a product of matrices": ("zero_times_inf", lambda x, bad: bad @ torch.tensor([[0.0], [1.0], [1.0]])),
    "a product of vectors": ("zero_times_inf", lambda x, bad: bad[2] @ torch.tensor([0.0, 1.0, 1.0])),
    "a convolution": ("zero_times_inf", lambda x, bad: functional.conv1d(bad[..., None], torch.zeros(2, 3, 1))),
    "a gate": ("zero_times_inf", lambda x, bad: functional.silu(bad)),
    "a product of elements": ("zero_times_inf", lambda x, bad: (bad * (x != 3)).prod(-1)),
    "a row less its largest": ("inf_minus_inf", lambda x, bad: bad[:, :1] - bad[:, :1].amax(-1, keepdim=True)),
    "added in a product": ("inf_minus_inf", lambda x, bad: bad @ torch.tensor([[1.0], [1.0], [1.0]])),
    "added in a layer": ("inf_minus_inf", lambda x, bad: functional.linear(bad, torch.ones(2, 3), torch.ones(2))),
    "a sum": ("inf_minus_inf", lambda x, bad: bad.sum(-1)),
    "a mean": ("inf_minus_inf", lambda x, bad: bad.mean(-1)),
    "a running sum": ("inf_minus_inf", lambda x, bad: bad.cumsum(-1)),
    "a deviation": ("inf_minus_inf", lambda x, bad: bad.std(-1)),
    "a softmax": ("inf_minus_inf", lambda x, bad: bad.softmax(-1)),
    "a normalisation": ("inf_minus_inf", lambda x, bad: functional.layer_norm(bad, (3,))),
    "a loss": ("infinity_used", lambda x, bad: functional.mse_loss(bad, bad * 1)),
    "an angle": ("infinity_used", lambda x, bad: bad.cos()),
    "a quotient": ("inf_over_inf", lambda x, bad: bad / bad),
}
"""Ops on x, and on x with -inf and +inf filled in at (2, 0) and (2, 1) in step 1."""


class Scaled(nn.Module):
    """An op on its input times a parameter, its result times ``factor``."""

    def __init__(self, op: Op, w: Tensor, factor: Tensor | float = 1.0) -> None:
        super().__init__()
        self.op, self.w, self.factor = op, w, factor
        self.scale = nn.Parameter(torch.ones((), dtype=w.dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.op(x * self.scale, self.w) * self.factor


def first_of(tmp_path, model: nn.Module, batches: list[Tensor], loss: Callable[[Tensor], Tensor] = Tensor.sum):
    """The first non-finite value of a training step on each batch, which is that of the last."""
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with tracehooks.attach(model, tmp_path / "run", quiet=True) as trace:
        for x in batches:
            optimizer.zero_grad()
            loss(model(x)).backward()
            optimizer.step()
        first = trace.first_nonfinite
    assert isinstance(first, FirstNonFinite)
    assert first.step == len(batches) - 1, first.message
    return first


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CANCELS)
def test_terms_that_overflow_and_cancel_are_an_overflow(tmp_path, name: str, dtype: torch.dtype) -> None:
    """NaN of finite operands in forward: the terms of a sum are beyond the dtype, of both signs."""
    op, function = CANCELS[name]
    x = torch.ones(4, 3, dtype=dtype)
    bad = x.clone()
    bad[2] = torch.tensor([LARGE, LARGE, -LARGE])
    w = torch.tensor([[3.0, 3.0], [3.0, 3.0], [6.0, 6.0]], dtype=dtype)
    first = first_of(tmp_path, Scaled(function, w), [x, bad])
    assert (first.phase, first.op, first.value, first.cause) == ("forward", op, "nan", "overflow"), first.message
    assert f"more than {str(dtype).removeprefix('torch.')} holds" in first.message
    assert "inf - inf" in first.message


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("name", "node"),
    [
        ("matmul", "MmBackward0"),
        ("linear", "AddmmBackward0"),
        ("bmm", "BmmBackward0"),
        ("baddbmm", "BaddbmmBackward0"),
        ("mv", "MvBackward0"),
        ("conv", "ConvolutionBackward0"),
    ],
)
def test_they_are_in_backward_too(tmp_path, name: str, node: str, dtype: torch.dtype) -> None:
    """A gradient and weights that are finite give NaN, or an infinity, where their products overflow."""
    factor = {"mv": torch.tensor(LARGE), "conv": torch.tensor([[LARGE], [-LARGE]])}.get(
        name, torch.tensor([LARGE, -LARGE])
    )
    model = Scaled(CANCELS[name][1], torch.full((3, 2), 3.0, dtype=dtype), factor.to(dtype))
    first = first_of(tmp_path, model, [torch.full((4, 3), 1e-30, dtype=dtype)], lambda y: y.float().sum())
    assert (first.phase, first.op, first.cause) == ("backward", node, "overflow"), first.message


@pytest.mark.parametrize("name", MEETS)
def test_infinities_that_meet(tmp_path, name: str) -> None:
    """NaN of operands with infinities that were put there on purpose is told by the form that is no number."""
    cause, function = MEETS[name]

    def op(x: Tensor, w: Tensor) -> Tensor:
        return function(x, x.masked_fill(x == 2, -INF).masked_fill(x == 3, INF))

    x = torch.ones(4, 3)
    bad = x.clone()
    bad[2, :2] = torch.tensor([2.0, 3.0])
    first = first_of(tmp_path, Scaled(op, torch.ones(())), [x, bad])
    assert (first.phase, first.value, first.cause) == ("forward", "nan", cause), first.message


def test_an_infinity_that_is_handed_on(tmp_path) -> None:
    """A mask's fill that reaches the loss as it is: smoothed targets give each position a weight, masked ones, too."""

    def op(x: Tensor, w: Tensor) -> Tensor:
        filled = x.masked_fill(x == 2, -INF)
        return functional.cross_entropy(filled, torch.tensor([0, 1, 2, 2]), label_smoothing=0.1)

    x = torch.ones(4, 3)
    bad = x.clone()
    bad[2, 0] = 2.0
    first = first_of(tmp_path, Scaled(op, torch.ones(())), [x, bad])
    assert (first.phase, first.value, first.cause) == ("forward", "inf", "infinity_used"), first.message


def test_steps_of_a_recurrence_share_one_memory(tmp_path) -> None:
    """What overflows in one of them is told at the product that made it, not at the view that cut it out."""
    cell = nn.GRU(3, 2, batch_first=True)
    nn.init.constant_(cell.weight_ih_l0, 3.0)
    x = torch.ones(1, 4, 3)
    bad = x.clone()
    bad[0, 2] = torch.tensor([3e38, 3e38, -3e38])
    first = first_of(tmp_path, Scaled(lambda x, w: cell(x)[0], torch.ones(())), [x, bad])
    assert (first.op, first.cause) == ("aten.addmm.default", "overflow"), first.message


def test_a_transform_to_complex_numbers(tmp_path) -> None:
    """A Fourier transform is a sum, too."""
    x = torch.ones(4, 3)
    first = first_of(tmp_path, Scaled(lambda x, w: torch.fft.rfft(x).abs(), torch.ones(())), [x, x * 2e38])
    assert (first.op, first.cause) == ("aten._fft_r2c.default", "overflow"), first.message
    assert "complex64 holds" in first.message


def test_complex_operands(tmp_path) -> None:
    """Rules that compare numbers are not asked about complex ones: an exponential of them is an overflow, no error."""
    x = torch.ones(4, 3)

    def op(x: Tensor, w: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x).mul(100 * x[2, 0].detach()).exp(), n=3)

    first = first_of(tmp_path, Scaled(op, torch.ones(())), [x * 1e-3, x])
    assert (first.op, first.cause) == ("aten.exp.default", "overflow"), first.message


def test_half_precision_has_its_own_name() -> None:
    """Where sums are kept in float16 terms that cancel are an overflow of float16."""
    x = torch.full((2, 2), 6e4, dtype=torch.float16)
    cause = cause_of(case_of(torch.ops.aten.mm.default, (x, x), {}, torch.full_like(x, torch.nan)))
    assert cause.tag == "fp16_overflow"
    assert "65504" in cause.sentence


def test_of_several_results_the_damaged_one_is_judged() -> None:
    """The gradient of a convolution's input may be finite while that of its weight is not."""
    x, bad = torch.ones(1, 1, 2), torch.full((1, 1, 2), INF)
    case = case_of(torch.ops.aten.convolution_backward.default, (x, x, x), {}, (x, bad, x))
    assert case.output is bad
    assert cause_of(case).tag == "overflow"


def test_a_mean_whose_sum_overflows(tmp_path) -> None:
    """The mean itself would fit."""
    x = torch.ones(4, 3)
    first = first_of(tmp_path, Scaled(lambda x, w: x.mean(-1), torch.ones(())), [x, x * 2e38])
    assert first.cause == "overflow"
    assert "the sum under the mean is more than float32 holds" in first.message


@pytest.mark.parametrize(
    ("op", "value", "factor", "node"),
    [(lambda x, w: 1 / x, 1e-25, 1.0, "ReciprocalBackward0"), (lambda x, w: x**2, 0.9, 3e38, "PowBackward0")],
)
def test_a_derivative_that_overflows_where_it_is_defined(tmp_path, op: Op, value: float, factor: float, node) -> None:
    """It is no zero in a divisor and no root at zero: the numbers say what it is."""
    x = torch.ones(4, 3) * 1e-3
    bad = x.clone()
    bad[2, 0] = value
    first = first_of(tmp_path, Scaled(op, torch.ones(()), factor), [x, bad], lambda y: (y * 1e-3).sum() * 1e3)
    assert (first.phase, first.op, first.cause) == ("backward", node, "overflow"), first.message


def test_an_infinity_that_a_bounded_function_takes_in(tmp_path) -> None:
    """It is told where it was born, although the forward pass ends finite."""
    x = torch.full((4, 3), 0.5)
    first = first_of(tmp_path, Scaled(lambda x, w: torch.atan2(x, x * 1e19), torch.ones(())), [x, x * 3e38])
    assert (first.phase, first.op, first.value, first.cause) == ("forward", "aten.mul.Tensor", "inf", "overflow")


@pytest.mark.parametrize(
    "op",
    [lambda x: x.log().masked_fill(x == 0, 0.0), lambda x: x.log().nan_to_num(neginf=0.0)],
    ids=["masked", "replaced"],
)
def test_an_infinity_that_is_replaced(tmp_path, op: Callable[[Tensor], Tensor]) -> None:
    """Its gradient is computed all the same."""
    x = torch.full((4, 3), 0.5)
    bad = x.clone()
    bad[2, 0] = 0.0
    first = first_of(tmp_path, Scaled(lambda x, w: op(x), torch.ones(())), [x, bad])
    assert (first.phase, first.cause) == ("backward", "masked_branch_gradient"), first.message


def test_a_divisor_close_to_zero(tmp_path) -> None:
    """A quotient that overflows names its smallest divisor, not the operand that grew."""
    x = torch.ones(4, 3)
    first = first_of(tmp_path, Scaled(lambda x, w: 1 / x, torch.ones(())), [x, x * 1e-39])
    assert first.cause == "overflow"
    assert "divided by values as small as 1e-39" in first.message


def test_a_gradient_that_overflows_outside_the_model(tmp_path) -> None:
    """Of a node of the loss the operands are not kept, but that they and the gradient were finite is known."""
    x = torch.ones(4, 3) * 1e-30
    factors = iter([1.0, 1e25])

    def grown(y: Tensor, factor: float) -> Tensor:
        return (y * factor * factor).sum()

    first = first_of(
        tmp_path, Scaled(lambda x, w: x, torch.ones(())), [x, x], lambda y: (y * (f := next(factors)) * f).sum()
    )
    assert (first.phase, first.module, first.op, first.cause) == ("backward", None, "MulBackward0", "overflow")
    assert "more than float32 holds" in first.message
