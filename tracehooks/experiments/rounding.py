"""Ops that lose more than their dtype's rounding: each value of a run in low precision beside the same value in float64.

Every op of the forward and the backward pass runs a second time, on what its operands would be had nothing been rounded. So
an op that loses is told from one that is given what was lost before, and an overflow from an infinity that was meant.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tracehooks.capture import torch_internals
from tracehooks.locate.ops import Details, Op, OpMode, follows
from tracehooks.locate.replay import paths_followed

AMPLIFIED = 10.0
"""An op makes a difference of its own where its error is this many times the largest of its operands."""

KINDS = {
    "overflow": "its result is beyond the largest number of its dtype",
    "underflow": "what it makes is below the smallest number of its dtype and becomes zero or coarse",
    "rounding": "it loses more than its dtype's rounding, on these very operands",
    "cancellation": "its operands are rounded and their common part cancels",
}
"""What an op does to lose, in words."""


@dataclass(frozen=True)
class LossyOp:
    """An op whose result is off by more than rounding, though its operands are not."""

    op: str
    """aten overload, ``aten.addmm.default``."""
    module: str | None
    """Path of the module that ran it, or whose forward made the node that did; None outside the model."""
    phase: str
    """forward, backward or recompute."""
    kind: str
    """One of `KINDS`."""
    dtype: str
    error: float
    """‖result − exact‖ / ‖exact‖, infinite where it overflows."""
    error_before: float
    """The largest such error among its operands."""
    file: str | None = None
    line: int | None = None
    code: str | None = None

    def __str__(self) -> str:
        where = "outside the model" if self.module is None else f"in {self.module or '(root)'}"
        line = f", {self.file}:{self.line}: {self.code}" if self.file else ""
        numbers = (
            "" if self.kind == "overflow" else f" (relative error {self.error:.2g}, {self.error_before:.2g} before)"
        )
        return f"{self.op} {where} ({self.phase}), {self.dtype}{line}: {KINDS[self.kind]}{numbers}"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def lossy_ops(model: nn.Module, run: Callable[[], None], beyond: float) -> tuple[LossyOp, ...]:
    """The ops of ``run`` that lose more than ``beyond``, in the order in which they ran."""
    stack: list[str] = []
    seen = OpMode(lambda: stack[-1] if stack else None, _undescribed)
    with paths_followed(model, stack), seen, _Exactly(seen, beyond) as mode:
        run()
    return tuple(mode.found)


def _undescribed(*_: Any) -> Details:
    return Details("", "", "")


class _Exactly(torch_internals.DispatchMode):  # type: ignore[no-untyped-call]
    """Keeps a float64 value beside each tensor. It stands above a mode that knows module and line of each op."""

    def __init__(self, seen: OpMode, beyond: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[LossyOp] = []
        self._seen, self._beyond = seen, beyond
        self._exact: dict[Any, tuple[Tensor, Tensor]] = {}
        """Of each tensor: itself, so that its memory stays its own, and its exact value."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable and not (args and isinstance(args[0], Tensor) and follows(args[0])):
            return func(*args, **kwargs)  # to run it again would change a counter twice
        exact = _mapped((args, kwargs), self._exact_of)
        before = _mapped((args, kwargs), lambda x: x.detach().clone()) if func._schema.is_mutable else (args, kwargs)
        known = len(self._seen.ops)
        output = func(*args, **kwargs)
        was_active, self._seen.active = self._seen.active, False
        try:
            with torch_internals.without_torch_function():
                self._beside(func, exact, output)
                if len(self._seen.ops) > known and not _is_random(func):
                    self._judge(func, before, exact, output, self._seen.ops[-1])
        finally:
            self._seen.active = was_active
        return output

    def _beside(self, func: Any, exact: Any, output: Any) -> None:
        """Note the exact values of results. What is drawn at random, and what has no float64 kernel, is taken as it is."""
        args, kwargs = exact
        made = None if _is_random(func) else _again(func, args, kwargs)
        for result, value in zip(_tensors(output), _tensors(made), strict=False):
            fits = value.shape == result.shape and value.dtype == _wide(result.dtype)
            self._exact[_key(result)] = result.detach(), value if fits else result.detach().to(_wide(result.dtype))
        if made is None:
            for result in _tensors(output):
                self._exact[_key(result)] = result.detach(), result.detach().to(_wide(result.dtype))

    def _judge(self, func: Any, before: Any, exact: Any, output: Any, op: Op) -> None:
        operands = list(zip(_tensors(before), _tensors(exact), strict=True))
        results = [(result, self._exact_of(result)) for result in _tensors(output)]
        kind, error, error_before = "", 0.0, max((_error(*pair) for pair in operands), default=0.0)
        for number, (result, value) in enumerate(results):
            error = _error(result, value)
            if error == float("inf"):
                kind = "overflow" if error_before < error else ""
            elif error > self._beyond and (
                not number or op.phase == "backward"
            ):  # what else a forward op returns is for later
                kind = self._lost(func, before, result, value, error, error_before, operands)
            if kind:
                break
        if not kind:
            return
        self.found.append(
            LossyOp(
                op=op.name,
                module=op.module,
                phase=op.phase,
                kind=kind,
                dtype=str(result.dtype).removeprefix("torch."),
                error=error,
                error_before=error_before,
                file=op.place.file if op.place else None,
                line=op.place.line if op.place else None,
                code=op.place.code if op.place else None,
            )
        )

    def _lost(
        self, func: Any, before: Any, result: Tensor, value: Tensor, error: float, error_before: float, operands: Any
    ) -> str:
        """Why a result is off; nothing where its operands were."""
        wide = _mapped(before, lambda x: x.detach().to(_wide(x.dtype)))
        local = next((made for made in _tensors(_again(func, *wide)) if made.shape == result.shape), None)
        if local is not None and _error(result, local) > self._beyond:
            tiny = torch.finfo(result.dtype).smallest_normal
            small = torch.where(local.abs() < tiny, local - result, 0.0).norm()
            if small * 2 > (local - result).norm():
                return "underflow"
            sizes = [float(operand.detach().abs().max()) for operand, _ in operands if operand.numel()]
            if float((local - result).abs().max()) > torch.finfo(result.dtype).eps * max(sizes, default=0.0):
                return "rounding"  # a sum that is nearly zero is off by little, whatever its own size
        whole = all(result.numel() >= operand.numel() for operand, _ in operands)
        return "cancellation" if whole and error > AMPLIFIED * max(error_before, self._beyond / AMPLIFIED) else ""

    def _exact_of(self, x: Tensor) -> Tensor:
        found = self._exact.get(_key(x))
        if found is None:
            found = self._exact[_key(x)] = x.detach(), x.detach().to(_wide(x.dtype))
        return found[1]


