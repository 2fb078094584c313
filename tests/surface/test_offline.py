"""The front door of everything that needs no torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tracehooks
from tracehooks.core.errors import InvalidOptionError, NotARunError, UnknownNameError
from tracehooks.surface import offline
from tracehooks.testing import TraceBuilder

BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch is blocked")
sys.meta_path.insert(0, Block())
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run on disk."""
    return TraceBuilder().tensor("a", mean=1.0).tensor("b", mean=2.0).scalar("loss", 1.0).write(tmp_path / "a")


def test_open_takes_sql_conditions(run: Path) -> None:
    """`where` of an opened run is SQL."""
    assert offline.open(run).tensors(["module"], where="mean > 1.5")["module"].to_pylist() == ["b"]
    with pytest.raises(UnknownNameError, match="did you mean 'mean'"):
        offline.open(run).tensors(where="men > 1")
    with pytest.raises(NotARunError, match="not a run"):
        offline.open(run.parent)


def test_paths_and_runs_alike(run: Path) -> None:
    """Every function takes a path or an opened run."""
    opened = offline.open(str(run))
    assert offline.diff(run, opened).identical
    assert offline.first(run) is offline.first(opened) is None
    assert offline.query(run, "FROM scalars").equals(offline.query(opened, "FROM scalars"))
    assert offline.diff(opened, TraceBuilder().tensor("a", mean=1.0).run()).only_a


WRONG = {
    "open": (lambda run: offline.open(None), "path: got None, expected the path of a run directory"),
    "diagnose": (lambda run: offline.diagnose(None), "run: got None, expected a run directory's path, or a run"),
    "diff": (lambda run: offline.diff(run, 5), "run: got 5, expected a run directory's path, or a run"),
    "noise": (lambda run: offline.diff(run, run, noise="n"), "noise: got 'n', expected a list of runs that repeat A"),
    "checklist": (lambda run: offline.checklist(run, None), "symptom: got None, expected one of flat-loss, nan"),
    "query": (lambda run: offline.query({}, "FROM scalars"), "run: got 'dict', expected a run directory's path"),
    "control": (lambda run: offline.verify_fix(run, run, control="c"), "control: got 'c', expected a pair of runs"),
    "no pair": (lambda run: offline.verify_fix(run, run, [run]), "control: got '0 runs', expected as many as without"),
    "rename": (lambda run: offline.diff(run, run, rename=5), "rename: got 5, expected 'old=new'"),
    "repair": (lambda run: offline.repair(5), "path: got 5, expected the path of a run directory"),
    "columns": (lambda run: offline.open(run).tensors("step"), "columns: got 'step', expected a list of names"),
    "where": (lambda run: offline.open(run).tensors(where=5), "where: got 5, expected an SQL condition"),
    "checkpoint": (lambda run: tracehooks.checkpoint.inspect(None), "checkpoint: got None, expected the path"),
}


@pytest.mark.parametrize(("call", "message"), WRONG.values(), ids=WRONG)
def test_what_is_no_run_is_refused_in_words(run: Path, call, message: str) -> None:
    """One line says what was seen and what is expected instead."""
    with pytest.raises(InvalidOptionError, match=f"^option {message}") as caught:
        call(run)
    assert "\n" not in str(caught.value)


def test_without_torch(run: Path) -> None:
    """In a process where torch cannot be imported, a run is opened, shown, queried, searched and compared."""
    code = BLOCKED + (
        "import tracehooks\n"
        "from tracehooks.surface import offline\n"
        "from tracehooks.surface.cli import main\n"
        "path = sys.argv[1]\n"
        "opened = tracehooks.open(path)\n"
        "assert len(opened.tensors()) == 2 and tracehooks.diff(path, opened).identical\n"
        "for arguments in (['show', path], ['first', path], ['diff', path, path], ['query', path, 'FROM tensors'],\n"
        "                  ['export', path, '--table', 'tensors'], ['repair', path]):\n"
        "    try:\n"
        "        main(arguments)\n"
        "    except SystemExit as end:\n"
        "        assert end.code == 0, (arguments, end.code)\n"
        "import tracehooks.testing\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(run)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_imports_are_quick() -> None:
    """`import tracehooks` and the command line's help load neither pyarrow, DuckDB, rich nor torch."""
    code = (
        "import sys, tracehooks, tracehooks.surface.cli\n"
        "try: tracehooks.surface.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'pyarrow', 'duckdb', 'rich', 'numpy')))"
    )
    environment = {**os.environ, "PYTHONWARNINGS": "error"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
