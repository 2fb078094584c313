"""An optimizer's update once more, for one parameter, on copies, under the op-level mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from tracehooks.locate import answers, circumstances
from tracehooks.locate.case import Cause
from tracehooks.locate.ops import Describe, Op, OpMode


def rerun_update(optimizer: Optimizer, parameter: Tensor, describe: Describe) -> tuple[Op, Cause] | None:
    """The op that makes an update non-finite, and why.

    The parameter's value from before the step is gone; where it is not finite zero stands in for it, which leaves the
    division by the second moment, the usual culprit, as it was.
    """
    group = next((g for g in optimizer.param_groups if any(p is parameter for p in g["params"])), None)
    if group is None or parameter.grad is None:
        return None
    mode = OpMode(lambda: None, describe)
    try:
        stand_in = _copy(parameter).requires_grad_()
        stand_in.grad = _copy(parameter.grad)
        twin = type(optimizer)([stand_in], **{k: v for k, v in optimizer.defaults.items() if k != "fused"})
        twin.param_groups[0].update({k: v for k, v in group.items() if k != "params"} | {"fused": None})
        state = optimizer.state.get(parameter, {})
        twin.state[stand_in] = {k: _copy(v) if isinstance(v, Tensor) else v for k, v in state.items()}
        with mode:
            twin.step()
    except Exception:  # an optimizer that cannot be made a second time: then only the parameter is named
        return None
    op = next((op for op in mode.ops if op.output.bad and not any(status.bad for _, status in op.sources)), None)
    return None if op is None else (op, _cause(op, optimizer, group, parameter))


def _cause(op: Op, optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> Cause:
    eps = group.get("eps")
    if eps and "adam" in type(optimizer).__name__.lower() and float(torch.tensor(eps).to(parameter.dtype)) == 0.0:
        return circumstances.adam_eps(parameter.dtype, eps)
    return answers.cause_of(op)


def _copy(x: Tensor) -> Tensor:
    copied = x.detach().clone()
    return torch.where(torch.isfinite(copied), copied, 0) if copied.is_floating_point() else copied
