"""What recording costs on disk, in time and in memory; what reading a trace costs.

Run ``python benchmarks/storage.py [--rows 1000000] [--json FILE]``. It prints a table and one line of JSON, and refuses
to report anything when rows do not come back as they were written.

The rows look like those of a real run: a thousand sites a step, names that repeat each step, statistics of float32
tensors (min, max and absmax are float32 values; mean, std and rms use all bits of a float64), a new hash each time. Random
bits do not compress: 8 bytes of hash, about 7 each of mean, std and rms and 3.7 each of min, max and absmax are the floor.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tracehooks.core.records import Batch
from tracehooks.core.schema import SKETCH_SIZE
from tracehooks.storage import RunWriter, open_run
from tracehooks.storage.writer import BYTES_PER_PART, ROWS_PER_PART

SITES = 1000
PHASES = ("forward", "backward", "parameter", "gradient", "update")


def step_of(step: int, random: np.random.Generator, *, sketch: bool = False) -> Batch:
    """The tensors of one step of a made-up model."""
    blocks = [f"visual.blocks.{site // 50}.{('attention', 'ffn')[site % 2]}.{site % 7}" for site in range(SITES)]
    low = -np.abs(random.standard_normal(SITES)).astype(np.float32).astype(np.float64)
    high = np.abs(random.standard_normal(SITES)).astype(np.float32).astype(np.float64)
    columns: dict[str, Any] = {
        "step": np.full(SITES, step),
        "micro": np.zeros(SITES, np.int32),
        "time_ns": 1_700_000_000_000_000_000 + step * 10**8 + np.cumsum(random.integers(20_000, 80_000, SITES)),
        "seq": np.arange(SITES),
        "phase": [PHASES[site % len(PHASES)] for site in range(SITES)],
        "module": blocks,
        "type": ["Linear" if site % 3 else "LayerNorm" for site in range(SITES)],
        "slot": ["output" if site % 5 < 2 else "weight" for site in range(SITES)],
        "call": np.zeros(SITES, np.int32),
        "recompute": np.zeros(SITES, bool),
        "dtype": ["float32"] * SITES,
        "device": ["cuda:0"] * SITES,
        "shape": [(32, 197, (768, 3072)[site % 2]) for site in range(SITES)],
        "count": np.full(SITES, 32 * 197 * 768),
        **{name: np.zeros(SITES, np.int64) for name in ("nan", "posinf", "neginf")},
        "zeros": random.integers(0, 4, SITES) * (np.arange(SITES) % 3 == 0),
        "min": low,
        "max": high,
        "mean": random.standard_normal(SITES) * 1e-2,
        "std": np.abs(random.standard_normal(SITES)),
        "rms": np.abs(random.standard_normal(SITES)),
        "absmax": np.maximum(high, -low),
        "hash": random.integers(0, 2**64, SITES, dtype=np.uint64),
        "sketch": random.standard_normal((SITES, SKETCH_SIZE)).astype(np.float32) if sketch else None,
        "histogram": None,
    }
    return Batch("tensors", columns)


def steps_of(rows: int, *, sketch: bool = False) -> Iterator[Batch]:
    """Steps that make up at least this many rows, made as they are asked for."""
    random = np.random.default_rng(0)
    for step in range(-(-rows // SITES)):
        yield step_of(step, random, sketch=sketch)


def refuse_wrong_rows(root: Path) -> None:
    """End the benchmark when what is read is not what was written."""
    written = list(steps_of(5 * SITES, sketch=True))
    writer = RunWriter(root, {}, rows_per_part=2 * SITES)
    for batch in written:
        writer.write([batch])
    writer.close()
    found = open_run(root).tensors()
    for name in ("mean", "hash", "sketch", "module", "shape"):
        expected = pa.concat_arrays([pa.array(_plain(batch.columns[name]), _type(found, name)) for batch in written])
        if found[name].combine_chunks().cast(_type(found, name)) != expected:
            raise SystemExit(f"column {name} does not come back as it was written: nothing is reported")


def _plain(column: Any) -> Any:
    return list(column) if isinstance(column, np.ndarray) and column.ndim == 2 else column


def _type(table: pa.Table, name: str) -> pa.DataType:
    kind = table.schema.field(name).type
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def measure_writing(root: Path, rows: int, *, sketch: bool = False, durability: str = "process") -> dict[str, float]:
    """Rows a second in write() alone and until all is sealed, bytes a sealed row, the slowest flush."""
    writer = RunWriter(root, {}, durability=durability)
    inside, slowest, written, begin = 0.0, 0.0, 0, time.perf_counter()
    processor = 0.0
    for batch in steps_of(rows, sketch=sketch):
        before, thread = time.perf_counter(), time.thread_time()
        writer.write([batch])
        took, processor = time.perf_counter() - before, processor + time.thread_time() - thread
        inside, slowest, written = inside + took, max(slowest, took), written + len(batch)
    making = time.perf_counter() - begin - inside
    writer.close()
    total = time.perf_counter() - begin - making
    size = sum(part.stat().st_size for part in root.rglob("*.parquet"))
    return {
        "rows_per_second_written": written / inside,
        "rows_per_processor_second_written": written / processor,
        "rows_per_second_sealed": written / total,
        "slowest_flush_ms": slowest * 1e3,
        "bytes_per_row": size / written,
    }


def measure_memory(rows: int) -> float:
    """MiB by which a process that writes grows at most, over what it uses with everything imported."""
    command = [sys.executable, __file__, "--memory", "--rows", str(rows)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def write_and_print_growth(rows: int) -> None:
    """The child of `measure_memory`."""
    with tempfile.TemporaryDirectory() as directory:
        writer = RunWriter(directory, {})
        writer.write([next(steps_of(SITES))])
        before = _memory("VmRSS")
        for batch in steps_of(rows):
            writer.write([batch])
        writer.close()
        print((_memory("VmHWM") - before) / 1024)


def _memory(field: str) -> int:
    """KiB, from Linux: getrusage's peak would also count the process that started this one."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith(field)))


