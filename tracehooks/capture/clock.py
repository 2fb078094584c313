"""Where the time of a step went, by the host's clock.

A step's time runs from the end of the step before it to its own end, so that waiting for its data is part of it;
evaluation in between is not.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping


class Clock:
    """Seconds by phase: data, forward, backward, optimizer, evaluation, recording."""

    def __init__(self) -> None:
        self.recording = 0.0
        """Seconds that the recording took in the step under way."""
        self._spent: dict[str, float] = defaultdict(float)
        self._open: dict[str, float] = {}
        self._started: float | None = None
        """When the step under way began: None before the first forward pass."""
        self._done: float | None = None
        """When its last optimizer had stepped: None before."""
        self._evaluated = 0.0
        """Seconds of evaluation since then."""
        self._flushed = 0.0
        """When rows were last written."""

    def start(self) -> None:
        """A training pass begins: with the first one the first step does."""
        if self._started is None:
            self._started = time.perf_counter()

    def begin(self, phase: str) -> None:
        """A phase begins now."""
        self._open[phase] = time.perf_counter()

    def end(self, phase: str) -> None:
        """A phase ends now; without a beginning nothing is counted."""
        if (start := self._open.pop(phase, None)) is None:
            return
        seconds = time.perf_counter() - start
        if phase == "evaluation":
            self._evaluated += seconds
        else:
            self._spent[phase] += seconds

    def done(self) -> None:
        """The step's work is done, for now."""
        self._done = time.perf_counter()
        self._evaluated = 0.0

    def flushed(self) -> None:
        """Rows are written now."""
        self._flushed = time.perf_counter()

    def since_flush(self) -> float:
        """Seconds since rows were last written."""
        return time.perf_counter() - self._flushed

    def lap(self) -> dict[str, float]:
        """Seconds by phase of the step that is over, and ``step``, its length; empty before the first forward pass."""
        now = time.perf_counter()
        if self._started is None:
            return {}
        end = now if self._done is None else self._done
        spent, self._spent = dict(self._spent), defaultdict(float)
        spent["step"], spent["recording"], self.recording = end - self._started, self.recording, 0.0
        self._spent["data"] = max(0.0, now - end - self._evaluated)
        self._started, self._done = end + self._evaluated, None
        return spent


def scalars_of(spent: Mapping[str, float], batch: int) -> Iterator[tuple[str, float]]:
    """Names and values of the scalars of a step: what `Clock.lap` gave, and how many samples it trained on."""
    for phase in ("data", "forward", "backward", "optimizer", "step"):
        if phase in spent:
            yield f"time/{phase}", spent[phase]
    if spent["step"] > 0:
        yield "overhead", spent.get("recording", 0.0) / spent["step"]
        if batch:
            yield "samples_per_second", batch / spent["step"]
