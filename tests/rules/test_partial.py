"""Rules on traces of which part is missing: they answer, and never raise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch

import tracehooks
from tests.rules.broken_data import mask_inverted
from tests.rules.broken_training import half_of_the_units_dead
from tracehooks.analysis.rules import RULES, judge
from tracehooks.core.schema import TABLES
from tracehooks.testing import MemoryRun

RUNS = [mask_inverted, half_of_the_units_dead]


def parts(tables: Mapping[str, pa.Table]) -> Iterator[tuple[str, dict[str, pa.Table]]]:
    """The tables with one thing missing at a time: a table, a phase, scalars of one kind, the first or the last steps."""
    for name in tables:
        yield name, {**tables, name: tables[name].slice(0, 0)}
    for table, column in (("tensors", "phase"), ("scalars", "name")):
        kinds = pc.replace_substring_regex(tables[table][column].cast(pa.string()), "/.*", "")
        for kind in pc.unique(kinds).to_pylist():
            yield f"without {kind}", {**tables, table: tables[table].filter(pc.not_equal(kinds, kind))}
    yield "one step", {name: table.filter(pc.less(table["step"], 1)) for name, table in tables.items()}
    yield "the last steps", {name: table.filter(pc.greater_equal(table["step"], 4)) for name, table in tables.items()}


@pytest.mark.parametrize("build", RUNS, ids=lambda build: build.__name__)
def test_whatever_is_missing_rules_answer(build, tmp_path: Path) -> None:
    """Each rule gives its judgement of every part of a real run, with and without run.json."""
    torch.manual_seed(0)
    build().record(tmp_path / "run")
    run = tracehooks.open(tmp_path / "run")
    tables = {name: run.read(name) for name in TABLES}
    for what, kept in [*parts(tables), ("without run.json", tables)]:
        judged = judge(MemoryRun(kept, {} if what == "without run.json" else run.info))
        assert [judgement.rule for judgement in judged] == list(RULES), what
