"""Training and validation data: what they share."""

from __future__ import annotations

import re

from tracehooks.analysis.rules import needs
from tracehooks.analysis.rules.facts import Facts
from tracehooks.analysis.rules.rule import Answers, Clear, Found, listed, rule

OVERLAP = 2
NEAR_BITS = 3
"""Of 64: for independent samples the chance of so few differing bits is 2e-15 a pair."""
DENSER = 2.0
COMPARED = 4096
"""Samples of each split that are compared, all with all."""
WINDOW = re.compile(r"(?P<source>.*)@(?P<start>\d+(?:\.\d+)?)\+(?P<length>\d+(?:\.\d+)?)")


_NEAREST = f"""
WITH known AS (
    SELECT hash, any_value(sketch) AS sketch, bool_or(split::VARCHAR = 'train') AS train,
           bool_or(split::VARCHAR <> 'train') AS held_out, min(step) AS step
    FROM samples WHERE sketch IS NOT NULL AND name::VARCHAR = '{{name}}' GROUP BY hash),
trained AS (SELECT hash, sketch FROM known WHERE train ORDER BY step, hash LIMIT {COMPARED}),
others AS (SELECT hash, sketch, step FROM known WHERE held_out AND NOT train ORDER BY step, hash LIMIT {COMPARED}),
nearest AS (
    SELECT min(bit_count(xor(trained.sketch, others.sketch)::HUGEINT)) AS bits, any_value(step) AS step
    FROM others, trained GROUP BY others.hash),
alike AS (
    SELECT min(bit_count(xor(a.sketch, b.sketch)::HUGEINT)) AS bits
    FROM trained AS a JOIN trained AS b ON a.hash <> b.hash GROUP BY a.hash)
SELECT count(*) AS compared, count_if(bits <= {NEAR_BITS})::BIGINT AS near, min(bits) AS least,
       max(CASE WHEN bits <= {NEAR_BITS} THEN bits END) AS bits, min(CASE WHEN bits <= {NEAR_BITS} THEN step END) AS step,
       (SELECT count_if(held_out)::BIGINT FROM known) AS held_out,
       (SELECT coalesce(avg((bits <= {NEAR_BITS})::INT), 0) FROM alike) AS usual
FROM nearest
"""


@rule(
    sees="samples that are in the training and in the validation data",
    threshold=f"{OVERLAP} or more of the validation samples, but not all (to evaluate on training data may be meant, "
    "and is a note), by content hash of the most varied input of two floating or four other elements",
    source="content hashes of the samples",
    needs=needs.SPLITS,
    next_check="split by source id before anything is cut, shuffled or cached, and compare the ids",
    evidence=("count", "share", "cause"),
    causes=("shuffle_before_slice",),
)
def split_overlap(facts: Facts) -> Answers:
    rows = facts.sql(
        "WITH seen AS (SELECT name::VARCHAR AS name, hash, bool_or(split::VARCHAR = 'train') AS train, "
        "bool_or(split::VARCHAR <> 'train') AS held_out, min(CASE WHEN split::VARCHAR <> 'train' THEN step END) AS step "
        "FROM samples GROUP BY ALL) "
        "SELECT name, count_if(train)::BIGINT AS train, count_if(held_out)::BIGINT AS held_out, "
        "count_if(train AND held_out)::BIGINT AS shared, "
        "min(CASE WHEN train THEN step END) AS step FROM seen GROUP BY name ORDER BY train DESC, name LIMIT 1"
    ).to_pylist()
    for row in rows:
        if row["shared"] < OVERLAP or not facts.is_large(row["name"]):
            if row["train"] and row["held_out"]:
                yield Clear(f"{row['shared']} of {row['held_out']} validation samples are training samples")
            continue
        share = row["shared"] / row["held_out"]
        text = f"{row['shared']} of {row['held_out']} validation samples are training samples ({share:.0%})"
        evidence = {"count": row["shared"], "share": share, "cause": "shuffle_before_slice"}
        yield Found("warning" if share < 1 else "info", text, row["step"], row["name"], evidence)


