"""Which rank has stopped: judged from signs of life with a clock of our own, and on real processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rwkv_clip import train
from rwkv_clip.clip import RWKVCLIP
from rwkv_clip.training import stalls
from rwkv_clip.training.stalls import PHASES, Phases, Sign, Watch
from tests import launching

TIMEOUT = 10.0


class World:
    """Ranks that live and move as told, watched by rank 0."""

    def __init__(self, ranks: int) -> None:
        self.watch = Watch(0, ranks, TIMEOUT)
        self.signs = {rank: Sign() for rank in range(ranks)}
        self.now = 0.0
        self.reachable = True

    def second(self, *, alive: tuple[int, ...], moving: tuple[int, ...] = (), phase: str = "forward") -> list[str]:
        """Let a second pass, look, and return what is said."""
        self.now += 1.0
        for rank in alive:
            sign = self.signs[rank]
            moves = sign.moves + (rank in moving)
            self.signs[rank] = Sign(sign.sent + 1, moves, sign.step, phase if rank in moving else sign.phase)
        return self.watch.look(self.signs if self.reachable else None, self.now)

    def until_said(self, **state: tuple[int, ...]) -> tuple[float, list[str]]:
        """Let time pass until something is said; returns after how long, and what."""
        began = self.now
        while self.now - began < 100:
            said = self.second(**state)
            if said:
                return self.now - began, said
        raise AssertionError("nothing was said")


def test_nothing_is_said_of_ranks_that_get_on():
    """Ranks that live and move are never named, however long it takes."""
    world = World(3)
    assert [line for _ in range(100) for line in world.second(alive=(0, 1, 2), moving=(0, 1, 2))] == []


def test_a_slow_phase_below_the_timeout_is_fine():
    """A phase that takes 70 % of the timeout is no stop."""
    world = World(2)
    for _ in range(5):
        world.second(alive=(0, 1), moving=(0, 1))
        assert [line for _ in range(6) for line in world.second(alive=(0, 1))] == []


def test_a_silent_rank_is_named_in_time():
    """A rank whose process has died or is stopped is named before the timeout, with where it was last seen; only it."""
    world = World(3)
    world.second(alive=(0, 1, 2), moving=(0, 1, 2), phase="backward")
    after, said = world.until_said(alive=(0, 2))
    assert after < TIMEOUT
    (line,) = said
    assert line.startswith("rank 1 has stopped: no sign of life for ")
    assert "last seen in step 1, phase backward" in line
    assert [line for _ in range(30) for line in world.second(alive=(0, 2)) if "rank 1" in line] == []


def test_the_rank_behind_is_named_not_those_that_wait():
    """When all live and none moves, the one furthest behind is named, with its phase and those who wait for it."""
    world = World(3)
    world.second(alive=(0, 1, 2), moving=(0, 1, 2), phase="data")
    world.second(alive=(0, 1, 2), moving=(0, 2), phase="gather")
    after, said = world.until_said(alive=(0, 1, 2))
    assert after < TIMEOUT
    (line,) = said
    assert re.match(
        r"rank 1 has stopped: in step 1, phase data for \d\.\d s; waiting: rank 0 in step 1, phase gather, rank 2", line
    )


def test_when_all_stand_in_one_place_all_are_named():
    """When nobody is behind, nobody can be told from the others: each is named with its phase."""
    world = World(2)
    world.second(alive=(0, 1), moving=(0, 1), phase="backward")
    _, said = world.until_said(alive=(0, 1))
    assert [line.split(" for ")[0] for line in said] == [
        f"rank {r} has stopped: in step 1, phase backward" for r in (0, 1)
    ]


def test_going_on_is_said():
    """A rank that was named and moves again is said to go on, and can be named again."""
    world = World(2)
    world.until_said(alive=(0,))
    assert world.second(alive=(0, 1), moving=(1,)) == ["rank 1 goes on: step 1, phase forward"]
    assert world.until_said(alive=(0,))[1][0].startswith("rank 1 has stopped")


def test_a_rank_that_is_done_has_not_stopped():
    """A rank that has ended its run may fall silent."""
    world = World(2)
    world.second(alive=(0, 1), moving=(1,), phase="done")
    assert [line for _ in range(7) for line in world.second(alive=(0,), moving=(0,))] == []


def test_an_unreachable_store_speaks_against_its_keeper_alone():
    """When nothing can be read any more, rank 0, which keeps the store, is named and nobody else."""
    world = World(3)
    world.watch.rank = 1
    world.second(alive=(0, 1, 2), moving=(0, 1, 2))
    world.reachable = False
    after, said = world.until_said(alive=())
    assert after < TIMEOUT
    assert [line[:7] for line in said] == ["rank 0 "]


def test_phases_keep_their_time():
    """The seconds of each phase add up to the time that has passed; unknown phases are errors."""
    now = [0.0]
    phases = Phases(lambda: now[0])
    for phase, seconds in (("data", 1.0), ("gather", 2.0), ("data", 3.0)):
        phases.enter(phase)
        now[0] += seconds
    phases.enter("done")
    assert (phases.seconds["data"], phases.seconds["gather"]) == (4.0, 2.0)
    phases.step_done()
    assert (phases.now.step, phases.now.moves, phases.now.phase) == (1, 4, "done")
    assert set(phases.seconds) == set(PHASES)


def stuck(flags: list[str]) -> int:
    """Train, but rank 1 gets stuck in its fourth step while it waits for data."""
    load_steps = train.load_steps

    def loading(pairs, plan, *args, **options):
        for number, batches in enumerate(load_steps(pairs, plan, *args, **options)):
            if plan.rank == 1 and number == 3:
                time.sleep(1000)
            yield batches

    train.load_steps = loading
    return train.main(flags)


def wait_for(pattern: str, log: Path, seconds: float) -> re.Match[str]:
    """Wait until a log has the pattern."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = re.search(pattern, log.read_text()) if log.exists() else None
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"{pattern!r} is not in {log}:\n{log.read_text() if log.exists() else 'no such file'}")