def _again(func: Any, args: Any, kwargs: Any) -> Any:
    """The op in float64; None where it has no such kernel, or takes operands of these very layouts."""
    args, kwargs = _mapped((args, kwargs), lambda x: x, _wide)
    if func.overloadpacket.__name__ in ("_softmax", "_log_softmax"):
        args = (*args[:2], False)  # from half to float: there is no half
    try:
        return func(*args, **kwargs)
    except (RuntimeError, NotImplementedError, TypeError):
        return None


def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def _key(x: Tensor) -> Any:
    return torch_internals.storage_key(x), x.storage_offset(), tuple(x.shape), x.stride(), x.dtype


def _error(x: Tensor, exact: Tensor) -> float:
    """‖x − exact‖ / ‖exact‖; infinite where x alone is not finite. Elements of which the exact value is not finite, such as
    those of a mask, do not count."""
    known = torch.isfinite(exact)
    x, exact = x.detach()[known].to(exact.dtype), exact[known]
    if not torch.isfinite(x).all():
        return float("inf")
    norm = float(exact.norm())
    apart = float((x - exact).norm())
    return apart / norm if norm else 0.0


def _mapped(
    value: Any, tensor: Callable[[Tensor], Any], dtype: Callable[[torch.dtype], torch.dtype] | None = None
) -> Any:
    """A call's arguments with the floating tensors, and on request the floating dtypes, replaced."""
    if isinstance(value, Tensor):
        return tensor(value) if follows(value) else value
    if isinstance(value, tuple | list):
        return type(value)(_mapped(item, tensor, dtype) for item in value)
    if isinstance(value, dict):
        return {name: _mapped(item, tensor, dtype) for name, item in value.items()}
    if dtype is not None and isinstance(value, torch.dtype) and value.is_floating_point:
        return dtype(value)
    return value


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _mapped(value, found.append)
    return found
