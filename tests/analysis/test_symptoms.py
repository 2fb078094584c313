"""The checklist of a symptom: every cause answered, in order, with what rules it out or what is missing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import tracehooks
from tests.rules.broken_data import empty_captions
from tests.rules.broken_gradients import one_module_forgotten
from tests.rules.cases import Case, Ranks, Resumed, trained
from tests.rules.healthy_models import classified
from tests.rules.parts import mlp, regression
from tracehooks.analysis.rules import RULES
from tracehooks.analysis.symptoms import SYMPTOMS, Checklist, checklist, symptoms_of
from tracehooks.testing import TraceBuilder

OF_NO_SYMPTOM = {
    "frozen_param_changed",
    "frozen_buffer_changed",
    "recomputation_differs",
    "unequal_ranks",
    "similar_across_runs",
}
"""Invariants whose violation shows in no one way."""


def recorded(case: Case | Ranks | Resumed, path: Path) -> Path:
    """The case's run."""
    torch.manual_seed(0)
    case.record(path)
    return path


def test_causes_name_rules_that_exist() -> None:
    """Each rule on a checklist is in the catalogue, each rule of the catalogue is on a checklist, and each cause has a rule
    or something to ask."""
    known = {rule.name for rule in RULES}
    for _, causes in SYMPTOMS.values():
        assert len({cause.says for cause in causes}) == len(causes)
        for cause in causes:
            assert set(cause.rules) <= known
            assert cause.rules or cause.ask
    assert {name for name in known if not symptoms_of(name)} == OF_NO_SYMPTOM


def test_what_is_found_comes_first_then_what_is_not_known(tmp_path: Path) -> None:
    """A module that no optimizer holds: the cause that it is comes first, then what the trace cannot tell, then what is
    ruled out, each by a number."""
    found = tracehooks.checklist(recorded(one_module_forgotten(), tmp_path / "run"), "flat-loss")
    first = found.items[0]
    assert (first.status, first.cause) == ("found", "parameters are frozen, or no optimizer holds them")
    assert [finding.rule for finding in first.findings] == ["param_not_in_optimizer"]
    assert [item.status for item in found.items] == sorted(
        (item.status for item in found.items), key=("found", "not known", "ruled out").index
    )
    (rates,) = (item for item in found.of("ruled out") if "learning rate" in item.cause)
    assert rates.ruled_out["zero_lr"] == "the learning rate goes up to 0.01 and is zero in 0 of 8 steps"
    assert all(re.search(r"\d", text) for item in found.items for text in item.ruled_out.values())


def test_what_cannot_be_known_says_what_to_record_or_which_experiment_to_run(tmp_path: Path) -> None:
    """A short run tells neither whether the loss is flat nor whether the model has the capacity."""
    found = tracehooks.checklist(recorded(one_module_forgotten(), tmp_path / "run"), "flat-loss")
    unknown = {item.cause: item for item in found.of("not known")}
    assert unknown["the loss really is flat"].missing["loss_not_decreasing"].startswith("50 or more losses")
    assert "experiments.overfit" in unknown["the model lacks the capacity"].ask


def test_updates_that_are_all_zero_are_known(tmp_path: Path) -> None:
    """At a learning rate of zero nothing is missing: the rules that read updates say that there are none above zero."""
    model = mlp(6, 8, 1)
    case = trained(model, regression, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    found = tracehooks.checklist(recorded(case, tmp_path / "run"), "flat-loss")
    (rates,) = (item for item in found.items if "learning rate" in item.cause)
    assert [finding.rule for finding in rates.findings] == ["zero_lr"]
    told = "steps change 0 of 4 parameters: each update is exactly zero in 8 steps"
    assert (rates.ruled_out, rates.missing) == ({"update_ratio": told, "clipped_away": told}, {})


def test_a_condition_that_never_varies_explains_why_it_is_ignored(tmp_path: Path) -> None:
    """Empty captions are the first item; that gradients reach their path is ruled out as a cause."""
    found = tracehooks.checklist(recorded(empty_captions(), tmp_path / "run"), "ignores-condition")
    assert found.items[0].cause == "the condition is absent, or never varies"
    assert [finding.rule for finding in found.findings] == ["constant_input"]


@pytest.mark.parametrize("symptom", SYMPTOMS)
def test_a_healthy_run_has_no_cause(symptom: str, tmp_path: Path) -> None:
    """Nothing is found, and something is ruled out where anything was recorded of it."""
    found = tracehooks.checklist(recorded(classified(), tmp_path / "run"), symptom)
    assert found.findings == ()
    assert any(item.ruled_out for item in found.items)


def test_nothing_is_ruled_out_by_nothing() -> None:
    """An empty trace rules no cause out."""
    run = TraceBuilder().run()
    assert all(item.status == "not known" for symptom in SYMPTOMS for item in checklist(run, symptom).items)


def test_findings_of_the_control_are_left_out(tmp_path: Path) -> None:
    """What the control has as well is ruled out, and says by what."""
    path = recorded(one_module_forgotten(), tmp_path / "run")
    found = tracehooks.checklist(path, "flat-loss", control=path)
    assert found.findings == ()
    told: dict[str, Any] = {rule: text for item in found.items for rule, text in item.ruled_out.items()}
    assert told["param_not_in_optimizer"] == "all 1 findings are those of the control"


def test_an_unknown_symptom_lists_the_nearest(tmp_path: Path) -> None:
    """A slip is an error with the name that was meant."""
    with pytest.raises(tracehooks.TracehooksError, match="did you mean 'too-good'"):
        checklist(TraceBuilder().run(), "to-good")


def test_the_verdict_of_an_experiment_answers(tmp_path: Path) -> None:
    """A model without the capacity for its batch: what no rule can see is found by the verdict that the trace keeps, and
    what the experiment answers with yes is ruled out."""
    model, (x, y) = torch.nn.Linear(2, 1), (torch.randn(32, 2), torch.randn(32, 1))

    def loss_fn(m: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return (m(batch[0]) - batch[1]).square().mean()

    with tracehooks.attach(model, tmp_path / "run", quiet=True) as trace:
        trace.verdict(tracehooks.experiments.overfit(model, loss_fn, (x, y), steps=30, quiet=True))
    found = tracehooks.checklist(tmp_path / "run", "flat-loss")
    assert found.items[0].cause == "the model lacks the capacity"
    assert "Can the model represent the task?" in found.items[0].findings[0].message
    assert "targets are random" in [item.cause for item in found.of("ruled out")]


def test_json_holds_everything(tmp_path: Path) -> None:
    """Every item with its status, findings as plain values."""
    found = tracehooks.checklist(recorded(one_module_forgotten(), tmp_path / "run"), "flat-loss")
    plain = found.to_json()
    assert isinstance(found, Checklist)
    assert [item["status"] for item in plain["items"]] == [item.status for item in found.items]
    assert plain["items"][0]["findings"][0]["rule"] == "param_not_in_optimizer"