def log_of(output: Path, rank: int) -> Path:
    return output / ("training.log" if rank == 0 else f"training.rank{rank}.log")


def flags_of(small_flags: list[str], output: Path, timeout: float) -> list[str]:
    more = ["--batch-size", "2", "--epochs", "400", "--frequent", "1", "--stall-timeout", str(timeout)]
    return [*small_flags, *more, "--output", str(output)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_stuck_rank_is_named_by_the_others(tmp_path, small_flags, ranks):
    """A rank that hangs in its data is named by each other in time, with its phase; its own log has the line of code."""
    output, timeout = tmp_path / "run", 6.0
    with launching.running(stuck, flags_of(small_flags, output, timeout), ranks=ranks, log=tmp_path / "printed"):
        named = r"rank 1 has stopped: in step 4, phase data for ([\d.]+) s; waiting: rank 0 in step 4"
        for other in {*range(ranks)} - {1}:
            assert float(wait_for(named, log_of(output, other), 60)[1]) < timeout
        wait_for(r"(?s)this rank is at:.*time\.sleep\(1000\)", log_of(output, 1), 10)
    assert "rank 1 has stopped" in Path(f"{tmp_path / 'printed'}.0").read_text()


def slow_to_evaluate(flags: list[str]) -> int:
    """Train, with an evaluation of many batches that each take a while."""
    encode = RWKVCLIP.encode_image

    def slowly(self, image):
        time.sleep(0.0 if self.training else 0.3)
        return encode(self, image)

    RWKVCLIP.encode_image, train.BATCH = slowly, 15
    return train.main(flags)


def test_a_long_evaluation_is_no_stop(tmp_path, small_flags):
    """Ranks that evaluate for longer than the timeout, batch after batch, are not said to have stopped."""
    output, timeout = tmp_path / "run", 2.5
    flags = [*flags_of(small_flags, output, timeout), "--epochs", "1"]
    began = time.monotonic()
    launching.run(slow_to_evaluate, flags, ranks=2, log=tmp_path / "printed")
    assert time.monotonic() - began > timeout
    assert not any("has stopped" in log_of(output, rank).read_text() for rank in range(2))


SLOW = [(signal, victim, 2) for signal in (signal.SIGKILL, signal.SIGSTOP) for victim in (0, 1)]


@pytest.mark.parametrize(
    ("number", "victim", "ranks"),
    [(signal.SIGKILL, 2, 4), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_a_killed_or_stopped_rank_is_named_by_the_others(tmp_path, small_flags, number, victim, ranks):
    """Killed or stopped from outside, any rank, the store's keeper too, is named in the others' logs in time."""
    output, timeout = tmp_path / "run", 10.0
    with launching.running(
        train.main, flags_of(small_flags, output, timeout), ranks=ranks, log=tmp_path / "printed"
    ) as processes:
        wait_for("step:5/", output / "training.log", 60)
        os.kill(processes[victim].pid, number)
        stopped = time.monotonic()
        for other in {*range(ranks)} - {victim}:
            found = wait_for(rf"rank {victim} has stopped: .*step \d+, phase (\w+)", log_of(output, other), 60)
            assert found[1] in PHASES
        assert time.monotonic() - stopped < timeout


@pytest.mark.slow
def test_under_torchrun_a_killed_rank_is_named_before_all_end(tmp_path, small_flags):
    """torchrun terminates everybody when one rank dies; the others still say which it was and what it was at."""
    output = tmp_path / "run"
    launcher = ["torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(launching.free_port())]
    command = [sys.executable, "-m", *launcher, "-m", "rwkv_clip.train", *flags_of(small_flags, output, 10.0)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as torchrun:
        try:
            wait_for("step:5/", output / "training.log", 120)
            children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
            (victim,) = (p for p in children if "\0RANK=1\0" in Path(f"/proc/{p}/environ").read_text())
            os.kill(int(victim), signal.SIGKILL)
            wait_for(r"rank 1 has stopped: .*step \d+, phase \w+", output / "training.log", 10)
            torchrun.wait(60)
        finally:
            torchrun.kill()


def test_the_interval_fits_the_timeout():
    """However short the timeout, a silent rank is found within it."""
    for timeout in (0.5, 5.0, 300.0):
        watch = Watch(0, 2, timeout)
        assert (stalls.MISSED_SIGNS + 2) * watch.interval < timeout
