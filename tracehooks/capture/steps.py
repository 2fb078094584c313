"""Where one training step ends and the next begins: a state machine over what the hooks see.

A step begins with the first forward pass with gradients after the optimizers (or a GradScaler, also when it skips) have
stepped. Where no optimizer is ever seen, a forward pass after a backward pass begins the next step.
"""

from __future__ import annotations

from collections.abc import Callable


class Steps:
    """Counts steps and the forward passes inside them."""

    def __init__(self, has_optimizer: Callable[[], bool], first: int = 0) -> None:
        self.step = first
        self.micro = 0
        self._has_optimizer = has_optimizer
        self._passes = 0
        self._backward = False
        self._stepped: set[int] = set()
        """Optimizers that have stepped since the last training pass of this step."""
        self._done = False
        self._scoped = False
        self._inside = False

    @property
    def next_is_new(self) -> bool:
        """Whether a forward pass with gradients would begin a new step."""
        return not self._scoped and self._complete()

    def pass_begins(self, training: bool) -> bool:
        """A forward pass begins. Whether it is the first of a new step; `micro` numbers it inside the step."""
        new = training and self.next_is_new
        if new:
            self._next()
        if training:
            self._stepped.clear()
        self.micro = self._passes
        self._passes += 1
        return new

    def backward_seen(self) -> None:
        """A backward pass reached this model."""
        self._backward = True

    def optimizer_begins(self, optimizer: int, closure: bool) -> bool:
        """An optimizer (by identity) is about to step; with a closure its forward passes come inside the step. Whether
        that alone begins a new step: it steps again with no forward pass seen since (a compiled model's are not)."""
        new = optimizer in self._stepped and not closure and not self._scoped
        if new:
            self._next()
        self._inside = True
        return new

    def optimizer_ends(self, optimizer: int) -> None:
        """It has stepped, or a scaler skipped it."""
        self._stepped.add(optimizer)
        self._done, self._inside = True, False

    def scope_begins(self) -> bool:
        """A step the user delimits begins. Whether its number is new: the first one is step 0."""
        new = bool(self._passes or self._done)
        if new:
            self._next()
        self._scoped = True
        return new

    def scope_ends(self) -> None:
        """It ends."""
        self._scoped, self._done = False, True

    @property
    def untouched(self) -> bool:
        """Nothing has happened in this step yet."""
        return not (self._passes or self._done)

    def _complete(self) -> bool:
        if self._inside:  # LBFGS: the passes of one optimizer step are micro-steps of one step
            return self._done
        return self._done or (self._backward and not self._has_optimizer())

    def _next(self) -> None:
        self.step += 1
        self._passes = 0
        self._backward = self._done = False
        self._stepped.clear()
