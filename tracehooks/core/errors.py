"""Every error that tracehooks raises on purpose, worded in one place.

A message says where, what was seen, what was expected and how to fix it, in one line, so that the command line can
print it as it is.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from numbers import Number
from pathlib import PurePath


class TracehooksError(Exception):
    """Base of all errors raised on purpose; the command line prints it as one line and exits with status 2."""


class UnknownNameError(TracehooksError, ValueError):
    """A name (option, column, table, module pattern, verb …) that nothing answers to.

    Args:
        kind: what was named, for example ``"option"``.
        name: the name as given.
        known: the names that exist; the nearest of them are listed.
        where: where it was given, for example ``"attach()"``.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str], where: str) -> None:
        names = sorted(set(known))
        close = nearest(name, names)
        hint = f"did you mean {_listed(close)}?" if close else f"known: {_listed(names[:12])}" + _more(len(names) - 12)
        super().__init__(f"{where}: unknown {kind} {name!r}; {hint}")


class InvalidOptionError(TracehooksError, ValueError):
    """An option's value that is of the wrong type or out of range."""

    def __init__(self, option: str, seen: object, expected: str) -> None:
        super().__init__(f"option {option}: got {seen!r}, expected {expected}")


class RunExistsError(TracehooksError, FileExistsError):
    """The directory to record into holds a run already."""

    def __init__(self, path: object) -> None:
        super().__init__(
            f"{path}: holds a run already (run.json is there); "
            "choose another directory, remove this one, or pass resume=True to add to it"
        )


class RunBusyError(TracehooksError):
    """Another process is writing this run."""

    def __init__(self, path: object, rank: int, owner: str) -> None:
        super().__init__(
            f"{path}: rank {rank} of this run is being written by {owner}; "
            "two processes cannot write one run: choose another directory or stop that process"
        )


class NotARunError(TracehooksError, FileNotFoundError):
    """The path is not a run directory."""

    def __init__(self, path: object, seen: str) -> None:
        super().__init__(f"{path}: not a run ({seen}); expected a directory with run.json, as attach() writes it")


class FormatVersionError(TracehooksError):
    """The trace was written in a format newer than this reader knows."""

    def __init__(self, path: object, seen: object, newest: int) -> None:
        super().__init__(
            f"{path}: trace format version {seen!r}, this tracehooks reads versions 1 to {newest}; "
            "upgrade tracehooks to read it"
        )


class UnreadableRunError(TracehooksError):
    """A run's description (run.json) cannot be read at all."""

    def __init__(self, path: object, reason: str) -> None:
        super().__init__(f"{path}: cannot be read ({reason}); the tables beside it may still be readable with DuckDB")


class UnwritableError(TracehooksError, OSError):
    """A place that cannot be written: permissions, a full disk, a read-only file system."""

    def __init__(self, path: object, reason: object) -> None:
        super().__init__(f"{path}: cannot be written ({reason}); free space or choose another directory")


class InvalidRowsError(TracehooksError, ValueError):
    """Rows handed to a sink that do not fit the table: a mistake of the caller, nothing was written."""

    def __init__(self, table: str, column: str, reason: str) -> None:
        super().__init__(f"write({table}): column {column}: {reason}; nothing of this call was written")


class QueryError(TracehooksError, ValueError):
    """A query or filter that the engine refuses."""

    def __init__(self, query: str, reason: str) -> None:
        super().__init__(f"query {query!r}: {reason}")


class EngineError(TracehooksError):
    """An engine of queries that cannot be begun: Spark, its Java or its master is not there."""

    def __init__(self, engine: str, reason: str) -> None:
        super().__init__(f"engine {engine}: {reason}")


class SnapshotError(TracehooksError):
    """A kept op cannot be run again."""

    def __init__(self, path: object, reason: str) -> None:
        super().__init__(f"{path}: no op to run again: {reason}")


class CheckpointError(TracehooksError, ValueError):
    """A checkpoint that is not there, is damaged, or is in no format that is known."""

    def __init__(self, path: object, reason: str) -> None:
        super().__init__(
            f"{path}: not a checkpoint that can be read ({reason}); expected .safetensors, what torch.save wrote, "
            "sharded safetensors, or a directory of torch.distributed.checkpoint"
        )


class GoldenError(TracehooksError, ValueError):
    """A golden batch that is not there, is damaged, or is there already."""

    def __init__(self, path: object, reason: str) -> None:
        super().__init__(f"{path}: golden batch: {reason}")


class BisectError(TracehooksError):
    """A search over commits that cannot be made or finds nothing."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"bisect: {reason}")


class AlreadyAttachedError(TracehooksError, RuntimeError):
    """attach() on a model that a live trace records already."""

    def __init__(self, model: str, path: object) -> None:
        super().__init__(
            f"attach(): {model} is being recorded into {path} already; close() that trace before attaching again"
        )


class ClosedTraceError(TracehooksError, RuntimeError):
    """A call on a trace that was closed."""

    def __init__(self, call: str, path: object) -> None:
        super().__init__(f"{call}: the trace {path} is closed; attach() again to record more")


class NonFiniteError(TracehooksError, ArithmeticError):
    """Raised before the optimizer step with ``on_nonfinite="raise"``; ``first`` holds what was found."""

    def __init__(self, first: object) -> None:
        super().__init__(getattr(first, "message", str(first)))
        self.first = first


def shown(value: object) -> object:
    """A wrong value as an error shows it: texts, paths, numbers and None themselves, of anything else its type."""
    return value if value is None or isinstance(value, str | Number | PurePath) else type(value).__name__


def nearest(name: str, known: Iterable[str], n: int = 3) -> list[str]:
    """The at most ``n`` known names most like ``name``, best first; empty when none is alike."""
    return difflib.get_close_matches(name, list(known), n=n, cutoff=0.5)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names) or "none"


def _more(count: int) -> str:
    return f" and {count} more" if count > 0 else ""
