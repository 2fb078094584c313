"""Cause against effect: of the sites that differ, those that made the difference. docs/diff.md, "Culprits", says how."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from tracehooks.analysis.compare import DIFFERS, DTYPE, EQUAL, ONLY_A, ONLY_B, SHAPE
from tracehooks.analysis.divergence import Compared, Divergence, scalar_divergence, tensor_divergence
from tracehooks.analysis.tolerance import EPSILON
from tracehooks.analysis.window import Bools, Floats, Ints

AMPLIFIED = 10.0
"""A site makes a difference of its own where its error is this many times the largest that came before it."""

CAUSES = {
    "parameter": "another parameter",
    "buffer": "another buffer",
    "input": "other data",
    "setting": "another learning rate or loss scale",
    "mode": "training mode on one side, evaluation mode on the other",
    "between": "made in a module's own code, between the modules that it calls",
    "module": "made in the module's own forward",
    "structure": "a module, tensor, shape or dtype that one side alone has",
    "unexplained": "no site stands out: the difference grew, or was made where nothing is recorded",
}
"""Causes and what they mean."""


@dataclass(frozen=True)
class Culprit(Divergence):
    """A site that made the difference, and how much of what differs comes after it."""

    cause: str = "unexplained"
    """One of `CAUSES`."""
    why: str = ""
    """What is known of the cause, in words."""
    explained: int = 0
    """Sites that differ in this step from the first effect on; with several causes a site counts for each before it."""

    def __str__(self) -> str:
        downstream = f"; {self.explained} {'site' if self.explained == 1 else 'sites'} downstream explained"
        why = f"; {self.why}" if self.why else ""
        return f"{self.cause}: {super().__str__()}{why}{downstream if self.explained else ''}"


@dataclass(frozen=True)
class Circumstances:
    """What run.json says that bears on causes, under the module paths that were compared."""

    modes_a: Mapping[str, bool] = field(default_factory=dict)
    """Whether each module was in training mode when it was attached."""
    modes_b: Mapping[str, bool] = field(default_factory=dict)
    tied: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Further modules that hold a parameter, by its own module."""
    inputs_recorded: bool = False
    """Whether inputs of modules that are no module's output were recorded on both sides."""


def first_and_culprits(compared: Compared, known: Circumstances) -> tuple[Divergence | None, tuple[Culprit, ...]]:
    """The first site of the window that differs, in execution order, and the sites that made the difference."""
    tensors = np.flatnonzero(compared.tensors.status >= DIFFERS)
    scalars = np.flatnonzero(compared.scalars.status >= DIFFERS)
    step = compared.column("step")
    scalar_step = compared.scalar_column("step")
    if not len(tensors) and not len(scalars):
        return None, ()
    if not len(tensors) or (len(scalars) and scalar_step[scalars[0]] < step[tensors[0]]):
        first = scalar_divergence(compared, int(scalars[0]))
        here = [row for row in scalars.tolist() if scalar_step[row] == first.step]
        return first, _distinct(_scalar(compared, row) for row in here)
    first_step = step[tensors[0]]
    found = _Step(compared, np.flatnonzero(step == first_step), known).causes()
    here = scalars[(scalar_step[scalars] == first_step) & (compared.scalars.status[scalars] == DIFFERS)]
    settings = [row for row in here.tolist() if _is_setting(compared, row)]
    if settings and found[0].phase in ("update", "optimizer"):
        found = []
    return tensor_divergence(compared, int(tensors[0])), _distinct([*found, *(_scalar(compared, r) for r in settings)])


