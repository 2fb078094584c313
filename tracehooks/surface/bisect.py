"""Which commit changed the numbers: a golden batch run over commits in a worktree, halved by git's own bisect."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tracehooks.analysis.diff import Diff
from tracehooks.analysis.divergence import Divergence
from tracehooks.core.errors import BisectError
from tracehooks.surface import offline

CACHE = "tracehooks-bisect"
"""Directory in the repository's .git that keeps the run of each commit."""
PLACE = "{}"
"""What in the command stands for the run directory that it is to write."""


@dataclass(frozen=True)
class Bisection:
    """The commit that changed the numbers."""

    commit: str
    subject: str
    first: Divergence | None
    """The first site that it changed."""
    diff: Diff
    """Between the good commit's run and this one's."""
    runs: int
    """Commands that were run; commits in the cache cost none."""
    tested: tuple[tuple[str, str], ...]
    """Each commit that was tested, in that order, and good, bad or skip."""
    candidates: tuple[str, ...] = ()
    """Where commits before it were skipped: all that may be the first bad one."""

    def __str__(self) -> str:
        lines = [f"first commit that changed the numbers: {self.commit[:12]} {self.subject}"]
        if len(self.candidates) > 1:
            lines.append(
                f"or one of {', '.join(item[:12] for item in self.candidates)}, of which some could not be run"
            )
        lines += [f"{len(self.tested)} commits tested, {self.runs} run", str(self.diff)]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        plain = {name: getattr(self, name) for name in ("commit", "subject", "runs", "tested", "candidates")}
        return {**plain, "first": self.first and asdict(self.first), "diff": self.diff.to_json()}


