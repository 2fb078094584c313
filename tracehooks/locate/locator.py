"""The locator: keeps what a step needs to be looked at again, and says where its first non-finite value was born."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from tracehooks.capture import torch_internals
from tracehooks.capture.hooks import named_arguments
from tracehooks.capture.leaves import leaves
from tracehooks.capture.parameters import Held, held_buffers, held_parameters
from tracehooks.capture.select import argument_names
from tracehooks.core.records import FirstNonFinite
from tracehooks.locate import answers, arithmetic, causes, circumstances, snapshot
from tracehooks.locate.case import Cause, case_of
from tracehooks.locate.chain import Birth, birth
from tracehooks.locate.clip import GradientWatch
from tracehooks.locate.describe import describe_tensor
from tracehooks.locate.loss import LossWatch
from tracehooks.locate.ops import Details, Op, OpMode, Place, Status, Unseen, user_place
from tracehooks.locate.replay import Modules, Pass, Record, Replay
from tracehooks.locate.update import rerun_update

MAX_PASSES = 8
"""Forward passes of one step that are kept to be run again, the latest ones: their arguments are held until it ends."""

Answer = FirstNonFinite | None
Outputs = Mapping[tuple[int, str], bool]
Keep = Callable[[str, bytes], None]
"""Keeps a file under a relative name."""


class StepLocator:
    """Implements `core.records.Locator` for one model, by running the step again.

    The places where a value can be born are looked at in the order in which a step runs: forward passes, loss, backward
    outside the model, backward inside it, clipping, buffers, the update. The first that is damaged answers.
    """

    def __init__(self, root: nn.Module, keep: Keep | None = None, ema: nn.Module | None = None) -> None:
        self._root, self._keep, self._ema = root, keep, ema
        self._modules = Modules(root)
        self._answer: Details | None = None
        self._outputs: Outputs = {}
        self._passes: deque[Pass] = deque(maxlen=MAX_PASSES)
        self._replays: dict[int, Replay] = {}
        self._loss = LossWatch(self._describe)
        self._gradients = GradientWatch()
        self._loss_values: deque[Tensor] = deque(maxlen=MAX_PASSES)
        self._update: tuple[Optimizer, Place | None] | None = None
        self._batch: int | None = None
        self._steps_follow = False
        """An optimizer has been seen: what comes between backward and its step ends there."""

    # ---- what the session tells

    def step_begins(self) -> None:
        """Forget the last step."""
        self._passes.clear()
        self._replays.clear()
        self._loss.forget()
        self._gradients.forget()
        self._loss_values.clear()
        self._update = None

    def pass_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any], micro: int) -> None:
        """The root is called."""
        self._passes.append(Pass(self._modules, args, kwargs, micro, user_place()))
        first = next((tensor for _, tensor in leaves((args, kwargs), "") if tensor.ndim), None)
        self._batch = first.size(0) if first is not None else None

    def pass_ends(self, output: Any) -> None:
        """It returned. Where gradients are on, what follows is the loss; an evaluation pass is over with it."""
        if torch.is_grad_enabled():
            self._loss.enter([tensor for _, tensor in leaves(output, "output")])
        elif self._passes and not self._passes[-1].training:
            self._passes.pop()

    def comes_next(self, what: str) -> None:
        """A pass, backward, an optimizer or close comes next: the loss is over. Or, after backward, what is done to the
        gradients."""
        self._loss.leave()
        self._gradients.leave()
        if what == "gradients" and self._passes and self._steps_follow:
            self._gradients.enter()

    def output_gradient(self, micro: int, slot: str, gradient: Tensor) -> None:
        """The gradient of an output of the root arrived."""
        if torch_internals.unwrapped(gradient) is not gradient:  # of a transform of torch.func: it has its own backward
            return
        for taken in self._passes:
            if taken.micro == micro:
                taken.keep_gradient(slot, gradient)

    def backward_begins(self, tensors: Tensor | Sequence[Tensor]) -> None:
        """Backward starts."""
        loss = tensors if isinstance(tensors, Tensor) else tensors[0] if len(tensors) == 1 else None
        self._loss.backward_begins(loss)
        if loss is not None and loss.numel() == 1:
            self._loss_values.append(loss.detach())

    def backward_ends(self) -> None:
        """It is over."""
        self._loss.backward_ends()

    def loss_left(self) -> float | None:
        """The loss of a pass on which backward was never called, where it is not finite."""
        value = self._loss.left()
        if value is not None:
            self._loss_values.append(torch.tensor(value))
        return value

    def update_begins(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step."""
        self._steps_follow = True
        self._update = optimizer, user_place()

    def close(self) -> None:
        """Let go of the model."""
        self.step_begins()
        self._root, self._ema = nn.Module(), None
        self._modules = Modules(self._root)

    # ---- the answer

    def locate(self, step: int, seen: FirstNonFinite, outputs: Outputs) -> Answer:
        """Where it was born; None when what was seen is nobody's concern: nothing computed from it is damaged.

        Args:
            outputs: of each output of the root that was recorded, by (micro, slot), whether it is not finite. A replay that
                does not end the same way is not believed.
        """
        self._answer, self._outputs = None, outputs
        found = self._look(step, seen)
        if found is not None and self._keep is not None:
            self._keep_snapshot(step, self._keep)
        return found

    def _keep_snapshot(self, step: int, keep: Keep) -> None:
        if self._answer is not None and self._answer.call is not None:
            keep(f"step-{step:08d}/{snapshot.OP_FILE}", self._answer.call)
        if self._passes:
            taken = self._passes[-1]
            keep(f"step-{step:08d}/{snapshot.BATCH_FILE}", snapshot.batch_bytes(taken.args, taken.kwargs))

    def _look(self, step: int, seen: FirstNonFinite) -> Answer:
        if seen.phase == "param":
            bad = (held.name for held in self._parameters() if not bool(torch.isfinite(held.tensor.detach()).all()))
            return answers.told(replace(seen, params=tuple(bad)), circumstances.UNINITIALISED)
        if seen.phase == "update":
            return self._in_update(seen) if seen.module is not None else self._in_average(seen)
        doubts = [doubt for taken in self._passes if (doubt := self._doubt(taken, self._record(taken))) is not None]
        if doubts and any(self._outputs.values()):
            return answers.unsure(seen, doubts[0])
        for look in (self._forwards, self._in_loss, self._in_loss_backward, self._backwards, self._buffers):
            found = look(step)
            if found is not None:
                return found
        if doubts:
            return answers.unsure(seen, doubts[0])
        if seen.phase == "backward" and seen.params:
            return self._after_backward(seen)
        return None if seen.phase in ("data", "forward", "eval", "buffer") else answers.told(seen)

    def _doubt(self, taken: Pass, record: Record) -> str | None:
        """Why a replay is not to be believed; None when it is."""
        if record.failed is not None:
            return f"the step could not be run again ({type(record.failed).__name__}: {record.failed})".splitlines()[0]
        for slot, writer in zip(record.slots, record.outputs, strict=False):
            recorded = self._outputs.get((taken.micro, slot))
            bad = writer is not None and writer >= 0 and record.mode.ops[writer].output.bad
            if recorded is not None and recorded != bad and writer is not None and writer >= 0:
                return "run again, the step did not end the same way"
        return None

    def _forwards(self, step: int) -> Answer:
        for taken in self._passes:
            record = self._record(taken)
            for writer in record.outputs:
                born = _birth(record.mode, writer)
                if born is not None and not (taken.training and self._harmless()):
                    return self._of_birth(step, "forward" if taken.training else "eval", born, record)
        return None

    def _harmless(self) -> bool:
        """Whether loss and gradients are finite: then an output that is not is one that nothing was computed from."""
        if not self._loss_values or not all(math.isfinite(float(loss)) for loss in self._loss_values):
            return False
        gradients = (held.tensor.grad for held in self._parameters())
        return all(g is None or g.layout != torch.strided or bool(torch.isfinite(g).all()) for g in gradients)

    def _in_loss(self, step: int) -> Answer:
        value = next((v for v in map(float, self._loss_values) if not math.isfinite(v)), None)
        if value is None:
            return None
        if self._loss.mode is not None:
            self._loss.mode.resolve()
        born = _birth(self._loss.mode, self._loss.loss) if self._loss.mode is not None else None
        if born is None:  # it was not watched, because something is compiled
            status = Status(math.isnan(value), value == math.inf, value == -math.inf)
            return answers.told(answers.found(step, "loss", None, None, status, None))
        return self._of_birth(step, "loss", born, None)

    def _in_loss_backward(self, step: int) -> Answer:
        found = self._loss.birth
        if found is None:
            return None
        made_by, status = found.made_by, found.status
        cause = circumstances.backward_cause(found.node)
        if cause is None and made_by is not None:
            infinite = made_by.output.bad or any(source.bad for _, source in made_by.sources)
            cause = circumstances.product_cause(found.node, found.dtype, infinite, status.nan)
        if cause is None:
            cause = Cause("unknown", f"the derivative {found.node} made it", "look at the operands of its op")
        place = made_by.place if made_by is not None else None
        first = answers.found(step, "backward", None, found.node, status, place)
        return answers.told(first, self._if_clipped(cause, not status.nan))

    def _backwards(self, step: int) -> Answer:
        for taken in self._passes:
            ops = self._record(taken).mode.ops
            damaged = next((op for op in ops if op.phase == "backward" and op.output.bad and not op.meant), None)
            if damaged is None:
                continue
            born = birth(ops, self._record(taken).mode.unseen, damaged.index)
            if born.op is not None and born.op.phase != "backward" and not _hidden(ops):
                return self._of_birth(step, "forward", born, self._record(taken))  # a bounded function took it in
            if born.op is not None:
                return self._of_backward(step, ops, born.op, damaged)
            if born.unseen is not None and not _sent(taken, born.unseen):
                return self._of_unseen(step, "backward", born, self._record(taken))
        return None

    def _of_backward(self, step: int, ops: list[Op], op: Op, damaged: Op) -> FirstNonFinite:
        hidden = op.phase != "backward"  # born in the forward pass, where nothing of it reached an output
        node = damaged if hidden else op
        if hidden or _through_where(ops, node):
            cause = circumstances.MASKED_BRANCH
        else:
            cause, known = answers.cause_of(op), circumstances.backward_cause(node.node or "")
            if known is not None:  # but a derivative may overflow where it is defined
                cause = cause._replace(next_check=known.next_check) if cause.tag in arithmetic.OVERFLOWS else known
        self._answer = op.details
        first = answers.found(step, "backward", node.module, node.node, node.output, node.place, op.details)
        return answers.told(first, self._if_clipped(cause, not node.output.nan))

    def _buffers(self, step: int) -> Answer:
        for taken in self._passes:
            record = self._record(taken)
            for held in held_buffers(record.root):
                born = _birth(record.mode, record.mode.writer(held.tensor))
                if born is not None and taken.began_finite(record.root, held.tensor):
                    return answers.with_buffer(self._of_birth(step, "buffer", born, record), held.name)
        return None

    def _after_backward(self, seen: FirstNonFinite) -> Answer:
        """Run again, backward gives finite gradients: something changed them on the way or afterwards."""
        bad = {held.name: held.tensor.grad for held in self._parameters() if _bad_gradient(held.tensor)}
        write = next(self._gradients.writers([gradient for gradient in bad.values() if gradient is not None]), None)
        if write is None:
            return answers.told(seen, circumstances.GRADIENT_HOOK)
        status = Status(seen.value == "nan", seen.value == "inf", seen.value == "-inf")
        first = answers.found(seen.step, "clip", None, write.op, status, write.place, params=tuple(bad))
        return answers.told(first, circumstances.clipping(self._norm_of_backward()))

    def _norm_of_backward(self) -> float:
        """Norm of the gradients as backward made them, in their own precision."""
        total: dict[str, Tensor] = {}
        for taken in self._passes:
            for held in held_parameters(self._record(taken).root):
                if held.tensor.grad is not None:
                    total[held.name] = held.tensor.grad + total.get(held.name, 0)
        norms = [torch.linalg.vector_norm(gradient) for gradient in total.values()]
        return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else math.nan

    def _in_average(self, seen: FirstNonFinite) -> Answer:
        """The moving average is not finite while the model is."""
        averages = [] if self._ema is None else [*held_parameters(self._ema), *held_buffers(self._ema)]
        bad = [held for held in averages if not bool(torch.isfinite(held.tensor.detach()).all())]
        return answers.told(replace(seen, params=tuple(held.name for held in bad)), circumstances.POISONED_AVERAGE)

    def _in_update(self, seen: FirstNonFinite) -> Answer:
        if self._update is None:
            return answers.told(seen)
        optimizer, place = self._update
        held = next((held for held in held_parameters(self._root) if held.name in seen.params), None)
        found = rerun_update(optimizer, held.tensor, self._describe) if held is not None else None
        if found is None:
            return answers.told(seen)
        op, cause = found
        self._answer = op.details
        first = answers.found(seen.step, "update", seen.module, op.name, op.output, place, op.details, seen.params)
        return answers.told(first, cause)

    def _of_birth(self, step: int, phase: str, born: Birth, record: Record | None) -> FirstNonFinite:
        op, turned = born.op, born.turned_nan
        if op is None:
            return self._of_unseen(step, phase, born, record)
        self._answer = op.details
        first = answers.found(step, phase, op.module, op.name, op.output, op.place, op.details)
        return answers.told(first, answers.cause_of(op), turned if turned is not op else None)

    def _of_unseen(self, step: int, phase: str, born: Birth, record: Record | None) -> FirstNonFinite:
        """It came in from outside: with a parameter, a buffer, an argument, or something else the code holds."""
        unseen = born.unseen
        assert unseen is not None
        root = self._root if record is None else record.root
        held = next((h for h in held_parameters(root) if OpMode.same_memory(h.tensor, unseen)), None)
        if held is not None:
            kind, cause = ("param", circumstances.UNINITIALISED) if step == 0 else ("update", circumstances.POISONED)
            first = answers.found(step, kind, held.module, None, unseen.status, None, None, (held.name,))
            return answers.told(first, cause)
        buffer = next((h for h in held_buffers(root) if OpMode.same_memory(h.tensor, unseen)), None)
        if buffer is not None:
            first = answers.found(step, "buffer", buffer.module, None, unseen.status, None)
            return answers.with_buffer(answers.told(first, circumstances.POISONED_BUFFER), buffer.name)
        if record is None:
            first = answers.found(step, phase, None, born.path[0].name, unseen.status, born.path[0].place)
            return answers.told(first, circumstances.BAD_TARGET)
        name, tensor = _argument(record, unseen)
        details = None if tensor is None else Details("", "", "", [], describe_tensor(tensor, self._batch))
        first = answers.found(step, "data", "", None, unseen.status, None, details)
        return answers.told(first, circumstances.bad_input(name, unseen.reader))

    # ---- what it needs for that

    def _parameters(self) -> list[Held]:
        return held_parameters(self._root)

    def _record(self, taken: Pass) -> Record:
        """What ran in a pass, op by op."""
        if id(taken) not in self._replays:
            self._replays[id(taken)] = replay = Replay(self._root, taken, self._describe)
            replay.run()
        return self._replays[id(taken)]

    def _if_clipped(self, cause: Cause, infinite: bool) -> Cause:
        """Clipping by an infinite norm makes NaN of infinite gradients and zero of all others."""
        gradients = [(held.name, held.tensor.grad) for held in self._parameters() if held.tensor.grad is not None]
        dense = [(name, gradient) for name, gradient in gradients if gradient.layout == torch.strided]
        poisoned = tuple(name for name, gradient in dense if bool(torch.isnan(gradient).any()))
        zero = all(not bool(gradient.any()) for name, gradient in dense if name not in poisoned)
        spread = infinite and poisoned and zero and len(dense) > len(poisoned)
        return circumstances.clipped(cause, poisoned) if spread else cause

    def _describe(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
        copies: tuple[Any, ...],
        makers: tuple[str, ...],
    ) -> Details:
        case = case_of(func, args, kwargs, output, copies, makers)
        cause = causes.cause_of(case)
        inputs = [describe_tensor(x, self._batch) for x in case.tensors[:4]]
        result = describe_tensor(case.output, self._batch) if case.output is not None else {}
        call = snapshot.call_bytes(str(func), args, kwargs) if self._keep is not None and not copies else None
        return Details(*cause, inputs, result, call)


