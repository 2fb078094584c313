"""Specification of the fast lane compiled with sanitizers: whatever it is given, it touches no memory but its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from .laning import needs_native

ROOT = Path(__file__).parents[2]
COMPILER = ["c++", "-std=c++17", "-O1", "-g", "-w", "-ffp-contract=off", "-pthread", "-fPIC", "-shared"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
EXTENSIONS = {"stats/_cpu": ("stats/cpu.cpp", "stats/door.cpp"), "capture/_lane": ("capture/lane.cpp",)}


def runtime(name: str) -> str:
    """Where the compiler keeps a sanitizer's library."""
    return subprocess.run(
        ["c++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.slow
@needs_native
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    """The tests of lanes and seats pass on a copy of the package whose native parts were compiled with the address and
    undefined-behaviour sanitizers, and these say nothing."""
    preloaded = [runtime("libasan.so"), runtime("libubsan.so")]
    if not all(map(os.path.isabs, preloaded)):
        pytest.skip("this compiler has no such sanitizer to preload")
    for folder in ("tracehooks", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    package = tmp_path / "tracehooks"
    for name, sources in EXTENSIONS.items():
        target = str(package / name) + sysconfig.get_config_var("EXT_SUFFIX")
        include = f"-I{sysconfig.get_path('include')}"
        files = [str(package / source) for source in sources]
        subprocess.run([*COMPILER, *SANITIZERS, include, *files, "-o", target], check=True)
    environment = os.environ | {
        "LD_PRELOAD": ":".join(preloaded),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own are many; test_lane_leaks.py counts ours
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": str(tmp_path),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "--capture=sys"]
    files = ["tests/capture/test_lane.py", "tests/capture/test_seat.py"]
    done = subprocess.run([*command, *files], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert " skipped" not in done.stdout
