"""The table of how far the implementation is from the original's numbers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import oracle
from tests.rwkv_clip import originals

DESCRIBES_ANOTHER = {"wkv_cases.json"}


def test_every_file_of_numbers_is_compared():
    """No file of the original's numbers is left out."""
    files = {path.name for path in originals.ORACLE.iterdir() if path.suffix in (".json", ".npz")}
    assert {agreement.file for agreement in oracle.AGREEMENTS} == files - DESCRIBES_ANOTHER


@pytest.mark.parametrize("without", ["B32", pytest.param(None, marks=pytest.mark.slow)])
def test_no_error_is_larger_than_allowed(without):
    """Each file's largest error is within what is allowed."""
    lines = list(oracle.measure(without))
    assert len(lines) == len(oracle.AGREEMENTS) - (4 if without else 0)
    assert [line for line in lines if not line["largest_error"] <= line["allowed"]] == []


def test_the_documented_table_is_the_kept_one():
    """The table in the documentation is the one in the results, for every comparison."""
    root = Path(oracle.__file__).parents[1]
    kept = [json.loads(line) for line in (root / "benchmarks/results/oracle.jsonl").read_text().splitlines()][1:]
    assert [(line["file"], line["what"]) for line in kept] == [(a.file, a.what) for a in oracle.AGREEMENTS]
    page = (root / "docs/rwkv_clip.md").read_text(encoding="utf-8")
    for line in kept:
        row = f"| `{line['file']}` | {line['what']} | {line['largest_error']:g} | {line['allowed']:g} |"
        assert row in page, row


def test_a_difference_is_seen(monkeypatch, capsys):
    """With one weight changed, features and gradients are off, and the status says so."""
    weights = originals.generated_weights

    def changed(shapes):
        values = weights(shapes)
        values["image_model.ln1.bias"][3] += 1e-6
        return values

    monkeypatch.setattr(originals, "generated_weights", changed)
    monkeypatch.setattr(oracle, "AGREEMENTS", [a for a in oracle.AGREEMENTS if a.file == "tiny_f64.npz"])
    monkeypatch.setattr(sys, "argv", ["oracle"])
    oracle.passed.cache_clear()
    assert oracle.main() == 1
    oracle.passed.cache_clear()
    assert "tiny_f64.npz, features, logits, loss: " in capsys.readouterr().err


def test_an_error_that_is_no_number_is_the_largest():
    """A NaN does not pass for agreement."""
    assert np.isnan(oracle.error({"a": np.zeros(1), "b": np.array([np.nan])}, {"a": np.ones(1), "b": np.zeros(1)}))
