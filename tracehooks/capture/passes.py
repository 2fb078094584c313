"""Which forward pass a module call belongs to, and the how-manieth call of its module it is."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident


class Passes:
    """Nesting of the root's calls, calls of modules outside them, call numbers inside a pass."""

    def __init__(self) -> None:
        self.depth = 0
        self.calls: dict[tuple[str, bool], int] = {}
        """How often each module was called in this pass, by path, and whether in recomputation."""
        self._opener: tuple[str, bool] | None = None
        """The module that opened a pass without the root, and whether with gradients."""
        self._threads: set[int] = set()
        """Threads in which passes ran."""
        self._root_called: set[bool] = set()
        """Whether the root was ever called, with (True) and without gradients (False)."""

    def enter(self, nested: Callable[[], bool]) -> bool:
        """The root is called; whether from outside. ``nested`` says, where another call seems to be under way, whether
        it is: one that a KeyboardInterrupt ended was never told to have ended."""
        if self.depth and not nested():
            self.depth = 0
        self.depth += 1
        return self.depth == 1

    def leave(self) -> bool:
        """It returned; whether to the outside."""
        self.depth = max(0, self.depth - 1)
        return self.depth == 0

    def begin(self, training: bool, opener: str | None = None) -> None:
        """A pass begins: the root's, or one that another module opens."""
        self.calls.clear()
        self._threads.add(get_ident())
        self._opener = None if opener is None else (opener, training)
        if opener is None:
            self._root_called.add(training)

    @property
    def here(self) -> bool:
        """Whether this thread has run passes, or none has yet: what another one does is another model's, and gradients must
        not be read while their own thread may free them."""
        return not self._threads or get_ident() in self._threads

    @property
    def root_called(self) -> bool:
        """Whether the root itself is called, and not only modules in it."""
        return bool(self._root_called)

    def end_opened(self) -> None:
        """Backward or an optimizer step ends a pass that was begun without the root."""
        self._opener = None

    def opens(self, path: str, training: bool) -> bool:
        """Whether a module called outside the root's forward opens a pass: only where the root is never called. Without
        gradients its next call opens the next pass, with gradients the first call after backward or a step does."""
        if training in self._root_called:
            return False
        return self._opener is None or self._opener[1] != training or (not training and self._opener[0] == path)

    def next_call(self, path: str, recompute: bool) -> int:
        """Number of this call of a module in the pass, from 0, counted."""
        call = self.calls.get((path, recompute), 0)
        self.calls[path, recompute] = call + 1
        return call

    def coming_call(self, path: str) -> int:
        """Number that a call that has begun will have."""
        return self.calls.get((path, False), 0)
