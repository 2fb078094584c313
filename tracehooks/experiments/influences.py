"""Whether each input of a model moves its output, how far the change gets, and whether gradients come back on that way."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor, nn

from tracehooks.capture.leaves import leaves
from tracehooks.capture.select import argument_names, unwrap
from tracehooks.core.errors import InvalidOptionError, UnknownNameError, shown
from tracehooks.core.records import Check, Verdict
from tracehooks.experiments.given import one_batch
from tracehooks.experiments.progress import progress
from tracehooks.experiments.recording import LossFn, record_step
from tracehooks.experiments.training import norm
from tracehooks.storage import Run, open_run

CHANGES = ("permuted", "zeroed", "dropped")
"""Another sample's value; zeros, False or the id 0; not given at all."""

ROUNDING = 1e-6
"""A smaller relative change of the output is none."""

SCHEMA = pa.schema(
    [
        ("input", pa.string()),
        ("change", pa.string()),
        ("output", pa.float64()),
        ("loss", pa.float64()),
        ("modules", pa.int64()),
        ("first", pa.string()),
        ("last", pa.string()),
        ("gradient", pa.float64()),
        ("no_gradient", pa.string()),
        ("error", pa.string()),
    ]
)


@dataclass(frozen=True)
class Influence(Verdict):
    """A verdict with a table: a row for each input and each way to change it.

    Columns: ``output`` and ``loss`` (relative change of the output, L2, and of the loss; null where they cannot be
    compared), ``modules`` (how many return something else), ``first`` and ``last`` (of these, in execution order),
    ``gradient`` (rms of d loss / d what ``first`` returns; 0 where none comes back), ``no_gradient`` (of these modules the
    last one to which none comes back), ``error`` (what the model said of the changed batch).
    """

    table: pa.Table | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values; the rows of the table are the evidence."""
        return Verdict(self.title, self.checks, self.evidence).to_json()


def influence(
    model: nn.Module,
    batch: Any,
    inputs: Iterable[str] | str | None = None,
    *,
    loss_fn: LossFn | None = None,
    seed: int = 0,
    quiet: bool = False,
) -> Influence:
    """Run a batch as it is, and again with each input permuted over the samples, zeroed and left out, and see which
    modules return something else.

    The model runs in the mode that it is in, with the same seed each time, and is left as it was.

    Args:
        batch: what the model takes: a mapping by keyword, a tuple or list by position, a tensor as it is.
        inputs: names of arguments; tensors further in by their path (``"batch.caption"``). All tensors by default.
        loss_fn: (model, batch) → the loss; by default the mean square of what the model returns.
        seed: of every generator.
        quiet: draw no bar.

    Raises:
        UnknownNameError: an input that the batch does not hold; its names are listed.
        InvalidOptionError: an argument of another kind.
    """
    ask = _mean_square if loss_fn is None else loss_fn
    one_batch(model, ask, batch)
    if not isinstance(inputs, Iterable | None):
        raise InvalidOptionError("inputs", shown(inputs), "names of inputs, or None for all")
    named = _Named(model, batch)
    wanted = [inputs] if isinstance(inputs, str) else list(named.tensors if inputs is None else inputs)
    for name in wanted:
        if name not in named.tensors:
            raise UnknownNameError("input", str(name), named.tensors, "influence()")
    with tempfile.TemporaryDirectory() as folder, progress("influence", len(wanted) * len(CHANGES), quiet) as done:
        watched = _Watched(model, ask, Path(folder), seed)
        base = watched.run(batch)
        rows = []
        for name in wanted:
            for change in CHANGES:
                rows.append(_row(name, change, named, watched, base))
                done(name)
    checks = [check for name in wanted for check in _checks(name, [row for row in rows if row["input"] == name])]
    evidence = {name: [row for row in rows if row["input"] == name] for name in wanted}
    return Influence("Influence of inputs", tuple(checks), evidence, pa.Table.from_pylist(rows, SCHEMA))


class _Named:
    """The tensors of a batch by name."""

    def __init__(self, model: nn.Module, batch: Any) -> None:
        self._batch = batch
        self._names: list[str] | None = None
        if isinstance(batch, Mapping):
            found = leaves(dict(batch), "")
        elif isinstance(batch, tuple | list):
            names = argument_names(unwrap(model))
            self._names = [names[i] if i < len(names) else str(i) for i in range(len(batch))]
            found = leaves(dict(zip(self._names, batch, strict=True)), "")
        else:
            self._names = [next(iter(argument_names(unwrap(model))), "input")]
            found = leaves({self._names[0]: batch}, "")
        self.tensors = {name.lstrip("."): tensor for name, tensor in found}

    def changed(self, name: str, value: Tensor | None) -> Any:
        """The batch with another value for a tensor, None to leave it out."""
        parts = name.split(".")
        if isinstance(self._batch, Mapping):
            return _replaced(dict(self._batch), parts, value)
        assert self._names is not None
        if not isinstance(self._batch, tuple | list):
            return value
        place = self._names.index(parts[0])
        items = list(self._batch)
        if value is None and len(parts) == 1:
            items[place] = None
        else:
            items[place] = _replaced(items[place], parts[1:], value)
        return tuple(items)


def _replaced(held: Any, parts: list[str], value: Tensor | None) -> Any:
    if not parts:
        return value
    if isinstance(held, Mapping):
        new = dict(held)
        key = next(key for key in new if str(key) == parts[0])
        if value is None and len(parts) == 1:
            del new[key]
        else:
            new[key] = _replaced(new[key], parts[1:], value)
        return new
    if isinstance(held, tuple | list):
        place = int(parts[0])
        return type(held)(_replaced(item, parts[1:], value) if i == place else item for i, item in enumerate(held))
    raise InvalidOptionError("inputs", type(held).__name__, "tensors in mappings, tuples and lists")


@dataclass(frozen=True)
class _Ran:
    """What one run returned and left."""

    outputs: list[Tensor]
    loss: float
    hashes: dict[tuple[str, str, int], int]
    """Content of what each call of a module returned, in execution order."""
    gradients: dict[str, float]
    """Largest rms of a gradient that came back to what a module returned; 0 where none did."""


class _Watched:
    """Runs a batch and reads what every module returned."""

    def __init__(self, model: nn.Module, loss_fn: LossFn, folder: Path, seed: int) -> None:
        self._model, self._loss_fn, self._folder, self._seed, self._count = model, loss_fn, folder, seed, 0

    def run(self, batch: Any) -> _Ran:
        """One step, recorded."""
        outputs: list[Tensor] = []
        losses: list[float] = []

        def loss_fn(model: nn.Module, batch: Any) -> Any:
            loss = self._loss_fn(model, batch)
            losses.append(float(loss.detach()))
            return loss

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            outputs[:] = [tensor.detach().clone() for _, tensor in leaves(output, "") if tensor.is_floating_point()]

        handle = unwrap(self._model).register_forward_hook(keep)
        self._count += 1
        try:
            record = {"record": ("outputs", "output_grads"), "on_nonfinite": "record", "sketch": False}
            path = self._folder / str(self._count)
            run = open_run(record_step(self._model, loss_fn, batch, path, seed=self._seed, options=record))
        finally:
            handle.remove()
        return _Ran(outputs, losses[-1], *_read(run))


def _read(run: Run) -> tuple[dict[tuple[str, str, int], int], dict[str, float]]:
    columns = ["seq", "phase", "module", "slot", "call", "recompute", "hash", "rms"]
    rows = sorted(run.tensors(columns).to_pylist(), key=lambda row: row["seq"])
    hashes: dict[tuple[str, str, int], int] = {}
    gradients: dict[str, float] = {}
    for row in rows:
        if row["phase"] == "forward" and not row["recompute"]:
            hashes[row["module"], row["slot"], row["call"]] = row["hash"]
            gradients.setdefault(row["module"], 0.0)
        elif row["phase"] == "backward":
            gradients[row["module"]] = max(gradients.get(row["module"], 0.0), row["rms"] or 0.0)
    return hashes, gradients


def _mean_square(model: nn.Module, batch: Any) -> Tensor:
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, tuple | list) else model(batch)
    found = [tensor.float().square().mean() for _, tensor in leaves(output, "") if tensor.is_floating_point()]
    return torch.stack(found).sum()


def _row(name: str, change: str, named: _Named, watched: _Watched, base: _Ran) -> dict[str, Any]:
    row: dict[str, Any] = {"input": name, "change": change}
    x = named.tensors[name]
    value = None if change == "dropped" else torch.zeros_like(x) if change == "zeroed" else _permuted(x)
    if value is not None and torch.equal(value, x):
        return {**row, "error": f"{change} it is what it was"}
    try:
        other = watched.run(named.changed(name, value))
    except Exception as error:  # the model cannot do with it, which is an answer
        return {**row, "error": f"{type(error).__name__}: {error}".splitlines()[0]}
    path = list(
        dict.fromkeys(key[0] for key, found in other.hashes.items() if base.hashes.get(key) != found and key[0])
    )
    dead = [module for module in path if not base.gradients.get(module)]
    return {
        **row,
        "output": _distance(base.outputs, other.outputs),
        "loss": abs(other.loss - base.loss) / max(abs(base.loss), 1e-300),
        "modules": len(path),
        "first": path[0] if path else None,
        "last": path[-1] if path else None,
        "gradient": base.gradients.get(path[0], 0.0) if path else None,
        "no_gradient": dead[-1] if dead else None,
    }


def _permuted(x: Tensor) -> Tensor:
    return x.roll(1, 0) if x.ndim and x.size(0) > 1 else x


def _distance(base: list[Tensor], other: list[Tensor]) -> float | None:
    """‖other − base‖ / ‖base‖ over all tensors; None where they are not counterparts."""
    if len(base) != len(other) or any(a.shape != b.shape for a, b in zip(base, other, strict=True)):
        return None
    size = norm(base)
    apart = norm([b.double() - a.double() for a, b in zip(base, other, strict=True)])
    return apart / size if size > 0 else apart


def _checks(name: str, rows: list[dict[str, Any]]) -> tuple[Check, Check]:
    told = [row for row in rows if row.get("output") is not None]
    moved = max((row["output"] for row in told), default=None)
    said = ", ".join(
        f"{row['change']}: {row['output']:.3g}"
        if row.get("output") is not None
        else f"{row['change']}: {row['error']}"
        if row.get("error")
        else f"{row['change']}: outputs of other shapes"
        for row in rows
    )
    stops = [row for row in told if row["output"] <= ROUNDING and row["last"]]
    if moved is not None and moved <= ROUNDING:
        said += f"; the change ends in {stops[0]['last']}" if stops else "; no module returns anything else"
    path = next((row for row in told if row["modules"]), None)
    back = None if path is None else path["gradient"] > 0
    if path is None:
        how = "no module takes it"
    elif back:
        how = f"d loss / d output of {path['first']} has rms {path['gradient']:.3g}"
    else:
        how = f"none comes back to {path['no_gradient'] or path['first']}"
    return (
        Check(f"Does {name} move the output?", None if moved is None else moved > ROUNDING, f"relative change {said}"),
        Check(f"Do gradients reach the path of {name}?", back, how),
    )
