"""How a run is shown: a progress bar on a terminal, plain lines in a pipe; the same lines always in training.log."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["Display", "show"]


class Display:
    """Shows lines and, on a terminal, a bar below them."""

    def __init__(self, logger: logging.Logger, progress: Progress, total: int, done: int = 0) -> None:
        self.logger = logger
        self._progress = progress
        self._task = progress.add_task("training", total=total, completed=done, note="")

    def line(self, text: str) -> None:
        """Show a line and append it to training.log."""
        self.logger.info(text)

    def warn(self, text: str) -> None:
        """Show a line on stderr, whatever this rank shows else, and append it to its log."""
        self.logger.warning(text)
        print(text, file=sys.stderr, flush=True)

    def advance(self, note: str | None = None) -> None:
        """Move the bar one step on, and change the note beside it if one is given."""
        if note is None:
            self._progress.advance(self._task)
        else:
            self._progress.update(self._task, advance=1, note=note)


class _ConsoleHandler(logging.Handler):
    """Print records above the bar, or as plain lines, without wrapping or markup."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.WARNING:  # warnings go to stderr
            self._console.print(self.format(record), markup=False, highlight=False, soft_wrap=True)


@contextmanager
def show(
    log: Path, total: int, *, done: int = 0, stream: TextIO | None = None, console: bool = True
) -> Iterator[Display]:
    """Open ``log`` for appending and show ``total`` steps on ``stream`` (stdout) until the block ends.

    Args:
        log: the file of this rank.
        total: steps of the run.
        done: steps that were done before.
        stream: where lines and bar go.
        console: False for ranks that only write their log.

    The logger is this run's own and is closed with the block; no global logging configuration is touched.
    """
    output = Console(file=stream or sys.stdout, quiet=not console)
    logger = logging.Logger("rwkv_clip", level=logging.INFO)
    file = logging.FileHandler(log, encoding="utf-8")
    file.setFormatter(logging.Formatter("Training: %(asctime)s %(message)s"))
    for handler in (file, _ConsoleHandler(output)):
        logger.addHandler(handler)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    note = TextColumn("{task.fields[note]}")
    bar = console and output.is_terminal
    try:
        with Progress(*columns, note, console=output, transient=True, disable=not bar) as progress:
            yield Display(logger, progress, total, done)
    except Exception:  # whatever it was, it goes on its way; stderr may be shared by many ranks, or lost
        logger.exception("the run failed")
        raise
    finally:
        file.close()