def _argument(record: Record, unseen: Unseen) -> tuple[str | None, Tensor | None]:
    """The argument of the root that lies in the memory of a tensor no op wrote, with its name."""
    for name, value in named_arguments(argument_names(record.root), record.args, record.kwargs):
        for slot, tensor in leaves(value, name):
            if OpMode.same_memory(tensor, unseen):
                return slot, tensor
    return None, None


def _sent(taken: Pass, unseen: Unseen) -> bool:
    """Whether a tensor no op wrote is a gradient that came from outside, and so was not born in this pass."""
    return any(OpMode.same_memory(gradient, unseen) for gradient in taken.gradients.values())


def _birth(mode: OpMode, writer: int | None) -> Birth | None:
    """Where what a tensor holds was born; None when it is finite, or holds only infinities put there on purpose."""
    if writer is None or writer < 0 or not mode.ops[writer].output.bad:
        return None
    born = birth(mode.ops, mode.unseen, writer)
    meant = born.op.meant if born.op is not None else born.unseen is None or born.unseen.status.only_neginf
    return None if meant and not any(op.output.nan for op in born.path) else born


_REPLACING = ("aten.where", "aten.masked_fill", "aten.nan_to_num")


def _bad_gradient(parameter: Tensor) -> bool:
    gradient = parameter.grad
    return gradient is not None and gradient.layout == torch.strided and not bool(torch.isfinite(gradient).all())


def _hidden(ops: Sequence[Op]) -> bool:
    """Whether something in the forward pass puts finite values in the place of others."""
    replacing = (op for op in ops if op.phase != "backward" and op.name.startswith(_REPLACING))
    return any(not op.output.bad and any(status.bad for _, status in op.sources) for op in replacing)


def _through_where(ops: Sequence[Op], node: Op) -> bool:
    """Whether what the node's forward op made went through torch.where, or what else puts other values in its place."""
    if node.forward is None:
        return False
    chosen = (op for op in ops if op.phase != "backward" and op.name.startswith(_REPLACING))
    return any(node.forward in _writers(op) for op in chosen)


def _writers(op: Op) -> Iterator[int]:
    return (writer for writer, _ in op.sources)
