"""One batch in full and in lower precision: what overflows, what differs beyond rounding, what should stay in float32."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tracehooks.analysis.diff import Diff, diff
from tracehooks.analysis.first import first_in_rows
from tracehooks.analysis.tolerance import EPSILON
from tracehooks.core.arguments import number
from tracehooks.core.errors import InvalidOptionError
from tracehooks.core.records import FirstNonFinite, Site
from tracehooks.experiments.given import one_batch
from tracehooks.experiments.progress import progress
from tracehooks.experiments.recording import record_step, seed_all, untouched
from tracehooks.experiments.rounding import LossyOp, lossy_ops
from tracehooks.storage import Run, open_run

SCALE = 2.0**16
"""The first loss scale of torch's GradScaler."""

BEYOND = 10.0
"""A module whose output is this many roundings of the lower precision away from the full one's should stay in float32."""

SITE = ("module", "slot", "phase", "call")

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}

LossFn = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True)
class PrecisionDiff(Diff):
    """A diff between full (a) and lower (b) precision, and what it means."""

    dtype: str = ""
    overflow: FirstNonFinite | None = None
    """The first non-finite value in lower precision; None when all is finite."""
    underflow: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Parameters whose gradient has more zeros in lower precision than in full, without and with scaling: (unscaled,
    scaled) counts of elements lost."""
    keep_float32: tuple[str, ...] = ()
    """Modules whose output overflows, or is more than 10 roundings away by what they themselves do."""
    scaled_overflow: FirstNonFinite | None = None
    """The first non-finite value with the loss scaled; None when all is finite."""
    ops: tuple[LossyOp, ...] = ()
    """Ops that overflow or lose more than 10 roundings of the lower precision, in the order in which they ran."""
    scaled_ops: tuple[LossyOp, ...] = ()
    """The same with the loss scaled."""

    def __str__(self) -> str:
        lines = [f"float32 against autocast to {self.dtype}"]
        for title, seen in (("overflow", self.overflow), ("overflow with the loss scaled", self.scaled_overflow)):
            lines.append(f"{title}: {seen.message.splitlines()[0] if seen else 'none'}")
        for title, ops in (("first op to lose", self.ops), ("first op to lose with the loss scaled", self.scaled_ops)):
            more = f"; {len(ops) - 1} more" if len(ops) > 1 else ""
            lines.append(f"{title}: {ops[0]}{more}" if ops else f"{title}: none")
        lost = {name: counts for name, counts in self.underflow.items() if counts[0]}
        lines.append(f"gradients that lose elements to zero: {len(lost)}")
        lines += [f"  {name}: {plain} unscaled, {scaled} scaled" for name, (plain, scaled) in list(lost.items())[:10]]
        lines.append(f"keep in float32: {', '.join(self.keep_float32) or 'nothing stands out'}")
        return "\n".join([*lines, self._agreement()])

    def _agreement(self) -> str:
        """How far the two are apart beyond what was asked for: another dtype, within its rounding."""
        rows = self.differing.to_pylist()
        beyond = [row for row in rows if not _only_lowered(row)]
        if not beyond:
            return (
                f"all {len(self.rows)} tensors and scalars agree within {BEYOND:g} roundings of {self.dtype}; "
                f"{len(rows)} of them are kept in it"
            )
        first = beyond[0]
        site = first["slot"] if first["module"] is None else Site(*(first[name] for name in SITE))
        apart = first["status"] if first["difference"] is None else f"relative difference {first['difference']:.2g}"
        return (
            f"{len(beyond)} of {len(self.rows)} tensors and scalars are more than {BEYOND:g} roundings of {self.dtype} "
            f"apart, the first of them {site}: {apart}"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            **super().to_json(),
            "dtype": self.dtype,
            "overflow": self.overflow and self.overflow.to_details(),
            "scaled_overflow": self.scaled_overflow and self.scaled_overflow.to_details(),
            "ops": [op.to_json() for op in self.ops],
            "scaled_ops": [op.to_json() for op in self.scaled_ops],
            "underflow": {name: list(counts) for name, counts in self.underflow.items()},
            "keep_float32": list(self.keep_float32),
        }


def precision(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    dtype: str | torch.dtype = "float16",
    *,
    seed: int = 0,
    scale: float = SCALE,
    quiet: bool = False,
) -> PrecisionDiff:
    """Run one batch in float32, under autocast, and under autocast with the loss scaled; compare the three.

    The latter two run once more with every value beside its exact one, in float64.

    Args:
        loss_fn: (model, batch) → the loss.
        dtype: float16 or bfloat16, by name or as torch's.
        scale: what the loss is multiplied by in the third run, as a GradScaler does.
        quiet: draw no bar.

    Raises:
        InvalidOptionError: another dtype, or an argument of another kind.
    """
    one_batch(model, loss_fn, batch)
    number("scale", scale, "a number above 0", lambda factor: 0 < factor < math.inf)
    dtype = str(dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise InvalidOptionError("dtype", dtype, " or ".join(DTYPES))
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")

    def lowered(factor: float) -> LossFn:
        def run(model: nn.Module, batch: Any) -> Any:
            with torch.autocast(device, DTYPES[dtype]):
                loss = loss_fn(model, batch)
            return loss * factor if factor != 1 else loss

        return run

    def lossy(factor: float) -> tuple[LossyOp, ...]:
        def run() -> None:
            seed_all(seed)
            loss = lowered(factor)(model, batch)
            if isinstance(loss, torch.Tensor) and loss.requires_grad and loss.numel() == 1:
                loss.backward()  # type: ignore[no-untyped-call]

        with untouched(model), torch.enable_grad():
            return lossy_ops(model, run, BEYOND * EPSILON[dtype])

    with tempfile.TemporaryDirectory() as folder, progress("precision", 5, quiet) as done:
        runs = []
        for name, run in (("full", loss_fn), ("lower", lowered(1.0)), ("scaled", lowered(scale))):
            runs.append(open_run(record_step(model, run, batch, Path(folder) / name, seed=seed)))
            done(name)
        full, lower, scaled = runs
        found = diff(full, lower, tolerance=BEYOND * EPSILON[dtype])
        zeros = [_gradient_zeros(run) for run in runs]
        ops = lossy(1.0)
        done("ops")
        scaled_ops = lossy(scale)
        done("ops, scaled")
        parts = {name: getattr(found, name) for name in Diff.__dataclass_fields__}
        return PrecisionDiff(
            **{**parts, "a": "float32", "b": dtype},
            dtype=dtype,
            overflow=_overflow(lower, full),
            scaled_overflow=_overflow(scaled, full),
            underflow={
                name: (max(zeros[1][name] - count, 0), max(zeros[2].get(name, count) - count, 0))
                for name, count in zeros[0].items()
                if name in zeros[1]
            },
            keep_float32=_too_far(found, ops),
            ops=ops,
            scaled_ops=scaled_ops,
        )


def _only_lowered(row: dict[str, Any]) -> bool:
    """Whether a row of a diff has another dtype, and within tolerance the same numbers."""
    return row["status"] == "dtype" and row["difference"] is not None and bool(row["difference"] <= row["tolerance"])


def _overflow(run: Run, full: Run) -> FirstNonFinite | None:
    """Where a value first is not finite: as it was located, or, where it damaged nothing further on, as rows show it."""
    found, usual = run.first_nonfinite or first_in_rows(run), first_in_rows(full)
    same = found and usual and (found.phase, found.module, found.value) == (usual.phase, usual.module, usual.value)
    return None if same else found


def _gradient_zeros(run: Run) -> dict[str, int]:
    """Zeros in each parameter's gradient."""
    rows = run.tensors(["phase", "module", "slot", "zeros"]).to_pylist()
    named = ((f"{row['module']}.{row['slot']}".lstrip("."), row) for row in rows)
    return {name: row["zeros"] for name, row in named if row["phase"] in ("gradient", "gradient_local")}


def _too_far(found: Diff, ops: tuple[LossyOp, ...]) -> tuple[str, ...]:
    """Modules that made a difference of their own beyond the tolerance (another dtype alone is none), and those whose ops
    lose in the forward pass."""
    made = [item.module for item in found.culprits if item.phase == "forward" and item.kind == "differs"]
    made += [op.module for op in ops if op.phase == "forward"]
    return tuple(dict.fromkeys(path for path in made if path))
