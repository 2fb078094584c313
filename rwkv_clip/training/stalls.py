"""Which rank has stopped, and where: every rank leaves signs of life in the store that the processes share.

Threads on each rank write what the training loop is at and read what the others wrote. They name a rank that has
fallen silent (its process is dead or stopped), and, when nobody gets on, the ranks that are furthest behind: the others
wait for them in a collective. Everybody is named before ``timeout`` seconds are over.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from rwkv_clip.training.distributed import Place

__all__ = ["PHASES", "Phases", "Sign", "Watch", "watched"]

PHASES = ("start", "data", "forward", "gather", "backward", "update", "report", "evaluate", "save", "done")
"""What a rank can be at, in the order of a step."""

SIGNS_WITHIN_TIMEOUT = 10
MISSED_SIGNS = 5  # as many not seen in time, and a process counts as silent
PATIENCE = 0.75  # share of the timeout after which somebody who does not get on is named
LONGEST_INTERVAL = 1.0  # seconds
KEEPER = 0  # the rank whose machine keeps the store
STACK = 8  # innermost frames that are shown


@dataclass(frozen=True, slots=True)
class Sign:
    """What a rank last said of itself."""

    sent: int = 0  # signs sent: grows while the process lives
    moves: int = 0  # phases entered, the same for all ranks that stand in the same collective
    step: int = 0  # optimiser steps done
    phase: str = "start"


class Phases:
    """What this rank is at. Told by the training loop, read by the watch; also keeps the time spent in each phase."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.now = Sign()
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._clock, self._since = clock, clock()

    def enter(self, phase: str) -> None:
        """Say that ``phase`` begins, one of PHASES."""
        now = self._clock()
        self.seconds[self.now.phase] += now - self._since
        self._since = now
        self.now = replace(self.now, moves=self.now.moves + 1, phase=phase)

    def step_done(self) -> None:
        """Say that an optimiser step is done."""
        self.now = replace(self.now, step=self.now.step + 1)


@dataclass(slots=True)
class _Seen:
    """What this rank knows of another, and since when by its own clock."""

    sign: Sign
    heard: float  # a new sign
    moved: float  # a sign of having moved on


@dataclass(slots=True)
class Watch:
    """Judges the signs of all ranks; :meth:`look` takes what was read and returns what there is to say."""

    rank: int
    world: int
    timeout: float  # seconds
    seen: dict[int, _Seen] = field(default_factory=dict)
    named: dict[int, int] = field(default_factory=dict)  # rank -> its moves when it was named

    @property
    def interval(self) -> float:
        """Seconds between two signs."""
        return min(LONGEST_INTERVAL, self.timeout / SIGNS_WITHIN_TIMEOUT)

    def look(self, signs: dict[int, Sign] | None, now: float) -> list[str]:
        """Return a line for each rank that is newly found stopped, or on its way again.

        ``signs`` is None while the store cannot be reached, which says something of its keeper alone: rank 0.
        """
        for rank in range(self.world):
            self._note(rank, None if signs is None else signs.get(rank), now)
            if signs is None and rank != KEEPER:
                self.seen[rank].heard = self.seen[rank].moved = now
        return [*self._recovered(), *self._silent(now), *self._behind(now)]

    def _note(self, rank: int, sign: Sign | None, now: float) -> None:
        before = self.seen.setdefault(rank, _Seen(Sign(), now, now))
        if sign is None:
            return
        if sign.sent != before.sign.sent:
            before.heard = now
        if sign.moves != before.sign.moves:
            before.moved = now
        before.sign = sign

    def _recovered(self) -> list[str]:
        back = [rank for rank, moves in self.named.items() if self.seen[rank].sign.moves != moves]
        for rank in back:
            del self.named[rank]
        return [f"rank {rank} goes on: {_at(self.seen[rank].sign)}" for rank in back]

    def _silent(self, now: float) -> list[str]:
        lines = []
        for rank, seen in self.seen.items():
            quiet = now - seen.heard
            if rank != self.rank and quiet > MISSED_SIGNS * self.interval and self._name(rank):
                lines.append(
                    f"rank {rank} has stopped: no sign of life for {quiet:.1f} s, last seen in {_at(seen.sign)}; "
                    "its process is dead, stopped or out of reach"
                )
        return lines

    def _behind(self, now: float) -> list[str]:
        at_work = {rank: seen for rank, seen in self.seen.items() if seen.sign.phase != "done"}
        still = [now - seen.moved for seen in at_work.values()]
        if not still or min(still) < PATIENCE * self.timeout:
            return []
        least = min(seen.sign.moves for seen in at_work.values())
        last = [rank for rank, seen in at_work.items() if seen.sign.moves == least]
        others = [rank for rank in at_work if rank not in last]
        waiting = f"; waiting: {', '.join(f'rank {r} in {_at(self.seen[r].sign)}' for r in others)}" if others else ""
        return [
            f"rank {rank} has stopped: in {_at(self.seen[rank].sign)} for {now - self.seen[rank].moved:.1f} s{waiting}"
            for rank in last
            if self._name(rank)
        ]

    def _name(self, rank: int) -> bool:
        """Note that a rank is named; False when it was already."""
        new = rank not in self.named and self.seen[rank].sign.phase != "done"
        if new:
            self.named[rank] = self.seen[rank].sign.moves
        return new


