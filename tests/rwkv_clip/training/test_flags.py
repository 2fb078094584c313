"""Every flag of ``python -m rwkv_clip.train`` does something: one proof each, and none may be missing."""

from __future__ import annotations

import pytest

from rwkv_clip.training.flags import build_parser
from tests.rwkv_clip.training import flags_of_data, flags_of_models, flags_of_runs
from tests.rwkv_clip.training.flag_bench import Bench

PROOFS = flags_of_data.PROOFS | flags_of_models.PROOFS | flags_of_runs.PROOFS


@pytest.fixture
def bench(tmp_path, small_flags, picture_flags, monkeypatch, capsys):
    return Bench(tmp_path, small_flags, picture_flags, monkeypatch, capsys)


def flags() -> list[str]:
    return [a.option_strings[-1] for a in build_parser()._actions if a.dest != "help"]


@pytest.mark.parametrize("flag", flags())
def test_a_flag_does_something(bench, flag):
    """Each flag of --help has a proof beside this file, and it holds."""
    assert flag in PROOFS, f"{flag} has no proof that it does anything"
    PROOFS[flag](bench)


def test_every_proof_is_of_a_flag():
    """No proof is left of a flag that is gone."""
    assert set(PROOFS) == set(flags())
