"""What all tests share: Hypothesis without a deadline, since the machine is busy with other tests, and Triton's interpreter
in place of a GPU, which must be asked for before Triton is imported; and what would make every test slow without being
tested is kept away from it."""

from __future__ import annotations

import gc
import os
import sys

import pytest
from hypothesis import settings

os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile("tracehooks", deadline=None, max_examples=50)
settings.load_profile("tracehooks")

IMPORTED = pytest.StashKey[int]()
"""How many modules there were when libraries_are_not_searched() looked last."""


LONG = ("test_musicgen_tutorial.py", "test_distributed.py", "test_stalls.py")
"""Files that wait, or whose tests share one long training: they come first, so that no worker ends alone with them and
none makes such a training again."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests first; else the order stays."""
    items.sort(key=lambda item: item.path.name not in LONG)


@pytest.fixture(autouse=True)
def libraries_are_not_searched(pytestconfig: pytest.Config) -> None:
    """What importing left behind, a million objects at last, is kept out of gc: attach() looks through all objects for
    optimizers and loaders, and tests collect often. (It does not find one that a fixture made for several tests.)"""
    if len(sys.modules) != pytestconfig.stash.get(IMPORTED, 0):
        gc.collect()
        gc.freeze()
        pytestconfig.stash[IMPORTED] = len(sys.modules)


@pytest.fixture(autouse=True)
def nobody_pulls_the_plug(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are not waited for until they are on the disk; tests/storage does."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
