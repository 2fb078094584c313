"""The locator that locates nothing: what was seen is the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tracehooks.core.records import FirstNonFinite


class Unlocated:
    """Implements `core.records.Locator` for traces that only note non-finite values."""

    def step_begins(self) -> None:
        """Nothing to forget."""

    def pass_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any], micro: int) -> None:
        """Nothing to keep."""

    def pass_ends(self, output: Any) -> None:
        """Nothing to watch."""

    def comes_next(self, what: str) -> None:
        """Nothing watched."""

    def output_gradient(self, micro: int, slot: str, gradient: Any) -> None:
        """Nothing to keep."""

    def backward_begins(self, tensors: Any) -> None:
        """Nothing to watch."""

    def backward_ends(self) -> None:
        """Nothing watched."""

    def loss_left(self) -> float | None:
        """None watched."""

    def update_begins(self, optimizer: Any) -> None:
        """Nothing to keep."""

    def locate(self, step: int, seen: FirstNonFinite, outputs: Mapping[tuple[int, str], bool]) -> FirstNonFinite | None:
        """What was seen."""
        return seen

    def close(self) -> None:
        """Nothing held."""
