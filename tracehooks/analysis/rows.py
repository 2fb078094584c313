"""The rows of a diff as a table: one for each aligned pair, in execution order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from tracehooks.analysis.align import Alignment
from tracehooks.analysis.compare import ESTIMATES, STATUSES, Comparison
from tracehooks.analysis.divergence import Compared, merged
from tracehooks.analysis.window import KEY, Vocabulary, Window


def columns_of(compared: Compared, *, by_rank: bool) -> dict[str, Any]:
    """The rows of a window as columns, the scalars of a step after its tensors."""
    tensors = _judged(compared.a, compared.b, compared.pairs, compared.tensors)
    scalars = _judged(compared.scalars_a.window, compared.scalars_b.window, compared.scalar_pairs, compared.scalars)
    scalars["seq_a"][:] = scalars["seq_b"][:] = -1
    columns = {name: np.concatenate((tensors[name], scalars[name])) for name in tensors}
    if not by_rank:
        columns["rank"][:] = -1
    if len(compared.scalar_pairs.a):
        order = np.argsort(columns["step"], kind="stable")
        columns = {name: column[order] for name, column in columns.items()}
    return columns


def _judged(a: Window, b: Window, pairs: Alignment, judged: Comparison) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for name in KEY:
        columns[name] = merged(a, b, pairs, name).astype(np.int64 if name == "step" else np.int32)
    columns["seq_a"] = np.where(pairs.a >= 0, a.columns["seq"][pairs.a], -1) if len(a) else np.full(len(pairs.a), -1)
    columns["seq_b"] = np.where(pairs.b >= 0, b.columns["seq"][pairs.b], -1) if len(b) else np.full(len(pairs.b), -1)
    columns |= {"status": judged.status, "difference": judged.distance, "tolerance": judged.allowed}
    return columns | judged.estimates


def table_of(parts: list[dict[str, Any]], vocabulary: Vocabulary) -> tuple[pa.Table, dict[str, int]]:
    """The windows' columns as the rows of a diff, and how many there are by status."""
    names = (*KEY, "seq_a", "seq_b", "status", "difference", "tolerance", *ESTIMATES)
    whole = {name: np.concatenate([part[name] for part in parts]) if parts else np.empty(0, np.int32) for name in names}
    counts = np.bincount(whole["status"].astype(np.int64), minlength=len(STATUSES)).tolist()
    scalar = whole["phase"] == vocabulary.code("scalar")
    columns = {
        "step": pa.array(whole["step"], pa.int64()),
        "micro": pa.array(whole["micro"], pa.int32()),
        "phase": _named(whole["phase"], vocabulary.names),
        "module": _named(whole["module"], vocabulary.names, null=scalar),
        "slot": _named(whole["slot"], vocabulary.names),
        "call": pa.array(whole["call"], pa.int32()),
        "recompute": pa.array(whole["recompute"].astype(bool)),
        "rank": pa.array(whole["rank"], pa.int32(), mask=whole["rank"] < 0),
        "seq_a": pa.array(whole["seq_a"], pa.int64(), mask=whole["seq_a"] < 0),
        "seq_b": pa.array(whole["seq_b"], pa.int64(), mask=whole["seq_b"] < 0),
        "status": _named(whole["status"].astype(np.int32), STATUSES),
    }
    columns |= {name: _nullable(whole[name]) for name in ("difference", "tolerance", *ESTIMATES)}
    return pa.table(columns), dict(zip(STATUSES, counts, strict=True))


def _nullable(numbers: Any) -> pa.Array:
    """NaN becomes null."""
    plain = numbers if numbers.dtype.kind == "f" else numbers.astype(float)  # no rows at all
    return pa.array(plain, mask=np.isnan(plain))


def _named(codes: Any, names: Sequence[str], null: Any = None) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32(), mask=null), pa.array(names, pa.string()))
