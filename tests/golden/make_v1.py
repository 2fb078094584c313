"""How `v1/` and `v1.json` were made, once, by the first release. Kept to be read: running it refuses to overwrite them."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tracehooks.core.records import Batch
from tracehooks.core.schema import HISTOGRAM_EXPONENTS, SKETCH_SIZE, TABLES
from tracehooks.storage import RunWriter

INFO = {
    "run_id": "01900000-0000-7000-8000-000000000001",
    "created": "2026-01-01T00:00:00.000Z",
    "pid": 1,
    "host": "golden",
    "command": ["train.py", "--seed", "0"],
    "git": None,
    "packages": {"tracehooks": "0.1.0"},
    "devices": ["cpu"],
    "world_size": 2,
    "model": {"class": "Golden", "parameter_count": 12},
    "flags": {"seed": 0},
    "optimizers": [{"class": "SGD", "lr": 0.1}],
    "config": {"every": 1},
    "notes": ["ünïcode"],
}


def when(step: int) -> dict[str, Any]:
    return {"step": step, "micro": step % 2, "time_ns": 1_700_000_000_000_000_000 + step}


def rows(step: int) -> dict[str, list[dict[str, Any]]]:
    """One step: values that exercise every type and every null."""
    statistics = {"min": -1.5, "max": 2.0**-step, "mean": 1 / 3, "std": 0.1 * step, "rms": 0.7, "absmax": 1.5}
    tensor = {
        **when(step),
        "seq": 0,
        "phase": "forward",
        "module": "",
        "type": "Golden",
        "slot": "output",
        "call": 0,
        "recompute": bool(step % 2),
        "dtype": "bfloat16",
        "device": "cuda:0",
        "shape": [2, 3],
        "count": 6,
        "nan": 0,
        "posinf": 0,
        "neginf": 0,
        "zeros": step,
        **statistics,
        "hash": 2**64 - 1 - step,
        "sketch": [float(i - step) for i in range(SKETCH_SIZE)],
        "histogram": [i % 3 for i in range(len(HISTOGRAM_EXPONENTS))],
    }
    empty = dict.fromkeys((*statistics, "hash", "sketch", "histogram"))
    lost = tensor | empty | {"seq": 1, "module": "blöcke.0", "slot": "output.0", "shape": [], "count": 1, "nan": 1}
    mask = {**when(step), "seq": 2, "module": "attention", "slot": "input.mask", "shape": [4, 0], "count": 0, "kept": 0}
    mask |= {"rows": 4, "empty_rows": 4, "min_kept": 0, "max_kept": 0, "first_empty": 0, "convention": "keep=True"}
    return {
        "tensors": [tensor, lost],
        "scalars": [{**when(step), "name": name, "value": value} for name, value in (("loss", 0.5), ("lr/0", 1e-300))],
        "masks": [mask, mask | {"min_kept": None, "max_kept": None, "first_empty": None, "convention": "additive"}],
        "samples": [
            {**when(step), "index": 0, "name": "image", "split": "train", "hash": 2**63 + step, "source_id": "a/ü.png"},
            {**when(step), "index": 1, "name": "image", "split": "validation", "hash": 0, "source_id": None},
        ],
        "events": [
            {**when(step), "seq": 3, "kind": "note", "severity": "info", "module": None, "slot": None, "message": "m",
             "details": "{}"},
        ],
    }  # fmt: skip


def batches(step: int) -> list[Batch]:
    return [
        Batch(table, {n: [row[n] for row in found] for n in TABLES[table].names}) for table, found in rows(step).items()
    ]


def make(here: Path) -> None:
    """Write the golden run and its rows."""
    target = here / "v1"
    if target.exists():
        raise SystemExit(f"{target} is there: a golden run is never written again")
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory) / "run"
        for step in (0, 1):
            writer = RunWriter(root, INFO, resume=True)
            writer.write(batches(step))
            if step == 0:
                other = RunWriter(root, {}, rank=1)
                other.write([batch for batch in batches(9) if batch.table == "scalars"])
                other.close()
                writer.close()
        # As a process that was killed leaves it: the second step in the journal, nobody holding it.
        shutil.copytree(root, target, ignore=shutil.ignore_patterns("lock", "owner"))
        writer.close()
    expected = {table: [row | {"rank": 0} for step in (0, 1) for row in rows(step)[table]] for table in TABLES}
    expected["scalars"][2:2] = [row | {"rank": 1} for row in rows(9)["scalars"]]
    (here / "v1.json").write_text(json.dumps({"info": INFO, "tables": expected}, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    make(Path(__file__).parent)
