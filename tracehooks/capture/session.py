"""One model being watched: what each hook saw becomes rows, steps are counted, flushes go to the sink."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from tracehooks.capture import torch_internals
from tracehooks.capture.budget import Budget
from tracehooks.capture.clock import Clock, scalars_of
from tracehooks.capture.edge import edge, outer_edge, swift_edge
from tracehooks.capture.hooks import BackwardSeen, OutputHook, TensorHooks
from tracehooks.capture.inputs import Inputs
from tracehooks.capture.lane import CLOSED, KEY, RECORDING, WATCHING
from tracehooks.capture.leaves import leaves
from tracehooks.capture.losses import Losses
from tracehooks.capture.model_state import ModelState
from tracehooks.capture.outbox import Outbox
from tracehooks.capture.passes import Passes
from tracehooks.capture.places import Site
from tracehooks.capture.probed import Probed
from tracehooks.capture.recorder import Recorder
from tracehooks.capture.stepping import Stepping
from tracehooks.capture.steps import Steps
from tracehooks.capture.taps import SWITCHBOARD
from tracehooks.capture.unlocated import Unlocated
from tracehooks.capture.wiring import Wiring
from tracehooks.core.config import Config
from tracehooks.core.records import FirstNonFinite, Locator, Sink
from tracehooks.stats import Spec


class Session:
    """Everything between the hooks of one model and a sink.

    Methods that hooks call are edges: they never raise into the run (but for a NonFiniteError that was asked for).
    """

    def __init__(
        self,
        root: nn.Module,
        config: Config,
        sink: Sink,
        *,
        first_step: int = 0,
        ema: nn.Module | None = None,
        locator: Locator | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self.config = config
        self.pid, self.lock = os.getpid(), threading.RLock()
        self.closed = self.silent = False
        self.recorder = Recorder(Spec(config.hash, config.sketch, config.histogram))
        self.locator: Locator = locator if locator is not None and config.on_nonfinite != "record" else Unlocated()
        self.outbox = Outbox(self.recorder, sink, config, self._locate, say)
        self.state = ModelState(root, config, self.recorder, ema)
        self.inputs, self.probed = Inputs(self.recorder, config), Probed(self)
        self.steps = Steps(self.state.optimizers.any, first_step)
        self.clock, self.budget = Clock(), Budget(config.budget, config.every, self.outbox.failed)
        self.losses = Losses(self.recorder)
        self.wiring = Wiring(self, root)
        self._wants_outputs, self._wants_gradients = (kind in config.record for kind in ("outputs", "output_grads"))
        self.passes, self.tensor_hooks = Passes(), TensorHooks()
        self._backward_depth = self._batch = 0
        self.stepping = Stepping(self)
        self.paused = self.live = self.recording = False
        """live, recording: whether this step is watched for non-finite values, whether its tensors are recorded."""
        self.lane = self.recorder.lane
        self.lane.outputs, self.lane.gradients = self._wants_outputs, self._wants_gradients
        calls, tables = self.passes.calls, self.tensor_hooks.tables
        self.lane.serve(calls, tables, self.lock, self.outbox.failed, self.tensor_hooks.add, KEY)

    # ---- life

    def connect(self, optimizer: Optimizer | None = None) -> None:
        """Put the hooks on. Raises UnknownNameError for a module pattern that matches nothing."""
        self.wiring.connect()
        if optimizer is not None:
            self.stepping.meet(optimizer)
        SWITCHBOARD.connect(self)
        self.recorder.begin_step(self.steps.step)
        self._chosen = self.budget.records(self.steps.step)
        self._select_step()

    def close(self, status: str = "closed") -> None:
        """Take every hook off, write what is left, let go of the model. A second call does nothing."""
        if self.closed:
            return
        if self.pid == os.getpid():
            with torch_internals.undisturbed():
                self._last_words()
                self.flush()  # writes what is known of an error in the last flush
        self.comes_next("close")
        self.closed = self.silent = True
        self.locator.close()
        self.live = self.recording = False
        self._open_lane()
        SWITCHBOARD.disconnect(self)
        self.wiring.disconnect()
        self.tensor_hooks.remove()
        self.state.release()
        self.wiring.release()
        if self.pid == os.getpid():
            self.outbox.close(status)

    @edge
    def _last_words(self) -> None:
        self.losses.left(self.locator.loss_left(), self.steps.micro)
        self.end_of_step()
        self.state.inspection.close()
        self.write()

    # ---- forward

    @edge
    def pass_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any], arguments: list[tuple[str, Any]]) -> None:
        """The root is called; ``arguments`` are the same by name."""
        if torch_internals.not_a_pass():
            return
        if not self.passes.enter(
            lambda: torch_internals.calls_on_stack(self.wiring.root, torch_internals.ROOT_CALL) > 1
        ):
            return
        self._begin_pass()
        self.clock.begin("forward" if self.recorder.training else "evaluation")
        if self.live:
            self._batch += self.inputs.of_root(self.wiring.root, arguments, self.steps.micro)
            self.state.inspection.pass_begins(arguments)
        self.locator.pass_begins(args, kwargs, self.steps.micro)
        self._open_lane()

    @edge
    def pass_ends(self, output: Any) -> None:
        """The root returned, or raised (then ``output`` is None)."""
        if torch_internals.not_a_pass() or not self.passes.leave():
            return
        self._open_lane()
        self.clock.end("forward" if self.recorder.training else "evaluation")
        if self.recorder.training:
            self._await_backward(output)
        else:
            self.write()  # judged while the pass can still be run again

    @outer_edge
    def loss_begins(self, output: Any) -> None:
        """What follows is the loss."""
        if not self.passes.depth:
            self.locator.pass_ends(output)

    @outer_edge
    def comes_next(self, what: str) -> None:
        """``what`` comes next: a pass, backward, what is done to gradients, an optimizer or close."""
        self.locator.comes_next(what)

    @edge
    def module_called(self, path: str, arguments: list[tuple[str, Any]]) -> None:
        """A module other than the root is called: its inputs and masks."""
        module = self.wiring.paths.get(path)
        if module is None or torch_internals.not_a_pass():
            return
        self.inputs.of_module(path, module, arguments, self.passes.coming_call(path), self.steps.micro)

    @swift_edge
    def module_returned(self, call_of: tuple[OutputHook, Any], output: Any) -> None:
        """A module returned, called with these arguments: its outputs, and hooks for their gradients."""
        hook, args = call_of
        recompute = torch_internals.graph_task_id() != -1
        if torch_internals.tracing():
            return
        if not self.passes.depth and not recompute:
            self.ran_outside(hook.path, output)
        if not self.live:
            return
        if self.state.inspection.looking:
            self.state.inspection.module_returned(hook.path, args, output, recompute)
        call = self.passes.next_call(hook.path, recompute)
        grad = self.recording and self._wants_gradients and torch.is_grad_enabled()
        for slot, tensor in (("output", output),) if type(output) is Tensor else leaves(output, "output"):
            site, gradient_hook = hook.site(slot, call, self.steps.micro, recompute)
            if self._wants_outputs:
                self.recorder.tensor(tensor, site)
            if grad and tensor.requires_grad:
                self.tensor_hooks.add(tensor, gradient_hook)

    def _begin_pass(self, opener: str | None = None) -> None:
        training = torch.is_grad_enabled()
        if training and self.losses.left(self.locator.loss_left(), self.steps.micro):
            self.write()
        if training and self.steps.next_is_new:
            self.end_of_step()
            if len(self.recorder):
                self.write()
        if self.steps.pass_begins(training):
            self.begin_step()
        if training:
            self.clock.start()
        self.recorder.begin_pass(training, self.steps.micro)
        self.tensor_hooks.sweep()
        self.passes.begin(training, opener)
        if self.recording and self.state.outdated():
            self._rewire()
        if self.recorder.full:
            self.write()

    def ran_outside(self, path: str, output: Any) -> None:
        """A module or probe ran outside the root's forward: a due step begins, and a pass where the root is never called."""
        training = torch.is_grad_enabled()
        if (training and self.steps.next_is_new) or self.passes.opens(path, training):
            self._begin_pass(path)
            if self.live:
                self.state.inspection.pass_begins(())
        if training and not self.recording:
            self._await_backward(output)

    # ---- backward

    @swift_edge
    def gradient_arrived(self, site: Site, gradient: Tensor) -> None:
        """The gradient of a forward row."""
        self._backward_reached()
        if self.recording:
            self.recorder.tensor(gradient, site)

    @edge
    def backward_reached(self, micro: int, slot: str, gradient: Tensor) -> None:
        """The gradient of one of the root's outputs arrived."""
        self._backward_reached()
        self.locator.output_gradient(micro, slot, gradient)

    @edge
    def backward_begins(self, tensors: Tensor | Sequence[Tensor]) -> None:
        """torch.autograd.backward is called, by whom and for which model ever."""
        self._backward_depth += 1
        if self._backward_depth == 1:
            self.clock.begin("backward")
            self.lane.reached = False
            self.losses.backward_begins(tensors)
            self.locator.backward_begins(tensors)
            self.state.inspection.backward_begins(tensors)

    @edge
    def backward_ends(self) -> None:
        """It returned or raised."""
        self._backward_depth -= 1
        if self._backward_depth:
            return
        self.clock.end("backward")
        self.tensor_hooks.forget()
        self.locator.backward_ends()
        self.state.inspection.backward_ends(self.losses.reached)
        if not self.losses.backward_ends(self.steps.micro):
            return  # it was another model's
        self.passes.end_opened()
        if not self.state.optimizers.any():
            if self.recording:
                self.state.record_gradients("gradient_local")
                self.state.record_parameters()
            self.write()

    @edge
    def loss_scaled(self, scaler: object, outputs: Any, scaled: Any) -> None:
        """A GradScaler scaled a loss."""
        self.losses.scaled(outputs, scaled)

    def _backward_reached(self) -> None:
        self.losses.reached = self.lane.reached = True
        self.steps.backward_seen()

    def _await_backward(self, output: Any) -> None:
        for slot, tensor in leaves(output, "output"):
            if tensor.requires_grad and torch.is_grad_enabled():
                self.tensor_hooks.add(tensor, BackwardSeen(self, self.steps.micro, slot))

    # ---- steps

    def scope_begins(self) -> None:
        """``with trace.step_scope()`` is entered."""
        if not self.steps.untouched:
            self.end_of_step()
        if self.steps.scope_begins():
            self.begin_step()

    @edge
    def scope_ends(self) -> None:
        """It is left."""
        if self.recording:
            self.state.record_gradients("gradient_local")
            self.state.record_parameters()
        self.steps.scope_ends()
        self.write()
        self.clock.done()

    def pause(self, paused: bool) -> None:
        """Record no tensors, or again."""
        self.paused = paused
        kind, text = ("paused", "recording paused") if paused else ("resumed", "recording goes on")
        self.recorder.event(kind, "info", text)
        self._select_step()

    def begin_step(self) -> None:
        """What follows is a new step."""
        self.recorder.begin_step(self.steps.step)
        self.state.begin_step()
        self.locator.step_begins()
        self._chosen = self.budget.records(self.steps.step)
        self._select_step()

    def _select_step(self) -> None:
        self.live = not (self.paused or self.outbox.stopped or self.closed)
        self.recording = self.live and self._chosen
        self.wiring.watch_modules(self.recording or not self.budget.ends_only or not self.passes.root_called)
        self.recorder.only_watching = not self.recording
        self._open_lane()

    def _open_lane(self) -> None:
        """Hooks take the fast lane where there is nothing beside their tensors to look at."""
        usual = self.live and not self.silent and self.passes.depth and not self.state.inspection.looking
        self.lane.mode = CLOSED if not usual else RECORDING if self.recording else WATCHING
        self.lane.recording = self.recording and not self.silent

    def end_of_step(self, step: int | None = None) -> None:
        """A step is over, the one under way if not this: its times, and whether others are recorded from now on."""
        step = self.steps.step if step is None else step
        self.clock.recording += self.lane.spent * 1e-9
        self.lane.spent = 0
        spent = self.clock.lap()
        if not spent:
            return
        for name, value in scalars_of(spent, self._batch):
            self.recorder.scalar(name, value, step=step)
        notice = self.budget.step_ended(self.recording, spent.get("recording", 0.0), spent["step"])
        if notice is not None:
            self.recorder.event(*notice)
        self._batch = 0
        if self.recording:
            self.state.record_ema(step)

    def _rewire(self) -> None:
        for notice in self.state.take_census(set(self.wiring.paths)):
            self.recorder.event(*notice)
        self.wiring.reconnect()

    # ---- flushing

    @edge
    def flush(self) -> None:
        """Write everything recorded so far."""
        self.write()
        self.outbox.settle()

    def write(self, optimizer: str = "", number: int = 0) -> None:
        """Write what is known by now.

        Args:
            optimizer: class of the optimizer that has just stepped, and ``number`` which of the model's it is.
        """
        self.clock.flushed()
        self.outbox.flush(self.losses.scaling, optimizer, number)
        if self.outbox.stopped:
            self._select_step()

    def _locate(self, seen: FirstNonFinite, outputs: dict[tuple[int, str], bool]) -> FirstNonFinite | None:
        """Ask the locator, whose replay our own hooks must not record."""
        self._be_silent(True)
        try:
            return self.locator.locate(seen.step, seen, outputs)
        except Exception as error:  # code that cannot be looked at again: what was seen stands
            self.outbox.failed("locating the first non-finite value", error)
            return seen
        finally:
            self._be_silent(False)

    def _be_silent(self, silent: bool) -> None:
        self.silent = silent
        self._open_lane()

    def took(self, seconds: float) -> None:
        """Count time that the recording took inside training steps."""
        self.clock.recording += seconds * self.recorder.training
