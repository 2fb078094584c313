"""What rules read: a run's tables, summed up once and shared by all of them.

The tensors table is scanned once, grouped by site, so that ten million rows cost one pass; what a rule needs beyond that
it asks with a query narrowed to few rows.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tracehooks.analysis.engine import Queries
from tracehooks.analysis.rules.series import notch
from tracehooks.core.records import RunSource

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LASTING = 3
"""Recorded steps up to the last in which something must hold to be more than chance."""

ADAPTIVE = ("Adam", "Adagrad", "RMSprop", "Rprop", "Adafactor", "Adadelta", "Lion")
"""Parts of the names of optimizers whose steps do not depend on the scale of the gradients."""
VALIDATION = re.compile(r"(^|[/_.-])(val|valid|validation|eval|evaluation|test|dev)([/_.-]|$)")

_SITES = """
SELECT phase::VARCHAR AS phase, module::VARCHAR AS module, slot::VARCHAR AS slot, call,
       any_value(type::VARCHAR) AS type, any_value(dtype::VARCHAR) AS dtype, count(*) AS rows,
       min(step) AS first_step, max(step) AS last_step, min(step * 1000000 + seq) AS order,
       max(count) AS count, any_value(shape) AS shape,
       max(CASE WHEN zeros < count OR count = 0 THEN step END) AS last_nonzero,
       max(CASE WHEN min IS NULL OR max > min OR count < 2 THEN step END) AS last_varied,
       max(CASE WHEN count > 0 THEN step END) AS last_filled,
       max(CASE WHEN max > 0 THEN step END) AS last_positive,
       sum(count)::BIGINT AS elements, sum(zeros)::BIGINT AS zeros,
       sum(nan + posinf + neginf)::BIGINT AS nonfinite,
       max(absmax) AS absmax, min(min) AS least, max(max) AS greatest, exp(avg(CASE WHEN rms > 0 THEN ln(rms) END)) AS rms,
       min(hash) AS least_hash, max(hash) AS greatest_hash