def bisect(
    good: str,
    bad: str,
    command: Sequence[str],
    *,
    repository: str | os.PathLike[str] = ".",
    tolerance: float | str = "auto",
    rename: Sequence[str] = (),
    repeats: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> Bisection:
    """Find the first commit after ``good`` whose numbers differ from it.

    Args:
        good, bad: revisions; bad's numbers differ.
        command: records a run: ``{}`` in it stands for the directory to write. Without it, the newest run that it leaves
            in its working directory is taken, such as attach() makes under runs/. A commit on which it exits with
            another status than 0 or leaves no run is skipped.
        repeats: further runs of the good commit, to measure its noise.

    Raises:
        BisectError: no repository, no such revision, the command does not run on the good commit, or the bad commit's
            numbers are the good one's.
    """
    root = Path(repository)
    commits = {name: _git(root, "rev-parse", "--verify", f"{revision}^{{commit}}") for name, revision in
               (("good", good), ("bad", bad))}  # fmt: skip
    cache = Path(_git(root, "rev-parse", "--path-format=absolute", "--git-common-dir")) / CACHE / _digest(command)
    with _worktree(root, commits["good"]) as tree:
        runner = _Runner(tree, cache, list(command), say)
        reference = runner.run(commits["good"])
        if reference is None:
            raise BisectError(f"the command does not run on the good commit {commits['good'][:12]}; {runner.why}")
        noise = [run for run in (runner.run(commits["good"], number) for number in range(1, repeats + 1)) if run]
        diffs: dict[str, Diff] = {}

        def judged(commit: str) -> str:
            run = runner.run(commit)
            if run is None:
                return "skip"
            diffs[commit] = offline.diff(reference, run, tolerance=tolerance, rename=list(rename) or None, noise=noise)
            return "good" if diffs[commit].within_tolerance else "bad"

        tested, found = _halve(tree, commits, judged, say)
        for commit in found:
            if commit not in diffs:  # the bad commit itself is tested last, and only if it is the answer
                tested.append((commit, judged(commit)))
        changed = [commit for commit in found if commit in diffs and not diffs[commit].within_tolerance]
        if not changed:
            raise BisectError(f"no commit after {commits['good'][:12]} that runs has other numbers, up to {bad}")
        subject = _git(root, "show", "-s", "--format=%s", changed[0])
        told = diffs[changed[0]]
        return Bisection(changed[0], subject, told.first, told, runner.runs, tuple(tested), tuple(found))


def _halve(
    tree: Path, commits: dict[str, str], judged: Callable[[str], str], say: Callable[[str], None]
) -> tuple[list[tuple[str, str]], list[str]]:
    """What git bisect asks for, and the commits that it is left with: one, or several where some were skipped."""
    tested: list[tuple[str, str]] = []
    told = _git(tree, "bisect", "start", commits["bad"], commits["good"])
    while not (found := _first_bad(told)):
        commit = _git(tree, "rev-parse", "HEAD")
        answer = judged(commit)
        tested.append((commit, answer))
        say(f"{commit[:12]} {answer}: {_git(tree, 'show', '-s', '--format=%s', commit)}")
        _git(tree, "checkout", "--force", "--quiet", commit)  # what the command changed must not be in git's way
        told = _git(tree, "bisect", answer, accept=(0, 2))
    _git(tree, "bisect", "reset", accept=(0, 1))
    return tested, found


def _first_bad(told: str) -> list[str]:
    """The commits in git's last words; none while it goes on."""
    lines = told.splitlines()
    for position, line in enumerate(lines):
        if line.endswith("is the first bad commit"):
            return [line.split()[0]]
        if line.startswith("The first bad commit could be any of"):
            return [item.strip() for item in lines[position + 1 :] if len(item.strip()) == 40]
    return []


class _Runner:
    """Runs the command on commits, once each."""

    def __init__(self, tree: Path, cache: Path, command: list[str], say: Callable[[str], None]) -> None:
        self._tree, self._cache, self._command, self._say = tree, cache, command, say
        # Two commits that are checked out within a second would share compiled Python where a file keeps its size.
        self._environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        self.runs = 0
        self.why = ""
        """Why the last command gave no run."""

    def run(self, commit: str, repeat: int = 0) -> Path | None:
        """The run of a commit; None where the command does not run."""
        kept = self._cache / (commit if not repeat else f"{commit}-{repeat}")
        outcome = kept / "outcome.json"
        if outcome.exists():
            self.why = json.loads(outcome.read_text())["why"]
            return None if self.why else kept / "run"
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir(parents=True)
        _git(self._tree, "checkout", "--force", "--quiet", commit)
        self.runs += 1
        self.why = self._made(kept)
        outcome.write_text(json.dumps({"why": self.why, "command": self._command}))
        return None if self.why else kept / "run"

    def _made(self, kept: Path) -> str:
        """Run the command and keep its run; what went wrong, or nothing."""
        before = set(self._tree.rglob("run.json"))
        command = [part.replace(PLACE, str(kept / "run")) for part in self._command]
        with (kept / "output.txt").open("wb") as output:
            try:
                done = subprocess.run(
                    command, cwd=self._tree, env=self._environment, stdout=output, stderr=subprocess.STDOUT, check=False
                )
            except OSError as error:
                return f"{command[0]}: {error.strerror}"
        if done.returncode:
            return f"it ended with {done.returncode}, see {kept / 'output.txt'}"
        if not (kept / "run" / "run.json").exists():
            made = sorted(set(self._tree.rglob("run.json")) - before, key=lambda path: path.stat().st_mtime)
            if not made:
                return f"it left no run in its working directory, and {PLACE} is not in it"
            shutil.move(made[-1].parent, kept / "run")
        return ""


@contextmanager
def _worktree(repository: Path, commit: str) -> Iterator[Path]:
    """A worktree of its own, so that the checkout of whoever asks stays as it is."""
    with tempfile.TemporaryDirectory(prefix="tracehooks-bisect-") as folder:
        tree = Path(folder) / "tree"
        _git(repository, "worktree", "add", "--quiet", "--detach", str(tree), commit)
        try:
            yield tree
        finally:
            _git(repository, "worktree", "remove", "--force", str(tree))


def _digest(command: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(command).encode()).hexdigest()[:16]


def _git(where: Path, *arguments: str, accept: tuple[int, ...] = (0,)) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=where, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BisectError(f"git cannot be run in {where}: {error.strerror}") from error
    if done.returncode not in accept:
        raise BisectError(f"git {' '.join(arguments[:3])}: {(done.stderr or done.stdout).strip().splitlines()[-1]}")
    return done.stdout.strip()
