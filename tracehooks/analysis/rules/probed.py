"""Tokens and audio that probes saw: invalid, padded, repeated, silent, clipped."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tracehooks.analysis.rules.facts import LASTING, Facts, Series
from tracehooks.analysis.rules.masks import of_positions
from tracehooks.analysis.rules.rule import Answers, Clear, Found, rule

TOKENS = "tokens that a probe saw: tracehooks.tokens(ids, name, vocab_size=…, pad=…)"
AUDIO = "audio that a probe saw: tracehooks.audio(x, name, sample_rate=…), one after each stage"
PADDING = 0.8
REPEATED = 0.5
DISTINCT = 0.3
SILENT = 0.9
CLIPPED = 0.01


@rule(
    sees="token ids that the vocabulary does not have",
    threshold="one such id",
    source="an id outside of an embedding fails on the CPU and may read foreign memory elsewhere; a codebook's offset "
    "added twice, or another tokenizer than the model's",
    needs=TOKENS,
    next_check="which tokenizer made the ids, and how many entries has the embedding?",
    evidence=("site", "count", "cause"),
    causes=("out_of_vocabulary",),
)
def out_of_vocabulary(facts: Facts) -> Answers:
    for site, found in _tokens(facts, "out_of_vocabulary"):
        outside = found.values > 0
        if outside.any():
            text = (
                f"{int(found.values.max())} ids of {site} are outside of the vocabulary, in {int(outside.sum())} "
                f"of {len(outside)} looks"
            )
            evidence = {"site": site, "count": int(found.values.sum()), "cause": "out_of_vocabulary"}
            yield Found("error", text, int(found.steps[outside][0]), site, evidence)
        yield Clear(f"0 ids of {site} are outside of the vocabulary in {len(outside)} looks")


@rule(
    sees="sequences that are mostly padding",
    threshold=f"more than {PADDING:.0%} of the positions in the median of {LASTING} or more looks, by a probe of "
    "tokens or by a mask of two dimensions named attention_mask or after padding",
    source="work on padding is lost: a batch costs what its longest sequence costs; sort by length, or pack",
    needs=TOKENS + ", or a mask of the positions",
    next_check="print the lengths of one batch: does one long sequence stretch all others, or is the length fixed?",
    evidence=("site", "share", "count", "cause"),
    causes=("padded_to_the_longest",),
)
def padding_share(facts: Facts) -> Answers:
    for site, share, looks, step in _padding(facts):
        if share > PADDING and looks >= LASTING:
            evidence = {"site": site, "share": share, "count": looks, "cause": "padded_to_the_longest"}
            yield Found("warning", f"{share:.0%} of the positions of {site} are padding", step, site, evidence)
        yield Clear(f"{share:.0%} of the positions of {site} are padding")


@rule(
    sees="tokens that repeat themselves: long stretches that come again, few distinct n-grams, or one token in all",
    threshold=f"in the median of the last third of the looks the longest repeat covers {REPEATED:.0%} of a sequence, "
    f"or less than {DISTINCT:.0%} of the 4-grams are distinct, or there is one distinct id",
    source="Welleck et al., 2020, Neural text generation with unlikelihood training: repeated n-grams; Holtzman et "
    "al., 2020",
    needs=TOKENS + " on what is generated, or on the training sequences",
    next_check="compare several temperatures, top-k and top-p; where training sequences repeat as well, look at the data",
    evidence=("site", "longest_repeat", "length", "distinct_4grams", "distinct", "cause"),
    causes=("repeats",),
)
def repetition(facts: Facts) -> Answers:
    lengths = {_site(seen.module, seen.slot): seen.shape[-1] for seen in facts.of_phase("probe") if seen.shape}
    for site, found in _tokens(facts, "longest_repeat"):
        longest, length = _late(found), lengths.get(site, 0)
        grams = _late(facts.scalar(f"tokens/{site}/distinct_4grams"), 1.0)
        distinct = _late(facts.scalar(f"tokens/{site}/distinct"), 2.0)
        told = f"the longest repeat of {site} has {longest:.0f} of {length} tokens, {grams:.0%} of the 4-grams are distinct"
        if length >= 8 and (longest >= REPEATED * length or grams < DISTINCT or distinct <= 1):
            evidence = {"site": site, "longest_repeat": longest, "length": length, "distinct_4grams": grams,
                        "distinct": distinct, "cause": "repeats"}  # fmt: skip
            yield Found("warning", told, int(found.steps[0]), site, evidence)
        yield Clear(told)


@rule(
    sees="sequences none of which ever ends: the stop token, and so padding after it, never comes",
    threshold=f"a probe named gen…, sampled… or output… that is given pad= sees none in {LASTING} or more looks; a note",
    source="generation runs to its longest length where the stop token is never likely, or never in the targets",
    needs="generated tokens that a probe saw: tracehooks.tokens(ids, 'generated', pad=stop_or_pad_id)",
    next_check="is the stop token in the training targets, and does the loss count it?",
    evidence=("site", "count", "cause"),
    causes=("never_stops",),
)
def stop_never_reached(facts: Facts) -> Answers:
    for site, found in _tokens(facts, "padding"):
        if not site.rpartition(".")[2].startswith(("gen", "sampled", "output")):
            continue
        if not found.values.any() and len(found.values) >= LASTING:
            evidence = {"site": site, "count": len(found.values), "cause": "never_stops"}
            yield Found(
                "info", f"no sequence of {site} ends before its longest length", int(found.steps[0]), site, evidence
            )
        yield Clear(f"{float(np.median(found.values)):.0%} of the positions of {site} lie after the end")


@rule(
    sees="audio that is silent in some stage, where what came before it was not",
    threshold=f"{SILENT:.0%} of the frames below -60 dBFS in the median, in each channel; the first silent stage in "
    "order of execution is named",
    source="EBU Tech 3341 takes blocks below -70 LUFS as silence; 16-bit dither is at about -93 dBFS",
    needs=AUDIO,
    next_check="listen to the stage before: is it the source, the crop, the sum of channels, the codec, or the scale?",
    evidence=("site", "share", "rms_dbfs", "count", "cause"),
    causes=("silent",),
)
def silent_audio(facts: Facts) -> Answers:
    for site, shares in _audio(facts, "silent"):
        share = min(float(np.median(series.values)) for series in shares)
        levels = dict(_audio(facts, "rms_dbfs")).get(site, [])
        level = max((float(np.median(series.values)) for series in levels), default=-200.0)
        if share >= SILENT:
            text = f"{share:.0%} of the frames of {site} are silent, its level is {level:.0f} dBFS"
            evidence = {"site": site, "share": share, "rms_dbfs": level, "count": len(shares), "cause": "silent"}
            yield Found("warning", text, int(shares[0].steps[0]), site, evidence)
        yield Clear(f"{share:.0%} of the frames of {site} are silent")


@rule(
    sees="audio that is clipped: samples at full scale",
    threshold=f"more than {CLIPPED:.0%} of the samples of a channel in the median",
    source="a sine of full scale has 0.5 % of its 16-bit samples at the largest value; music of normal level has next "
    "to none",
    needs=AUDIO,
    next_check="is a gain applied twice, or an integer signal read as floating without a division?",
    evidence=("site", "share", "peak", "count", "cause"),
    causes=("clipped",),
)
def clipped_audio(facts: Facts) -> Answers:
    for site, shares in _audio(facts, "clipped"):
        share = max(float(np.median(series.values)) for series in shares)
        peaks = dict(_audio(facts, "peak")).get(site, [])
        peak = max((float(series.values.max()) for series in peaks), default=0.0)
        if share > CLIPPED:
            evidence = {"site": site, "share": share, "peak": peak, "count": len(shares), "cause": "clipped"}
            yield Found(
                "warning",
                f"{share:.1%} of the samples of {site} are at full scale",
                int(shares[0].steps[0]),
                site,
                evidence,
            )
        yield Clear(f"{share:.1%} of the samples of {site} are at full scale, its peak is {peak:.3g}")


def _padding(facts: Facts) -> Iterator[tuple[str, float, int, int]]:
    """Where padding was counted, its share in the median, in how many looks, and since when: by probes, and by masks of
    positions that are named so."""
    for site, found in _tokens(facts, "padding"):
        yield site, float(np.median(found.values)), len(found.values), int(found.steps[0])
    for mask in of_positions(facts):
        if "attention_mask" in mask["slot"] or "pad" in mask["slot"]:
            yield mask["slot"], 1 - mask["share"], mask["passes"], mask["first"]


def _tokens(facts: Facts, what: str) -> Iterator[tuple[str, Series]]:
    for name, series in facts.scalars("tokens/").items():
        site, _, number = name.removeprefix("tokens/").rpartition("/")
        if number == what:
            yield site, series


def _audio(facts: Facts, what: str) -> Iterator[tuple[str, list[Series]]]:
    """The channels of each probe, in order of execution."""
    found: dict[str, list[Series]] = {}
    for name, series in facts.scalars("audio/").items():
        site, number, _ = name.removeprefix("audio/").rsplit("/", 2)
        if number == what:
            found.setdefault(site, []).append(series)
    order = {_site(seen.module, seen.slot): seen.order for seen in facts.of_phase("probe")}
    yield from sorted(found.items(), key=lambda item: order.get(item[0], 0))


def _site(module: str, slot: str) -> str:
    return f"{module}.{slot}".lstrip(".")


def _late(series: Series, missing: float = 0.0) -> float:
    third = len(series.values) // 3
    return float(np.median(series.values[-third - 1 :])) if len(series.values) else missing


RULES = (out_of_vocabulary, padding_share, repetition, stop_never_reached, silent_audio, clipped_audio)
