"""Why an op made something non-finite: a tag, one plain sentence, the next check.

Told from the op and from its operands as they were. Tags are listed in docs/causes.md.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tracehooks.locate import arithmetic
from tracehooks.locate.case import Case, Cause, Rule, dtype_of, finite, operand


def cause_of(case: Case) -> Cause:
    """The first rule for this op that applies, else what can be said of any op."""
    known = _ARITHMETIC if any(x.is_complex() for x in case.tensors) else _RULES  # the others compare numbers
    for rule in (*known.get(case.name, ()), arithmetic.overflow):
        found = rule(case)
        if found is not None:
            return found
    if arithmetic.holds_infinity(case):
        return Cause(
            "infinity_used",
            f"{case.name} was given infinities that were there before, a mask's fill, a constant or -inf from outside",
            "choose with torch.where after it, leave masked positions out, or mask with a large finite number",
        )
    return Cause("unknown", f"{case.name} made it of finite values", "look at the operands listed above")


# ---- rules


def _softmax(case: Case) -> Cause | None:
    x, dim = case.tensors[0], int(case.args[1]) if len(case.args) > 1 else -1
    masked = int((x == -torch.inf).all(dim).sum()) if x.ndim else 0
    if not masked:
        return arithmetic.total(case)  # its largest element is taken from each of them, and that may be +inf
    rows = x.numel() // max(1, x.shape[dim])
    return Cause(
        "fully_masked_row",
        f"softmax over rows in which every position is masked: -inf entirely in {masked:,} of {rows:,} rows",
        "give such rows one position to attend to, or leave them out and zero their result",
    )


def _fused_attention(case: Case) -> Cause | None:
    masks = [x for x in (*case.args, *case.kwargs.values()) if isinstance(x, Tensor) and x.dtype == torch.bool]
    additive = [x for x in case.tensors[3:] if x.ndim and bool((x == -torch.inf).all(-1).any())]
    if additive or any(bool(mask.all(-1).any()) for mask in masks if mask.ndim):
        return Cause(
            "fully_masked_row",
            "attention over a row in which every key is masked",
            "give such rows one position to attend to, or leave them out of the batch",
        )
    return None


def _logsumexp(case: Case) -> Cause | None:
    x = case.tensors[0]
    dims = case.args[1] if len(case.args) > 1 else -1
    if bool((x == -torch.inf).all(dims[0] if isinstance(dims, list | tuple) else int(dims)).any()):
        return Cause("logsumexp_all_neg_inf", "logsumexp over -inf only", "keep one finite element in each reduced row")
    return None


def _exp(case: Case) -> Cause | None:
    x = case.tensors[0]
    largest, limit = float(finite(x).max()), torch.finfo(x.dtype).max
    return Cause(
        "exp_overflow",
        f"exp of {largest:.6g} is more than {dtype_of(x)} holds ({limit:.4g}, the exponential of {_log(limit):.4g})",
        "clamp the exponent, or work with its logarithm",
    )


def _log(value: float) -> float:
    return float(torch.log(torch.tensor(value, dtype=torch.float64)))


def _logarithm(case: Case) -> Cause | None:
    x = case.tensors[0] + (1 if case.name == "log1p" else 0)
    zeros, negative = int((x == 0).sum()), int((x < 0).sum())
    if negative:
        sentence = f"{case.name} of negative values, the smallest {float(finite(case.tensors[0]).min()):.6g}"
        return Cause("log_of_negative", sentence, "clamp its argument above zero")
    if zeros:
        return Cause(
            "log_of_zero",
            f"{case.name} of zero in {zeros:,} elements",
            "clamp its argument above zero, or use log_softmax",
        )
    return None


def _division(case: Case) -> Cause | None:
    divisor = operand(case, 1)
    if divisor is None:
        return None
    zero = divisor == 0
    count = int(zero.sum()) if isinstance(zero, Tensor) else int(zero)
    if not count:
        return arithmetic.quotient(case)
    numerator = operand(case, 0)
    both = bool(((numerator == 0) & zero).any()) if isinstance(numerator, Tensor) else False
    whole = divisor.numel() if isinstance(divisor, Tensor) else 1
    what = "0/0" if both else "division by zero"
    counted = isinstance(divisor, Tensor) and (
        not divisor.is_floating_point() or case.makers[-1:] == ("aten.sum.default",)
    )
    if counted and whole == 1:
        return Cause(
            "empty_mask",
            f"{what}: a count of elements is zero, so a mean is taken over nothing",
            "skip such a batch, or divide by the count clamped to at least one",
        )
    tag = "division_by_zero"
    if isinstance(divisor, Tensor) and divisor.ndim and divisor.shape[-1] == 1 and both:
        tag = _normaliser(case.makers[1] if len(case.makers) > 1 else "")
    return Cause(
        tag,
        f"{what} in {count:,} of {whole:,} divisors",
        "add a small epsilon to the divisor or clamp it away from zero",
    )


def _normaliser(maker: str) -> str:
    """A divisor that belongs to one row each, by the op that made it: a vector's norm, or a sum of weights."""
    if "norm" in maker or maker.startswith("aten.sqrt"):
        return "division_by_zero_norm"
    return "zero_attention_normaliser" if any(op in maker for op in ("mm", "sum", "mv")) else "division_by_zero"


