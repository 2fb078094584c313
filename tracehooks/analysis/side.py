"""One of the two runs of a diff: its rows a window of steps at a time, under the names that are compared."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from tracehooks.analysis.moved import Look
from tracehooks.analysis.scalars import Scalars, read_scalars
from tracehooks.analysis.scalars import part as part_of_scalars
from tracehooks.analysis.steps import Chosen
from tracehooks.analysis.tables import Tables
from tracehooks.analysis.window import Bools, Ints, Vocabulary, Window, window_of
from tracehooks.core.names import split_parameter
from tracehooks.core.records import RunSource


class Side:
    """A run as one side of a diff."""

    def __init__(self, run: RunSource, tables: Tables, vocabulary: Vocabulary) -> None:
        self.run, self.tables = run, tables
        self.named: Callable[[str], str] = str
        """Makes its module paths those of the other side; set it before reading windows."""
        self._vocabulary = vocabulary
        self.extent = tables.extent()
        self.ranks = self.extent.ranks
        self._scalars = read_scalars(tables, vocabulary)
        self.model: Mapping[str, Any] = run.info.get("model") or {}

    def recorded(self, first: int, last: int) -> Ints:
        """The steps from first to last that have rows, ascending."""
        scalars = self._scalars.window.columns["step"]
        return np.union1d(self.tables.recorded(first, last), scalars[(scalars >= first) & (scalars <= last)])

    @property
    def span(self) -> tuple[int, int] | None:
        """The first and the last step that have rows."""
        scalars = self._scalars.window.columns["step"]
        first, last = np.append(self.extent.first, scalars), np.append(self.extent.last, scalars)
        return (int(first.min()), int(last.max())) if len(first) else None

    def window(self, chosen: Chosen) -> tuple[Window, Scalars]:
        """The rows of some steps."""
        return window_of(self.tables.tensors(chosen), self._vocabulary, self.named), self.scalars(chosen)

    def scalars(self, chosen: Chosen) -> Scalars:
        """The scalars of some steps."""
        return part_of_scalars(self._scalars, chosen)

    @cached_property
    def _modules(self) -> list[str]:
        return self.tables.modules()

    def modules(self) -> list[str]:
        """The paths of all modules that have rows."""
        return [self.named(name) for name in self._modules]

    def looks(self) -> list[Look]:
        """What each module looks like in the first recorded step, in execution order: class, and shapes of outputs,
        parameters and buffers."""
        if not len(self.extent.first):
            return []
        first = int(self.extent.first.min())
        rows = self.tables.tensors(Chosen(first, first))(["seq", "module", "type", "phase", "slot", "shape"])
        found: dict[str, tuple[str, set[Any]]] = {}
        for row in rows.sort_by("seq").to_pylist():
            if row["phase"] in ("forward", "parameter", "buffer"):
                kind = found.setdefault(row["module"], (row["type"], set()))
                kind[1].add((row["phase"], row["slot"], tuple(row["shape"] or ())))
        return [Look(self.named(path), (kind, frozenset(shapes))) for path, (kind, shapes) in found.items()]

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
