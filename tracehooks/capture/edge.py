"""The one edge between the recording and the run it watches: only a NonFiniteError that was asked for gets out."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from torch import Tensor

from tracehooks.capture import torch_internals
from tracehooks.core.errors import NonFiniteError

if TYPE_CHECKING:
    from tracehooks.capture.session import Session

Rest = ParamSpec("Rest")


class TakesErrors(Protocol):
    """Notes errors."""

    def failed(self, where: str, error: Exception) -> None:
        """An error of the recording's own."""


class Guarded(Protocol):
    """What an edge needs of the object whose methods it guards."""

    @property
    def silent(self) -> bool:
        """Whether nothing is recorded now."""

    @property
    def pid(self) -> int:
        """The process that records."""

    @property
    def lock(self) -> Any:
        """Held while a method runs."""

    def took(self, seconds: float) -> None:
        """Count time that the recording took."""

    @property
    def outbox(self) -> TakesErrors:
        """What takes note of errors of the recording's own."""


class Process:
    """Which process this is: a system call less for each hook."""

    def __init__(self) -> None:
        self.look()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.look)

    def look(self) -> None:
        """Ask again: after a fork."""
        self.pid = os.getpid()


PROCESS = Process()


class Companion:
    """What works for a session and is called by hooks, too: guarded as the session is."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def silent(self) -> bool:
        """As the session is."""
        return self._session.silent

    @property
    def pid(self) -> int:
        """The process that records."""
        return self._session.pid

    @property
    def lock(self) -> Any:
        """One for all of a session."""
        return self._session.lock

    @property
    def outbox(self) -> TakesErrors:
        """What takes note of errors."""
        return self._session.outbox

    def took(self, seconds: float) -> None:
        """Count time that the recording took."""
        self._session.took(seconds)


G = TypeVar("G", bound=Guarded)
What = TypeVar("What")


def edge(method: Callable[Concatenate[G, Rest], None]) -> Callable[Concatenate[G, Rest], None]:
    """A method that hooks call: does nothing while the session is silent, in forked children and where tensors have no
    values; one thread at a time, its time counted, its errors kept away from the run."""

    @functools.wraps(method)
    def guarded(self: G, *args: Rest.args, **kwargs: Rest.kwargs) -> None:
        if self.silent or self.pid != PROCESS.pid or torch_internals.pretending():
            return
        start = time.perf_counter()
        try:
            with self.lock, torch_internals.undisturbed_where_needed():
                method(self, *args, **kwargs)
        except NonFiniteError:
            raise
        except Exception as error:  # the run must go on whatever the recording does
            self.outbox.failed(method.__name__, error)
        finally:
            self.took(time.perf_counter() - start)

    return guarded  # type: ignore[return-value]


def swift_edge(method: Callable[[G, What, Any], None]) -> Callable[[G, What, Any], None]:
    """An edge for what is called with every tensor. Where that is a plain one, not a subclass with functions of its own, and
    no modes are active, there is nothing to keep the method apart from."""
    slow = edge(method)

    @functools.wraps(method)
    def guarded(self: G, what: What, x: Any) -> None:
        if type(x) is not Tensor or torch_internals.anything_active():
            slow(self, what, x)
            return
        if self.silent or self.pid != PROCESS.pid:
            return
        start = time.perf_counter()
        try:
            with self.lock:
                method(self, what, x)
        except NonFiniteError:
            raise
        except Exception as error:  # as above
            self.outbox.failed(method.__name__, error)
        finally:
            self.took(time.perf_counter() - start)

    return guarded


def outer_edge(method: Callable[Concatenate[G, Rest], None]) -> Callable[Concatenate[G, Rest], None]:
    """The same for what must find the user's own dispatch modes in place, because it puts one of ours among them."""

    @functools.wraps(method)
    def guarded(self: G, *args: Rest.args, **kwargs: Rest.kwargs) -> None:
        if self.silent or self.pid != PROCESS.pid or torch_internals.capturing():
            return
        try:
            with torch_internals.without_torch_function():
                method(self, *args, **kwargs)
        except Exception as error:  # as above
            self.outbox.failed(method.__name__, error)

    return guarded  # type: ignore[return-value]
