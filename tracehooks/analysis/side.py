"""One of the two runs of a diff: its rows a window of steps at a time, under the names that are compared."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tracehooks.analysis.moved import Look
from tracehooks.analysis.scalars import Scalars, read_scalars
from tracehooks.analysis.scalars import part as part_of_scalars
from tracehooks.analysis.steps import condition
from tracehooks.analysis.window import Bools, Ints, Trace, Vocabulary, Window
from tracehooks.core.names import split_parameter
from tracehooks.core.records import RunSource

REPLICATED = ("parameter", "buffer", "gradient", "update", "optimizer")
"""Phases that every rank of a data-parallel run has alike; what else there is belongs to a rank's share of the batch."""


class Side:
    """A run as one side of a diff."""

    def __init__(self, run: RunSource, vocabulary: Vocabulary) -> None:
        self.run = run
        self.named: Callable[[str], str] = str
        """Makes its module paths those of the other side; set it before reading windows."""
        self._vocabulary = vocabulary
        self._trace = Trace(run, vocabulary, lambda path: self.named(path))
        seen = self._trace.overview()
        self.tensor_steps, self.rows, self.ranks = seen.steps, seen.rows, seen.ranks
        self._modules = seen.modules
        self._scalars = read_scalars(run, vocabulary)
        self.steps = np.union1d(self.tensor_steps, self._scalars.window.columns["step"])
        self.model: Mapping[str, Any] = run.info.get("model") or {}

    def window(self, steps: Ints, recorded: Ints, *, replicated: bool = False) -> tuple[Window, Scalars]:
        """The rows of some steps. ``replicated``: only what every rank has alike, of the lowest rank."""
        tensors, scalars = self._trace.window(condition(steps, recorded)), part_of_scalars(self._scalars, steps)
        if not replicated or not self.ranks:
            return tensors, scalars
        phases = [self._vocabulary.code(name) for name in REPLICATED]
        kept = np.isin(tensors.columns["phase"], phases) & (tensors.columns["rank"] == self.ranks[0])
        return tensors.only(np.flatnonzero(kept)), scalars.only(
            np.flatnonzero(scalars.setting & (scalars.window.columns["rank"] == self.ranks[0]))
        )

    def modules(self) -> list[str]:
        """The paths of all modules that have rows."""
        return [self.named(name) for name in self._modules]

    def looks(self) -> list[Look]:
        """What each module looks like in the first recorded step, in execution order."""
        return [Look(self.named(path), kind) for path, kind in self._trace.looks(self.tensor_steps[:1])]

    def modes(self) -> dict[str, bool]:
        """Whether each module was in training mode at attach, where run.json says so."""
        listed = self.model.get("modules") or ()
        return {self.named(item["path"]): item["training"] for item in listed if "training" in item}

    def tied(self) -> dict[str, tuple[str, ...]]:
        """Modules that hold another module's parameter too, by that other module."""
        found: dict[str, tuple[str, ...]] = {}
        for item in self.model.get("parameters") or ():
            if item.get("aliases"):
                holders = tuple(self.named(split_parameter(name)[0]) for name in item["aliases"])
                owner = self.named(split_parameter(item["name"])[0])
                found[owner] = (*found.get(owner, ()), *holders)
        return found

    @property
    def inputs_recorded(self) -> bool:
        """Whether inputs of all modules were recorded, where no module had made them."""
        return "inputs" in (self.run.info.get("config") or {}).get("record", ())

    def may_have_lost(self, table: str, modules: Ints) -> Bools:
        """Of rows of these modules that are missing here, whether damage may be why: part of the table cannot be read,
        and the model has the module."""
        if not any(re.search(rf"(^|/){table}[/-]", problem.file) for problem in self.run.problems):
            return np.zeros(len(modules), bool)
        listed = self.model.get("modules")
        if not listed:
            return np.ones(len(modules), bool)
        return np.isin(modules, [self._vocabulary.code(self.named(item["path"])) for item in listed])
