"""The format is kept: what the first release wrote is read by this one, row for row."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jsonschema
import pytest

from tracehooks.core.schema import TABLES, run_json_schema
from tracehooks.storage import open_run, repair

from .building import Row, canonical, rows_of

GOLDEN = Path(__file__).parents[1] / "golden"
EXPECTED = json.loads((GOLDEN / "v1.json").read_text())


def expected(table: str) -> list[Row]:
    """The rows that version 1 wrote, with null in columns that came later."""
    return [canonical(dict.fromkeys(TABLES[table].names) | row) for row in EXPECTED["tables"][table]]


@pytest.mark.parametrize("table", TABLES)
def test_the_golden_run_reads_as_it_was_written(table: str) -> None:
    """Every row of version 1's golden run, sealed and not, of both ranks, is what `v1.json` says; null in columns that came
    later."""
    run = open_run(GOLDEN / "v1")
    found = run.read(table)
    assert rows_of(found) == expected(table)
    assert found["rank"].to_pylist() == [row["rank"] for row in EXPECTED["tables"][table]]
    assert not run.problems


def test_the_golden_description_reads_as_it_was_written() -> None:
    """run.json of version 1 obeys this version's schema and has the fields that were given; its writer is dead."""
    run = open_run(GOLDEN / "v1")
    jsonschema.validate(run.info, run_json_schema())
    assert {name: run.info[name] for name in EXPECTED["info"] if name != "notes"} == {
        name: value for name, value in EXPECTED["info"].items() if name != "notes"
    }
    assert (run.info["format_version"], run.status, run.ranks, run.steps) == (1, "crashed", [0, 1], [0, 1, 9])


def test_the_golden_run_can_be_repaired(tmp_path: Path) -> None:
    """Sealing version 1's journal with this version changes no row."""
    shutil.copytree(GOLDEN / "v1", tmp_path / "v1")
    assert len(repair(tmp_path / "v1")) == len(TABLES) + 1
    for table in TABLES:
        rows = sorted(rows_of(open_run(tmp_path / "v1").read(table)), key=repr)
        assert rows == sorted(expected(table), key=repr)