def measure_reading(root: Path) -> dict[str, float]:
    """Seconds to open a run, to have its dataset, to read all rows, to read what a diff reads, to verify every page."""
    columns = ["step", "seq", "phase", "module", "slot", "call", "count", "nan", "mean", "rms", "absmax", "hash"]
    tasks = {
        "open_s": lambda: open_run(root),
        "dataset_s": lambda: open_run(root).dataset("tensors"),
        "read_all_s": lambda: open_run(root).tensors(),
        "read_12_columns_s": lambda: open_run(root).tensors(columns),
        "verify_s": lambda: open_run(root).verify("tensors"),
    }
    return {name: min(_timed(task) for _ in range(3)) for name, task in tasks.items()}


def _timed(task: Any) -> float:
    before = time.perf_counter()
    task()
    return time.perf_counter() - before


def main() -> None:
    """Measure everything and print it."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rows", type=int, default=1_000_000)
    arguments.add_argument("--json", type=Path)
    arguments.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.memory:
        write_and_print_growth(given.rows)
        return
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        refuse_wrong_rows(root / "check")
        found = measure_writing(root / "plain", given.rows)
        found |= measure_reading(root / "plain")
        found["bytes_per_row_with_sketch"] = measure_writing(root / "sketch", given.rows // 5, sketch=True)[
            "bytes_per_row"
        ]
        fsync = measure_writing(root / "fsync", given.rows // 20, durability="fsync")
        found |= {f"fsync_{name}": fsync[name] for name in ("rows_per_second_written", "slowest_flush_ms")}
    found["writer_memory_growth_mib"] = measure_memory(given.rows)
    print(f"{given.rows} rows, {SITES} a flush; parts of {ROWS_PER_PART} rows or {BYTES_PER_PART >> 20} MiB of journal")
    for name, value in found.items():
        print(f"{name:36} {value:14.3f}")
    line = json.dumps({"rows": given.rows, **found})
    print(line)
    if given.json:
        given.json.write_text(line + "\n")


if __name__ == "__main__":
    main()
