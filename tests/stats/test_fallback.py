"""Specification of what happens without the native kernel: the reference measures, and a warning says so once."""

from __future__ import annotations

import importlib.machinery
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tracehooks import stats
from tracehooks.stats import cpu, reference

from .measuring import EVERYTHING

SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder, empty at first, where the library is looked for."""
    monkeypatch.setattr(cpu, "__file__", str(tmp_path / "cpu.py"))
    cpu.library.cache_clear()
    yield tmp_path
    cpu.library.cache_clear()


def test_the_reference_takes_over(nowhere: Path) -> None:
    """Without the library, rows and fingerprints are the reference's, and one warning says why."""
    x = torch.randn(3, 100)
    with pytest.warns(RuntimeWarning, match="not built") as warned:
        row = stats.summarize(x, EVERYTHING)
    assert len(warned) == 1
    assert torch.equal(row, reference.summarize(x, EVERYTHING))
    out = torch.zeros_like(row)
    assert torch.equal(stats.summarize(x, EVERYTHING, out), out)
    assert torch.equal(out, row)
    assert torch.equal(stats.summarize_many([x, x], EVERYTHING, torch.zeros(2, len(row), dtype=row.dtype))[1], row)
    assert torch.equal(stats.fingerprints(x), reference.hash_rows(x))
    assert stats.kernel_name("cpu") == "reference"


@pytest.mark.parametrize("content", [b"", b"not a library", b"\x7fELF" + bytes(100)])
def test_a_corrupt_library(nowhere: Path, content: bytes) -> None:
    """A file that is no library is as good as none."""
    (nowhere / f"_cpu{SUFFIX}").write_bytes(content)
    with pytest.warns(RuntimeWarning, match="cannot be loaded"):
        assert stats.kernel_name("cpu") == "reference"


@pytest.mark.parametrize(
    ("source", "reason"),
    [("int other;", "cannot be loaded"), ("int tracehooks_abi(void) { return 0; }", "another version")],
)
def test_another_library(nowhere: Path, source: str, reason: str) -> None:
    """A library of another version, or of something else, is not called."""
    (nowhere / "other.c").write_text(source)
    target = nowhere / f"_cpu{SUFFIX}"
    try:
        subprocess.run(["cc", "-shared", "-fPIC", "-o", str(target), str(nowhere / "other.c")], check=True)
    except FileNotFoundError:
        pytest.skip("no C compiler")
    with pytest.warns(RuntimeWarning, match=reason):
        assert stats.kernel_name("cpu") == "reference"


def test_importing_loads_nothing() -> None:
    """The library is loaded when the first tensor is measured, not when the package is imported."""
    code = "from tracehooks.stats import cpu; assert cpu.library.cache_info().currsize == 0"
    subprocess.run([sys.executable, "-c", code], check=True)