def _at(sign: Sign) -> str:
    return f"step {sign.step + 1}, phase {sign.phase}"


@contextmanager
def watched(place: Place, phases: Phases, timeout: float, say: Callable[[str], None]) -> Iterator[None]:
    """Keep watch while the block runs; nothing for one process or a timeout of 0.

    When the block fails, as a collective does whose other end is gone, or is told to terminate, as a launcher does to
    all when one has died, the watch goes on for a few more signs: neither says who it was.
    """
    if place.store is None or not timeout:
        yield
        return
    watcher = _Watcher(place, phases, timeout, say)
    watcher.start()
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    except (RuntimeError, SystemExit):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        watcher.named.wait((MISSED_SIGNS + 2) * watcher.interval)
        raise
    finally:
        watcher.stop()
        signal.signal(signal.SIGTERM, before)


def _terminate(number: int, _: object) -> None:
    raise SystemExit(128 + number)


class _Watcher:
    """Exchanges signs over a connection of its own, and judges them; in two threads, as an exchange may never return."""

    def __init__(self, place: Place, phases: Phases, timeout: float, say: Callable[[str], None]) -> None:
        assert place.store is not None
        self._store = PrefixStore("stalls", place.store.clone())
        self._phases, self._say = phases, say
        self._watch = Watch(place.rank, place.world, timeout)
        self._latest: tuple[float, dict[int, Sign]] = time.monotonic(), {}
        self._ended, self.named = threading.Event(), threading.Event()
        self._judge = threading.Thread(target=self._look, name="stalls: judge", daemon=True)
        self._exchange = threading.Thread(target=self._talk, name="stalls: exchange", daemon=True)

    @property
    def interval(self) -> float:
        """Seconds between two signs."""
        return self._watch.interval

    def start(self) -> None:
        """Begin to send and to judge."""
        self._exchange.start()
        self._judge.start()

    def stop(self) -> None:
        """Say nothing more. An exchange that hangs is left to the end of the process."""
        self._ended.set()
        self._judge.join()
        self._exchange.join(self.interval)

    def _talk(self) -> None:
        for sent in range(1, sys.maxsize):
            try:
                self._latest = time.monotonic(), self._signs(sent)
            except (RuntimeError, OSError):  # the keeper is gone; the judge sees that nothing comes any more
                return
            if self._ended.wait(self.interval):
                return

    def _signs(self, sent: int) -> dict[int, Sign]:
        rank, now = self._watch.rank, self._phases.now
        self._store.set(str(rank), json.dumps(asdict(replace(now, sent=sent))))
        names = [str(other) for other in range(self._watch.world)]
        return {int(name): Sign(**json.loads(self._store.get(name))) for name in names if self._store.check([name])}

    def _look(self) -> None:
        while not self._ended.wait(self.interval):
            now = time.monotonic()
            at, signs = self._latest
            reached = now - at <= MISSED_SIGNS * self.interval
            for line in self._watch.look(signs if reached else None, now):
                self._say(line)
            if self._watch.named and not self.named.is_set():
                self.named.set()
                if self._watch.rank in self._watch.named:
                    self._say(f"this rank is at:\n{self._stack()}")

    @staticmethod
    def _stack() -> str:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        return "".join(traceback.format_stack(frame)[-STACK:]).rstrip() if frame else "no Python frame"
