"""How modules and parameters are set, step after step: training or evaluation, trainable or frozen."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from tracehooks.capture.parameters import Held


class Modes:
    """Remembers every flag; what changed since it last looked. At first everything did."""

    def __init__(self) -> None:
        self._training: tuple[bool, ...] | None = None
        self._trainable: tuple[bool, ...] | None = None

    def training(self, modules: Mapping[str, nn.Module]) -> dict[str, list[str]] | None:
        """The modules in training and in evaluation mode where that is not as before, else None."""
        now = tuple([module.training for module in modules.values()])
        if now == self._training:
            return None
        self._training = now
        return _told_apart(("training", "evaluation"), modules, now)

    def trainable(self, parameters: list[Held]) -> dict[str, list[str]] | None:
        """The parameters that require a gradient and those that do not, where that is not as before, else None."""
        now = tuple([held.tensor.requires_grad for held in parameters])
        if now == self._trainable:
            return None
        self._trainable = now
        return _told_apart(("trainable", "frozen"), [held.name for held in parameters], now)


def _told_apart(
    names: tuple[str, str], members: Mapping[str, object] | list[str], flags: tuple[bool, ...]
) -> dict[str, list[str]]:
    pairs = list(zip(members, flags, strict=True))
    return {names[0]: [name for name, flag in pairs if flag], names[1]: [name for name, flag in pairs if not flag]}
