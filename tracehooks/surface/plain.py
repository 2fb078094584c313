"""Values as text for machines: JSON that every parser takes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any


def json_text(value: Any) -> str:
    """JSON on one line. NaN and the infinities, which JSON lacks, become the strings "NaN", "Infinity", "-Infinity"."""
    return json.dumps(plain(value), ensure_ascii=False, allow_nan=False)


def plain(value: Any) -> Any:
    """The value made of dict, list, str, int, finite float, bool and None; anything else as its text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else _NONFINITE[str(value)]
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, Iterable):
        return [plain(item) for item in value]
    return str(value)


_NONFINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