FROM tensors GROUP BY ALL ORDER BY "order"
"""

_BATCHES = """
SELECT step, micro, name::VARCHAR AS name, count(*) AS samples, bit_xor(hash(hash, index)) AS digest
FROM samples WHERE split::VARCHAR = 'train' GROUP BY ALL ORDER BY step, micro
"""


@dataclass(frozen=True)
class Seen:
    """All rows of one site: which tensor of which call of which module, in one phase."""

    phase: str
    module: str
    slot: str
    call: int
    type: str
    dtype: str
    rows: int
    first_step: int
    last_step: int
    order: int
    """Place in the order of execution of its first row."""
    count: int
    """Elements of the largest row."""
    shape: tuple[int, ...]
    last_nonzero: int | None
    """The last step in which it held anything but zeros; None when there is none."""
    last_varied: int | None
    """The last step in which its elements were not all equal."""
    last_filled: int | None
    """The last step in which it had elements at all."""
    last_positive: int | None
    """The last step in which an element was above zero."""
    elements: int
    zeros: int
    nonfinite: int
    absmax: float | None
    rms: float | None
    """Geometric mean over the rows that are not all zero."""
    least: float | None
    greatest: float | None
    """The smallest and the largest finite element of all rows."""
    least_hash: int | None
    greatest_hash: int | None

    @property
    def name(self) -> str:
        """Dotted name of a parameter or buffer."""
        return f"{self.module}.{self.slot}" if self.module else self.slot

    @property
    def changed(self) -> bool:
        """Whether its content was not the same in all rows, as far as hashes were recorded."""
        return self.least_hash != self.greatest_hash

    @property
    def norm(self) -> float:
        """L2 norm of a row, as far as the geometric mean tells."""
        return (self.rms or 0.0) * float(np.sqrt(self.count))


class Event(NamedTuple):
    """A row of the events table."""

    step: int
    module: str | None
    message: str
    details: Mapping[str, Any]


class Series(NamedTuple):
    """A scalar over time, finite values only; where a step has several, each."""

    steps: Ints
    values: Floats

    def at(self, wanted: Ints) -> Floats:
        """The last value of each of these steps, all of which it has."""
        return self.values[np.searchsorted(self.steps, wanted, side="right") - 1]


class Batches(NamedTuple):
    """The batches trained on, by one input of the root, in order. One that only repeats its predecessor inside the same
    step is left out."""

    name: str
    steps: Ints
    samples: Ints
    digests: NDArray[np.uint64]


class Facts:
    """One run, as rules see it."""

    def __init__(self, run: RunSource, control: RunSource | None = None) -> None:
        self.run, self.control = run, control
        self._queries = Queries(run)

    def sql(self, statement: str) -> pa.Table:
        """The result of a query over the run's tables."""
        return self._queries(statement)

    @cached_property
    def sites(self) -> list[Seen]:
        """Every site, in order of execution."""
        rows = self.sql(_SITES).to_pylist()
        return [Seen(**{**row, "shape": tuple(row["shape"] or ())}) for row in rows]

    def of_phase(self, *phases: str) -> list[Seen]:
        """The sites of some phases, in order of execution."""
        return [site for phase in phases for site in self._by_phase.get(phase, [])]

    @cached_property
    def _by_phase(self) -> dict[str, list[Seen]]:
        found: dict[str, list[Seen]] = defaultdict(list)
        for site in self.sites:
            found[site.phase].append(site)
        return found

    @cached_property
    def gradients(self) -> dict[str, Seen]:
        """Gradients of parameters by the parameter's name; a parameter that never had one is not there."""
        return {site.name: site for site in self.of_phase("gradient_local", "gradient")}

    @cached_property
    def updates(self) -> dict[str, Seen]:
        """What optimizers did to parameters, by name."""
        return {site.name: site for site in self.of_phase("update")}

    @cached_property
    def parameters(self) -> dict[str, Seen]:
        """Values of parameters by name."""
        return {site.name: site for site in self.of_phase("parameter")}

    @cached_property
    def described(self) -> dict[str, Mapping[str, Any]]:
        """Parameters as run.json describes them, by name, in the model's order."""
        model = self.run.info.get("model") or {}
        return {parameter["name"]: parameter for parameter in model.get("parameters", [])}

    @cached_property
    def modules(self) -> dict[str, str]:
        """Class of each module by path, in the model's order."""
        model = self.run.info.get("model") or {}
        return {module["path"]: module["type"] for module in model.get("modules", [])}

    @cached_property
    def trainable(self) -> list[str]:
        """Parameters that required a gradient at any time, in the model's order."""
        flagged = {name for event in self.events("trainable") for name in event.details["trainable"]}
        at_attach = {name for name, parameter in self.described.items() if parameter.get("requires_grad")}
        names = flagged or at_attach
        return [name for name in self.described if name in names] + sorted(names - self.described.keys())

    @cached_property
    def takers(self) -> dict[str, list[str]]:
        """Modules that are given an input of the root as it is, by the input's name."""
        return {
            name: list(paths)
            for event in self.events("inputs_taken")
            for name, paths in event.details["takers"].items()
        }

    @cached_property
    def routed(self) -> dict[str, list[str]]:
        """Modules that a router chooses between, by the path of the list that holds them: of one class, in numbered
        places, and next to the list a parameter with one row for each."""
        found: dict[tuple[str, str], list[str]] = defaultdict(list)
        for path, kind in self.modules.items():
            parent, _, name = path.rpartition(".")
            if name.isdigit():
                found[parent, kind].append(path)
        return {parent: paths for (parent, _), paths in found.items() if self._has_router(parent, len(paths))}

    def _has_router(self, container: str, members: int) -> bool:
        around = container.rpartition(".")[0]
        prefix = f"{around}." if around else ""
        beside = {
            name: described["shape"]
            for name, described in self.described.items()
            if name.startswith(prefix) and name.removeprefix(prefix).count(".") <= 1
        }
        return members >= 2 and any(len(shape) == 2 and shape[0] == members for shape in beside.values())

    @property
    def adaptive(self) -> bool:
        """Whether every optimizer divides gradients by their own size, so that a scale of the gradients does not matter."""
        return all(any(part in known["class"] for part in ADAPTIVE) for known in self.optimizers)

    @cached_property
    def relative_updates(self) -> dict[str, float]:
        """Norm of what a step does to each weight over that of the weight, geometric means over the steps: for weights of
        two dimensions or more that are held by an optimizer."""
        return {
            name: update.rms / weight.rms
            for name, update in self.updates.items()
            if (weight := self.parameters.get(name)) is not None
            and weight.rms
            and update.rms
            and len(weight.shape) >= 2
        }

    @cached_property
    def falls(self) -> bool:
        """Whether the loss fell by a hundredth or more, from the first three or the first tenth to the last, and by more
        than it wavers."""
        values = self.scalar("loss").values
        if not len(values):
            return False
        part = max(3, len(values) // 10)
        first, last = float(np.median(values[:part])), float(np.median(values[-part:]))
        return first - last > max(0.01 * abs(first), float(np.hypot(notch(values[:part]), notch(values[-part:]))))

    @cached_property
    def validation_loss(self) -> Series:
        """A loss that was recorded under a name of validation, or that the root returned in passes without gradients."""
        for name, series in self._scalars.items():
            if "loss" in name.lower() and VALIDATION.search(name.lower()):
                return series
        rows = self.sql(
            "SELECT t.step, avg(t.mean) AS value FROM tensors t JOIN (SELECT DISTINCT step, micro, rank FROM samples "
            "WHERE split::VARCHAR = 'validation') s ON t.step = s.step AND t.micro = s.micro AND t.rank = s.rank "
            "WHERE t.phase::VARCHAR = 'forward' AND t.module::VARCHAR = '' AND t.slot::VARCHAR LIKE '%.loss' AND "
            "t.count = 1 "
            "AND t.mean IS NOT NULL GROUP BY t.step ORDER BY t.step"
        )
        return Series(rows["step"].to_numpy(), rows["value"].to_numpy())

    def is_site(self, site: Seen) -> str:
        """The SQL condition that rows are of one site's module and slot."""
        return f"module = {quoted(site.module)} AND slot = {quoted(site.slot)}"

    def over_steps(self, column: str, where: str) -> Iterator[tuple[str, Ints, Floats]]:
        """A column of the tensors table step by step, its largest where a step has several rows: for each slot, its steps
        and values. ``where`` is an SQL condition over the columns phase, module, slot, type and dtype as text."""
        rows = self.sql(
            "SELECT slot, step, max(value) AS value FROM (SELECT phase::VARCHAR AS phase, module::VARCHAR AS module, "
            f"slot::VARCHAR AS slot, step, {column} AS value FROM tensors) "
            f"WHERE {where} AND value IS NOT NULL GROUP BY ALL ORDER BY slot, step"
        )
        slots = np.array(rows["slot"].to_pylist(), dtype=object)
        for slot in dict.fromkeys(slots):
            yield str(slot), rows["step"].to_numpy()[slots == slot], rows["value"].to_numpy()[slots == slot]

    def is_large(self, name: str) -> bool:
        """Whether samples of an input are not equal by chance: of two floating elements or more, or four of others."""
        sites = [site for site in self.of_phase("input") if site.module == "" and site.slot == f"input.{name}"]
        least = [2 if "float" in site.dtype else 4 for site in sites]
        return all(not site.shape or site.count >= few * site.shape[0] for site, few in zip(sites, least, strict=True))

    @cached_property
    def graphs(self) -> int:
        """How many autograd graphs of a loss were looked at whole."""
        return len(self.scalar("graph/nodes").values)

    @cached_property
    def optimizers(self) -> list[Mapping[str, Any]]:
        """Optimizers as run.json describes them."""
        return self.run.info.get("optimizers") or []

    @cached_property
    def held(self) -> set[str]:
        """Parameters that some optimizer holds."""
        groups = (group for optimizer in self.optimizers for group in optimizer.get("groups", []))
        return {name for group in groups for name in group.get("parameters", [])}

    @cached_property
    def order(self) -> dict[str, int]:
        """When each module first returned, in the order of execution."""
        return {site.module: site.order for site in reversed(self.of_phase("forward"))}

    def persists(self, site: Seen, last_otherwise: int | None) -> bool:
        """Whether something held of a tensor in every one of the last steps: `LASTING` or more since it was otherwise."""
        return not site.nonfinite and self.steps_between(last_otherwise, site.last_step) >= LASTING

    def is_constant(self, site: Seen) -> bool:
        """Whether all elements of a tensor were equal in every one of the last steps."""
        return self.persists(site, site.last_varied)

    @property
    def run_start(self) -> int:
        """The first recorded step."""
        return int(self.recorded[0]) if len(self.recorded) else 0

    def trains_after(self, step: int) -> bool:
        """Whether a loss was recorded in a later step."""
        losses = self.scalar("loss").steps
        return bool(len(losses)) and int(losses[-1]) > step

    @cached_property
    def recorded(self) -> Ints:
        """Steps that have rows in the tensors table, ascending."""
        steps: Ints = self.sql("SELECT DISTINCT step FROM tensors ORDER BY step")["step"].to_numpy()
        return steps

    def steps_between(self, after: int | None, until: int) -> int:
        """How many recorded steps lie after one (None: all) and up to another."""
        start = 0 if after is None else int(np.searchsorted(self.recorded, after, side="right"))
        return int(np.searchsorted(self.recorded, until, side="right")) - start

    @cached_property
    def _scalars(self) -> dict[str, Series]:
        table = self.sql("SELECT name::VARCHAR AS name, step, value FROM scalars ORDER BY step, micro, time_ns")
        names = np.array(table["name"].to_pylist(), dtype=object)
        steps, values = table["step"].to_numpy(), table["value"].to_numpy()
        finite = np.isfinite(values)
        return {
            str(name): Series(steps[chosen], values[chosen])
            for name in sorted(set(names))
            if (chosen := (names == name) & finite).any()
        }

    def scalar(self, name: str) -> Series:
        """A scalar over time; empty when it was not recorded."""
        return self._scalars.get(name, Series(np.zeros(0, np.int64), np.zeros(0)))

    def together(self, *names: str) -> tuple[Ints, list[Floats]]:
        """The steps that have all of these scalars, and each one's last value in them."""
        found = [self.scalar(name) for name in names]
        steps = reduce(np.intersect1d, [series.steps for series in found])
        return steps, [series.at(steps) for series in found]

    def scalars(self, prefix: str) -> dict[str, Series]:
        """The scalars whose names begin so."""
        return {name: series for name, series in self._scalars.items() if name.startswith(prefix)}

    @cached_property
    def _events(self) -> dict[str, list[Event]]:
        found: dict[str, list[Event]] = defaultdict(list)
        columns = "step, kind::VARCHAR AS kind, module::VARCHAR AS module, message, details"
        for row in self.sql(f"SELECT {columns} FROM events ORDER BY step, seq").to_pylist():
            details = _parsed(row["details"])
            found[row["kind"]].append(Event(row["step"], row["module"], row["message"], details))
        return found

    def events(self, kind: str) -> list[Event]:
        """Events of a kind, in order."""
        return self._events.get(kind, [])

    @cached_property
    def batches(self) -> list[Batches]:
        """The batches trained on, one entry for each input of the root, the most varied input first."""
        table = self.sql(_BATCHES)
        names = np.array(table["name"].to_pylist(), dtype=object)
        columns = [table[name].to_numpy() for name in ("step", "samples", "digest")]
        found = []
        for name in dict.fromkeys(names):
            steps, samples, digests = (column[names == name] for column in columns)
            fresh = np.ones(len(steps), dtype=bool)
            fresh[1:] = (digests[1:] != digests[:-1]) | (steps[1:] != steps[:-1])
            found.append(Batches(str(name), steps[fresh], samples[fresh], digests[fresh]))
        return sorted(found, key=lambda batches: -len(np.unique(batches.digests)))


def quoted(text: str) -> str:
    """A string as SQL writes it."""
    return "'" + text.replace("'", "''") + "'"


def _parsed(details: str) -> dict[str, Any]:
    try:
        parsed = json.loads(details)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}