def _std(case: Case) -> Cause | None:
    x = case.tensors[0]
    dims = case.args[1] if len(case.args) > 1 else None
    dims = [dims] if isinstance(dims, int) else list(dims) if dims else list(range(x.ndim))
    count = 1
    for dim in dims:
        count *= x.shape[dim]
    if count <= 1:
        return Cause(
            "std_of_single_element",
            f"unbiased {case.name} over {count} element: its divisor is zero",
            "use correction=0, or leave out sequences of length one",
        )
    return None


def _mean(case: Case) -> Cause | None:
    if case.tensors and case.tensors[0].numel() == 0:
        return Cause("empty_reduction", f"{case.name} over an empty tensor", "skip empty selections")
    return arithmetic.mean(case)


def _nll(case: Case) -> Cause | None:
    target = next((x for x in case.args if isinstance(x, Tensor) and not x.is_floating_point()), None)
    ignore = next((x for x in reversed(case.args) if isinstance(x, int) and not isinstance(x, bool)), -100)
    if target is not None and bool((target == ignore).all()):
        return Cause(
            "empty_mask",
            f"every one of the {target.numel():,} targets is ignored (index {ignore}): a mean over nothing",
            "skip such a batch, or keep at least one supervised target in it",
        )
    return None


def _ctc(case: Case) -> Cause | None:
    lengths = [x for x in case.args if isinstance(x, Tensor | list | tuple)][-2:]
    if len(lengths) == 2:
        inputs, targets = (torch.as_tensor(x).cpu() for x in lengths)
        longer = inputs.shape == targets.shape and bool((targets > inputs).any())
        return Cause(
            "ctc_target_longer_than_input",
            "a target cannot be aligned to its input: it is longer, or repeats leave no room for blanks"
            if longer
            else "a target with its repeats does not fit into its input",
            "drop or pad such samples, or use zero_infinity=True",
        )
    return None


def _normalisation(case: Case) -> Cause | None:
    x = case.tensors[0]
    if not bool(torch.isfinite(x).all()):
        return arithmetic.total(case)  # the mean, which is infinite, is taken from each element
    largest = float(finite(x).abs().max())
    # the variance is summed up in float32 at least
    if largest * largest * x.numel() <= max(torch.finfo(x.dtype).max, torch.finfo(torch.float32).max):
        return None
    return Cause(
        "variance_overflow",
        f"the variance of values up to {largest:.4g} is more than {dtype_of(x)} holds",
        "look for a corrupt sample, and clamp or drop it before it enters a mean or running statistics",
    )


def _domain(tag: str, sentence: str, inside: Callable[[Tensor], Tensor]) -> Rule:
    def rule(case: Case) -> Cause | None:
        outside = ~inside(case.tensors[0])
        if not bool(outside.any()):
            return None
        return Cause(tag, f"{sentence} in {int(outside.sum()):,} elements", "clamp the argument into the domain")

    return rule


def _power(case: Case) -> Cause | None:
    base, exponent = (torch.as_tensor(operand(case, index)) for index in (0, 1))
    told = f"{float(exponent):g}" if exponent.numel() == 1 else "what is no whole number"
    if bool(((base == 0) & (exponent < 0)).any()):
        below = told if exponent.numel() == 1 else "less than zero"
        return Cause("division_by_zero", f"zero to the power of {below}", "clamp the base away from zero")
    if bool(((base < 0) & (exponent != exponent.trunc())).any()):
        return Cause("pow_of_negative", f"negative values to the power of {told}", "clamp the base above zero")
    return None


