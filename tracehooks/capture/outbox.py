"""From the recorder to the sink: what passes is judged on its way, and no failure to write reaches the run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tracehooks.capture import findings
from tracehooks.capture.batches import batches
from tracehooks.capture.recorder import Drained, Recorder, Sent
from tracehooks.core.config import Config
from tracehooks.core.records import FirstNonFinite, Sink


@dataclass
class Parcel:
    """One flush under way, and what there is to know to judge it."""

    sent: Sent
    scaled: bool
    optimizer: str
    number: int
    late: bool = False
    """The step has gone on since: what was seen stands, it cannot be run again."""


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
        """The first non-finite value of the run, once seen. One of evaluation makes room for one of training."""
        self._in_training = False
        """Whether it was seen where gradients were computed."""
        self.stopped = False
        """Writing failed: nothing more is recorded, training goes on."""
        self._recorder, self._config, self._locate = recorder, config, locate
        self._dismissed: set[findings.Site] = set()
        self._under_way: deque[Parcel] = deque()
        self._pending: list[Drained] = []
        self._failures: set[str] = set()

    def flush(self, scaled: bool, optimizer: str = "", number: int = 0) -> None:
        """Send everything recorded so far, and write what has arrived: at once where no device has to be waited for."""
        self._send(scaled, optimizer, number)
        self._take_in(lambda parcel: parcel.sent.arrived())
        self._write()

    def settle(self) -> None:
        """Write everything sent so far, waiting for it."""
        self._take_in(lambda parcel: True)
        self._write()

    def drain(self, scaled: bool, optimizer: str = "", number: int = 0) -> bool:
        """Bring what was measured to the host, waiting for it, and judge it. Whether a parameter's gradient in it is not
        finite.

        Args:
            scaled: a GradScaler is at work.
            optimizer: class of the optimizer that has just stepped, and ``number`` which of the model's it is.
        """
        self._send(scaled, optimizer, number)
        return self._take_in(lambda parcel: True)

    def _send(self, scaled: bool, optimizer: str, number: int) -> None:
        for parcel in self._under_way:
            parcel.late = parcel.late or not parcel.sent.training or parcel.sent.step != self._recorder.step
        self._under_way.append(Parcel(self._recorder.send(), scaled, optimizer, number))

    def _take_in(self, may: Callable[[Parcel], bool]) -> bool:
        """Judge parcels in order, as long as they may be opened. Whether a gradient in the last is not finite."""
        poisoned = False
        while self._under_way and may(self._under_way[0]):
            poisoned = self._judge(self._under_way.popleft())
        return poisoned

    def _judge(self, parcel: Parcel) -> bool:
        drained = parcel.sent.open()
        self._pending.append(drained)
        for step in findings.skipped_steps(drained):
            self.note_skipped(parcel.optimizer, step)
        norm = findings.gradient_norm(drained)
        if norm is not None:
            name = f"grad_norm/{parcel.number}" if parcel.number else "grad_norm"
            drained.scalars.append((self._recorder.number(name, norm, step=parcel.sent.step), norm))
        if self.first is None or not self._in_training:
            self._look_for_first(drained, parcel)
        if self._recorder.holds_anything:
            self._pending.append(self._recorder.send().open())
        return findings.any_nonfinite_gradient(drained)

    def _write(self) -> None:
        pending, self._pending = self._pending, []
        made = batches(pending) if not self.stopped else []
        if made:
            self._safely(lambda: self.sink.write(made))

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

    def _look_for_first(self, drained: Drained, parcel: Parcel) -> None:
        """Sites whose values turned out to be nobody's concern (a NaN that is never used) are not asked about again."""
        for seen, first in findings.nonfinite(drained, parcel.scaled):
            training = seen[-1]
            if seen in self._dismissed or (self.first is not None and not training):
                continue
            outputs = findings.root_outputs(drained, first.step)
            located = first if parcel.late else self._locate(first, outputs)
            if located is not None:
                self._in_training = training
                self._note_first(located if training else findings.in_evaluation(located))
                return
            self._dismissed.add(seen)

    def _note_first(self, first: FirstNonFinite) -> None:
        self.first = first
        details = {**first.to_details(), "evaluation": not self._in_training}
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
