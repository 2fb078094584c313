"""run.json: who wrote a run, with what, and how it ended."""

from __future__ import annotations

import json
import os
import secrets
import time
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tracehooks.core.errors import FormatVersionError, UnreadableRunError
from tracehooks.core.schema import FORMAT_VERSION, HISTOGRAM_EXPONENTS
from tracehooks.storage.durable import write_atomic


def now() -> str:
    """The time, UTC, RFC 3339."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def new_info(given: Mapping[str, Any]) -> dict[str, Any]:
    """The description of a new run: what was given, and the fields that every run has."""
    required = {
        "format_version": FORMAT_VERSION,
        "run_id": _uuid7(),
        "created": now(),
        "pid": os.getpid(),
        "config": {},
        "histogram_exponents": list(HISTOGRAM_EXPONENTS),
    }
    return required | dict(given) | {"format_version": FORMAT_VERSION, "status": "running", "closed": None}


def resumed_info(old: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The description of a run that goes on: it keeps its id, its birth and its notes, the rest is today's."""
    kept = {name: old[name] for name in ("run_id", "created") if name in old}
    notes = [*old.get("notes", ()), *given.get("notes", ())]
    return dict(old) | new_info(given) | kept | ({"notes": notes} if notes else {})


def load_info(path: Path) -> dict[str, Any]:
    """Read run.json.

    Raises:
        FileNotFoundError: there is none.
        UnreadableRunError: it is no JSON object.
        FormatVersionError: the run was written in a newer format.
    """
    try:
        info = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UnreadableRunError(path, error.strerror or str(error)) from error
    except ValueError as error:
        raise UnreadableRunError(path, f"not JSON: {error}") from error
    if not isinstance(info, dict):
        raise UnreadableRunError(path, "not a JSON object")
    version = info.get("format_version", 1)
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise FormatVersionError(path.parent, version, FORMAT_VERSION)
    return info


def save_info(path: Path, info: Mapping[str, Any]) -> None:
    """Write run.json whole; values that JSON does not know are written as their text."""
    write_atomic(
        path, json.dumps(dict(info), indent=2, ensure_ascii=False, default=str).encode("utf-8", "backslashreplace")
    )


def _uuid7() -> str:
    milliseconds = time.time_ns() // 1_000_000
    number = (milliseconds << 80) | (7 << 76) | (secrets.randbits(12) << 64) | (2 << 62) | secrets.randbits(62)
    return str(uuid.UUID(int=number))
