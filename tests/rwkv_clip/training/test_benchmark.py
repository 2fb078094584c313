"""The benchmark of a traced training step."""

from __future__ import annotations

import contextlib
import json
import sys

import pytest
import torch

from benchmarks import training


@pytest.fixture
def small(monkeypatch, small_flags):
    """The smallest model in the place of those that are measured."""
    monkeypatch.setattr(training, "CONFIGS", {"digits": [*small_flags, "--batch-size", "6"]})
    monkeypatch.setattr(sys, "argv", ["training", "--config", "digits", "--rounds", "1", "--seconds", "0.0"])


def test_a_line_has_the_throughput_of_every_way_to_train(small, monkeypatch, capfd):
    """Of each configuration it prints images and tokens a second, bare and traced, and ratios; then the demonstration."""
    monkeypatch.setattr(training, "DEMO", [*training.DEMO, *training.CONFIGS["digits"], "--epochs", "1"])
    training.main()
    _, line, demonstrated = map(json.loads, capfd.readouterr().out.splitlines())
    assert (line["batch"], line["context"]) == (6, 12)
    assert line["tokens_per_second"] == pytest.approx(12 * line["images_per_second"], rel=0.05)
    for name in training.TRACED:
        assert line[name] > 0
        traced = line["images_per_second"] / line[name]
        assert line[f"{name} images_per_second"] == pytest.approx(traced, rel=0.05)
    assert demonstrated["steps"] == 8
    assert 0 <= demonstrated["zero_shot_accuracy"] <= 1


def test_a_trace_that_changes_the_run_is_not_measured(small, monkeypatch, capsys):
    """When a traced step is not the bare one nothing is reported, and the status is 1."""
    traced = training.traced

    @contextlib.contextmanager
    def meddling(run, options):
        with traced(run, options), torch.no_grad():
            run.bare.logit_scale.add_(0.0 if options is None else 1e-6)
            with torch.enable_grad():
                yield

    monkeypatch.setattr(training, "traced", meddling)
    with pytest.raises(SystemExit) as ended:
        training.main()
    assert ended.value.code == 1
    assert capsys.readouterr().out == ""
