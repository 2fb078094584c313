"""What each module of one model makes of the inputs that the same module of another model was given.

The second model's modules run in the shadow of the first one's, one by one, so that a difference is made where it shows:
nothing of it came in from before. (The "shadow mode" of PyTorch's numeric suite and of PaDiff.)
"""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tracehooks.analysis.culprits import Culprit
from tracehooks.analysis.diff import Diff, diff
from tracehooks.analysis.divergence import Divergence
from tracehooks.capture import identity
from tracehooks.capture.batches import batches
from tracehooks.capture.leaves import leaves
from tracehooks.capture.places import Place, Site
from tracehooks.capture.recorder import Recorder
from tracehooks.capture.select import named_modules, unwrap
from tracehooks.core.config import Config
from tracehooks.core.errors import InvalidOptionError
from tracehooks.core.names import split_parameter
from tracehooks.experiments.given import a_model, one_batch
from tracehooks.experiments.recording import seed_all, untouched
from tracehooks.locate.replay import Randomness
from tracehooks.stats import Spec
from tracehooks.storage import RunWriter, open_run

Runs = Callable[[nn.Module, Any], Any]


def shadow(
    model_a: nn.Module,
    model_b: nn.Module,
    batch: Any,
    *,
    loss_fn: Runs | None = None,
    seed: int = 0,
    tolerance: float | str = "auto",
) -> Diff:
    """Run A on a batch and each module of B on what A's module of the same path was given.

    Args:
        batch: what A takes: a mapping is passed by keyword, a tuple or list by position, anything else as it is.
        loss_fn: feeds the batch in another way: (model, batch) → anything.
        seed: of every generator, set anew before each module, so that dropout is the same in both.

    Returns:
        The differences of the outputs of modules, where ``culprits`` are all that differ and whose own modules do not:
        each of them computes something else from equal inputs. The root, which would be the whole model, is left out.

    Raises:
        InvalidOptionError: the two have no module in common, or an argument of another kind.
    """
    feed = _feed if loss_fn is None else loss_fn
    a_model(model_a, "model_a")
    a_model(model_b, "model_b")
    one_batch(model_a, feed, batch)
    root_a, root_b = unwrap(model_a), unwrap(model_b)
    shared = [path for path in named_modules(root_a) if path and path in named_modules(root_b)]
    if not shared:
        raise InvalidOptionError("model_b", type(root_b).__name__, "a model with modules of the same paths as model_a")
    with tempfile.TemporaryDirectory() as folder, untouched(root_a, root_b), torch.no_grad():
        pair = _Pair(root_a, root_b, shared, seed)
        seed_all(seed)
        with pair.hooks():
            feed(root_a, batch)
        paths = [pair.write(side, Path(folder)) for side in (0, 1)]
        found = diff(open_run(paths[0]), open_run(paths[1]), tolerance=tolerance)
    return replace(found, a="a", b="b", culprits=_local(found), beside=())


class _Pair:
    """Two models, and what their modules gave back for the same inputs."""

    def __init__(self, a: nn.Module, b: nn.Module, paths: list[str], seed: int) -> None:
        self._models, self._seed = (a, b), seed
        modules_a, modules_b = named_modules(a), named_modules(b)
        self._modules = {path: (modules_a[path], modules_b[path]) for path in paths}
        self._recorders = [Recorder(Spec(sketch=True)) for _ in range(2)]
        self._calls: Counter[str] = Counter()
        self._inside = False
        self._given: list[tuple[Any, Any]] = []

    def hooks(self) -> contextlib.ExitStack:
        """A block in which modules of A are watched; the hooks are gone after it."""
        stack = contextlib.ExitStack()
        for path, (module, _) in self._modules.items():
            stack.callback(module.register_forward_pre_hook(self._before, with_kwargs=True).remove)
            stack.callback(
                module.register_forward_hook(
                    lambda m, args, kwargs, output, path=path: self._after(path, output), with_kwargs=True
                ).remove
            )
        return stack

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Keep what the module is given: it may change it in place."""
        if not self._inside:
            self._given.append(copy.deepcopy((args, kwargs)))
            seed_all(self._seed)

    def _after(self, path: str, output: Any) -> None:
        if self._inside:
            return
        args, kwargs = self._given.pop()
        module_a, module_b = self._modules[path]
        call = self._calls[path]
        self._calls[path] += 1
        randomness = Randomness()
        self._inside = True
        try:
            seed_all(self._seed)
            shadowed = module_b(*args, **kwargs)
        finally:
            self._inside = False
            randomness.restore()
        for recorder, module, made in zip(self._recorders, (module_a, module_b), (output, shadowed), strict=True):
            for slot, tensor in leaves(made, "output"):
                recorder.tensor(tensor, Site(Place("forward", path, type(module).__name__, slot, call)))

    def write(self, side: int, folder: Path) -> Path:
        """The outputs of one side and its parameters as a run."""
        recorder, model = self._recorders[side], self._models[side]
        for name, parameter in model.named_parameters():
            module, slot = split_parameter(name)
            recorder.tensor(parameter, Site(Place("parameter", module, "", slot)))
        config = Config(sketch=True, quiet=True)
        writer = RunWriter(folder / "ab"[side], identity.describe_run(model, config))
        writer.write(batches([recorder.send().open()]))
        writer.close()
        return folder / "ab"[side]


def _feed(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def _local(found: Diff) -> tuple[Culprit, ...]:
    """Of the outputs that differ those of modules inside which none does, the largest difference first."""
    rows = [row for row in found.differing.to_pylist() if row["phase"] == "forward"]
    paths = {row["module"] for row in rows}
    innermost = [row for row in rows if not any(path.startswith(f"{row['module']}.") for path in paths)]
    innermost.sort(key=lambda row: -(row["difference"] or float("inf")))
    return tuple(_culprit(found, row) for row in innermost)


def _culprit(found: Diff, row: dict[str, Any]) -> Culprit:
    changed = [
        other["slot"]
        for other in found.differing.to_pylist()
        if other["phase"] == "parameter" and other["module"] == row["module"]
    ]
    why = (
        f"its parameter {', '.join(changed)} differs"
        if changed
        else "its code differs: inputs and parameters are equal"
    )
    told = [row["status"]]
    if row["difference"] is not None:
        told.append(f"relative difference {row['difference']:.2g}")
    if row["relative_l2"] is not None:
        told.append(f"relative L2 {row['relative_l2']:.2g} ± {row['relative_l2_error']:.1g}")
    site = Divergence(
        step=0, micro=0, phase="forward", module=row["module"], slot=row["slot"], call=row["call"], kind=row["status"],
        detail=", ".join(told), relative_l2=row["relative_l2"],
        cosine=row["cosine"],
    )  # fmt: skip
    return Culprit(**asdict(site), cause="parameter" if changed else "module", why=why)
