"""Whether a fix solved the right problem: runs without and with it, and a control that it should not touch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tracehooks.analysis.diff import diff
from tracehooks.core.errors import InvalidOptionError
from tracehooks.core.records import Check, Finding, RunSource, Verdict

Pair = tuple[RunSource, RunSource]
"""A run without the fix and one with it."""

SIDES = ("before", "after")

IDENTITY = ("run_id", "created", "git", "packages", "flags", "command")
"""Fields of run.json that say which run it was."""


def paired_runs(before: Sequence[RunSource], after: Sequence[RunSource], name: str) -> list[Pair]:
    """The runs without and with the fix, one by one.

    Raises:
        InvalidOptionError: not as many of one as of the other, or none.
    """
    if not before or len(before) != len(after):
        raise InvalidOptionError(
            name, f"{len(after)} runs", f"as many as without the fix ({len(before)}), and at least one"
        )
    return list(zip(before, after, strict=True))


class Fix(Verdict):
    """Whether a fix solved the right problem. Its text and its JSON are the written record."""

    def __str__(self) -> str:
        lines = [super().__str__()]
        for group, pairs in self.evidence.items():
            for number, pair in enumerate(pairs, 1):
                lines += [f"{group.removesuffix('s')} {number}, {side}: {_line_of(run)}" for side, run in pair.items()]
        return "\n".join(lines)


def judge_fix(
    pairs: Sequence[Pair],
    controls: Sequence[Pair],
    diagnose: Callable[[RunSource], Sequence[Finding]],
    *,
    tolerance: float | str = "auto",
) -> Fix:
    """Answer the questions of a fix: is the failure gone, is the control unchanged, does it hold more than once.

    A failure is what ``diagnose`` warns of.
    """
    seen = [(_failures(diagnose(before)), _failures(diagnose(after))) for before, after in pairs]
    persists = _unchanged(controls, tolerance), _holds(seen)
    checks = (_was_there(seen), _is_gone(pairs, seen), _went_as_far(pairs, seen), *persists)
    told = [
        {side: _identity(run, failures) for side, run, failures in zip(SIDES, pair, failed, strict=True)}
        for pair, failed in zip(pairs, seen, strict=True)
    ]
    control = [{side: _identity(run, ()) for side, run in zip(SIDES, pair, strict=True)} for pair in controls]
    return Fix("fix", checks, {"pairs": told, "control": control})


Seen = Sequence[tuple[Sequence[Finding], Sequence[Finding]]]


def _failures(findings: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.severity != "info"]


def _was_there(seen: Seen) -> Check:
    failed = [before for before, _ in seen if before]
    told = f"{len(failed)} of {len(seen)} runs" + (f"; {_line(failed[0][0])}" if failed else "")
    return Check("Did it fail without the fix?", len(failed) == len(seen), told)


def _is_gone(pairs: Sequence[Pair], seen: Seen) -> Check:
    """Another failure in its place is none, and what cannot be read may hold one."""
    still = [after for _, after in seen if after]
    unread = [str(problem) for _, run in pairs for problem in run.problems]
    runs = f"{len(still) or len(seen)} of {len(seen)} runs"
    told = f"{runs} fail: {_line(still[0][0])}" if still else f"{runs} are healthy"
    if unread and not still:
        return Check("Is the failure gone with it?", None, f"part of it cannot be read: {unread[0]}")
    return Check("Is the failure gone with it?", not still, told)


def _went_as_far(pairs: Sequence[Pair], seen: Seen) -> Check:
    """A run that ends before the step at which the other one failed shows nothing."""
    short = [
        f"the run ends at step {last}, the failure was at step {before[0].step}"
        for (_, run), (before, _) in zip(pairs, seen, strict=True)
        if before and before[0].step is not None and (last := _last_step(run)) < before[0].step
    ]
    return Check("Did it run as far as the failure?", not short, "; ".join(short))


def _unchanged(controls: Sequence[Pair], tolerance: float | str) -> Check:
    question = "Is the control unchanged?"
    if not controls:
        return Check(question, None, "no control was given")
    compared = [diff(before, after, tolerance=tolerance) for before, after in controls]
    changed = [found for found in compared if not found.within_tolerance]
    if not changed:
        return Check(question, True, f"{len(compared)} of {len(compared)} within tolerance")
    first = changed[0].culprits[0] if changed[0].culprits else changed[0].first
    return Check(question, False, f"{len(changed)} of {len(compared)} differ: {first}")


def _holds(seen: Seen) -> Check:
    question = "Does it hold over more than one batch, seed or checkpoint?"
    fixed = sum(bool(before) and not after for before, after in seen)
    if len(seen) == 1:
        return Check(question, None, "one pair of runs was given")
    return Check(question, fixed == len(seen), f"{fixed} of {len(seen)} pairs")


def _last_step(run: RunSource) -> int:
    steps = [run.read(table, ["step"])["step"] for table in ("tensors", "scalars")]
    return max((max(column.to_pylist()) for column in steps if len(column)), default=-1)


def _line(found: Finding) -> str:
    return f"{found.rule}: {found.message.splitlines()[0]}"


def _identity(run: RunSource, failures: Sequence[Finding]) -> dict[str, Any]:
    told = {name: run.info.get(name) for name in IDENTITY if name in run.info}
    return {"path": str(run.path or ""), **told, "failures": [*map(_line, failures)]}


def _line_of(run: Mapping[str, Any]) -> str:
    """The identity of a run in one line."""
    git, flags = run.get("git") or {}, run.get("flags") or {}
    commit = f"commit {str(git['commit'])[:12]}{' (dirty)' if git.get('dirty') else ''}" if git.get("commit") else None
    seed = f"seed {flags['seed']}" if "seed" in flags else None
    failures = run["failures"]
    more = f" and {len(failures) - 1} more" if len(failures) > 1 else ""
    told = (run["path"], run.get("run_id"), run.get("created"), commit, seed, failures[0] + more if failures else None)
    return ", ".join(str(part) for part in told if part)
