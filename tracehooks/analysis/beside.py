"""What lies beside the tensors: masks, samples and events of two runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracehooks.analysis.align import align
from tracehooks.analysis.side import Side
from tracehooks.analysis.steps import Chosen
from tracehooks.analysis.window import Vocabulary, Window

MASK_NUMBERS = ("count", "kept", "rows", "empty_rows", "min_kept", "max_kept", "first_empty")
EVENTS = (
    "nonfinite",
    "optimizer_step_skipped",
    "gradients_dropped",
    "parameters_replaced",
    "modules_changed",
    "exception",
)
"""Kinds that belong to the training; the others are about the recording or the user's own."""


@dataclass(frozen=True)
class Aside:
    """Rows of one table that the two runs do not share."""

    table: str
    """masks, samples or events."""
    step: int
    """The first step in which they differ."""
    site: str
    detail: str
    rows: int
    """Rows that differ, over all steps; of samples, batches."""

    def __str__(self) -> str:
        what = {"samples": "batch"}.get(self.table, "row")
        more = f" ({self.rows} {what}{'es' if what == 'batch' else 's'} in all)" if self.rows > 1 else ""
        return f"{self.table}: step {self.step}: {self.site}: {self.detail}{more}"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def compare_beside(
    a: Side, b: Side, vocabulary: Vocabulary, chosen: Chosen | None, *, by_rank: bool
) -> tuple[Aside, ...]:
    """The tables beside the tensors that differ in the chosen steps (None: all), the earliest first."""
    found = []
    for table, read, told in (
        ("masks", _masks, _mask_told),
        ("samples", _samples, _samples_told),
        ("events", _events, _event_told),
    ):
        rows_a, rows_b = (_keyed(read(side, chosen), side, vocabulary) for side in (a, b))
        found += _compared(table, rows_a, rows_b, told, by_rank=by_rank)
    return tuple(sorted(found, key=lambda item: item.step))


Keyed = tuple[Window, pa.Table]


def _compared(
    table: str, a: Keyed, b: Keyed, told: Callable[[dict[str, Any], dict[str, Any]], str], *, by_rank: bool
) -> list[Aside]:
    (window_a, rows_a), (window_b, rows_b) = a, b
    pairs = align(window_a, window_b, by_rank=by_rank)
    values_a, values_b = rows_a["value"].to_pylist(), rows_b["value"].to_pylist()
    differ = [
        (at_a, at_b)
        for at_a, at_b in zip(pairs.a.tolist(), pairs.b.tolist(), strict=True)
        if at_a < 0 or at_b < 0 or values_a[at_a] != values_b[at_b]
    ]
    if not differ:
        return []
    at_a, at_b = differ[0]
    row = rows_a.slice(at_a, 1).to_pylist()[0] if at_a >= 0 else rows_b.slice(at_b, 1).to_pylist()[0]
    if at_a < 0 or at_b < 0:
        detail = f"only in {'b' if at_a < 0 else 'a'}"
    else:
        detail = told(row, rows_b.slice(at_b, 1).to_pylist()[0])
    site = f"{row['module'] or '(root)'} {row['slot']}" if table == "masks" else row["slot"]
    return [Aside(table, row["step"], site, detail, len(differ))]


def _keyed(rows: pa.Table, side: Side, vocabulary: Vocabulary) -> Keyed:
    """Rows with step, micro, rank, seq, module and slot as a window to align, in execution order."""
    rows = rows.sort_by([(name, "ascending") for name in ("step", "seq", "rank")])
    size = len(rows)
    columns = {name: rows[name].to_numpy().astype(np.int64) for name in ("step", "micro", "rank", "seq")}
    columns |= {name: np.zeros(size, np.int64) for name in ("phase", "call", "recompute")}
    columns["module"] = vocabulary.encode(rows["module"], side.named)
    columns["slot"] = vocabulary.encode(rows["slot"])
    nothing = np.zeros(size, np.uint64), np.zeros(size, bool), np.arange(size)
    return Window(columns, *nothing, rows.select), rows


def _read(side: Side, table: str, columns: Sequence[str], chosen: Chosen | None) -> pa.Table:
    rows = side.tables.beside(table, [*columns, "step", "micro", "rank"], chosen)
    for position, field in enumerate(rows.schema):
        if pa.types.is_dictionary(field.type):
            rows = rows.set_column(position, field.name, rows[field.name].cast(pa.string()))
    return rows


def _masks(side: Side, chosen: Chosen | None) -> pa.Table:
    rows = _read(side, "masks", ["seq", "module", "slot", "shape", "convention", *MASK_NUMBERS], chosen)
    values = [repr(row) for row in rows.select(["shape", "convention", *MASK_NUMBERS]).to_pylist()]
    return rows.append_column("value", pa.array(values, pa.string()))


def _mask_told(a: dict[str, Any], b: dict[str, Any]) -> str:
    told = [f"{name} {a[name]} → {b[name]}" for name in ("shape", "convention", *MASK_NUMBERS) if a[name] != b[name]]
    return ", ".join(told)


def _samples(side: Side, chosen: Chosen | None) -> pa.Table:
    """One row for each batch of an input: digests of its samples' hashes in order and in any order."""
    rows = _read(side, "samples", ["index", "name", "split", "hash"], chosen)
    rows = rows.sort_by([(name, "ascending") for name in ("step", "micro", "rank", "split", "name", "index")])
    keys = ["step", "micro", "rank", "split", "name"]
    batches = rows.group_by(keys, use_threads=False).aggregate([("hash", "list")])
    lists = batches["hash_list"].combine_chunks()
    hashes, ends = lists.flatten().to_numpy(zero_copy_only=False), lists.offsets.to_numpy()
    digests = [hashlib.sha256(hashes[start:end].tobytes()).hexdigest() for start, end in pairwise(ends.tolist())]
    batches = batches.append_column("value", pa.array(digests, pa.string()))
    batches = batches.append_column("slot", pc.binary_join_element_wise(batches["split"], batches["name"], " "))
    batches = batches.append_column("module", pa.repeat(pa.scalar("", pa.string()), len(batches)))
    return batches.append_column("seq", pa.repeat(pa.scalar(0, pa.int64()), len(batches)))


def _samples_told(a: dict[str, Any], b: dict[str, Any]) -> str:
    left, right = a["hash_list"], b["hash_list"]
    if sorted(left) == sorted(right):
        return f"the same {len(left)} samples in another order"
    shared = len(set(left) & set(right))
    return f"{len(left)} samples → {len(right)}, {shared} of them in both"


def _events(side: Side, chosen: Chosen | None) -> pa.Table:
    rows = _read(side, "events", ["seq", "kind", "module", "severity", "details"], chosen)
    rows = rows.filter(pc.is_in(rows["kind"], value_set=pa.array(EVENTS)))
    values = [_event_value(row) for row in rows.select(["kind", "severity", "details"]).to_pylist()]
    return rows.append_column("slot", rows["kind"]).append_column("value", pa.array(values, pa.string()))


def _event_value(row: dict[str, Any]) -> str:
    if row["kind"] != "nonfinite":
        return str(row["severity"])
    details = json.loads(row["details"])
    return " ".join(str(details[name]) for name in ("value", "phase", "op", "cause") if details.get(name))


def _event_told(a: dict[str, Any], b: dict[str, Any]) -> str:
    return f"{a['value']} → {b['value']}"
