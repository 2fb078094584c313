"""`repair`: seal what a dead process left, so that every row is in a Parquet part."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

from tracehooks.core import arguments
from tracehooks.core.errors import UnreadableRunError
from tracehooks.storage.durable import writing
from tracehooks.storage.info import load_info, now, save_info
from tracehooks.storage.layout import DAMAGED, Layout
from tracehooks.storage.lock import RankLock
from tracehooks.storage.reader import open_run
from tracehooks.storage.sealing import Sealed, seal_all


def repair(path: str | os.PathLike[str]) -> list[str]:
    """Seal every journal segment of a run whose writer is dead and mark the run crashed.

    Journal files with bytes that could not be read are kept beside as ``*.damaged``. A second call does nothing.

    Returns:
        What was done, one line each; empty when there was nothing to do.

    Raises:
        NotARunError, FormatVersionError, UnreadableRunError: as `open_run`.
        RunBusyError: a live process writes the run; nothing was changed.
        UnwritableError: a part cannot be written; the rows stay in the journal.
        InvalidOptionError: something that is no path.
    """
    arguments.path("path", path, "the path of a run directory")
    open_run(path)
    layout = Layout(Path(path))
    done: list[str] = []
    with ExitStack() as locks, writing(layout.root):
        for rank in layout.journal_ranks():
            locks.callback(RankLock(layout.journal_of(rank), layout.root, rank).release)
        for rank in layout.journal_ranks():
            done += [line for sealed in seal_all(layout, rank) for line in _described(layout, sealed)]
        done += _mark(layout)
    return done


def _described(layout: Layout, sealed: Sealed) -> list[str]:
    segment = str(layout.segment(sealed.piece).relative_to(layout.root))
    part = str(layout.part(sealed.piece).relative_to(layout.root))
    lines = [
        f"sealed {sealed.rows} rows of {segment} into {part}" if sealed.rows else f"removed {segment}: no rows left"
    ]
    if sealed.damage:
        lines[0] = lines[0].replace(": no rows left", f": its rows are in {part}") if not sealed.rows else lines[0]
        lines += [f"{segment}: {damage}; kept as {segment}{DAMAGED}" for damage in sealed.damage]
    return lines


def _mark(layout: Layout) -> list[str]:
    try:
        info = load_info(layout.run_json)
    except (FileNotFoundError, UnreadableRunError):
        return []
    if info.get("status") != "running":
        return []
    save_info(layout.run_json, info | {"status": "crashed", "closed": now()})
    return ["marked the run as crashed"]
