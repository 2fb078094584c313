"""The layout's rules: who imports whom, what is public, what an import costs, that nothing needs torch offline."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tracehooks

ROOT = Path(__file__).parents[1]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]

PUBLIC = {
    "Config", "Diff", "Finding", "FirstNonFinite", "NonFiniteError", "Run", "Trace", "TracehooksError", "__version__",
    "attach", "audio", "checklist", "checkpoint", "diagnose", "diff", "experiments", "golden", "mask", "neutrality", "open",
    "probe", "repair", "tokens", "verify_fix",
}  # fmt: skip

VIOLATIONS = [
    ("core/names.py", "import tracehooks.stats"),
    ("stats/layout.py", "import tracehooks.capture"),
    ("capture/leaves.py", "import tracehooks.storage"),
    ("storage/layout.py", "import tracehooks.analysis"),
    ("analysis/diff.py", "import tracehooks.capture.steps"),
    ("capture/leaves.py", "import tracehooks.surface"),
    ("storage/layout.py", "import torch"),
    ("surface/cli/__init__.py", "import torch"),
    ("capture/leaves.py", "import pyarrow"),
    ("storage/layout.py", "import duckdb"),
    ("analysis/engine.py", "import pyspark"),
    ("capture/leaves.py", "import triton"),
    ("analysis/diff.py", "import rich"),
    ("core/names.py", "import rwkv_clip"),
    ("capture/leaves.py", "import tracehooks.locate"),
    ("locate/chain.py", "import tracehooks.surface"),
    ("locate/chain.py", "import tracehooks.experiments"),
    ("checkpoint/opened.py", "import torch"),
    ("checkpoint/opened.py", "import tracehooks.storage"),
    ("../rwkv_clip/train.py", "import tracehooks.core"),
]


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the packages and of the contracts."""
    folder = tmp_path_factory.mktemp("house")
    for package in ("tracehooks", "rwkv_clip"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def test_contracts_hold(copied: Path) -> None:
    """Every import contract is kept."""
    done = lint_imports(copied)
    assert done.returncode == 0, done.stdout
    assert f"{len(CONTRACTS)} kept, 0 broken" in done.stdout


@pytest.mark.parametrize(("file", "line"), VIOLATIONS)
def test_each_contract_can_fail(copied: Path, file: str, line: str) -> None:
    """An import that a contract forbids, added to a room, breaks it."""
    path = copied / "tracehooks" / file
    before = path.read_text()
    try:
        path.write_text(before + f"\n\ndef _violate():\n    {line}\n")
        done = lint_imports(copied)
    finally:
        path.write_text(before)
    assert done.returncode == 1
    assert "0 broken" not in done.stdout


def test_public_names_are_pinned() -> None:
    """What can be imported from tracehooks is exactly this, and each name can."""
    assert set(tracehooks.__all__) == PUBLIC
    for name in PUBLIC:
        assert getattr(tracehooks, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'atach'"):
        _ = tracehooks.atach


def test_the_front_door_is_small() -> None:
    """__init__ binds names and does nothing else."""
    assert len((ROOT / "tracehooks/__init__.py").read_text().splitlines()) <= 80


def test_import_is_light() -> None:
    """`import tracehooks` loads neither torch nor pyarrow, DuckDB, NumPy, rich or click."""
    heavy = ["torch", "pyarrow", "duckdb", "numpy", "rich", "click", "pandas", "pyspark"]
    code = f"import sys, tracehooks; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_import_loads_little() -> None:
    """`import tracehooks` loads only itself and some of the standard library: what makes it fast, counted."""
    code = "import sys; before = len(sys.modules); import tracehooks; print(len(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 20


def python_files() -> list[Path]:
    return sorted(path for package in ("tracehooks", "rwkv_clip") for path in (ROOT / package).rglob("*.py"))


def test_private_names_of_torch_stay_in_one_file() -> None:
    """torch._C and other private modules of torch are touched in torch_internals.py alone."""
    pattern = re.compile(
        r"torch\._(?!_version__|dynamo\.reset)|from torch\.[\w.]*\b_\w+ import|_local_tensor|_backward_hooks"
    )
    offenders = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in python_files()
        if path.name != "torch_internals.py" and "tracehooks" in path.parts
        for line in path.read_text().splitlines()
        if pattern.search(line.split("#")[0])
    ]
    assert offenders == []


def test_hooks_never_wait_for_the_device() -> None:
    """In capture and statistics nothing reads a value back to the host, but where a flush does."""
    forbidden = {"item", "cpu", "tolist", "numpy", "nonzero"}
    allowed = {
        "batches.py",
        "packing.py",
        "transfer.py",
        "findings.py",
        "trace.py",
        "optimizers.py",
        "layout.py",
        "cpu.py",
        "watch.py",
        "vanishing.py",
    }
    offenders = []
    for path in python_files():
        if path.parent.name not in ("capture", "stats") or path.name in allowed:
            continue
        calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
        attributes = (call.func for call in calls if isinstance(call.func, ast.Attribute))
        offenders += [f"{path.name}:{a.lineno} .{a.attr}()" for a in attributes if a.attr in forbidden]
    assert offenders == []


def test_files_and_functions_are_small() -> None:
    """No file of more than 450 lines, few functions of more than 60, no junk-drawer names, no global statement."""
    long_functions, functions = [], 0
    for path in python_files():
        text = path.read_text()
        assert text.count("\n") <= 450, path
        assert not re.search(r"util|helper|manager|handler", path.stem), path
        for node in ast.walk(ast.parse(text)):
            assert not isinstance(node, ast.Global), path
            if isinstance(node, ast.FunctionDef):
                functions += 1
                if (node.end_lineno or 0) - node.lineno + 1 > 60:
                    long_functions.append(f"{path.name}:{node.name}")
    assert len(long_functions) <= 0.05 * functions, long_functions


def test_the_project_speaks_of_itself_alone() -> None:
    """No file names a package registry's host, a path of somebody's machine or an issue's number."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    pattern = re.compile(r"py" + r"pi\.org|python" + r"hosted|/wo" + r"rk/|/ro" + r"ot/|iss" + r"ue #?\d")
    offenders = []
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix in {".py", ".md", ".toml", ".cpp", ".cu", ".json", ".txt", ".yml", ""} and path.is_file():
            try:
                text = path.read_text()
            except UnicodeDecodeError:
                continue
            offenders += [f"{name}: {found.group()}" for found in pattern.finditer(text)]
    assert offenders == []
