"""The rows of a diff as a table: one for each aligned pair, in execution order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from tracehooks.analysis.align import Alignment
from tracehooks.analysis.compare import ESTIMATES, STATUSES, Comparison
from tracehooks.analysis.divergence import Compared, merged
from tracehooks.analysis.window import KEY, Vocabulary, Window

_NUMBERS = ("seq_a", "seq_b", "status", "difference", "tolerance", *ESTIMATES)


def columns_of(compared: Compared, *, by_rank: bool) -> dict[str, Any]:
    """The rows of a window as columns, the scalars of a step after its tensors."""
    tensors = _judged(compared.a, compared.b, compared.pairs, compared.tensors)
    scalars = _judged(compared.scalars_a.window, compared.scalars_b.window, compared.scalar_pairs, compared.scalars)
    scalars["seq_a"][:] = scalars["seq_b"][:] = -1
    columns = tensors
    if len(compared.scalar_pairs.a):
        place = np.searchsorted(tensors["step"], scalars["step"], side="right")
        columns = {name: np.insert(tensors[name], place, scalars[name]) for name in tensors}
    if not by_rank:
        columns["rank"] = np.full(len(columns["rank"]), -1, np.int32)
    return columns


def _judged(a: Window, b: Window, pairs: Alignment, judged: Comparison) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for name in KEY:
        columns[name] = merged(a, b, pairs, name).astype(np.int64 if name == "step" else np.int32, copy=False)
    columns["seq_a"] = np.where(pairs.a >= 0, a.columns["seq"][pairs.a], -1) if len(a) else np.full(len(pairs.a), -1)
    columns["seq_b"] = np.where(pairs.b >= 0, b.columns["seq"][pairs.b], -1) if len(b) else np.full(len(pairs.b), -1)
    columns |= {"status": judged.status, "difference": judged.distance, "tolerance": judged.allowed}
    return columns | judged.estimates


def table_of(parts: list[dict[str, Any]], vocabulary: Vocabulary) -> tuple[pa.Table, dict[str, int]]:
    """The windows' columns as the rows of a diff, and how many there are by status. Empties ``parts`` on the way: the
    rows of a long run are not to be in memory twice."""
    counts = np.zeros(len(STATUSES), np.int64)
    scalar, names = vocabulary.code("scalar"), pa.array(vocabulary.names, pa.string())
    tables = [_window_table({}, names, scalar)]
    while parts:
        part = parts.pop(0)
        counts += np.bincount(part["status"], minlength=len(STATUSES))
        tables.append(_window_table(part, names, scalar))
    return pa.concat_tables(tables), dict(zip(STATUSES, counts.tolist(), strict=True))


def _window_table(part: dict[str, Any], names: pa.Array, scalar: int) -> pa.Table:
    whole = part or {name: np.empty(0, np.int32) for name in (*KEY, *_NUMBERS)}
    columns = {
        "step": pa.array(whole["step"], pa.int64()),
        "micro": pa.array(whole["micro"], pa.int32()),
        "phase": _named(whole["phase"], names),
        "module": _named(whole["module"], names, null=whole["phase"] == scalar),
        "slot": _named(whole["slot"], names),
        "call": pa.array(whole["call"], pa.int32()),
        "recompute": pa.array(whole["recompute"].astype(bool)),
        "rank": _from_zero(whole["rank"], pa.int32()),
        "seq_a": _from_zero(whole["seq_a"], pa.int64()),
        "seq_b": _from_zero(whole["seq_b"], pa.int64()),
        "status": _named(whole["status"].astype(np.int32), pa.array(STATUSES, pa.string())),
    }
    for name in ("difference", "tolerance"):
        columns[name] = _nullable(whole[name].astype(np.float64, copy=False))
    return pa.table(columns | {name: _nullable(whole[name].astype(np.float32, copy=False)) for name in ESTIMATES})


def _nullable(numbers: Any) -> pa.Array:
    """NaN becomes null."""
    return pa.array(numbers, from_pandas=True)


def _from_zero(numbers: Any, kind: pa.DataType) -> pa.Array:
    """Negative numbers become null."""
    absent = numbers < 0
    return pa.array(numbers, kind, mask=absent if absent.any() else None)


def _named(codes: Any, names: pa.Array, null: Any = None) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32(), mask=null), names)
