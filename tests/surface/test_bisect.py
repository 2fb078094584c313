"""A toy repository of twenty commits, one of which changes the numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tracehooks.core.errors import BisectError
from tracehooks.surface.bisect import Bisection, bisect
from tracehooks.surface.cli import main

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from tracehooks.testing import TraceBuilder
from model import SCALE, numbers
builder = TraceBuilder()
for name, mean in numbers():
    builder.tensor(name, mean=mean)
builder.write(sys.argv[1] if len(sys.argv) > 1 else "runs/one")
"""
MODEL = """
SCALE = {scale}
def numbers():
    return [("first", 1.0), ("second", 2.0 * SCALE), ("third", 3.0 * SCALE)]
"""


def git(where: Path, *arguments: str) -> str:
    """One git command."""
    return subprocess.run(["git", *arguments], cwd=where, capture_output=True, text=True, check=True).stdout.strip()


def twenty_commits(folder: Path, broken: tuple[int, ...] = ()) -> Path:
    """A repository whose fourteenth commit changes a number."""
    git(folder, "init", "--quiet", "--initial-branch", "main")
    git(folder, "config", "user.email", "nobody@example.org")
    git(folder, "config", "user.name", "nobody")
    (folder / "record.py").write_text(SCRIPT.format(root=str(ROOT)))
    for number in range(20):
        end = "raise SystemExit(1)" if number in broken else ""
        (folder / "model.py").write_text(MODEL.format(scale=1.0 if number < 13 else 1.5) + end)
        (folder / "notes.txt").write_text(f"{number}")
        git(folder, "add", ".")
        git(folder, "commit", "--quiet", "-m", f"commit {number}")
    return folder


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of its commits run."""
    return twenty_commits(tmp_path_factory.mktemp("repository"))


def found_in(repository: Path, *command: str) -> Bisection:
    """A search over all of it."""
    good = git(repository, "rev-list", "--max-parents=0", "HEAD")
    return bisect(good, "main", [sys.executable, "record.py", *command], repository=repository)


@pytest.mark.parametrize("place", [(), ("{}",)])
def test_the_commit_and_the_first_site_are_found_in_few_runs(repository: Path, place: tuple[str, ...]) -> None:
    """Five commits tested at most, the run of the good one beside them; the checkout stays as it is."""
    (repository / "untracked.txt").write_text("mine")
    head = git(repository, "rev-parse", "HEAD")
    found = found_in(repository, *place)
    assert found.subject == "commit 13"
    assert found.first is not None
    assert found.first.module == "second"
    assert len(found.tested) <= 5
    assert found.runs <= 6
    assert git(repository, "rev-parse", "HEAD") == head
    assert git(repository, "status", "--porcelain") == "?? untracked.txt"
    assert len(git(repository, "worktree", "list").splitlines()) == 1
    again = found_in(repository, *place)
    assert (again.commit, again.runs) == (found.commit, 0)


def test_no_commit_runs_what_another_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that keeps its size and its time from commit to commit, as in a quick checkout, is run as it is."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    repository = twenty_commits(tmp_path)
    script = "import os, runpy, sys; os.utime('model.py', (1, 1)); sys.path.insert(0, ''); runpy.run_path('record.py')"
    good = git(repository, "rev-list", "--max-parents=0", "HEAD")
    assert bisect(good, "main", [sys.executable, "-c", script, "{}"], repository=repository).subject == "commit 13"


@pytest.mark.parametrize(("broken", "candidates"), [((9,), 1), ((12,), 2)])
def test_commits_that_do_not_run_are_skipped(tmp_path: Path, broken: tuple[int, ...], candidates: int) -> None:
    """A commit on which the command fails is neither good nor bad; what may be the first beside the named one is told."""
    found = found_in(twenty_commits(tmp_path, broken), "{}")
    assert found.subject == "commit 13"
    assert len(found.candidates) == candidates
    assert "skip" in {answer for _, answer in found.tested}
    assert ("or one of" in str(found)) == (candidates > 1)


def test_errors_say_what_was_seen(repository: Path) -> None:
    """An unknown revision, a command that fails or leaves no run, equal numbers, no repository: each is one line."""
    good = git(repository, "rev-list", "--max-parents=0", "HEAD")
    for command, bad, expected in (
        (["record.py"], "nothing", "git rev-parse --verify nothing"),
        (["none.py"], "main", "does not run on the good commit .*it ended with 2"),
        (["-c", "pass"], "main", "it left no run in its working directory, and {} is not in it"),
        (["record.py"], "main~15", "no commit after .* that runs has other numbers"),
    ):
        with pytest.raises(BisectError, match=expected.replace("{}", r"\{\}")):
            bisect(good, bad, [sys.executable, *command], repository=repository)
    with pytest.raises(BisectError, match="git rev-parse"):
        bisect("a", "b", ["true"], repository="/")


def test_command_line(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tracehooks bisect prints the commit and what it changed."""
    monkeypatch.chdir(repository)
    good = git(repository, "rev-list", "--max-parents=0", "HEAD")
    arguments = ["bisect", "--good", good, "--bad", "main", "--json", "--", sys.executable, "record.py"]
    done = CliRunner().invoke(main, arguments, prog_name="tracehooks")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["first"]["module"] == "second"
    told = CliRunner().invoke(main, [name for name in arguments if name != "--json"], prog_name="tracehooks")
    assert "first commit that changed the numbers: " in told.stdout
    assert "commit 13" in told.stdout
