"""No alarm where nothing is wrong: models and loops of many kinds, and what looks like a failure and is none."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.rules.cases import Case, Ranks, Resumed
from tests.rules.conftest import Diagnose
from tests.rules.measured import ALL_HEALTHY, ALL_MEANT

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning"),
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]


BY_THE_CLOCK = {"stall", "slow_rank", "checkpoint_pause"}
"""Rules that a busy machine makes right: between two steps of some milliseconds others have its processors."""


@pytest.mark.parametrize("build", ALL_HEALTHY, ids=lambda build: build.__name__)
def test_a_healthy_run_gives_nothing(build: Callable[[], Case | Ranks | Resumed], diagnosed: Diagnose) -> None:
    """Not even a note."""
    told = [found for found in diagnosed(build()) if found.rule not in BY_THE_CLOCK]
    assert [(found.rule, found.severity, found.message) for found in told] == []


@pytest.mark.parametrize("build", ALL_MEANT, ids=lambda build: build.__name__)
def test_what_may_be_meant_is_a_note(build: Callable[[], Case], diagnosed: Diagnose) -> None:
    """Neither an error nor a warning."""
    assert [found for found in diagnosed(build()) if found.severity != "info"] == []
