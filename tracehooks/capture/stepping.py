"""What a session does around an optimizer's step: gradients and parameters before it, updates after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.optim.optimizer import Optimizer

from tracehooks.capture import torch_internals
from tracehooks.capture.edge import Companion, edge
from tracehooks.core.errors import NonFiniteError

if TYPE_CHECKING:
    from tracehooks.capture.session import Session

FLUSH_EVERY = 0.25
"""Seconds after which the numbers of watched steps that wait are written."""


class Stepping(Companion):
    """The steps of the optimizers that train one model, and of a GradScaler in front of them."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._under_way: list[Optimizer] = []
        self._closure = self._scaler_stepped = False
        """The optimizer under way calls a closure; an optimizer has stepped since a scaler was asked to step it."""

    @edge
    def begins(self, optimizer: Optimizer, closure: bool) -> None:
        """An optimizer is about to step. Raises NonFiniteError with ``on_nonfinite="raise"``."""
        session, state = self._session, self._session.state
        state.optimizers.look()
        if not state.optimizers.holds_ours(optimizer):
            return
        # an optimizer whose step raised was never told to have ended
        still = [o for o in self._under_way if torch_internals.calls_on_stack(o, torch_internals.OPTIMIZER_CALL)]
        self._under_way = [o for o in still if o is not optimizer] + [optimizer]
        if len(self._under_way) > 1:
            return
        self.meet(optimizer)
        if session.steps.optimizer_begins(id(optimizer), closure):
            session.end_of_step(session.steps.step - 1)
            session.begin_step()
        session.clock.begin("optimizer")
        session.passes.end_opened()
        self._closure = closure
        session.locator.update_begins(optimizer)
        if not session.live:
            return
        if not closure:
            self._record_gradients(optimizer)
            self._act_on_nonfinite(optimizer)
        if session.recording:
            state.look(optimizer)

    @edge
    def ends(self, optimizer: Optimizer) -> None:
        """It has stepped."""
        if optimizer not in self._under_way:
            return
        self._under_way.remove(optimizer)
        if self._under_way:
            return
        self._scaler_stepped = True
        session = self._session
        if session.live and self._closure:  # gradients and parameters were not there to be read before
            self._record_gradients(optimizer)
        if session.recording:
            session.state.record_updates(optimizer)
        elif session.live:
            session.state.watch_results(optimizer)
        session.state.record_settings(optimizer)
        self._done(optimizer)

    @edge
    def scaler_begins(self, scaler: object, optimizer: Optimizer) -> None:
        """GradScaler.step is called."""
        if self._session.state.optimizers.holds_ours(optimizer):
            self._scaler_stepped = False
            self._session.losses.scaler_begins(scaler, optimizer)

    @edge
    def scaler_ends(self, scaler: object, optimizer: Optimizer) -> None:
        """It returned: when the optimizer has not stepped, it was skipped."""
        if self._scaler_stepped or not self._session.state.optimizers.holds_ours(optimizer):
            return
        self.meet(optimizer)
        if self._session.live:
            self._record_gradients(optimizer)
        self._session.outbox.note_skipped(type(optimizer).__name__, self._session.steps.step)
        self._done(optimizer)

    def meet(self, optimizer: Optimizer) -> None:
        """Say what an optimizer is, the first time."""
        if (described := self._session.state.meet(optimizer)) is not None:
            self._session.outbox.update_info({"optimizers": described})

    def _record_gradients(self, optimizer: Optimizer) -> None:
        state = self._session.state
        if self._session.recording:
            state.record_gradients("gradient", optimizer)
            state.record_parameters()
        else:
            state.watch_gradients(optimizer)

    def _act_on_nonfinite(self, optimizer: Optimizer) -> None:
        """Before the parameters are touched: afterwards the step could not be run again."""
        session, outbox = self._session, self._session.outbox
        mode, seen = session.config.on_nonfinite, outbox.first
        if mode == "record" or session.recorder.nothing_to_judge:
            return
        scaling = session.losses.scaling
        poisoned = outbox.drain(scaling, *self._named(optimizer)) and not scaling
        if poisoned and mode == "skip":
            session.state.drop_gradients(optimizer)
        elif mode == "raise" and (poisoned or outbox.first is not seen):
            self._under_way.clear()
            session.write()
            raise NonFiniteError(outbox.first)

    def _done(self, optimizer: Optimizer) -> None:
        session = self._session
        session.steps.optimizer_ends(id(optimizer))
        session.clock.end("optimizer")
        if not self._may_wait():
            session.write(*self._named(optimizer))
        session.clock.done()

    def _may_wait(self) -> bool:
        """Whether what there is to write are a few numbers of a watched step that nobody would ask about: where even the
        watch is beyond the budget they go out with those of the next steps, some times a second."""
        session, recorder = self._session, self._session.recorder
        if not session.budget.ends_only or len(recorder) or session.clock.since_flush() > FLUSH_EVERY:
            return False
        return recorder.nothing_to_judge

    def _named(self, optimizer: Optimizer) -> tuple[str, int]:
        return type(optimizer).__name__, self._session.state.optimizers.index(optimizer)
