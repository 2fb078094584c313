"""A process that starts writers to be killed: imports once, forks one writer for each line it reads.

Reads lines ``<run directory> <first step>``; for each a forked child writes steps as fast as it can into the run with
tiny segments, printing ``pid N`` first and ``step N`` after each flush. When the child is dead, ``dead`` is printed.
"""

from __future__ import annotations

import os
import sys
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from storage.building import step_batches

from tracehooks.storage import RunWriter


def write_forever(path: str, first: int) -> None:
    """A training run, as far as storage can tell; it ends by being killed."""
    os.write(1, f"pid {os.getpid()}\n".encode())
    writer = RunWriter(path, {}, resume=True, rows_per_part=12)
    for step in count(first):
        writer.write(step_batches(step))
        os.write(1, f"step {step}\n".encode())


def main() -> None:
    """Serve until the input ends."""
    for line in sys.stdin:
        path, first = line.split()
        child = os.fork()
        if child == 0:
            write_forever(path, int(first))
        os.waitpid(child, 0)
        os.write(1, b"dead\n")


if __name__ == "__main__":
    main()
