"""What probes of tokens and audio leave in a trace, judged: built traces, one number of them wrong at a time."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tracehooks.analysis.rules import diagnose, judge
from tracehooks.testing import MemoryRun, TraceBuilder

TOKENS = {"padding": 0.2, "distinct": 30.0, "longest_repeat": 3.0, "distinct_4grams": 0.98, "out_of_vocabulary": 0.0}
AUDIO = {"rms_dbfs/0": -18.0, "peak/0": 0.8, "clipped/0": 0.0, "silent/0": 0.05, "dc_offset/0": 0.0}


def tokens(site: str, numbers: Mapping[str, float]) -> MemoryRun:
    """Six looks at 4 sequences of 64 tokens."""
    trace = TraceBuilder()
    for step in range(6):
        trace.step(step).tensor("", site, "probe", dtype="int64", shape=(4, 64))
        for name, value in {**TOKENS, **numbers}.items():
            trace.scalar(f"tokens/{site}/{name}", value)
    return trace.run()


def audio(stages: Mapping[str, Mapping[str, float]]) -> MemoryRun:
    """Three looks at each stage, in this order."""
    trace = TraceBuilder()
    for step in range(3):
        trace.step(step)
        for site, numbers in stages.items():
            trace.tensor("", site, "probe", shape=(2, 1, 24_000))
            for name, value in {**AUDIO, **numbers}.items():
                trace.scalar(f"audio/{site}/{name}", value)
    return trace.run()


@pytest.mark.parametrize(
    ("site", "numbers", "rule", "cause"),
    [
        ("ids", {"out_of_vocabulary": 2.0}, "out_of_vocabulary", "out_of_vocabulary"),
        ("ids", {"padding": 0.9}, "padding_share", "padded_to_the_longest"),
        ("generated", {"longest_repeat": 40.0}, "repetition", "repeats"),
        ("generated", {"distinct_4grams": 0.1}, "repetition", "repeats"),
        ("generated", {"distinct": 1.0}, "repetition", "repeats"),
        ("generated", {"padding": 0.0}, "stop_never_reached", "never_stops"),
        ("caption", {"padding": 0.0}, "condition_truncated", "cut_at_the_limit"),
    ],
)
def test_tokens_that_are_wrong_are_named(site: str, numbers: Mapping[str, float], rule: str, cause: str) -> None:
    """The one number that is wrong gives the one finding that is about it."""
    found = diagnose(tokens(site, numbers))
    assert [(finding.rule, finding.evidence["cause"], finding.site) for finding in found] == [(rule, cause, site)]


@pytest.mark.parametrize("site", ["ids", "generated", "caption"])
def test_ordinary_tokens_give_nothing(site: str) -> None:
    """Not even a note."""
    assert diagnose(tokens(site, {})) == []


def test_the_first_silent_stage_is_named_first() -> None:
    """Sound goes in, the sum of the channels is silent and so is all that follows."""
    found = diagnose(audio({"source": {}, "mono": {"silent/0": 1.0}, "decoded": {"silent/0": 0.97}}))
    assert [(finding.rule, finding.site) for finding in found] == [
        ("silent_audio", "mono"),
        ("silent_audio", "decoded"),
    ]


def test_clipped_audio_is_named() -> None:
    """Two per cent of the samples of one stage are at full scale."""
    (found,) = diagnose(audio({"source": {}, "scaled": {"clipped/0": 0.02, "peak/0": 1.0}}))
    assert (found.rule, found.site, found.evidence["peak"]) == ("clipped_audio", "scaled", 1.0)


def test_ordinary_audio_is_ruled_out_with_numbers() -> None:
    """Music with pauses and a normal level is neither silent nor clipped."""
    run = audio({"source": {}, "decoded": {"silent/0": 0.3}})
    told = {judgement.rule.name: judgement.because for judgement in judge(run)}
    assert told["silent_audio"] == "5% of the frames of source are silent; 30% of the frames of decoded are silent"
    assert diagnose(run) == []
