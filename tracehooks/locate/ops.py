"""Every tensor operation of a stretch of code, with what flowed into it: the op-level mode.

An op is an *origin* when something non-finite comes out of it although nothing non-finite went in. Values are followed
by storage, so that a mask full of -inf, which was made on purpose, is told from an overflow.
"""

from __future__ import annotations

import functools
import linecache
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tracehooks import stats
from tracehooks.capture import torch_internals

UNINITIALISED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_"})
"""Ops whose output is whatever was in memory."""
UNDECLARED_VIEWS = frozenset({"unsafe_split", "unsafe_split_with_sizes"})
"""Ops whose results are views of their operand although their schema does not say so."""
FILLS = frozenset(
    {"full", "full_like", "fill", "fill_", "masked_fill", "masked_fill_", "scalar_tensor", "new_full", "where",
     "lift_fresh", "_local_scalar_dense", "constant_pad_nd"}
)  # fmt: skip
"""Ops that put a number somewhere: an infinity out of them was meant."""
REPLAY = "/tracehooks/locate/replay.py"
COMMUNICATES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
"""Namespaces of collectives: in a replay they would wait for processes that replay nothing."""
FOREIGN = ("/torch/", "/tracehooks/")
_PASSING = ("aten.clamp", "aten.add.Scalar", "aten.clone", "aten._to_copy", "aten.mul.Scalar")
DETAILED = 400
"""Origins of which inputs and outputs are described; later ones are only counted."""


class WouldCommunicateError(Exception):
    """A replay came to a collective; it was not called."""


class Status(NamedTuple):
    """What of non-finite a tensor holds."""

    nan: bool = False
    posinf: bool = False
    neginf: bool = False

    @property
    def bad(self) -> bool:
        """Whether anything is not finite."""
        return self.nan or self.posinf or self.neginf

    @property
    def only_neginf(self) -> bool:
        """Whether -inf is all: what masks and log-space states are full of."""
        return self.neginf and not self.nan and not self.posinf

    def joined(self, other: tuple[bool, ...]) -> Status:
        """What either holds."""
        return Status(*(a or b for a, b in zip(self, other, strict=True)))


FINE = Status()


@dataclass
class Op:
    """One executed operation."""

    index: int
    name: str
    """aten overload, ``aten.div.Tensor``."""
    module: str | None
    """Path of the innermost module running, None outside the model."""
    phase: str
    """forward, backward or recompute."""
    node: str | None
    """The autograd node that runs it in backward."""
    place: Place | None
    sources: tuple[tuple[int, Status], ...]
    """For each floating input: the op that wrote it (negative: never seen being written) and what it held."""
    meant: bool
    """An infinite number was among the arguments, or the op writes numbers it was given."""
    output: Status
    forward: int | None = None
    """In backward: the forward op that made the node."""
    details: Details | None = None
    unread: tuple[Tensor, ...] = ()
    """Smallest and largest element of each result that is still on its device, until `OpMode.resolve` reads them."""


class Unseen(NamedTuple):
    """A tensor that no recorded op wrote: what it held, which module read it first, which memory it is."""

    status: Status
    reader: str | None
    storage: int


class Place(NamedTuple):
    """A line of the user's code."""

    file: str
    line: int
    function: str

    @property
    def code(self) -> str:
        """The line's text, empty where the source is not at hand."""
        return linecache.getline(self.file, self.line).strip()


@dataclass
class Details:
    """The operands of an origin as they were when it ran: described at once, never kept."""

    cause: str
    sentence: str
    next_check: str
    inputs: list[dict[str, Any]] = field(default_factory=list)
    output: dict[str, Any] = field(default_factory=dict)
    call: bytes | None = None
    """The call itself, to be run again, where it was asked for."""


class Before(NamedTuple):
    """What is known of an op's operands before it runs."""

    sources: tuple[tuple[int, Status], ...]
    copies: tuple[Tensor, ...]
    """Of the operands of an op that works in place."""
    statistics: tuple[tuple[Tensor, Status], ...]
    """Of the operands of a normalisation, which may change some of them."""


Describe = Callable[[Any, tuple[Any, ...], dict[str, Any], Any, tuple[Any, ...], tuple[str, ...]], Details]


