"""Rows to disk and back: the only room that knows Parquet."""

from __future__ import annotations

from tracehooks.storage.reader import Run, open_run
from tracehooks.storage.repair import repair
from tracehooks.storage.writer import RunWriter

__all__ = ["Run", "RunWriter", "open_run", "repair"]
