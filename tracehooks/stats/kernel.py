"""The kernel for GPUs, in Triton: the definitions of docs/statistics.md in one launch for one tensor or for many.

A tensor is cut into parts, a number that depends on its size alone, and each program measures one, chunk by chunk
(chunks.py), each chunk's spread about its own mean. What a part found goes to a record of its own. Whichever program
finds, by an integer counter, that it is the last of its tensor brings the records together in a fixed order and writes
the row. No float is added atomically: additions happen in the same order in every run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tracehooks.stats.chunks import (
    BUCKETS,
    FLOAT64,
    GOLDEN64,
    INFINITY,
    KINDS,
    PAIRS,
    SKETCH_SIZE,
    UP,
    digests_of,
    extremes,
    finish64,
    histogram_of,
    merged,
    nonfinite,
    rest_of,
    scale_for,
    sketch_of,
    spread_about,
    sums_of,
)

TILES = tl.constexpr(4)
"""Tiles of a chunk."""
PARTS = tl.constexpr(512)
"""Parts of a tensor at most, so that the last program holds a field of all records at once."""

HASH = tl.constexpr(1)
SKETCH = tl.constexpr(2)
HISTOGRAM = tl.constexpr(4)
"""The bits of FLAGS: which of the optional statistics are computed."""

ADDRESS = tl.constexpr(0)
COUNT = tl.constexpr(1)
KIND_OF = tl.constexpr(2)
FIRST = tl.constexpr(3)
PARTS_OF = tl.constexpr(4)
ROW = tl.constexpr(5)
COLUMNS = tl.constexpr(6)
"""Of the table of a list of tensors. FIRST is the number of the program that measures a tensor's first part."""

NAN = tl.constexpr(0)
POSINF = tl.constexpr(1)
NEGINF = tl.constexpr(2)
ZEROS = tl.constexpr(3)
FINITE = tl.constexpr(4)
DIGESTS = tl.constexpr(5)
LOW = tl.constexpr(6)
HIGH = tl.constexpr(7)
SCALE = tl.constexpr(8)
SUM = tl.constexpr(9)
SQUARES = tl.constexpr(10)
SPREAD = tl.constexpr(11)
FIELDS = tl.constexpr(12)
"""Of a record, eight bytes each. SUM, SQUARES and SPREAD, the squared distances from the part's own mean, are those of
the elements times SCALE, a power of two."""

NOT_A_NUMBER = tl.constexpr(0x7FF8000000000000)
"""The bits of a float64."""


