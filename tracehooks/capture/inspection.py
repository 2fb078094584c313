"""What rules ask of a live model beyond its tensors. Asked once a run, or once a step: never once a tensor.

Everything goes into the trace as events and scalars; nothing is judged here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from tracehooks.capture import classes, connection, memory, objective, torch_internals
from tracehooks.capture.averages import AveragedBuffers
from tracehooks.capture.calls import Calls
from tracehooks.capture.carried import Carried
from tracehooks.capture.graph import Graph, leaf
from tracehooks.capture.loaders import Loaders
from tracehooks.capture.masks import kept_of_padding
from tracehooks.capture.modes import Modes
from tracehooks.capture.optimizers import parameters_of, strangers_like
from tracehooks.capture.recorder import Drained, Recorder
from tracehooks.capture.vanishing import VanishingPoint

if TYPE_CHECKING:
    from tracehooks.capture.model_state import ModelState

LOOKED_AT = 3
"""Steps whose module calls and graphs are looked at: a GAN's players, or branches taken in turn, come up in one of them."""
SHIFTS = range(4)
"""Positions between a token and the prediction it is the target of."""


class Inspection:
    """Looks at the model and at the graphs of its losses, from the moments that the session tells it of."""

    def __init__(self, root: nn.Module, state: ModelState, recorder: Recorder, ema: nn.Module | None) -> None:
        self._root, self._state, self._recorder = root, state, recorder
        self._modes, self._calls, self._loaders = Modes(), Calls(), Loaders()
        self._vanishing = VanishingPoint()
        self._average = None if ema is None else AveragedBuffers(root, ema)
        self._carried: dict[int, Carried] = {}
        self._tokens: Tensor | None = None
        self._first = recorder.step
        self._backwards = 0
        self._graph: Graph | None = None
        self._unreached: dict[str, connection.Break] | None = None
        """Trainable parameters that no backward pass has reached yet, once one was looked at."""
        self._told: set[str] = set()
        self._early = True
        """Whether the steps are not over in which what the loss reaches is looked at."""
        self.looking = True
        """Whether module calls are remembered."""
        self._near = 0
        """Nodes below a loss among which its loss functions were last, 0 where there are none."""
        recorder.readers.append(self._read)

    # ---- forward

    def pass_begins(self, arguments: Sequence[tuple[str, Any]]) -> None:
        """A forward pass of the root begins."""
        if not self._recorder.training:
            return
        modules = self._state.census.modules
        changed = self._modes.training(modules)
        if changed is not None:
            text = (
                f"{len(changed['training'])} modules in training mode, {len(changed['evaluation'])} in evaluation mode"
            )
            self._recorder.event("training_mode", "info", text, changed)
        changed = self._modes.trainable(self._state.census.parameters)
        if changed is not None:
            text = f"{len(changed['trainable'])} parameters trainable, {len(changed['frozen'])} frozen"
            self._recorder.event("trainable", "info", text, changed)
        if not self._backwards and self._early:
            self._note_padding_rows()
        if self._early:
            self._note_kept_padding(arguments)
        if self._early and self._recorder.step - self._first >= LOOKED_AT:
            self._tell_unreached()
        self.looking = self._early or self._vanishing.wanted
        self._calls.begin()
        if self.looking:
            self._calls.give(arguments)
            self._tokens = next((value for _, value in arguments if _are_tokens(value)), None)

    def _note_padding_rows(self) -> None:
        for path, module in self._state.census.modules.items():
            if isinstance(module, nn.Embedding) and module.padding_idx is not None and not module.weight.is_meta:
                with torch.no_grad():
                    norm = torch.linalg.vector_norm(module.weight.detach()[module.padding_idx].double())
                self._recorder.scalar(f"padding_row/{path}", norm)

    def _note_kept_padding(self, arguments: Sequence[tuple[str, Any]]) -> None:
        tables = (module for module in self._state.census.modules.values() if isinstance(module, nn.Embedding))
        padding = next((table.padding_idx for table in tables if table.padding_idx is not None), None)
        if padding is not None:
            for name, share in kept_of_padding(arguments, self._root, padding):
                self._recorder.scalar(f"mask/{name}", share)

    def module_returned(self, path: str, args: Any, output: Any, recompute: bool) -> None:
        """A module returned, while module calls are remembered."""
        if self._recorder.training and not recompute:
            with torch_internals.without_torch_function():  # what goes in may be a subclass where what comes out is not
                self._calls.add(path, args, output)

    # ---- backward

    def backward_begins(self, tensors: Tensor | Sequence[Tensor]) -> None:
        """Backward starts from these; whose loss it is the graph tells."""
        for carried in self._carried.values():
            carried.backward_begins()
        starts = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        nodes = [x.grad_fn for x in starts if isinstance(x, Tensor) and x.grad_fn is not None]
        counted = self._backwards.bit_count() <= 1  # ever more rarely
        if self._early or self._vanishing.wanted or counted:
            self._whole(Graph(nodes))
        elif self._near:
            self._targets(Graph(nodes, self._near))

    def backward_ends(self, ours: bool) -> None:
        """It is over; whether it reached this model."""
        self._vanishing.backward_ends()
        graph, self._graph = self._graph, None
        if not ours:
            return
        self._backwards += 1
        if graph is not None and self._early:
            self._note_unreached(graph)
            self._note_held_graphs()
            if self._backwards == 1:
                takers = self._calls.takers()
                self._once("inputs_taken", f"{len(takers)} inputs go to modules as they are", {"takers": takers})
                self._loaders.find()
                self._tell_loaders()

    def _whole(self, graph: Graph) -> None:
        known = self._state.census.parameters
        names = {id(held.tensor): held.name for held in known}
        if not any(id(x) in names for x in graph.leaves()) and not graph.opaque:
            return  # another model's
        self._graph = graph
        if graph.complete:
            self._recorder.scalar("graph/nodes", float(len(graph.nodes)))
        self._targets(graph)
        for name, number in classes.of_targets(graph):
            self._recorder.scalar(f"targets/{name}", number)
        self._note_resources()
        owners = self._calls.owners(graph, {id(held.tensor): held.module for held in known})
        if self._early:
            self._note_slips(graph, owners)
            self._note_strangers(graph, owners)
        if self._vanishing.wanted:
            self._vanishing.watch(graph, owners, names)

    def _note_resources(self) -> None:
        for name, size in memory.used():
            self._recorder.scalar(f"memory/{name}", size)
        if graphs := torch_internals.graphs_compiled():
            self._recorder.scalar("compiled/graphs", float(graphs))

    def _targets(self, graph: Graph) -> None:
        found = objective.classifying(graph)
        if self._near or found:  # elsewhere this time: a wider look at the next
            self._near = min(1 + max(map(graph.nodes.index, found), default=objective.NEAR), objective.NEAR)
        for node in found:
            kept = objective.kept_share(node)
            if kept is not None:
                self._recorder.scalar("targets/kept", kept)
            shares = objective.shift_matches(node, self._tokens, SHIFTS) if self._tokens is not None else None
            for shift, share in zip(SHIFTS, shares or (), strict=False):
                self._recorder.scalar(f"targets/shift/{shift}", share)

    def _note_slips(self, graph: Graph, owners: dict[Any, str | None]) -> None:
        for slip in objective.broadcasts(graph, {node for node, owner in owners.items() if not owner}):
            shapes = [list(slip.prediction), list(slip.target)]
            text = f"{slip.op} of shapes {slip.prediction} and {slip.target} came out as {slip.result}"
            self._once("loss_broadcast", text, {"op": slip.op, "shapes": shapes, "result": list(slip.result)})
        for found in objective.probabilities(graph):
            module = owners.get(found.node)
            text = f"{found.loss} was given the result of a {found.made_by}"
            self._once("loss_of_probabilities", text, {"loss": found.loss, "op": found.made_by}, module)

    def _note_strangers(self, graph: Graph, owners: dict[Any, str | None]) -> None:
        # what a module made in this very pass is registered by now, though no census has seen it
        ours = set(map(id, self._root.parameters())) | self._calls.arguments
        parents = graph.found_from
        inside = {id(x) for n in graph.nodes if (x := leaf(n)) is not None and owners.get(parents[n]) is not None}
        for found in connection.strangers(graph, ours, inside, self._root):
            count = len(found.shapes)
            text = f"{count} tensors that require gradients reach the loss but are no parameters of the model"
            self._once("unregistered", text, {**found._asdict(), "count": count}, found.owner)

    def _note_unreached(self, graph: Graph) -> None:
        reached = {id(x) for x in graph.leaves()}
        missing = {
            held.name: connection.broken(held, self._calls)
            for held in self._state.census.parameters
            if held.tensor.requires_grad and held.tensor.grad is None and id(held.tensor) not in reached
        }
        before = self._unreached
        self._unreached = {
            name: before[name] if before is not None and broken.cause == "module_not_called" else broken
            for name, broken in missing.items()
            if before is None or name in before
        }

    def _note_held_graphs(self) -> None:
        held = [
            f"{path}.{name}".lstrip(".")
            for path, module in self._state.census.modules.items()
            for name, value in [*module.named_buffers(recurse=False), *vars(module).items()]
            if isinstance(value, Tensor) and value.grad_fn is not None
        ]
        if held:
            text = f"{len(held)} tensors kept by the model hold the graph that made them"
            self._once("graph_held", text, {"buffers": held})

    # ---- the optimizer's step and the end

    def optimizer_ends(self, optimizer: Optimizer) -> None:
        """An optimizer of this model has stepped."""
        carried = self._carried.get(id(optimizer))
        if carried is None:
            carried = self._carried[id(optimizer)] = Carried(parameters_of(optimizer))
        norm = carried.stepped()
        if norm is not None:
            self._recorder.scalar("gradient/carried", norm)

    def close(self) -> None:
        """The run ends."""
        if self._early:
            self._tell_unreached()
        self._tell_loaders()
        stale = [] if self._average is None else self._average.stale()
        if stale:
            text = f"{len(stale)} buffers of the moving average stand still while the model's change"
            self._recorder.event("average", "info", text, {"stale_buffers": stale})

    def release(self) -> None:
        """Let go of the model."""
        self._root = nn.Module()
        self._average = None
        self._carried.clear()
        self._calls.begin()
        self._tokens = self._graph = None
        self._vanishing.backward_ends()

    def _tell_unreached(self) -> None:
        self._early = False
        self._tokens = None
        self._tell_strange_optimizers()
        causes: dict[connection.Break, list[str]] = {}
        for name, broken in (self._unreached or {}).items():
            causes.setdefault(broken, []).append(name)
        for broken, names in causes.items():
            text = f"no gradient reaches {len(names)} trainable parameters: {broken.cause}"
            self._recorder.event(
                "unreached", "info", text, {"cause": broken.cause, "parameters": names}, module=broken.module
            )

    def _tell_strange_optimizers(self) -> None:
        if self._state.optimizers.held():
            return
        alone = [held.tensor for held in self._state.census.parameters if held.tensor.requires_grad]
        for optimizer in strangers_like(alone):
            shapes = [list(tensor.shape) for tensor in parameters_of(optimizer)]
            text = (
                f"{type(optimizer).__name__} holds none of the model's parameters but {len(shapes)} tensors like them"
            )
            self._once("foreign_optimizer", text, {"optimizer": type(optimizer).__name__, "shapes": shapes})

    def _tell_loaders(self) -> None:
        for described in self._loaders.describe():
            text = f"data loader {described['number']}: {described['samples']} samples, {described['sampler']}"
            self._once("data_loader", text, described)

    def _read(self, drained: Drained) -> None:
        for killer in self._vanishing.judge(drained):
            text = (
                f"gradients end at {killer.op}: it receives some and sends zeros towards {', '.join(killer.parameters)}"
            )
            self._recorder.event("gradient_lost", "info", text, killer._asdict(), module=killer.module)

    def _once(self, kind: str, text: str, details: dict[str, Any], module: str | None = None) -> None:
        key = f"{kind} {details}"
        if key not in self._told:
            self._told.add(key)
            self._recorder.event(kind, "info", text, details, module=module)


def _are_tokens(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 2 and value.dtype in (torch.int64, torch.int32)
