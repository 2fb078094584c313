"""The values that pass between the rooms, and the Protocols by which the rooms know one another.

Capture makes a `Batch` of each table at the end of a step and hands it to a `Sink`; storage implements the sink and
gives analysis a `RunSource`; a `Locator` says where the first non-finite value was born.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.dataset as pa_dataset

Severity = Literal["info", "warning", "error"]


@dataclass(frozen=True)
class Site:
    """A place in the model: which tensor of which call of which module, in which phase."""

    module: str
    slot: str = "output"
    phase: str = "forward"
    call: int = 0
    type: str = ""

    def __str__(self) -> str:
        call = f" call {self.call}" if self.call else ""
        return f"{self.module or '(root)'} {self.slot}{call} ({self.phase})"


@dataclass(frozen=True)
class Batch:
    """Rows of one table, by column, all columns of equal length.

    Columns are NumPy arrays, lists or tuples, named as in `core.schema`; whoever gives the same tuple or unwriteable array
    again says that the column is the same. Null is None in a list, NaN in a float array of a nullable column (statistics
    over finite elements are never NaN; in a column that is not nullable NaN is a value), or None in place of the whole
    column when it is null in every row. ``shape`` is a list of tuples of int, ``sketch`` a float32 array of shape (rows,
    16), ``histogram`` an int64 array of shape (rows, buckets).
    """

    table: str
    columns: Mapping[str, Any]

    def __len__(self) -> int:
        return next((len(column) for column in self.columns.values() if column is not None), 0)


class Sink(Protocol):
    """Where recorded rows go."""

    path: Path | None
    """The run's directory, None for a sink in memory."""

    def write(self, batches: Sequence[Batch]) -> None:
        """Take the rows of one flush. When it returns they survive the death of the process (durability "process")."""

    def update_info(self, fields: Mapping[str, Any]) -> None:
        """Merge fields into run.json, atomically."""

    def keep(self, name: str, data: bytes) -> None:
        """Keep a file under snapshots/, atomically. ``name`` is a relative path."""

    def close(self, status: str = "closed") -> None:
        """Seal what is open and mark the run; a second call does nothing."""


class RunSource(Protocol):
    """A run as analysis reads it."""

    path: Path | None

    @property
    def info(self) -> Mapping[str, Any]:
        """run.json."""

    @property
    def problems(self) -> Sequence[Problem]:
        """What could not be read, so far: reading may find more."""

    def dataset(self, table: str) -> pa_dataset.Dataset:
        """Every readable row of the table exactly once, sealed or not, with an int32 column ``rank`` added. Lazy:
        columns and filters are pushed down. Scanning it may raise OSError at a damaged page; then call `verify`."""

    def verify(self, table: str) -> None:
        """Read the table whole, set what is damaged aside and note it in `problems`; `dataset` then leaves it out."""

    def read(self, table: str, columns: Sequence[str] | None = None, where: str | None = None) -> pa.Table:
        """Rows of a table as Arrow, healed as by `verify`. ``where`` is an SQL condition over its columns."""


@dataclass(frozen=True)
class Problem:
    """Something of a run that could not be read."""

    file: str
    what: str
    """One line: which byte range, row group or field, and why."""

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


@dataclass(frozen=True)
class FirstNonFinite:
    """Where the first non-finite value of a run was seen.

    ``phase`` is one of data, param, forward, loss, backward, clip, update, buffer, eval; ``module`` the canonical path
    ("" the root, None outside the model); ``op`` an aten overload or an autograd node, None where only the site is
    known; ``value`` nan, inf or -inf; ``inputs`` and ``output`` statistics as in a tensors row.
    """

    step: int
    phase: str
    module: str | None
    value: str
    message: str
    op: str | None = None
    cause: str | None = None
    file: str | None = None
    line: int | None = None
    code: str | None = None
    params: tuple[str, ...] = ()
    buffer: str | None = None
    inputs: tuple[Mapping[str, Any], ...] = ()
    output: Mapping[str, Any] | None = None

    def to_details(self) -> dict[str, Any]:
        """The ``details`` of a ``nonfinite`` event."""
        return asdict(self)

    @classmethod
    def from_details(cls, details: Mapping[str, Any]) -> FirstNonFinite:
        """The inverse of `to_details`, after a way through JSON; keys of later versions are ignored."""
        known = {name: value for name, value in details.items() if name in cls.__dataclass_fields__}
        for name in ("params", "inputs"):
            known[name] = tuple(known.get(name) or ())
        return cls(**known)


class Locator(Protocol):
    """Keeps what a step needs to be looked at again, and says where its first non-finite value was born."""

    def step_begins(self) -> None:
        """A new step: forget the last one."""

    def pass_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any], micro: int) -> None:
        """The root is called."""

    def pass_ends(self, output: Any) -> None:
        """It returned."""

    def output_gradient(self, micro: int, slot: str, gradient: Any) -> None:
        """The gradient of one of its outputs arrived."""

    def comes_next(self, what: str) -> None:
        """``what`` comes next: a "pass", "backward", what is done to "gradients" after it, an "optimizer" or "close".
        Called with the user's own dispatch modes in place, as is `pass_ends`."""

    def backward_begins(self, tensors: Any) -> None:
        """Backward starts from these."""

    def backward_ends(self) -> None:
        """It is over."""

    def loss_left(self) -> float | None:
        """The loss of the last pass where it is not finite and backward was never called on it."""

    def update_begins(self, optimizer: Any) -> None:
        """An optimizer is about to step."""

    def locate(self, step: int, seen: FirstNonFinite, outputs: Mapping[tuple[int, str], bool]) -> FirstNonFinite | None:
        """Refine what the recorded rows show (module and phase) to op, line and cause; None when it is no finding.
        ``outputs`` says of each recorded output of the root, by (micro, slot), whether it is not finite."""

    def close(self) -> None:
        """Let go of the model."""


@dataclass(frozen=True)
class Finding:
    """An answer of an analysis: what is wrong, where, with the numbers behind it and what to check next."""

    rule: str
    severity: Severity
    step: int | None
    site: str
    message: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    next_check: str = ""


@runtime_checkable
class Answer(Protocol):
    """What an experiment found: a `Verdict` or a diff."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""


@dataclass(frozen=True)
class Check:
    """One question of an experiment, answered."""

    question: str
    passed: bool | None
    """None where it could not be told."""
    answer: str

    def __str__(self) -> str:
        mark = {True: "yes", False: "NO", None: "not shown"}[self.passed]
        return f"{mark}: {self.question} {self.answer}".rstrip()


@dataclass(frozen=True)
class Verdict:
    """What an experiment found: questions with their answers, and what they were answered from."""

    title: str
    checks: tuple[Check, ...]
    evidence: Mapping[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether no question was answered with no, nor left open."""
        return all(check.passed for check in self.checks)

    def __str__(self) -> str:
        return "\n".join([f"{self.title}: {'passed' if self.passed else 'not passed'}", *map(str, self.checks)])

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "passed": self.passed}