def _reciprocal(what: str) -> Rule:
    def rule(case: Case) -> Cause | None:
        count = int((case.tensors[0] == 0).sum())
        if count:
            return Cause("division_by_zero", f"{what} in {count:,} elements", "add an epsilon")
        return arithmetic.small_divisor(case, case.tensors[0])

    return rule


_MATRICES = {
    (0, 1): ("mm", "bmm", "mv", "dot", "vdot", "matmul"),
    (1, 2): ("addmm", "addbmm", "addmv", "baddbmm", "_addmm_activation"),
}
"""Sums of products over the last dimension of one operand and the last but one of the other, by their positions."""
_PRODUCTS = (
    "convolution", "_convolution", "convolution_backward", "mkldnn_convolution", "cudnn_convolution", "conv1d", "conv2d",
    "conv3d", "einsum", "_trilinear", "addcmul",
)  # fmt: skip
_ATTENTION = tuple(
    f"_scaled_dot_product_{kind}{backward}"
    for kind in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
    for backward in ("", "_backward")
)
_TOTALS = (
    "_fft_r2c",
    "_fft_c2r",
    "_fft_c2c",
    "sum",
    "cumsum",
    "trace",
    "index_add",
    "scatter_add",
    "index_put",
    "lerp",
)
_NORMALISATIONS = (
    "native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "_batch_norm_with_update", "native_layer_norm",
    "native_group_norm",
)  # fmt: skip
_OWN_PRODUCTS = ("silu", "gelu", "mish", "hardswish", "glu", "prod", "cumprod")

_ARITHMETIC: dict[str, tuple[Rule, ...]] = {
    "mul": (arithmetic.product,),
    "add": (arithmetic.difference,),
    "sub": (arithmetic.difference,),
    "rsub": (arithmetic.difference,),
    "linear": (arithmetic.contraction(0, 1, (-1, -1)),),
    **{name: (arithmetic.contraction(*places),) for places, names in _MATRICES.items() for name in names},
    **dict.fromkeys(_PRODUCTS, (arithmetic.products,)),
    **dict.fromkeys(_TOTALS, (arithmetic.total,)),
    **dict.fromkeys(_OWN_PRODUCTS, (arithmetic.own_product,)),
}
"""Rules of sums and products, real or complex."""

_RULES: dict[str, tuple[Rule, ...]] = {
    **_ARITHMETIC,
    "_softmax": (_softmax,),
    "_log_softmax": (_softmax,),
    "_safe_softmax": (_softmax,),
    "_masked_softmax": (_fused_attention,),
    "_transformer_encoder_layer_fwd": (_fused_attention,),
    "_native_multi_head_attention": (_fused_attention,),
    "logsumexp": (_logsumexp,),
    "exp": (_exp,),
    "exp2": (_exp,),
    "expm1": (_exp,),
    "sinh": (_exp,),
    "cosh": (_exp,),
    "log": (_logarithm,),
    "log2": (_logarithm,),
    "log10": (_logarithm,),
    "log1p": (_logarithm,),
    "div": (_division,),
    "true_divide": (_division,),
    "reciprocal": (_reciprocal("division by zero"),),
    "rsqrt": (_reciprocal("reciprocal square root of zero"),),
    "std": (_std, arithmetic.total),
    "var": (_std, arithmetic.total),
    "var_mean": (_std, arithmetic.total),
    "std_mean": (_std, arithmetic.total),
    "mean": (_mean,),
    "nll_loss_forward": (_nll,),
    "nll_loss2d_forward": (_nll,),
    "_ctc_loss": (_ctc,),
    "sqrt": (_domain("sqrt_of_negative", "square root of negative values", lambda x: x >= 0),),
    "acos": (_domain("acos_at_domain_edge", "arc cosine of values beyond 1", lambda x: x.abs() <= 1),),
    "asin": (_domain("acos_at_domain_edge", "arc sine of values beyond 1", lambda x: x.abs() <= 1),),
    "atanh": (_domain("atanh_at_domain_edge", "inverse tanh at or beyond 1", lambda x: x.abs() < 1),),
    "pow": (_power,),
    **dict.fromkeys(_ATTENTION, (_fused_attention, arithmetic.products)),
    **dict.fromkeys(_NORMALISATIONS, (_normalisation,)),
}
"""Rules by op, tried in order. An op in `_RULES` without a rule that applies may still have overflowed."""
