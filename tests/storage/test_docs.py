"""docs/trace-format.md is a specification: all that the schema has is in it, in its place and with its type."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tracehooks.core.schema import (
    EVENT_KINDS,
    FORMAT_VERSION,
    HISTOGRAM_EXPONENTS,
    PHASES,
    RUN_FIELDS,
    SEVERITIES,
    SKETCH_SIZE,
    SPLITS,
    STATUSES,
    TABLES,
    Table,
)
from tracehooks.storage import checksum
from tracehooks.storage.parts import ROWS_PER_GROUP
from tracehooks.storage.schemas import TABLE_KEY, VERSION_KEY

DOCUMENT = (Path(__file__).parents[2] / "docs" / "trace-format.md").read_text()


def section(heading: str) -> str:
    """The text under a heading, up to the next one of its level or above."""
    level = heading.index(" ")
    found = re.search(rf"^{re.escape(heading)}\n(.*?)(?=^#{{1,{level}}} |\Z)", DOCUMENT, re.DOTALL | re.MULTILINE)
    assert found, f"no section {heading!r}"
    return found[1]


def cells(text: str) -> list[list[str]]:
    """The rows of the tables in a text, each as its cells, head and rule left out."""
    lines = [line.removeprefix("|").removesuffix("|") for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)] for line in lines]


def test_the_version_is_in_the_title() -> None:
    """The document says which version it specifies."""
    assert DOCUMENT.startswith(f"# The trace format, version {FORMAT_VERSION}\n")


@pytest.mark.parametrize("table", TABLES.values(), ids=lambda table: table.name)
def test_every_column_is_documented(table: Table) -> None:
    """Each table lists exactly its columns, in file order, with type, nullability and meaning."""
    text = section(f"### {table.name}")
    assert table.meaning.lower() in text.lower()
    expected = [[f"`{c.name}`", c.type, "yes" if c.nullable else "", c.meaning] for c in table.columns]
    assert cells(text) == expected


def test_every_phase_is_documented() -> None:
    """The phases are listed with their meaning, and no others."""
    assert cells(section("## Phases")) == [[f"`{name}`", meaning] for name, meaning in PHASES.items()]


def test_every_event_kind_is_documented() -> None:
    """The event kinds are listed with meaning and detail keys, and no others."""
    expected = [
        [f"`{name}`", kind.meaning, ", ".join(f"`{key}`" for key in kind.details) or "none"]
        for name, kind in EVENT_KINDS.items()
    ]
    assert cells(section("## Events")) == expected


def test_every_field_of_run_json_is_documented() -> None:
    """The fields of run.json are listed with their meaning and whether they are always there, and no others."""
    documented = {row[0]: (row[2], row[3]) for row in cells(section("## run.json"))}
    assert documented == {f"`{f.name}`": ("yes" if f.required else "", f.meaning) for f in RUN_FIELDS}


def test_every_number_and_word_of_the_format_is_documented() -> None:
    """Buckets, sizes, metadata keys, statuses, severities and splits are those of the code."""
    buckets = section("## Histogram buckets")
    assert f"{len(HISTOGRAM_EXPONENTS)} buckets" in buckets
    assert all(str(exponent) in buckets for exponent in (HISTOGRAM_EXPONENTS[0], HISTOGRAM_EXPONENTS[-1]))
    assert f"[{SKETCH_SIZE}]" in section("## Tables")
    parts = section("## Sealed parts")
    assert f"{ROWS_PER_GROUP:,} rows".replace(",", " ") in parts
    for key in (checksum.KEY, VERSION_KEY.decode(), TABLE_KEY.decode()):
        assert f"`{key}`" in parts
    for word in (*STATUSES, *SEVERITIES, *SPLITS):
        assert f"`{word}`" in DOCUMENT
