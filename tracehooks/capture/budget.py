"""Which steps are recorded: as the option `every` says, and more rarely where a budget would not allow it.

The recorder measures itself. Let R and W be what recording took in a recorded step and in one that was only watched, and B
the rest of a step. With every n-th step recorded, n steps take n B and recording R + (n - 1) W: a share of b where
n = (R - W) / (b B - W). Medians over the latest steps stand for R, W and B, looked at after each recorded step and whenever
they have been renewed, so that one slow step does not decide for long; n is rounded up to 1, 2, 5, 10, 20, 50 …, so that it
seldom changes and steps of two runs coincide.

Where watching alone takes most of the budget, watched steps look at the ends alone: what the model returns, the loss,
gradients, parameters. What is not finite inside and matters comes out at one of them.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from typing import Any

MOST = 10_000
"""Recording is never rarer than every so many eligible steps."""
LATEST = 9
"""Steps of each kind over which medians are taken."""
FEW = 3
"""Watched steps after which it is known well enough what watching costs to choose anew."""
MOST_FOR_WATCHING = 0.5
"""Share of the budget that may go to watching every module: beyond, only the model's ends are watched."""
WARM_UP = 1
"""First steps, which cost more than others and are not measured."""

Notice = tuple[str, str, str, dict[str, Any]]
"""Kind, severity, message and details of an event."""


class Budget:
    """Chooses the steps whose tensors are recorded.

    Args:
        failed: is told, with where, of an error of the predicate `every`; the step is then recorded.
    """

    def __init__(
        self,
        share: float | None,
        every: int | Callable[[int], bool],
        failed: Callable[[str, Exception], None] = lambda where, error: None,
    ) -> None:
        self._share, self._every, self._failed = share, every, failed
        self.stride = 1
        """Of the steps that `every` names, one in so many is recorded."""
        self.ends_only = False
        """Watched steps look at the ends of the model alone."""
        self._eligible = -1
        self._ended = self._since = 0
        self._recorded: deque[float] = deque(maxlen=LATEST)
        self._watched: deque[float] = deque(maxlen=LATEST)
        self._bare: deque[float] = deque(maxlen=LATEST)

    def records(self, step: int) -> bool:
        """Whether the tensors of this step are recorded. Asked once a step, in order."""
        if not callable(self._every):
            return step % (self._every * self.stride) == 0
        try:
            named = bool(self._every(step))
        except Exception as error:  # the user's own code, called where training must go on
            self._failed("every(step), taken for a yes", error)
            named = True
        self._eligible += named
        return named and self._eligible % self.stride == 0

    def step_ended(self, recorded: bool, seconds: float, step: float) -> Notice | None:
        """A step is over: ``seconds`` of the ``step`` seconds it took went to recording. An event when that changes which
        steps are recorded from now on."""
        self._ended += 1
        if self._share is None or self._ended <= WARM_UP:
            return None
        (self._recorded if recorded else self._watched).append(seconds)
        self._bare.append(step - seconds)
        self._since += 1
        if not self._recorded or (not recorded and self._since % LATEST and len(self._watched) != FEW):
            return None
        self._since = 0
        before = self.stride, self.ends_only
        self._choose()
        return None if (self.stride, self.ends_only) == before else self._notice()

    def _costs(self) -> tuple[float, float, float]:
        watched = statistics.median(self._watched) if self._watched else 0.0
        return statistics.median(self._recorded), watched, statistics.median(self._bare)

    def _choose(self) -> None:
        assert self._share is not None
        recorded, watched, bare = self._costs()
        if len(self._watched) >= FEW and watched > MOST_FOR_WATCHING * self._share * bare:
            self.ends_only = True
        spare = self._share * bare - watched
        steps = (recorded - watched) / spare if spare > 0 else math.inf
        every = 1 if callable(self._every) else self._every
        stride = rounded_up(min(steps / every, MOST))
        # a median that wavers must not: it is recorded more often again only where that is far within the budget
        if stride > self.stride or 2 * stride < self.stride:
            self.stride = stride

    def _notice(self) -> Notice:
        assert self._share is not None
        recorded, watched, bare = self._costs()
        every = self.stride if callable(self._every) else self.stride * self._every
        which = "step" if every == 1 else f"{every}. step" + (" that `every` names" if callable(self._every) else "")
        text = (
            f"recording every {which}: a recorded step costs {1e3 * recorded:.3g} ms, a watched one {1e3 * watched:.3g} ms, "
            f"of {1e3 * bare:.4g} ms; the budget is {self._share:.3g}"
        )
        if self.ends_only:
            text += (
                "; between recorded steps only what the model returns, its loss, gradients and parameters are watched"
            )
        if watched > self._share * bare:
            text += ", and the watch for non-finite values alone takes more"
        details = {"every": every, "recorded_seconds": recorded, "watched_seconds": watched, "step_seconds": bare}
        return "recording_paced", "info", text, {**details, "budget": self._share}


def rounded_up(steps: float) -> int:
    """The next of 1, 2, 5, 10, 20, 50 …"""
    if steps <= 1:
        return 1
    power = 10 ** math.floor(math.log10(steps))
    return next(int(power * digit) for digit in (1, 2, 5, 10) if power * digit >= steps)
