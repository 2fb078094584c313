"""From the recorder to the sink: what passes is judged on its way, and no failure to write reaches the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tracehooks.capture import findings
from tracehooks.capture.recorder import Drained, Recorder
from tracehooks.core.config import Config
from tracehooks.core.records import Batch, FirstNonFinite, Sink


class Outbox:
    """Flushes of one session, in order."""

    def __init__(
        self,
        recorder: Recorder,
        sink: Sink,
        config: Config,
        locate: Callable[[FirstNonFinite, dict[tuple[int, str], bool]], FirstNonFinite | None],
        say: Callable[[str], None],
    ) -> None:
        self.sink, self.say = sink, say
        self.first: FirstNonFinite | None = None
        """The first non-finite value of the run, once seen."""
        self.stopped = False
        """Writing failed: nothing more is recorded, training goes on."""
        self._recorder, self._config, self._locate = recorder, config, locate
        self._dismissed: set[findings.Site] = set()
        self._pending: list[Batch] = []
        self._failures: set[str] = set()

    def flush(self, scaled: bool, optimizer: str = "", number: int = 0) -> None:
        """Write everything recorded so far."""
        self.drain(scaled, optimizer, number)
        pending, self._pending = self._pending, []
        if pending and not self.stopped:
            self._safely(lambda: self.sink.write(pending))

    def drain(self, scaled: bool, optimizer: str = "", number: int = 0) -> bool:
        """Bring what was measured to the host and judge it. Whether a parameter's gradient in it is not finite.

        Args:
            scaled: a GradScaler is at work.
            optimizer: class of the optimizer that has just stepped, and ``number`` which of the model's it is.
        """
        drained = self._recorder.drain()
        self._pending += drained.batches
        for step in findings.skipped_steps(drained):
            self.note_skipped(optimizer, step)
        norm = findings.gradient_norm(drained)
        if norm is not None:
            self._recorder.scalar(f"grad_norm/{number}" if number else "grad_norm", norm)
        if self.first is None:
            self._look_for_first(drained, scaled)
        self._pending += self._recorder.drain().batches
        return findings.any_nonfinite_gradient(drained)

    def note_skipped(self, optimizer: str, step: int) -> None:
        """A GradScaler skipped the step of an optimizer."""
        text = f"GradScaler skipped the step of {optimizer}: its gradients are not finite"
        self._recorder.event("optimizer_step_skipped", "info", text, {"optimizer": optimizer}, step=step)

    def update_info(self, fields: Mapping[str, Any]) -> None:
        """Merge fields into run.json."""
        if not self.stopped:
            self._safely(lambda: self.sink.update_info(fields))

    def close(self, status: str) -> None:
        """Seal what is open."""
        self._safely(lambda: self.sink.close(status))

    def failed(self, where: str, error: Exception) -> None:
        """An error of the recording's own: said once and recorded as an event for each place and kind."""
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        key = f"{where}: {type(error).__name__}"
        if key not in self._failures:
            self._failures.add(key)
            message = f"error inside the recorder, in {where} ({text})"
            self._recorder.event("recorder_error", "warning", message, {"where": where, "error": text})
            self.say(f"tracehooks: {message}; training goes on, this is said once")

    def _look_for_first(self, drained: Drained, scaled: bool) -> None:
        """Sites whose values turned out to be nobody's concern (a NaN that is never used) are not asked about again."""
        for seen, first in findings.nonfinite(drained, scaled):
            if seen in self._dismissed:
                continue
            located = self._locate(first, findings.root_outputs(drained, first.step))
            if located is not None:
                self._note_first(located)
                return
            self._dismissed.add(seen)

    def _note_first(self, first: FirstNonFinite) -> None:
        self.first = first
        details = first.to_details()
        self._recorder.event("nonfinite", "error", first.message, details, module=first.module, step=first.step)
        if self._config.on_nonfinite != "record":
            self.say(f"tracehooks: {first.message}")

    def _safely(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:  # a full disk, a directory that went away: storage words it
            if not self.stopped:
                self.stopped = True
                self.say(f"tracehooks: recording stopped, training goes on: {error}")
