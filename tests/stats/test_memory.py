"""Specification of the native kernel compiled otherwise: it reads its tensor, writes its row, and is the same elsewhere."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import tracehooks.stats

SOURCE = Path(tracehooks.stats.__file__).parent / "cpu.cpp"
DRIVER = Path(__file__).parent / "bounds.cpp"
ROWS = Path(__file__).parent / "rows.cpp"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_sanitizers_find_nothing(tmp_path: Path, sanitizers: str) -> None:
    """Address, undefined-behaviour and thread sanitizers find nothing in any size, dtype or instruction set."""
    compiler = ["c++", "-std=c++17", "-O1", "-g", "-w", "-ffp-contract=off", "-pthread"]
    compiler += [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    empty = tmp_path / "empty.cpp"
    empty.write_text("int main() {}")
    if subprocess.run([*compiler, str(empty), "-o", str(tmp_path / "empty")], capture_output=True).returncode:
        pytest.skip("this compiler has no such sanitizer")
    program = tmp_path / "bounds"
    subprocess.run([*compiler, str(SOURCE), str(DRIVER), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert int(done.stdout) > 10_000


@pytest.mark.slow
@pytest.mark.skipif(
    not all(map(shutil.which, ("c++", "aarch64-linux-gnu-g++", "qemu-aarch64"))),
    reason="no compiler for ARM, or no QEMU",
)
def test_another_processor_gives_the_same_bits(tmp_path: Path) -> None:
    """Rows of all dtypes are the same bit for bit with NEON as with this processor's instruction sets."""
    found = []
    for compiler, run in (("c++", []), ("aarch64-linux-gnu-g++", ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"])):
        program = tmp_path / compiler
        options = ["-std=c++17", "-O2", "-w", "-ffp-contract=off", "-pthread"]
        subprocess.run([compiler, *options, str(SOURCE), str(ROWS), "-o", str(program)], check=True)
        done = subprocess.run([*run, str(program)], capture_output=True, text=True, check=True)
        found.append(set(done.stdout.splitlines()))
    assert len(found[0]) == 13 * 17 * 4
    assert found[0] == found[1]
