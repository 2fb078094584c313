"""Real processes that train: started from a server that has imported torch once, so that each starts in no time."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    [
        "rwkv_clip.train",
        "sklearn.datasets",
        "tests.launching",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "torch.utils.tensorboard",
        "tracehooks.surface.attach",
    ]
)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def start(work: Callable[..., object], *arguments: Any, ranks: int = 1, log: Path) -> list[BaseProcess]:
    """Start ``work(*arguments)`` on every rank, with the environment that torchrun would give it.

    What rank r writes to stdout and stderr is in ``log`` with the suffix ``.r``.
    """
    port = free_port()
    processes = []
    for rank in range(ranks):
        output = f"{log}.{rank}"
        process = _SERVER.Process(target=_rank, args=(rank, ranks, port, output, work, arguments), daemon=False)
        process.start()
        processes.append(process)
    return processes


def _rank(rank: int, ranks: int, port: int, output: str, work: Callable[..., object], arguments: Sequence[Any]) -> None:
    descriptor = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()})
    status = work(*arguments)
    sys.stdout.flush()
    os._exit(status if isinstance(status, int) else 0)  # as soon as it is done, like a script's process


@contextlib.contextmanager
def running(work: Callable[..., object], *arguments: Any, ranks: int = 1, log: Path) -> Iterator[list[BaseProcess]]:
    """Processes as :func:`start` starts them; whatever happens, none is left."""
    processes = start(work, *arguments, ranks=ranks, log=log)
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def run(work: Callable[..., object], *arguments: Any, ranks: int = 1, log: Path, timeout: float = 120) -> None:
    """Run to the end on every rank.

    Raises:
        AssertionError: when a rank fails or does not end in time, with what it wrote.
    """
    with running(work, *arguments, ranks=ranks, log=log) as processes:
        for rank, process in enumerate(processes):
            process.join(timeout)
            written = Path(f"{log}.{rank}").read_text() if Path(f"{log}.{rank}").exists() else ""
            assert process.exitcode == 0, f"rank {rank} ended with {process.exitcode}:\n{written}"
