"""What a model holds, recorded: parameters, buffers, gradients, updates, optimizer state, distance to an EMA."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from tracehooks.capture import optimizers, torch_internals
from tracehooks.capture.inspection import Inspection
from tracehooks.capture.optimizers import Optimizers
from tracehooks.capture.parameters import Census, Held, held_parameters
from tracehooks.capture.places import Place, Site
from tracehooks.capture.recorder import Recorder
from tracehooks.capture.updates import UpdateProbe
from tracehooks.core.config import Config
from tracehooks.core.names import canonical

Notice = tuple[str, str, str, dict[str, Any]]


class ModelState:
    """The parameters and buffers of one model as one step after another finds them. Each is recorded once a step."""

    def __init__(self, root: nn.Module, config: Config, recorder: Recorder, ema: nn.Module | None) -> None:
        self._root, self._ema = root, ema
        self._wants, self._recorder = frozenset(config.record), recorder
        self.census = Census(root)
        self.optimizers = Optimizers(self.census.parameters, self.census.lazy)
        self._probe = UpdateProbe(recorder.lane)
        self._known_sites: dict[tuple[str, str, str], Site] = {}
        self._known_groups: dict[tuple[str, int], tuple[list[int], list[Site]]] = {}
        self._of_optimizers: dict[int, tuple[Census, set[int], list[Held]]] = {}
        self._recorded: dict[str, set[int]] = {}
        self._met: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._descriptions: list[dict[str, Any]] = []
        self.inspection = Inspection(root, self, recorder, ema)

    def begin_step(self) -> None:
        """A new step: everything may be recorded once more."""
        self._recorded.clear()

    def release(self) -> None:
        """Let go of the model."""
        self._root = nn.Module()
        self._ema = None
        self.census = Census(self._root)
        self.optimizers = Optimizers([], [])
        self._of_optimizers.clear()
        self._probe = UpdateProbe(self._recorder.lane)
        self.inspection.release()

    # ---- what changed since attach

    def outdated(self) -> bool:
        """Whether the model has other parameters or modules than when last looked at."""
        return self.census.outdated()

    def take_census(self, hooked: set[str]) -> Iterator[Notice]:
        """Look at the model anew; events that say what changed."""
        before, self.census = self.census, Census(self._root)
        self._known_groups.clear()  # their ids may be others' by now
        self._of_optimizers.clear()
        self.optimizers.update(self.census.parameters)
        old, new = before.names, self.census.names
        replaced = sorted(name for name in old.keys() & new.keys() if old[name] != new[name])
        added, removed = sorted(new.keys() - old.keys()), sorted(old.keys() - new.keys())
        if replaced or added or removed:
            text = (
                f"parameters changed after attach: {len(replaced)} replaced, {len(added)} added, {len(removed)} removed"
            )
            yield "parameters_replaced", "info", text, {"added": added, "removed": removed, "replaced": replaced}
        modules = set(self.census.modules)
        added, removed = sorted(modules - set(before.modules)), sorted(set(before.modules) - modules)
        if added or removed:
            text = f"modules changed after attach: {len(added)} added, {len(removed)} removed; hooked anew"
            yield "modules_changed", "info", text, {"added": added, "removed": removed}

    # ---- rows

    def record_parameters(self) -> None:
        """Parameters and buffers as they are now."""
        if "parameters" not in self._wants:
            return
        for phase, group in (("parameter", self.census.parameters), ("buffer", self.census.buffers)):
            now = self._unrecorded(phase, group)
            self._recorder.tensors([held.tensor for held in now], self._sites(phase, now))

    def record_gradients(self, phase: str, optimizer: Optimizer | None = None) -> None:
        """Gradients of the parameters that an optimizer holds, and of those that no known optimizer does; of all
        without one. A parameter without a gradient has no row."""
        if "gradients" not in self._wants:
            return
        held, gradients = self._gradients(phase, optimizer)
        self._recorder.tensors(gradients, self._sites(phase, held))

    def watch_gradients(self, optimizer: Optimizer | None) -> None:
        """Watch gradients in a step that records none."""
        held, gradients = self._gradients("gradient", optimizer)
        self._recorder.watch_gradients(gradients, self._sites("gradient", held))

    def watch_results(self, optimizer: Optimizer) -> None:
        """Watch what a step that records none left: the parameters it changed, and buffers."""
        for phase, group in (("update", self._held_by(optimizer)), ("buffer", self.census.buffers)):
            self._recorder.tensors([held.tensor for held in group], self._sites(phase, group))

    def look(self, optimizer: Optimizer) -> None:
        """Remember values before the step, to tell what it did."""
        if "updates" in self._wants:
            self._probe.look(self._held_by(optimizer))

    def record_updates(self, optimizer: Optimizer) -> None:
        """What the step did, and the optimizer's state if asked for."""
        kept, tensors = self._probe.kept()
        if kept:
            self._recorder.lane.take_changes(tensors, self._sites("update", kept))
        changed, changes = self._probe.changes()
        self._recorder.tensors(changes, self._sites("update", changed), [held.tensor for held in changed])
        if "optimizer_state" in self._wants:
            for held in self.census.parameters:
                for slot, tensor in optimizers.state_tensors(optimizer, held):
                    self._recorder.tensor(tensor, self._site("optimizer", held, slot))

    def record_settings(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped: learning rates, numbered over the groups of all optimizers."""
        before = self.optimizers.living()[: self.optimizers.index(optimizer)]
        start = sum(len(optimizers.learning_rates(other)) for other in before)
        for i, rate in enumerate(optimizers.learning_rates(optimizer)):
            self._recorder.scalar(f"lr/{start + i}", rate)
        found_inf = torch_internals.fused_scaling(optimizer)[1]
        if found_inf is not None:
            self._recorder.scalar("found_inf", found_inf)
        self.inspection.optimizer_ends(optimizer)

    def record_ema(self, step: int) -> None:
        """Relative L2 distance between the model's parameters and those of its moving average, as ``ema/distance``."""
        if self._ema is None:
            return
        own = {held.name: held.tensor for held in self.census.parameters}
        with torch.no_grad():
            averages = {canonical(held.name): held.tensor for held in held_parameters(self._ema)}
            pairs = [(own[name], average) for name, average in averages.items() if name in own]
            if pairs:
                apart = _norm(a.detach().double() - b.detach().to(a.device).double() for a, b in pairs)
                self._recorder.scalar("ema/distance", apart / _norm(a.detach().double() for a, _ in pairs), step=step)

    # ---- the rest

    def drop_gradients(self, optimizer: Optimizer) -> None:
        """Take this step's gradients away from an optimizer."""
        dropped = [parameter for parameter in optimizers.parameters_of(optimizer) if parameter.grad is not None]
        for parameter in dropped:
            parameter.grad = None
        text = f"dropped the gradients of {len(dropped)} parameters"
        self._recorder.event("gradients_dropped", "warning", text, {"parameters": len(dropped)})

    def meet(self, optimizer: Optimizer) -> list[dict[str, Any]] | None:
        """An optimizer steps: when it is the first time, what run.json says of all that have, else None."""
        self.optimizers.add(optimizer)
        if optimizer in self._met:
            return None
        names = {id(held.tensor): held.name for held in self.census.parameters}
        self._met.add(optimizer)
        self._descriptions.append(optimizers.describe(optimizer, names))
        return self._descriptions

    def _of(self, optimizer: Optimizer | None) -> list[Held]:
        others = set() if optimizer is None else self.optimizers.held() - self.optimizers.ids_of(optimizer)
        return (
            [one for one in self.census.parameters if id(one.tensor) not in others]
            if others
            else self.census.parameters
        )

    def _held_by(self, optimizer: Optimizer) -> list[Held]:
        """Parameters that an optimizer holds: the same list as long as they are the same."""
        own = self.optimizers.ids_of(optimizer)
        known = self._of_optimizers.get(id(optimizer))
        if known is None or known[0] is not self.census or known[1] != own:
            held = [one for one in self.census.parameters if id(one.tensor) in own]
            known = self._of_optimizers[id(optimizer)] = self.census, own, held
        return known[2]

    def _gradients(self, phase: str, optimizer: Optimizer | None) -> tuple[list[Held], list[Tensor]]:
        scale = torch_internals.fused_scaling(optimizer)[0] if optimizer is not None else None
        held = self._unrecorded(phase, [one for one in self._of(optimizer) if one.tensor.grad is not None])
        gradients = [gradient for one in held if (gradient := one.tensor.grad) is not None]
        return held, gradients if scale is None else [optimizers.unscaled(gradient, scale) for gradient in gradients]

    def _sites(self, phase: str, group: list[Held]) -> list[Site]:
        """Where the tensors of a group are seen: made once, as long as the group is the same."""
        if not group:
            return []
        ids = list(map(id, group))
        kind = phase, len(group)
        known = self._known_groups.get(kind)
        if known is None or known[0] != ids:
            known = self._known_groups[kind] = ids, [self._site(phase, held, held.slot) for held in group]
        return known[1]

    def _site(self, phase: str, held: Held, slot: str) -> Site:
        key = phase, held.module, slot
        site = self._known_sites.get(key)
        if site is None:
            site = self._known_sites[key] = Site(Place(phase, held.module, held.type, slot))
        return site

    def _unrecorded(self, phase: str, group: list[Held]) -> list[Held]:
        """Those of a group that were not recorded in this step yet. They are now."""
        recorded = self._recorded.setdefault(phase, set())
        new = [held for held in group if id(held.tensor) not in recorded] if recorded else group
        recorded.update([id(held.tensor) for held in new])
        return new


def _norm(parts: Iterable[Tensor]) -> Tensor:
    return torch.stack([part.square().sum() for part in parts]).sum().sqrt()
