"""A bar for what takes a while, on a terminal; nothing when the output is piped or nobody wants it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(title: str, total: int, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """A block in which the function it gives is called after each of ``total`` parts, with what to say beside the bar. It
    is drawn on the standard error stream, where that is a terminal, and taken away at the end."""
    before = random.getstate()
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    random.setstate(before)  # rich draws random numbers when it is imported
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[said]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(title, total=total, said="")
        yield lambda said: bar.update(task, advance=1, said=said)
