"""Proof on one's own model that recording changes nothing, and what it costs."""

from __future__ import annotations

import contextlib
import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from tracehooks import stats
from tracehooks.capture.leaves import leaves
from tracehooks.core.arguments import function, whole
from tracehooks.core.errors import InvalidOptionError, shown
from tracehooks.core.records import Check, Verdict
from tracehooks.experiments.given import a_model
from tracehooks.experiments.progress import progress
from tracehooks.experiments.recording import recording
from tracehooks.experiments.training import KeptOptimizer, as_it_was
from tracehooks.locate.replay import Randomness
from tracehooks.storage import open_run

KINDS = ("what it returns", "parameters", "gradients", "buffers", "optimizers", "generators")


def neutrality(
    model: nn.Module,
    step_fn: Callable[[nn.Module], Any],
    *,
    steps: int = 5,
    rounds: int = 3,
    keep: Any = (),
    quiet: bool = False,
    **options: Any,
) -> Verdict:
    """Run the same training steps without and with a trace, from the same state, and compare everything bit for bit; time
    both.

    Afterwards the model, its optimizers and all generators are as they were; the trace is thrown away.

    Args:
        step_fn: model → anything: one step of training on a batch that is the same each time, with its optimizer. What it
            returns (a loss, outputs) is compared, too.
        steps: how many steps make a run; the first is not timed.
        rounds: runs of each kind that are timed, in turn.
        keep: what else a step changes, one thing or several, each with ``state_dict()`` and ``load_state_dict()``: a
            scheduler, a scaler.
        quiet: draw no bar.
        options: of the recording, as attach() takes them.

    Raises:
        InvalidOptionError: fewer than two steps, no round, or an argument of another kind.
    """
    a_model(model)
    function("step_fn", step_fn, "model → what one step of training returns")
    whole("steps", steps, "at least 2 steps", 2)
    whole("rounds", rounds, "at least 1 round", 1)
    held = _Held(model, _kept(keep))
    with tempfile.TemporaryDirectory() as folder, progress("neutrality", 2 + 2 * rounds, quiet) as done:

        def run(name: str = "") -> tuple[dict[str, list[bytes]], list[float]]:
            with held.as_it_was():
                if not name:
                    found = _steps(model, step_fn, steps, held)
                else:
                    with recording(model, Path(folder) / name, {"sketch": False, **options}):
                        found = _steps(model, step_fn, steps, held)
            done("with a trace" if name else "without")
            return found

        run()  # the first time optimizers make their state, and kernels are chosen
        bare, again = run(), run()
        watched = [run(f"run{i}") for i in range(rounds)]
        plain = [again, *(run() for _ in range(rounds - 1))]
        blind = any(not open_run(path).steps for path in Path(folder).iterdir())
    seconds, recorded = (statistics.median(t for _, times in runs for t in times[1:]) for runs in (plain, watched))
    return _verdict(bare[0], again[0], [found for found, _ in watched], seconds, recorded, blind)


def _kept(keep: Any) -> list[Any]:
    """What else a step changes; one thing may be given by itself."""
    things = list(keep) if isinstance(keep, Iterable) else [keep]
    for thing in things:
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise InvalidOptionError(
                "keep", shown(thing), "what has state_dict() and load_state_dict(), or a list of it"
            )
    return things


class _Held:
    """What a run of steps changes, and how it comes back."""

    def __init__(self, model: nn.Module, keep: list[Any]) -> None:
        self._model, self._keep = model, keep
        self.optimizers: dict[int, KeptOptimizer] = {}
        """Optimizers that stepped, as they were when they first did."""

    @contextlib.contextmanager
    def as_it_was(self) -> Iterator[None]:
        """A block after which all of it is as it was."""
        kept = [(thing, copy.deepcopy(thing.state_dict())) for thing in self._keep]
        meeting = register_optimizer_step_pre_hook(self._meet)
        try:
            with as_it_was(self._model):
                yield
        finally:
            meeting.remove()
            for optimizer in self.optimizers.values():
                optimizer.restore()
            for thing, state in kept:
                thing.load_state_dict(state)

    def _meet(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if id(optimizer) not in self.optimizers:
            self.optimizers[id(optimizer)] = KeptOptimizer(optimizer)


Found = dict[str, list[Any]]
"""Content of everything that a run of steps leaves, by kind, in order."""


def _steps(model: nn.Module, step_fn: Callable[[nn.Module], Any], steps: int, held: _Held) -> tuple[Found, list[float]]:
    """Run the steps; what they leave, and the seconds that each took."""
    found: Found = {kind: [] for kind in KINDS}
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        result = step_fn(model)
        seconds.append(time.perf_counter() - start)
        found["what it returns"] += [_content(result) if isinstance(result, float | int) else _contents(result)]
        found["gradients"] += [_contents([parameter.grad for parameter in model.parameters()])]
    found["parameters"] = _contents(list(model.parameters()))
    found["buffers"] = _contents(list(model.buffers()))
    found["optimizers"] = [_contents(list(kept.optimizer.state.values())) for kept in held.optimizers.values()]
    found["generators"] = Randomness().content()
    return found, seconds


def _contents(held: Any) -> list[Any]:
    return [(name, _content(tensor)) for name, tensor in leaves(held, "")]


def _content(x: Tensor | float) -> Any:
    """Equal for bit-equal values only: dtype, shape and content hash of a tensor."""
    if not isinstance(x, Tensor):
        return repr(x)
    packed = stats.summarize(x.detach(), stats.Spec(hash=True)).cpu().numpy()[None]
    columns: Mapping[str, Any] = stats.unpack(packed, stats.Spec(hash=True))
    return str(x.dtype), tuple(x.shape), int(columns["hash"][0])


def _verdict(bare: Found, again: Found, watched: list[Found], plain: float, recorded: float, blind: bool) -> Verdict:
    """``blind``: nothing of a step was recorded, so that nothing is shown."""
    unsteady = [kind for kind in KINDS if bare[kind] != again[kind]]
    checks = [
        Check(
            "Do two runs without a trace agree?",
            not unsteady,
            "bit for bit"
            if not unsteady
            else f"not in {', '.join(unsteady)}: where a step differs from itself nothing is "
            "shown; give it the same batch each time, and name in keep= what else it changes",
        )
    ]
    for kind in KINDS:
        same = all(bare[kind] == found[kind] for found in watched)
        shown = None if blind or kind in unsteady else same
        many = f"{len(bare[kind])} compared, bit for bit" if same else "not the same"
        if blind:
            many = "nothing was recorded: step_fn does not call the model that it is given"
        checks.append(Check(f"Are {kind} the same with a trace?", shown, many))
    ratio = recorded / plain
    evidence = {"seconds": plain, "seconds_recorded": recorded, "ratio": ratio, "differs": unsteady}
    title = f"Recording changes nothing and takes {ratio:.2f} times a step of {1000 * plain:.3g} ms"
    return Verdict(title, tuple(checks), evidence)