@triton.jit(do_not_specialize=["x", "count", "row", "parts"])
def summarize_one(
    x: tl.int64, count: tl.int64, row: tl.int64, parts: tl.int32, scratch, counters,
    KIND: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """The row of one tensor at address ``x`` to address ``row``, by as many programs as it has parts."""
    x, count, row = x.to(tl.int64), count.to(tl.int64), row.to(tl.int64)  # small ones are 32 bits to the interpreter
    _measure(x, count, row, 0, tl.program_id(0), parts, scratch, parts, counters, KIND, FLAGS)


@triton.jit(do_not_specialize=["length", "total"])
def summarize_list(
    table, length: tl.int32, total: tl.int32, scratch, counters, PRESENT: tl.constexpr, FLAGS: tl.constexpr
):
    """The rows of ``length`` tensors, by ``total`` programs. The kinds that occur are the bits of PRESENT."""
    program = tl.program_id(0)
    index = tl.full((), 0, tl.int32)
    beyond = length
    while beyond - index > 1:
        middle = (index + beyond) // 2
        if tl.load(table + middle * COLUMNS + FIRST) <= program:
            index = middle
        else:
            beyond = middle
    entry = table + index * COLUMNS
    x = tl.load(entry + ADDRESS)
    count = tl.load(entry + COUNT)
    kind = tl.load(entry + KIND_OF)
    first = tl.load(entry + FIRST).to(tl.int32)
    parts = tl.load(entry + PARTS_OF).to(tl.int32)
    row = tl.load(entry + ROW)
    for KIND in tl.static_range(KINDS):
        if (PRESENT >> KIND) & 1:  # noqa: SIM102, decided when compiling
            if kind == KIND:
                _measure(x, count, row, first, program - first, parts, scratch, total, counters + index, KIND, FLAGS)


@triton.jit
def _measure(x, count, row, first, part, parts, scratch, total, counter, KIND: tl.constexpr, FLAGS: tl.constexpr):
    """One part of a tensor, and the row when it is the last. Field f of program p is ``scratch[f * total + p]``; behind
    the fields lie, if asked for, 16 numbers of each program's sketch, then 64 of its histogram."""
    _record(x, count, part, parts, scratch, total, first + part, KIND, FLAGS)
    tl.debug_barrier()  # what every thread has written is released with the counter
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == parts - 1:
        tl.store(counter, 0)  # as the next launch wants it
        _write_row(count, row.to(tl.pointer_type(tl.int64)), first, parts, scratch, total, KIND, FLAGS)


@triton.jit
def _record(x, count, part, parts, scratch, total, program, KIND: tl.constexpr, FLAGS: tl.constexpr):
    """Measure a part and leave its record."""
    TILE: tl.constexpr = 8 * PAIRS >> (KIND // 4)  # elements in a tile
    size = count << (KIND // 4)
    rest = rest_of(x, count, KIND)
    nothing = tl.full((), 0, tl.int64)
    nan, posinf, neginf, zeros, finite = nothing, nothing, nothing, nothing, nothing
    digests = nothing.to(tl.uint64)
    low = tl.full((), INFINITY, tl.float64)
    high = tl.full((), -INFINITY, tl.float64)
    scale = tl.full((), UP if KIND == FLOAT64 else 1.0, tl.float64)
    sum, squares, spread = nothing.to(tl.float64), nothing.to(tl.float64), nothing.to(tl.float64)
    sketch = tl.zeros((SKETCH_SIZE,), tl.float64)
    histogram = tl.zeros((BUCKETS,), tl.int64)

    tiles = (size + 8 * PAIRS - 1) // (8 * PAIRS)
    chunks = (tiles + TILES - 1) // TILES
    each = (chunks + parts - 1) // parts
    for chunk in range(part * each, tl.minimum(part * each + each, chunks)):
        start = chunk * TILES
        end = tl.minimum(start + TILES, tiles)
        some_low, some_high, some_zeros = extremes(x, rest, start, end, count, KIND)
        some_nan, some_posinf, some_neginf = nonfinite(x, rest, start, end, count, KIND)
        some = tl.minimum(count - start * TILE, TILES * TILE) - some_nan - some_posinf - some_neginf
        if HASH & FLAGS:
            digests += digests_of(x, rest, start, end, count, KIND)
        if SKETCH & FLAGS:
            sketch += sketch_of(x, rest, start, end, count, KIND)
        if HISTOGRAM & FLAGS:
            histogram += histogram_of(x, rest, start, end, count, KIND)
            # zeros, what is not finite and what lies beyond the end went to the first bucket
            uncounted = (end - start) * TILE - some + some_zeros
            histogram -= tl.where(tl.arange(0, BUCKETS) == 0, uncounted, 0)
        some_scale = scale_for(some_low, some_high, KIND)
        some_sum, some_squares = sums_of(x, rest, start, end, count, some_scale, KIND)
        mean = some_sum / tl.maximum(some, 1).to(tl.float64)
        some_spread = spread_about(x, rest, start, end, count, some_scale, mean, KIND)
        scale, sum, squares, spread = merged(
            finite, scale, sum, squares, spread, some, some_scale, some_sum, some_squares, some_spread
        )
        nan, posinf, neginf = nan + some_nan, posinf + some_posinf, neginf + some_neginf
        zeros, finite = zeros + some_zeros, finite + some
        low, high = tl.minimum(low, some_low), tl.maximum(high, some_high)

    record = scratch + program
    tl.store(record + NAN * total, nan)
    tl.store(record + POSINF * total, posinf)
    tl.store(record + NEGINF * total, neginf)
    tl.store(record + ZEROS * total, zeros)
    tl.store(record + FINITE * total, finite)
    tl.store(record + DIGESTS * total, digests.to(tl.int64, bitcast=True))
    tl.store(record + LOW * total, low.to(tl.int64, bitcast=True))
    tl.store(record + HIGH * total, high.to(tl.int64, bitcast=True))
    tl.store(record + SCALE * total, scale.to(tl.int64, bitcast=True))
    tl.store(record + SUM * total, sum.to(tl.int64, bitcast=True))
    tl.store(record + SQUARES * total, squares.to(tl.int64, bitcast=True))
    tl.store(record + SPREAD * total, spread.to(tl.int64, bitcast=True))
    if SKETCH & FLAGS:
        at = FIELDS * total + program * SKETCH_SIZE + tl.arange(0, SKETCH_SIZE)
        tl.store(scratch + at, sketch.to(tl.int64, bitcast=True))
    if HISTOGRAM & FLAGS:
        at = (FIELDS + (SKETCH_SIZE if SKETCH & FLAGS else 0)) * total + program * BUCKETS + tl.arange(0, BUCKETS)
        tl.store(scratch + at, histogram)


# ---- all records of a tensor


@triton.jit
def _field(scratch, total, first, parts, FIELD: tl.constexpr):
    """A field of all records, zeros beyond. The cache nearest to this program knows nothing of other programs' writes."""
    part = tl.arange(0, PARTS)
    return tl.load(scratch + FIELD * total + first + part, mask=part < parts, other=0, cache_modifier=".cg")


@triton.jit
def _write_row(count, row, first, parts, scratch, total, KIND: tl.constexpr, FLAGS: tl.constexpr):
    """The row of a tensor from the records of its parts, as stats/layout.py lays it out."""
    finite = _field(scratch, total, first, parts, FINITE)
    there = finite > 0
    low = _field(scratch, total, first, parts, LOW).to(tl.float64, bitcast=True)
    high = _field(scratch, total, first, parts, HIGH).to(tl.float64, bitcast=True)
    scale = _field(scratch, total, first, parts, SCALE).to(tl.float64, bitcast=True)
    sum = _field(scratch, total, first, parts, SUM).to(tl.float64, bitcast=True)
    squares = _field(scratch, total, first, parts, SQUARES).to(tl.float64, bitcast=True)
    spread = _field(scratch, total, first, parts, SPREAD).to(tl.float64, bitcast=True)
    least = tl.min(tl.where(there, low, INFINITY)) + 0.0  # a zero has no sign
    greatest = tl.max(tl.where(there, high, -INFINITY)) + 0.0

    smallest = tl.min(tl.where(there, scale, UP))
    ratio = smallest / tl.where(there, scale, UP)
    n = tl.sum(finite)
    sum = tl.where(there, sum, 0) * ratio
    mean = tl.sum(sum) / tl.maximum(n, 1).to(tl.float64)
    size = finite.to(tl.float64)
    away = sum / tl.maximum(size, 1.0) - mean
    spread = tl.where(there, spread, 0) * ratio * ratio + size * away * away
    squares = tl.where(there, squares, 0) * ratio * ratio
    std = tl.sqrt(tl.sum(spread) / tl.maximum(n, 1).to(tl.float64))
    rms = tl.sqrt(tl.sum(squares) / tl.maximum(n, 1).to(tl.float64))

    content = tl.full((), 0, tl.int64)
    if HASH & FLAGS:
        digests = tl.sum(_field(scratch, total, first, parts, DIGESTS).to(tl.uint64, bitcast=True))
        content = finish64(digests ^ ((count << (KIND // 4)).to(tl.uint64) * GOLDEN64)).to(tl.int64, bitcast=True)
    tl.store(row, count)
    tl.store(row + 1, tl.sum(_field(scratch, total, first, parts, NAN)))
    tl.store(row + 2, tl.sum(_field(scratch, total, first, parts, POSINF)))
    tl.store(row + 3, tl.sum(_field(scratch, total, first, parts, NEGINF)))
    tl.store(row + 4, tl.sum(_field(scratch, total, first, parts, ZEROS)))
    tl.store(row + 5, content)
    _store_float(row + 6, least, n)
    _store_float(row + 7, greatest, n)
    _store_float(row + 8, mean / smallest, n)
    _store_float(row + 9, std / smallest, n)
    _store_float(row + 10, rms / smallest, n)
    _store_float(row + 11, tl.maximum(tl.abs(least), tl.abs(greatest)), n)
    row += 12
    if SKETCH & FLAGS:
        sketches = scratch + FIELDS * total + first * SKETCH_SIZE
        sums = _together(sketches, parts, SKETCH_SIZE, tl.float64)
        tl.store(row + tl.arange(0, SKETCH_SIZE), sums.to(tl.int64, bitcast=True))
        row += SKETCH_SIZE
    if HISTOGRAM & FLAGS:
        histograms = scratch + (FIELDS + (SKETCH_SIZE if SKETCH & FLAGS else 0)) * total + first * BUCKETS
        tl.store(row + tl.arange(0, BUCKETS), _together(histograms, parts, BUCKETS, tl.int64))


@triton.jit
def _together(numbers, parts, WIDTH: tl.constexpr, DTYPE: tl.constexpr):
    """The sum over all parts of their WIDTH numbers each."""
    column = tl.arange(0, WIDTH)[None, :]
    sums = tl.zeros((WIDTH,), DTYPE)
    for start in range(0, parts, 32):
        part = start + tl.arange(0, 32)[:, None]
        found = tl.load(numbers + part * WIDTH + column, mask=part < parts, other=0, cache_modifier=".cg")
        sums += tl.sum(found.to(DTYPE, bitcast=True), axis=0)
    return sums


@triton.jit
def _store_float(at, value, finite):
    """A number over the finite elements: NaN where there are none."""
    tl.store(at, tl.where(finite > 0, value.to(tl.int64, bitcast=True), NOT_A_NUMBER))
