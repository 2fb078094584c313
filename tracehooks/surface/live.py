"""Diagnosing a run while it trains: what was written so far is read by a thread of its own, and new findings are said.

It stands between the recording and the writer, as a sink that passes everything on. Nothing of the model is touched, no
random number is drawn, and the thread that trains only looks at the number of the step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tracehooks.core.records import Batch, Finding, Sink
from tracehooks.surface import offline

SHARE = 0.05
"""Share of the time that diagnosing may take where no budget is given: it waits until as much time has passed."""


class DiagnosingSink:
    """A sink that diagnoses the run that it writes, every so many steps and once more when it is closed.

    Args:
        sink: where the rows go; it has a directory.
        every: steps from one look to the next.
        share: largest share of the time that looking may take; looks are rarer where they take long.
        say: prints a line.
    """

    def __init__(self, sink: Sink, every: int, share: float | None, say: Callable[[str], None]) -> None:
        self._sink, self._every, self._share, self._say = sink, every, SHARE if share is None else share, say
        self.path = sink.path
        self._next_step, self._not_before = every, 0.0
        self._looking: threading.Thread | None = None
        self._said: set[tuple[str, str, object]] = set()
        self._failed = False

    def write(self, batches: Sequence[Batch]) -> None:
        """Take the rows of one flush, and look at the run if it is time."""
        self._sink.write(batches)
        step = max((int(batch.columns["step"][-1]) for batch in batches if len(batch)), default=-1)
        if step >= self._next_step and time.monotonic() >= self._not_before and not self._busy():
            self._next_step = step - step % self._every + self._every
            self._looking = threading.Thread(target=self._look, name="tracehooks diagnosis", daemon=True)
            self._looking.start()

    def update_info(self, fields: Mapping[str, Any]) -> None:
        """Merge fields into run.json."""
        self._sink.update_info(fields)

    def keep(self, name: str, data: bytes) -> None:
        """Keep a file under snapshots/."""
        self._sink.keep(name, data)

    def close(self, status: str = "closed") -> None:
        """Seal what is open, and look once more."""
        if self._looking is not None:
            self._looking.join()
        self._sink.close(status)
        self._look()

    def _busy(self) -> bool:
        return self._looking is not None and self._looking.is_alive()

    def _look(self) -> None:
        start = time.monotonic()
        try:
            assert self.path is not None
            found = offline.diagnose(Path(self.path))
        except Exception as error:  # the run must go on whatever becomes of its diagnosis
            if not self._failed:
                self._failed = True
                text = f"{type(error).__name__}: {error}".splitlines()[0]
                self._say(f"tracehooks: diagnosing the run failed ({text}); training goes on, this is said once")
            return
        self._tell(found)
        now = time.monotonic()
        self._not_before = now + (now - start) * (1 - self._share) / self._share

    def _tell(self, found: Sequence[Finding]) -> None:
        for finding in found:
            key = finding.rule, finding.site, finding.evidence.get("cause")
            if key in self._said or finding.severity == "info":
                continue
            self._said.add(key)
            where = f" at {finding.site}" if finding.site else ""
            when = "" if finding.step is None else f", step {finding.step}"
            self._say(f"tracehooks: {finding.severity}: {finding.rule}{where}{when}: {finding.message}")
            self._say(f"tracehooks:   next: {finding.next_check}")
