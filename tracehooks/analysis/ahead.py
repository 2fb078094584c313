"""Work done ahead, a little of it at a time: while one stretch of two runs is judged, the next is read."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")

MOST = 4
"""Pieces of work under way: each holds its stretch in memory."""


def ahead(work: Callable[[Item], Made], items: Iterable[Item]) -> Iterator[Made]:
    """``work`` on each item, in order, in as many threads as there are cores, up to `MOST`."""
    threads = min(MOST, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[Future[Made]] = deque()
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) == threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
