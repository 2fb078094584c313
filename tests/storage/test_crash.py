"""Kill -9 at random moments: every flushed step is readable exactly once, by us and by everybody's tools."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from tracehooks.storage import open_run, repair

from .building import canonical, expected_mean, files, rows_of, tensor_rows

RUNS, KILLS = 5, 10
ROWS = 4
"""Rows that the server writes a step."""


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(Path(__file__).with_name("crash_server.py"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        yield process
        assert process.stdin
        process.stdin.close()


def killed(server: subprocess.Popen[str], run: Path, first: int, delay: float) -> list[int]:
    """Let a writer go on from step ``first`` and kill it; the steps that it had flushed."""
    assert server.stdin
    assert server.stdout
    server.stdin.write(f"{run} {first}\n")
    pid = int(server.stdout.readline().split()[1])
    time.sleep(delay)
    os.kill(pid, signal.SIGKILL)
    return [int(line.split()[1]) for line in iter(server.stdout.readline, "dead\n")]


def check(run: Path, flushed: list[int]) -> None:
    """Each flushed step is there once and right; a step that was being written may be there, once and right."""
    opened = open_run(run)
    found = rows_of(opened.tensors())
    seen = Counter(row["step"] for row in found)
    assert set(flushed) <= set(seen)
    assert set(seen.values()) <= {ROWS}
    expected = {step: [canonical(row) for row in tensor_rows(step)] for step in seen}
    assert found == [row for step in dict.fromkeys(row["step"] for row in found) for row in expected[step]]
    losses = Counter(opened.scalars()["step"].to_pylist())
    assert set(flushed) <= set(losses)
    assert set(losses.values()) <= {1}
    assert all("torn" in problem.what for problem in opened.problems)


def check_parts(run: Path, at_least: set[int]) -> None:
    """The sealed parts are read alike by plain pyarrow, DuckDB and pandas, each row once and right."""
    if not files(run / "tensors", "*.parquet"):
        assert not at_least
        return
    columns = ["step", "seq", "mean"]
    arrow = ds.dataset(run / "tensors", format="parquet", partitioning="hive").to_table(columns=columns)
    glob = f"{run}/tensors/**/*.parquet"
    duck = duckdb.sql(f"select step, seq, mean from read_parquet('{glob}', hive_partitioning=true)").to_arrow_table()
    panda = pa.Table.from_pandas(pd.read_parquet(run / "tensors", columns=columns), preserve_index=False)
    for table in (arrow, duck, panda):
        rows = list(zip(*table.to_pydict().values(), strict=True))
        assert len(set(rows)) == len(rows)
        assert at_least <= {row[0] for row in rows}
        assert all(mean == expected_mean(step, seq) for step, seq, mean in rows)


@pytest.mark.parametrize("seed", range(RUNS))
def test_kill_at_random_moments(seed: int, server: subprocess.Popen[str], tmp_path: Path) -> None:
    """A run killed ten times at random moments, resumed each time with or without repair: every step that was flushed
    is readable exactly once, at each death and after the last repair, when all of it is sealed."""
    moments = random.Random(seed)
    run = tmp_path / "run"
    flushed: list[int] = []
    first = 0
    for kill in range(KILLS):
        printed = killed(server, run, first, moments.uniform(0.0, 0.15))
        flushed += printed
        # The step after the last one printed may have been flushed all the same: its number is not used again.
        first = (printed[-1] if printed else first) + 2
        if not (run / "run.json").exists():
            continue
        check(run, flushed)
        assert open_run(run).status == "crashed"
        check_parts(run, set())
        if kill % 2 and moments.random() < 0.5:
            repair(run)
            check_parts(run, set(flushed))
    repair(run)
    check(run, flushed)
    check_parts(run, set(flushed))
    assert len(flushed) > KILLS
    assert len(files(run / "tensors", "*.parquet")) > 1
