"""A diff in words, for a person at a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from tracehooks.analysis.moved import in_words

if TYPE_CHECKING:
    from tracehooks.analysis.diff import Diff

_SITE = ["phase", "module", "slot", "call"]

LISTED = 10
"""Items of a list that are spelled out; the rest is counted."""


def essay(found: Diff) -> str:
    """What the two run.json say differently; identical, equal within tolerance, or where they part and why; then what
    else the two runs do not share."""
    return "\n".join([*_listed("run.json", found.changes), *_verdict(found), *_beside(found)])


def _verdict(found: Diff) -> Iterator[str]:
    total = sum(found.counts.values())
    rows = _counted(total, "row")
    if not total:
        yield f"{found.a} and {found.b}: nothing to compare, neither run has rows"
    elif found.identical:
        yield f"{found.a} and {found.b} are identical: all {rows} equal"
    elif found.first is None:
        alike = "are equal within tolerance" if found.within_tolerance else "agree in all tensors and scalars compared"
        yield f"{found.a} and {found.b} {alike}: {found.counts['within']} of {rows} differ in bits"
        if found.counts["unread"]:
            yield f"{_counted(found.counts['unread'], 'row')} may be lost to damage and were not compared"
        if found.first_bits:
            yield f"first bits to differ: {found.first_bits}"
    else:
        yield f"{found.a} and {found.b} differ"
        yield f"first divergence: {found.first}"
        yield from _listed("cause", found.culprits)
        yield _extent(found)
        if found.first_bits and found.first and found.first_bits != found.first:
            yield f"bits differ before that, within tolerance: {found.first_bits}"


def _beside(found: Diff) -> Iterator[str]:
    yield from _listed("world sizes", [found.worlds] if found.worlds else [])
    yield from _listed("not compared", [found.refused] if found.refused else [])
    yield from _listed("noise", [found.noise] if found.noise else [])
    yield from _listed("taken for renamed or moved", in_words(found.guessed))
    yield from _listed("also", found.beside)
    yield from _listed(f"only in {found.a}", found.only_a)
    yield from _listed(f"only in {found.b}", found.only_b)
    yield from _listed("could not be read, not compared", found.problems)


def _extent(found: Diff) -> str:
    (sites, scalars), (of_sites, of_scalars) = _places(found.differing), _places(found.rows)
    parts = [f"{sites} of {_counted(of_sites, 'site')}"] if sites or not scalars else []
    parts += [f"{scalars} of {_counted(of_scalars, 'scalar')}"] if scalars else []
    steps = len(pc.unique(found.differing["step"]))
    told = ", ".join(f"{count} {status}" for status, count in found.counts.items() if count)
    return f"{' and '.join(parts)} differ, in {_counted(steps, 'step')}; rows: {told}"


def _places(rows: pa.Table) -> tuple[int, int]:
    """How many sites and how many scalars, which have no module, there are rows of."""
    places = rows.select(_SITE).group_by(_SITE).aggregate([])
    scalars = places["module"].null_count
    return len(places) - scalars, scalars


def _listed(title: str, items: Sequence[object]) -> Iterator[str]:
    if len(items) == 1:
        yield f"{title}: {items[0]}"
    elif items:
        yield f"{title}:"
        yield from (f"  {item}" for item in items[:LISTED])
        if len(items) > LISTED:
            yield f"  and {len(items) - LISTED} more"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
