"""JSON that every parser takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tracehooks.core.records import Problem
from tracehooks.surface.plain import json_text


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (float("nan"), '"NaN"'),
        ([float("inf"), -float("inf"), 0.5], '["Infinity", "-Infinity", 0.5]'),
        ({1: (2**64 - 1, None, True)}, '{"1": [18446744073709551615, null, true]}'),
        (Path("a/b"), '"a/b"'),
        (Problem("part", "torn"), '"part: torn"'),
        (np.float64("nan"), '"NaN"'),
    ],
)
def test_json(value: Any, expected: str) -> None:
    """Non-finite numbers are strings, whole numbers keep all digits, anything else is its text."""
    assert json_text(value) == expected
    json.loads(expected)