@rule(
    sees="validation samples that are nearly training samples",
    threshold=f"two or more that are equal to none but differ from one in {NEAR_BITS} bits or fewer of 64, and "
    f"{DENSER:g} times the share of training samples that are so close to another of them (where all are alike, none "
    f"is a leak); no more than {COMPARED} samples of each split are compared",
    source="Charikar, 2002, Similarity estimation techniques from rounding algorithms: signs of random projections "
    "differ in proportion to the angle",
    needs=needs.SPLITS + "; samples of 256 floats or 16 tokens and more have a sketch",
    next_check="look at the pairs: the same recording at another level, another crop, a copy in other bits?",
    evidence=("count", "share", "bits", "cause"),
    causes=("nearly_the_same_sample",),
)
def near_duplicates(facts: Facts) -> Answers:
    for name in _sketched(facts):
        (found,) = facts.sql(_NEAREST.format(name=name.replace("'", "''"))).to_pylist()
        if not found["compared"]:
            continue
        share = found["near"] / found["held_out"]
        if found["near"] >= OVERLAP and share > DENSER * found["usual"]:
            text = f"{found['near']} of {found['held_out']} validation samples of {name} are nearly training samples"
            evidence = {
                "count": found["near"],
                "share": share,
                "bits": found["bits"],
                "cause": "nearly_the_same_sample",
            }
            yield Found("warning", text, found["step"], name, evidence)
        yield Clear(
            f"the nearest of {found['compared']} validation samples of {name} differs in {found['least']} of 64 bits"
        )


@rule(
    sees="one source in both splits, or windows of it that overlap",
    threshold="one source id in both; with ids that name a window, NAME@START+LENGTH, one pair of windows of a name "
    "that overlap, or one name with windows in both",
    source="windows of one recording are more alike than recordings are: Flexer and Schnitzer, 2010, on albums and artists",
    needs="source ids of both splits: trace.samples(batch, split, source_id=[…])",
    next_check="split by source before windows are cut",
    evidence=("count", "sources", "share", "cause"),
    causes=("source_in_both_splits", "overlapping_windows"),
)
def source_overlap(facts: Facts) -> Answers:
    ids = {split: _windows(facts, split) for split in ("=", "<>")}
    if not ids["="] or not ids["<>"]:
        return
    both = sorted(ids["="].keys() & ids["<>"].keys())
    overlapping = [name for name in both if _any_overlap(ids["="][name], ids["<>"][name])]
    named = overlapping or both
    share = len(both) / len(ids["<>"])
    if both:
        what = "have windows in training that overlap theirs" if overlapping else "are in training as well"
        text = f"{len(named)} of {len(ids['<>'])} sources of the validation data {what}: {listed(named)}"
        evidence = {"count": len(named), "sources": named[:20], "share": share,
                    "cause": "overlapping_windows" if overlapping else "source_in_both_splits"}  # fmt: skip
        yield Found("warning", text, None, named[0], evidence)
    yield Clear(f"0 of {len(ids['<>'])} sources of the validation data are among the {len(ids['='])} of training")


def _sketched(facts: Facts) -> list[str]:
    rows = facts.sql("SELECT DISTINCT name::VARCHAR AS name FROM samples WHERE sketch IS NOT NULL ORDER BY name")
    return [str(name) for name in rows["name"].to_pylist()]


def _windows(facts: Facts, split: str) -> dict[str, list[tuple[float, float]]]:
    """Windows of each source of a split, as (start, end); none where ids name the source alone."""
    rows = facts.sql(
        f"SELECT DISTINCT source_id FROM samples WHERE source_id IS NOT NULL AND split::VARCHAR {split} 'train'"
    )
    found: dict[str, list[tuple[float, float]]] = {}
    for source in rows["source_id"].to_pylist():
        window = WINDOW.fullmatch(source)
        spans = found.setdefault(window["source"] if window else source, [])
        if window:
            start = float(window["start"])
            spans.append((start, start + float(window["length"])))
    return found


def _any_overlap(train: list[tuple[float, float]], held_out: list[tuple[float, float]]) -> bool:
    return any(a < end and start < b for a, b in train for start, end in held_out)


RULES = (split_overlap, near_duplicates, source_overlap)
