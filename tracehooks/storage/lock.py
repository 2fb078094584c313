"""One process writes one rank of a run: a POSIX record lock that dies with its holder.

The lock is a ``fcntl`` record lock on ``journal/rank=R/lock``: a forked child does not inherit it, the system releases
it when the process ends, however it ends. It has one trap: closing *any* descriptor of the file in the holding process
releases it. So who holds it is written into a second file, ``owner``, and a process that finds itself named there
never opens ``lock``.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from tracehooks.core.errors import RunBusyError
from tracehooks.storage.durable import write_atomic

_PATIENCE = 5
"""Tries before a lock counts as held: a reader that looks whether a writer lives holds it for an instant."""


class RankLock:
    """The lock of one rank of a run, held from construction to `release`.

    Args:
        directory: ``journal/rank=R``, made when it is not there.
        run: the run's path, for the message.

    Raises:
        RunBusyError: a live process (this one, perhaps) holds it; the message names its process id and host.
        OSError: the directory cannot be written.
    """

    def __init__(self, directory: Path, run: Path, rank: int) -> None:
        self._directory = directory
        self._pid = os.getpid()
        if _is_this_process(_owner(directory)):
            raise RunBusyError(run, rank, _described(_owner(directory)))
        self._descriptor = self._acquire(run, rank)
        write_atomic(directory / "owner", json.dumps(_identity()).encode())

    def release(self) -> None:
        """Give the lock back and remove its directory, unless rows are left there. In a forked child: nothing."""
        if self._descriptor < 0 or os.getpid() != self._pid:
            return
        with suppress(OSError):
            for name in ("owner", "lock"):
                (self._directory / name).unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = -1
        with suppress(OSError):  # not empty: rows are left there, or another rank writes
            self._directory.rmdir()
            self._directory.parent.rmdir()

    def _acquire(self, run: Path, rank: int) -> int:
        path = self._directory / "lock"
        for _ in range(_PATIENCE):
            self._directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Whoever released it meanwhile has removed the file: a lock on a removed file excludes nobody.
                if os.stat(path).st_ino == os.fstat(descriptor).st_ino:
                    return descriptor
            except (BlockingIOError, PermissionError):
                time.sleep(0.05)
            except FileNotFoundError:
                pass
            except OSError:  # a file system without locks: better to refuse than to let two processes write
                os.close(descriptor)
                raise
            os.close(descriptor)
        raise RunBusyError(run, rank, _described(_owner(self._directory)))


def is_held(directory: Path) -> bool:
    """Whether a live process holds the lock of ``journal/rank=R``."""
    if _is_this_process(_owner(directory)):
        return True
    try:
        descriptor = os.open(directory / "lock", os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _identity() -> dict[str, object]:
    return {"pid": os.getpid(), "host": socket.gethostname(), "started": _started()}


def _started() -> str:
    """When this process started, as the kernel counts: tells it from an earlier one with its number."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot + ":" + Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _owner(directory: Path) -> dict[str, object]:
    try:
        owner = json.loads((directory / "owner").read_bytes())
    except (OSError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _is_this_process(owner: dict[str, object]) -> bool:
    return owner == _identity()


def _described(owner: dict[str, object]) -> str:
    if not owner:
        return "another process"
    return f"process {owner.get('pid')} on {owner.get('host')}" + (" (this process)" if _is_this_process(owner) else "")