class OpMode(torch_internals.DispatchMode):  # type: ignore[no-untyped-call]
    """Records every op on floating tensors while it is active.

    Args:
        path_of: path of the innermost module that is running, None outside the model.
        describe: makes `Details` of an origin from (func, args, kwargs, output, copies of what it changes in place, the
            op that made each floating operand).
        place: the line of the user's code that stands behind it all, where the stack leads to a replay instead.
        waits: whether results may be waited for. Without, what is on a device is read by `resolve`, and not described.
    """

    def __init__(
        self, path_of: Callable[[], str | None], describe: Describe, waits: bool = True, place: Place | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.active = True
        self.failed: Exception | None = None
        """An error of the recording's own, after which nothing more is recorded."""
        self._path_of, self._describe, self._waits, self._place = path_of, describe, waits, place
        self.reset()

    def reset(self) -> None:
        """Forget what was recorded."""
        self.ops: list[Op] = []
        self.unseen: list[Unseen] = []
        """Tensors never seen being written: parameters, inputs, buffers."""
        self._writer: dict[int, int] = {}
        self._status: dict[int, Status] = {}
        self._by_sequence: dict[int, int] = {}
        self._described = 0
        self.last_number: int | None = None
        """Index of the op that last made a single number."""

    def writer(self, x: Tensor) -> int | None:
        """Index of the op that last wrote a tensor; negative or None when none was seen."""
        return self._writer.get(_storage(x)) if follows(x) else None

    @staticmethod
    def same_memory(x: Tensor, unseen: Unseen) -> bool:
        """Whether a tensor lies in the memory that an unseen one lay in."""
        return follows(x) and _storage(x) == unseen.storage

    def made_node(self, sequence: int) -> Op | None:
        """The op that made the autograd node of a sequence number."""
        index = self._by_sequence.get(sequence)
        return None if index is None else self.ops[index]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._place is not None and func.namespace in COMMUNICATES:
            raise WouldCommunicateError(str(func))
        kind = _kind(func) if self.active else "view"
        if kind == "view":
            return func(*args, **kwargs)
        before: Before | None = None
        if kind != "op":  # which leaves its operands as they are
            try:
                with torch_internals.without_torch_function():
                    before = self._before(kind, args, kwargs)
            except Exception as error:  # what an op of the user's sees must not depend on us
                self._give_up(error)
        output = func(*args, **kwargs)
        if kind == "op" or before is not None:
            try:
                with torch_internals.without_torch_function():
                    self._after(func, kind, args, kwargs, output, before or self._before(kind, args, kwargs))
            except Exception as error:  # nor may what it returned
                self._give_up(error)
        return output

    def _give_up(self, error: Exception) -> None:
        self.active, self.failed = False, error

    def _before(self, kind: str, args: Any, kwargs: Any) -> Before:
        operands = [x for x in _tensors((args, kwargs)) if follows(x)]
        sources = tuple(self._source(x) for x in operands)
        copies = tuple(x.detach().clone() for x in operands) if kind == "inplace" else ()
        statistics = tuple((x, self._look(x)) for x in operands) if kind == "norm" else ()
        return Before(sources, copies, statistics)

    def _after(self, func: Any, kind: str, args: Any, kwargs: Any, output: Any, before: Before) -> None:
        written = args[0] if output is None and kind == "inplace" and args else output  # the foreach ops return nothing
        results = [x for x in _tensors(written) if follows(x)]
        if kind == "uninitialised":
            for x in results:
                self._write(x, len(self.ops), FINE)
            return
        # batch norm writes its running statistics without saying so in its schema
        results += [x for x, status in before.statistics if status != self._look(x)]
        if results:
            self._record(func, args, kwargs, written, results, before.sources, before.copies)

    def _record(
        self, func: Any, args: Any, kwargs: Any, output: Any, results: list[Tensor], sources: Any, copies: Any
    ) -> None:
        statuses = [self._look(x) for x in results]
        status = FINE
        for one in statuses:
            status = status.joined(one)
        module, backward = self._path_of(), torch_internals.graph_task_id() != -1
        recompute = backward and module is not None
        phase = "recompute" if recompute else "backward" if backward else "forward"
        node, sequence = torch_internals.current_node() if phase == "backward" else (None, -1)
        op = Op(
            index=len(self.ops),
            name=str(func),
            module=module,
            phase=phase,
            node=node,
            place=(user_place() or self._place) if phase != "backward" else None,
            sources=sources,
            meant=status.bad and _meant(func, args, kwargs),
            output=status,
        )
        if phase == "backward":
            op.forward = self._by_sequence.get(sequence)
            if op.forward is not None:
                made = self.ops[op.forward]
                op.module, op.place = made.module, made.place
        else:
            self._by_sequence[torch_internals.last_sequence()] = op.index
        op.unread = tuple(edge for x in results if not self._readable(x) for edge in _edges(x))
        if status.bad and not any(source.nan for _, source in sources) and self._described < DETAILED:
            self._described += 1
            makers = tuple(self._maker(writer) for writer, _ in sources)
            op.details = self._describe(func, args, kwargs, output, copies, makers)
        self.ops.append(op)
        if len(results) == 1 and results[0].ndim == 0:
            self.last_number = op.index
        for x, one in zip(results, statuses, strict=True):
            self._write(x, op.index, one)

    def resolve(self) -> None:
        """Read what was left on devices; waits for each once."""
        pending = [op for op in self.ops if op.unread]
        if not pending:
            return
        edges = torch.stack([edge.double().cpu() for op in pending for edge in op.unread]).tolist()
        for op in pending:
            mine, edges = edges[: len(op.unread)], edges[len(op.unread) :]
            nan = any(math.isnan(edge) for edge in mine)
            op.output = op.output.joined((nan, math.inf in mine, -math.inf in mine))
            op.unread = ()
        for op in self.ops:
            op.sources = tuple((w, self.ops[w].output if w >= 0 else status) for w, status in op.sources)

    def _readable(self, x: Tensor) -> bool:
        return self._waits or x.is_cpu

    def _look(self, x: Tensor) -> Status:
        return _status(x) if self._readable(x) else FINE

    def _maker(self, writer: int) -> str:
        """Name of the op that made a value, seen through ops that only clamp or shift it; empty for unseen tensors."""
        while writer >= 0 and len(self.ops[writer].sources) == 1 and self.ops[writer].name.startswith(_PASSING):
            writer = self.ops[writer].sources[0][0]
        return self.ops[writer].name if writer >= 0 else ""

    def status(self, x: Tensor) -> Status:
        """What a tensor held when it was last written."""
        return self._status.get(_storage(x), FINE) if follows(x) else FINE

    def _source(self, x: Tensor) -> tuple[int, Status]:
        key = _storage(x)
        if key not in self._writer:
            self.unseen.append(Unseen(self._look(x), self._path_of(), key))
            self._writer[key], self._status[key] = -len(self.unseen), self.unseen[-1].status
        known = self._status[key]
        return self._writer[key], self._look(x) if known.bad else known

    def _write(self, x: Tensor, index: int, status: Status) -> None:
        key = _storage(x)
        whole = x.numel() * x.element_size() >= x.untyped_storage().nbytes()
        self._status[key] = status if whole else self._status.get(key, FINE).joined(status)
        self._writer[key] = index


def user_place() -> Place | None:
    """The innermost line outside torch and tracehooks; None where the stack leads to a replay first."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if _is_users(file):
            return None if file.endswith(REPLAY) else Place(file, frame.f_lineno, frame.f_code.co_qualname)
        frame = frame.f_back
    return None


@functools.lru_cache(maxsize=4096)
def _is_users(file: str) -> bool:
    """Whether a frame of this file ends the search for a line of the user's: it is one, or the replay's."""
    return file.endswith(REPLAY) or not (file.startswith("<frozen") or any(part in file for part in FOREIGN))


@functools.cache
def _kind(func: Any) -> str:
    schema, name = func._schema, func.overloadpacket.__name__
    if name in UNINITIALISED:
        return "uninitialised"
    if name in UNDECLARED_VIEWS or any(
        result.alias_info is not None and not result.alias_info.is_write for result in schema.returns
    ):
        return "view"
    if "batch_norm" in name or "instance_norm" in name:
        return "norm"
    return "inplace" if schema.is_mutable else "op"


def _meant(func: Any, args: Any, kwargs: Any) -> bool:
    if func.overloadpacket.__name__ in FILLS:
        return True
    return any(isinstance(x, float) and not math.isfinite(x) for x in _flat((args, kwargs), []))


def _tensors(value: Any) -> list[Tensor]:
    return [item for item in _flat(value, []) if isinstance(item, Tensor)]


def _flat(value: Any, into: list[Any]) -> list[Any]:
    if isinstance(value, tuple | list):
        for item in value:
            if isinstance(item, tuple | list | dict):
                _flat(item, into)
            else:
                into.append(item)
    elif isinstance(value, dict):
        _flat(list(value.values()), into)
    else:
        into.append(value)
    return into


def follows(x: Tensor) -> bool:
    """Whether a tensor's values can be followed: an ordinary one (to read a distributed tensor would communicate),
    floating or complex, dense, with values."""
    if type(x) is not Tensor and type(x) is not torch.nn.Parameter:
        return False
    return (x.is_floating_point() or x.is_complex()) and x.layout == torch.strided and not (x.is_meta or x.is_nested)


def _storage(x: Tensor) -> int:
    return torch_internals.storage_key(x)


def _status(x: Tensor) -> Status:
    if not x.numel():
        return FINE
    if x.is_cpu:
        return status_of(stats.nonfinite((x.detach(),)))
    low, high = (float(edge) for edge in _edges(x))
    if not math.isnan(low):
        return Status(False, high == math.inf, low == -math.inf)
    values = _real(x)
    return Status(True, bool(torch.isposinf(values).any()), bool(torch.isneginf(values).any()))


def status_of(kinds: int) -> Status:
    """What the bits of `stats.nonfinite` say."""
    return Status(bool(kinds & stats.NAN), bool(kinds & stats.POSINF), bool(kinds & stats.NEGINF)) if kinds else FINE


def _edges(x: Tensor) -> tuple[Tensor, ...]:
    """Smallest and largest element, both NaN when there is a NaN; nothing of an empty tensor."""
    return tuple(torch.aminmax(_real(x))) if x.numel() else ()


def _real(x: Tensor) -> Tensor:
    values = torch.view_as_real(x.detach().resolve_conj()) if x.is_complex() else x.detach()
    return values.to(torch.float32) if values.element_size() == 1 else values
