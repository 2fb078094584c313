"""What the documents say is what the code does."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from tracehooks.capture.trace import Trace
from tracehooks.core.config import RECORDABLE, Config

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md")])


def test_every_option_is_documented_with_its_default() -> None:
    """Each field of Config has a row in docs/recording.md that states its default."""
    text = (ROOT / "docs/recording.md").read_text()
    for field in dataclasses.fields(Config):
        row = re.search(rf"^\| `{field.name}` \| (.*?) \|", text, re.MULTILINE)
        assert row, field.name
        if field.name != "record":
            default = field.default if not isinstance(field.default, str) else f'"{field.default}"'
            assert row.group(1) == f"`{default}`"
    for name in RECORDABLE:
        assert f"`{name}`" in text


def test_every_method_of_a_trace_is_documented() -> None:
    """Each public name of Trace stands in docs/recording.md."""
    text = (ROOT / "docs/recording.md").read_text()
    for name in (name for name in vars(Trace) if not name.startswith("_")):
        assert f".{name}" in text, name


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    """Every relative link in a document names a file that exists."""
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", path.read_text()):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target


def test_every_room_is_on_the_layout_page() -> None:
    """docs/layout.md names every file of capture, locate, analysis, checkpoint and experiments."""
    text = (ROOT / "docs/layout.md").read_text()
    rooms = [ROOT / "tracehooks" / room for room in ("capture", "locate", "analysis", "checkpoint", "experiments")]
    for path in (path for room in rooms for path in room.glob("*.py")):
        if path.stem not in ("__init__", "trace", "select"):
            assert f"`{path.name}`" in text, path.name


def test_the_readme_names_the_two_commands() -> None:
    """README says how to set up and test, and CI runs exactly that test command."""
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text
    assert "make test" in text
    assert (ROOT / ".ci/run").read_text().rstrip().endswith("\nmake test")


def test_every_cause_is_documented() -> None:
    """Each cause that the locator can give stands in docs/causes.md."""
    text = (ROOT / "docs/causes.md").read_text()
    rooms = ("arithmetic", "causes", "circumstances")
    source = "".join((ROOT / f"tracehooks/locate/{name}.py").read_text() for name in rooms)
    tags = set(re.findall(r'Cause\(\s*"([a-z0-9_]+)"', source)) | set(re.findall(r'_domain\(\s*"([a-z0-9_]+)"', source))
    tags |= set(re.findall(r'(?:return|tag =) "([a-z0-9_]+)"', source)) | {"fp16_overflow", "overflow"}
    assert len(tags) > 20
    for tag in tags:
        assert f"`{tag}`" in text, tag
