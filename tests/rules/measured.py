"""What the rules say of every run that the tests train: python -m tests.rules.measured trains them all and keeps it beside
this file; docs/rules.md shows it as a table."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

import tracehooks
from tests.rules.broken_data import DATA
from tests.rules.broken_gradients import GRADIENTS
from tests.rules.broken_objective import OBJECTIVE
from tests.rules.broken_precision import PRECISION
from tests.rules.broken_probed import PROBED
from tests.rules.broken_state import STATE
from tests.rules.broken_training import TRAINING
from tests.rules.cases import Case, Ranks, Resumed
from tests.rules.healthy_data import HEALTHY_DATA
from tests.rules.healthy_models import HEALTHY_MODELS, MEANT_MODELS
from tests.rules.healthy_steps import HEALTHY_STEPS, MEANT_STEPS

KEPT = Path(__file__).with_suffix(".jsonl")
ALL_BROKEN = (*GRADIENTS, *OBJECTIVE, *STATE, *PRECISION, *TRAINING, *DATA, *PROBED)
ALL_HEALTHY = (*HEALTHY_STEPS, *HEALTHY_MODELS, *HEALTHY_DATA)
ALL_MEANT = (*MEANT_STEPS, *MEANT_MODELS)

Build = Callable[[], Case | Ranks | Resumed]


def cases() -> dict[str, tuple[Build, str]]:
    """Every case by name, and whether it is broken, healthy, or meant (a note is right)."""
    broken = {broken.build.__name__: (broken.build, "broken") for broken in ALL_BROKEN}
    healthy: dict[str, tuple[Build, str]] = {build.__name__: (build, "healthy") for build in ALL_HEALTHY}
    return broken | healthy | {build.__name__: (build, "meant") for build in ALL_MEANT}


@cache
def kept() -> tuple[dict[str, Any], ...]:
    """What was measured last: for each case its kind and the rules that spoke, with severity and cause."""
    return tuple(json.loads(line) for line in KEPT.read_text().splitlines())


def numbers(rule: str) -> tuple[int, int, int, int]:
    """Of a rule: the cases that it is for, those that it found, healthy runs and other failures in which it spoke. In
    what may be meant a note is right."""
    wanted = {broken.build.__name__ for broken in ALL_BROKEN if broken.rule == rule}
    spoke = {row["case"]: [found for found in row["found"] if found[0] == rule] for row in kept()}
    kinds = {row["case"]: row["kind"] for row in kept()}
    alarms = [case for case, found in spoke.items() if found and kinds[case] == "healthy"]
    alarms += [case for case, found in spoke.items() if any(f[1] != "info" for f in found) and kinds[case] == "meant"]
    beside = [case for case, found in spoke.items() if found and kinds[case] == "broken" and case not in wanted]
    return len(wanted), sum(bool(spoke.get(case)) for case in wanted), len(alarms), len(beside)


def said_of(build: Build) -> list[tuple[str, str, str | None]]:
    """Train one case and ask: rule, severity and cause of each finding."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        build().record(Path(folder) / "run")
        return [(f.rule, f.severity, f.evidence.get("cause")) for f in tracehooks.diagnose(Path(folder) / "run")]


def main() -> None:
    """Train all of them."""
    torch.set_num_threads(1)
    lines = []
    for name, (build, kind) in cases().items():
        lines.append(json.dumps({"case": name, "kind": kind, "found": said_of(build)}))
        print(lines[-1], flush=True)
    KEPT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
