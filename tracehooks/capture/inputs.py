"""What a forward pass is given: the root's inputs with the samples in them, other modules' inputs, masks."""

from __future__ import annotations

from typing import Any

from torch import nn

from tracehooks.capture.leaves import leaves
from tracehooks.capture.masks import convention, masks_among
from tracehooks.capture.places import Place, Site
from tracehooks.capture.recorder import Recorder
from tracehooks.core.config import Config

Arguments = list[tuple[str, Any]]


class Inputs:
    """Records arguments of forward passes."""

    def __init__(self, recorder: Recorder, config: Config) -> None:
        self._recorder, self._wants = recorder, frozenset(config.record)
        self._sites: dict[tuple[str, str, int, int], Site] = {}

    def of_root(self, root: nn.Module, arguments: Arguments, micro: int) -> int:
        """Rows, masks and samples of the root's arguments; how many samples are trained on."""
        batch = 0
        split = "train" if self._recorder.training else "validation"
        self._masks("", root, arguments, micro)
        for name, value in arguments:
            for slot, tensor in leaves(value, f"input.{name}"):
                self._recorder.tensor(tensor, self._site("", root, slot, 0, micro))
                first = tensor.size(0) if tensor.ndim else 0
                batch = batch or first
                if "samples" in self._wants and tensor.ndim and first == batch:
                    self._recorder.samples(tensor, slot.removeprefix("input."), split, micro)
        return batch if self._recorder.training else 0

    def of_module(self, path: str, module: nn.Module, arguments: Arguments, call: int, micro: int) -> None:
        """Masks of another module's arguments and, if asked for, rows of those that are no module's output."""
        self._masks(path, module, arguments, micro)
        if "inputs" not in self._wants:
            return
        for name, value in arguments:
            for slot, tensor in leaves(value, f"input.{name}"):
                if not self._recorder.returned(tensor):
                    self._recorder.tensor(tensor, self._site(path, module, slot, call, micro))

    def _site(self, path: str, module: nn.Module, slot: str, call: int, micro: int) -> Site:
        key = path, slot, call, micro
        site = self._sites.get(key)
        if site is None:
            site = Site(Place("input", path, type(module).__name__, slot, call, micro))
            if site.place.returns:
                self._sites[key] = site
        return site

    def _masks(self, path: str, module: nn.Module, arguments: Arguments, micro: int) -> None:
        if "masks" in self._wants:
            for name, mask in masks_among(arguments):
                self._recorder.mask(mask, path, name, micro, convention(name, mask, module))