class _Step:
    """The paired rows of the first step that differs; positions count from its first row."""

    def __init__(self, compared: Compared, rows: Ints, known: Circumstances) -> None:
        self._compared, self._rows, self._known = compared, rows, known
        self._names = compared.vocabulary.names
        self._phase, self._module = compared.column("phase")[rows], compared.column("module")[rows]
        self._status = compared.tensors.status[rows]
        self._beyond: Bools = self._status >= DIFFERS
        self._both = (compared.pairs.a[rows] >= 0) & (compared.pairs.b[rows] >= 0)
        self._flow: Bools = self._is("forward", "input", "probe") & (compared.column("recompute")[rows] == 0)
        self._ran = set(self._module[self._is("forward")].tolist())
        self._error = self._errors()
        self._sites = _numbers(self._phase, self._module, compared.column("slot")[rows], compared.column("call")[rows])
        self._effects: dict[int, int] = {}
        """First position of the flow that each changed parameter or buffer explains, by the cause's position."""
        self._inside: dict[str, set[int]] = {}
        """Causes by the modules that hold them."""
        self._around: dict[str, set[int]] = {}
        """Causes by the modules around those."""

    def causes(self) -> list[Culprit]:
        """In execution order."""
        flow = self._beyond & self._flow
        other_values = np.isin(self._status, (DIFFERS, SHAPE))
        given = np.flatnonzero(other_values & self._is("parameter")).tolist()
        given += self._changed_buffers(flow)
        self._reach_of(given)
        made = [cause for one_pass in self._passes() for cause in self._walk(one_pass)]
        found = [self._given(position) for position in given]
        found += [self._made(position, cause) for position, cause in made]
        if not found:
            found = [self._made(int(np.flatnonzero(self._beyond)[0]), "unexplained")]
        return [culprit for _, culprit in sorted(found, key=lambda pair: pair[0])]

    def _walk(self, positions: Ints) -> Iterable[tuple[int, str]]:
        """The positions of one forward pass that made a difference of their own, each with its cause."""
        carried, told, after_missing = 0.0, False, False
        used: set[int] = set()
        for position in positions.tolist():
            error, beyond = float(self._error[position]), bool(self._beyond[position])
            if self._status[position] in (ONLY_A, ONLY_B):
                if not told:
                    yield position, "structure"
                told = after_missing = True
                continue
            explained = beyond and self._explained(position, used)
            after_missing = after_missing and beyond
            if beyond and not explained and not after_missing and (not carried or error > AMPLIFIED * carried):
                cause = self._cause(position)
                yield position, cause
                told = True
                if cause == "input":
                    error = np.inf  # other data: nothing that follows can be judged by its size
            carried = max(carried, error)

    def _reach_of(self, given: list[int]) -> None:
        """Note which modules each changed parameter or buffer may act in."""
        for cause in given:
            owner = self._names[self._module[cause]]
            for holder in (owner, *self._known.tied.get(owner, ())):
                self._inside.setdefault(holder, set()).add(cause)
                for path in _around(holder):
                    self._around.setdefault(path, set()).add(cause)

    def _explained(self, position: int, used: set[int]) -> bool:
        """Whether a changed parameter or buffer made the error of this row. Of the modules around its own the first one
        of a pass to differ may have used it directly; later ones only passed it on."""
        path = self._names[self._module[position]]
        found = self._around.get(path, set()) - used
        for place in (path, *_around(path)):
            found = found | self._inside.get(place, set())
        used.update(found)
        for cause in found:
            self._effects[cause] = min(position, self._effects.get(cause, position))
        return bool(found)

    def _cause(self, position: int) -> str:
        path = self._names[self._module[position]]
        if self._phase[position] == self._compared.vocabulary.code("input"):
            return "between" if path else "input"
        if self._status[position] in (SHAPE, DTYPE):
            return "structure"
        modes = self._known.modes_a.get(path), self._known.modes_b.get(path)
        return "mode" if None not in modes and modes[0] != modes[1] else "module"

    def _changed_buffers(self, flow: Bools) -> list[int]:
        """Buffers that differ and are no effect: buffers are read after the pass, which may have changed them."""
        first = np.flatnonzero(flow)
        source = int(first[0]) if len(first) else len(flow)
        found = []
        for buffer in np.flatnonzero(self._beyond & self._both & self._is("buffer")).tolist():
            path = self._names[self._module[buffer]]
            same_mode = self._known.modes_a.get(path) == self._known.modes_b.get(path)
            if source > buffer or (self._module[source] == self._module[buffer] and same_mode):
                found.append(buffer)
        return found

    def _given(self, position: int) -> tuple[int, Culprit]:
        cause = self._names[self._phase[position]]
        effect = self._effects.get(position)
        explained = 0 if effect is None else self._sites_from(effect) - (position >= effect)
        return position if effect is None else effect, self._culprit(position, cause, "", explained)

    def _made(self, position: int, cause: str) -> tuple[int, Culprit]:
        return position, self._culprit(position, cause, self._why(position, cause), self._sites_from(position) - 1)

    def _why(self, position: int, cause: str) -> str:
        path = self._names[self._module[position]]
        if cause == "between":
            return f"made in the forward of {_said(self._caller(path))}, outside the modules that it calls"
        if cause == "mode":
            there = "training" if self._known.modes_b[path] else "evaluation"
            return f"{_said(path)} is in {there} mode in b alone"
        if cause == "input":
            return self._why_input(position)
        if cause != "module":
            return CAUSES[cause] if cause == "unexplained" else ""
        if self._calls_modules(path):
            return f"made in the forward of {_said(path)}, outside the modules that it calls"
        if self._known.inputs_recorded:
            return f"made in the forward of {_said(path)}"
        caller = _said(self._caller(path))
        return f"made in the forward of {_said(path)}, or in {caller}, which calls it: inputs were not recorded"

    def _why_input(self, position: int) -> str:
        row_a, row_b = (int(side[self._rows[position]]) for side in (self._compared.pairs.a, self._compared.pairs.b))
        shape_a, shape_b = self._compared.a.shape(row_a), self._compared.b.shape(row_b)
        if not shape_a or not shape_b or shape_a[0] == shape_b[0] or shape_a[1:] != shape_b[1:]:
            return ""
        sizes = f"batches of {shape_a[0]} and {shape_b[0]}"
        return f"{sizes}: what is computed from them has other shapes and is not compared"

    def _caller(self, path: str) -> str:
        """The nearest module around this one that has a forward of its own."""
        return next((place for place in _around(path) if self._compared.vocabulary.code(place) in self._ran), "")

    def _calls_modules(self, path: str) -> bool:
        inside = f"{path}." if path else ""
        return any(self._names[code].startswith(inside) and self._names[code] != path for code in self._ran)

    def _culprit(self, position: int, cause: str, why: str, explained: int) -> Culprit:
        site = tensor_divergence(self._compared, int(self._rows[position]))
        where = {"module": self._caller(site.module or ""), "slot": f"{site.slot} of {site.module}"}
        changed = asdict(site) | (where if cause == "between" else {})
        return Culprit(**changed, cause=cause, why=why, explained=explained)

    def _sites_from(self, position: int) -> int:
        return len(np.unique(self._sites[position:][self._beyond[position:]]))

    def _passes(self) -> list[Ints]:
        """Positions of the rows of each forward pass of each rank."""
        flow = np.flatnonzero(self._flow)
        passes = _numbers(*(self._compared.column(name)[self._rows][flow] for name in ("micro", "rank")))
        return [flow[passes == number] for number in np.unique(passes)]

    def _errors(self) -> Floats:
        """How far the rows are apart: 0 for equal bits, infinite where it cannot be a small number (shapes, whole
        numbers), and otherwise at least a rounding."""
        error = np.array(self._compared.tensors.distance[self._rows])
        exact = [code for code, name in enumerate(self._names) if name not in EPSILON]
        whole = np.isin(self._compared.column("dtype")[self._rows], exact)
        error[(self._status == SHAPE) | (self._beyond & whole)] = np.inf
        error[self._beyond] = np.maximum(error[self._beyond], EPSILON["float32"])
        error[self._status == EQUAL] = 0.0
        return error

    def _is(self, *phases: str) -> Bools:
        return np.isin(self._phase, [self._compared.vocabulary.code(phase) for phase in phases])


def _scalar(compared: Compared, row: int) -> Culprit:
    cause = "setting" if _is_setting(compared, row) else "unexplained"
    return Culprit(**asdict(scalar_divergence(compared, row)), cause=cause)


def _is_setting(compared: Compared, row: int) -> bool:
    at = compared.scalar_pairs.a[row]
    return bool(compared.scalars_a.setting[at] if at >= 0 else compared.scalars_b.setting[compared.scalar_pairs.b[row]])


def _numbers(*columns: Ints) -> Ints:
    """One number for each distinct combination of the columns."""
    return np.unique(np.stack(columns), axis=1, return_inverse=True)[1].reshape(-1)


def _around(path: str) -> list[str]:
    """The modules that a module lies in, the nearest first; none for the root."""
    found = []
    while path:
        path = path.rpartition(".")[0]
        found.append(path)
    return found


def _said(path: str) -> str:
    return path or "(root)"


def _distinct(found: Iterable[Any]) -> tuple[Culprit, ...]:
    """One of each site, the earliest: the same site in later micro-steps and on other ranks is the same answer."""
    sites: dict[tuple[object, ...], Culprit] = {}
    for item in found:
        sites.setdefault((item.phase, item.module, item.slot, item.call), item)
    return tuple(sites.values())
