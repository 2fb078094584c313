"""Causes that are known from where a value came from, not from the operands of an op: the autograd node, a parameter, an
argument, what was done to gradients.
"""

from __future__ import annotations

import math

import torch

from tracehooks.locate.case import Cause

BACKWARD: dict[str, Cause] = {
    "SqrtBackward0": Cause(
        "sqrt_at_zero", "the derivative of the square root is infinite at zero", "add an epsilon inside the square root"
    ),
    "PowBackward0": Cause(
        "pow_at_zero",
        "the derivative of a power below one is infinite at zero",
        "add an epsilon to the base or clamp it",
    ),
    "PowBackward1": Cause("pow_at_zero", "the derivative of a power with a zero base", "clamp the base away from zero"),
    "AcosBackward0": Cause(
        "acos_at_domain_edge", "the derivative of acos is infinite at ±1", "clamp its argument inside ±1"
    ),
    "AsinBackward0": Cause(
        "acos_at_domain_edge", "the derivative of asin is infinite at ±1", "clamp its argument inside ±1"
    ),
    "LinalgSvdBackward0": Cause(
        "repeated_singular_values",
        "the derivative of the SVD divides by differences of squared singular values, and two of them are equal",
        "add noise to the matrix, or avoid the gradient of singular vectors",
    ),
    "LinalgEighBackward0": Cause(
        "repeated_singular_values", "the derivative of eigenvectors divides by differences of eigenvalues", "add noise"
    ),
    "DivBackward0": Cause(
        "division_by_zero", "the derivative of a quotient divides by its divisor, zero here", "clamp the divisor"
    ),
    "LogBackward0": Cause("log_of_zero", "the derivative of the logarithm is infinite at zero", "clamp its argument"),
    "LinalgVectorNormBackward0": Cause("sqrt_at_zero", "the derivative of a norm at a zero vector", "add an epsilon"),
    "NormBackward0": Cause("sqrt_at_zero", "the derivative of a norm at a zero vector", "add an epsilon"),
    "StdBackward0": Cause("std_of_single_element", "the derivative of a standard deviation of zero", "add an epsilon"),
    "ReciprocalBackward0": Cause("division_by_zero", "the derivative of a reciprocal at zero", "clamp its argument"),
    "LogsumexpBackward0": Cause(
        "logsumexp_all_neg_inf", "the derivative of logsumexp over -inf only", "keep one finite element in each row"
    ),
    "SoftmaxBackward0": Cause("fully_masked_row", "softmax over rows that are masked entirely", "keep one position"),
    "RsqrtBackward0": Cause("division_by_zero", "the derivative of 1/sqrt at zero", "add an epsilon"),
}
"""Autograd nodes whose derivative is not defined everywhere their op is."""

PRODUCTS = frozenset(
    f"{op}Backward0"
    for op in ("Mul", "Mm", "Addmm", "Bmm", "Baddbmm", "Mv", "Dot", "Linear", "Convolution", "Exp", "Prod", "Addcmul")
)
"""Autograd nodes whose derivative is a product of the gradient and operands or results of their op."""

MASKED_BRANCH = Cause(
    "masked_branch_gradient",
    "torch.where, masked_fill or nan_to_num hides the branch in the forward pass, but its gradient is computed all the "
    "same: zero times infinity",
    "choose the argument with where first, so that the op never sees the values that where hides",
)


UNINITIALISED = Cause(
    "uninitialised_parameter",
    "a parameter is not finite before the first step",
    "initialise it: torch.empty holds whatever was in memory",
)
BAD_TARGET = Cause(
    "nonfinite_input", "it came into the loss from outside: a target, a weight", "look at it where it is loaded"
)
POISONED_BUFFER = Cause(
    "poisoned_buffer",
    "a buffer was not finite before this pass",
    "look at the step that changed it, or at its checkpoint",
)
POISONED = Cause(
    "poisoned_parameter", "a parameter was not finite before this pass", "look at the step that changed it"
)


POISONED_AVERAGE = Cause(
    "poisoned_average",
    "the moving average of the model is not finite, the model itself is",
    "look at how the average is updated: its decay, its dtype, a division by a bias correction of zero",
)
GRADIENT_HOOK = Cause(
    "gradient_hook",
    "run again without hooks on tensors, backward gives finite gradients: a hook that changes gradients made it",
    "look at the hooks registered on parameters and activations",
)


def clipping(norm: float) -> Cause:
    """Gradients that backward made finite, of this norm, are not after clipping."""
    if norm == 0:
        return Cause(
            "division_by_zero",
            "every gradient is zero, and clipping divides by their norm",
            "add an epsilon to the norm, and look for what makes every gradient zero",
        )
    if math.isinf(norm):
        return Cause(
            "clip_with_infinite_norm",
            "every gradient is finite, but their norm overflows their dtype, and clipping by it leaves no number",
            "take the norm in float32, or clip with error_if_nonfinite=True",
        )
    return Cause(
        "unknown",
        f"backward gave finite gradients of norm {norm:.4g}; an op between backward and the optimizer's step changed them",
        "look at the operands of that op",
    )


def bad_input(name: str | None, reader: str | None) -> Cause:
    """The model's input is not finite."""
    what = f"argument {name} of the root" if name else "a tensor that came from outside the model"
    by = f", first read by module {reader or '(root)'}" if reader is not None else ""
    return Cause("nonfinite_input", f"{what} holds it already{by}", "look at these samples where they are loaded")


def clipped(cause: Cause, names: tuple[str, ...]) -> Cause:
    """An infinite gradient that clipping by its infinite norm spread."""
    return Cause(
        "clip_with_infinite_norm",
        f"{cause.sentence}; clipping by the infinite norm made NaN of it in {', '.join(names)} and zero of all other "
        "gradients",
        f"{cause.next_check}; clip with error_if_nonfinite=True",
    )


def adam_eps(dtype: torch.dtype, eps: float) -> Cause:
    """Adam's epsilon is zero in the parameters' dtype."""
    return Cause(
        "adam_eps_underflow",
        f"eps={eps:g} is zero in {str(dtype).removeprefix('torch.')}, and the second moment underflowed, so the update "
        "divides by zero",
        "keep the parameters or the optimizer's state in float32, or raise eps",
    )


def product_cause(node: str, dtype: torch.dtype, infinite: bool, nan: bool) -> Cause | None:
    """What a derivative that is a product makes of a finite gradient: of ``infinite`` operands, or else of finite ones."""
    if node not in PRODUCTS or (infinite and not nan):
        return None
    if infinite:
        sentence = f"the derivative {node} multiplies a gradient of zero by an infinite operand"
        return Cause("zero_times_inf", sentence, "keep infinities out of products: choose with torch.where instead")
    name = str(dtype).removeprefix("torch.")
    return Cause(
        "fp16_overflow" if dtype == torch.float16 else "overflow",
        f"the derivative {node} multiplies a finite gradient by finite operands, and that is more than {name} holds "
        f"({torch.finfo(dtype).max:.6g})",
        "look for the operand that grew, and for a loss that is scaled too far",
    )


def backward_cause(node: str) -> Cause | None:
    """What is known of an autograd node whose gradient was the first that is not finite."""
    return BACKWARD.get(node)
