"""The kernel for GPUs, in Triton: the definitions of docs/statistics.md in one launch for one tensor or for many.

A tensor is cut into parts, a number that depends on its size alone, and each program measures one. It takes the elements
chunk by chunk, as the 64-bit pairs of words that the hash is defined on; one statistic after another reads the chunk,
the first from memory, the others from the nearest cache, so that registers hold a tile and many programs fit beside one
another. A chunk's spread is taken about its own mean. What a part found goes to a record of its own. Whichever program
finds, by an integer counter, that it is the last of its tensor brings the records together in a fixed order and writes
the row. No float is added atomically: additions happen in the same order in every run.
"""

from __future__ import annotations

import triton
import triton.language as tl

PAIRS = tl.constexpr(512)
"""Pairs of words under one digest of the hash: a tile."""
TILES = tl.constexpr(4)
"""Tiles of a chunk."""
PARTS = tl.constexpr(512)
"""Parts of a tensor at most, so that the last program holds a field of all records at once."""

SIGNED = tl.constexpr(0)
UNSIGNED = tl.constexpr(1)
FLOAT = tl.constexpr(2)
BRAIN = tl.constexpr(3)
KINDS = tl.constexpr(16)
"""A kind of element is four times the binary logarithm of its bytes, plus one of the four above."""
FLOAT32 = tl.constexpr(4 * 2 + 2)
FLOAT64 = tl.constexpr(4 * 3 + 2)

HASH = tl.constexpr(1)
SKETCH = tl.constexpr(2)
HISTOGRAM = tl.constexpr(4)
"""The bits of FLAGS: which of the optional statistics are computed."""
SKETCH_SIZE = tl.constexpr(16)
BUCKETS = tl.constexpr(64)
LOWEST_EXPONENT = tl.constexpr(-32)

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

GOLDEN32 = tl.constexpr(0x9E3779B1)
MIX_A = tl.constexpr(0x85EBCA6B)
MIX_B = tl.constexpr(0xC2B2AE35)
GOLDEN64 = tl.constexpr(0x9E3779B97F4A7C15)
FINAL_A = tl.constexpr(0xFF51AFD7ED558CCD)
FINAL_B = tl.constexpr(0xC4CEB9FE1A85EC53)

INFINITY = tl.constexpr(float("inf"))
NOT_A_NUMBER = tl.constexpr(0x7FF8000000000000)
"""The bits of a float64."""
HUGE = tl.constexpr(2.0**400)
TINY = tl.constexpr(2.0**-400)
UP = tl.constexpr(2.0**600)
DOWN = tl.constexpr(2.0**-600)
"""float64 beyond these magnitudes is scaled up or down before it is squared."""


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
    rest = _rest(x, count, KIND)
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
        some_low, some_high, some_zeros = _extremes(x, rest, start, end, count, KIND)
        some_nan, some_posinf, some_neginf = _nonfinite(x, rest, start, end, count, KIND)
        some = tl.minimum(count - start * TILE, TILES * TILE) - some_nan - some_posinf - some_neginf
        if HASH & FLAGS:
            digests += _digests(x, rest, start, end, count, KIND)
        if SKETCH & FLAGS:
            sketch += _sketch(x, rest, start, end, count, KIND)
        if HISTOGRAM & FLAGS:
            histogram += _histogram(x, rest, start, end, count, KIND)
            # zeros, what is not finite and what lies beyond the end went to the first bucket
            uncounted = (end - start) * TILE - some + some_zeros
            histogram -= tl.where(tl.arange(0, BUCKETS) == 0, uncounted, 0)
        some_scale = _scale(some_low, some_high, KIND)
        some_sum, some_squares = _sums(x, rest, start, end, count, some_scale, KIND)
        mean = some_sum / tl.maximum(some, 1).to(tl.float64)
        some_spread = _spread(x, rest, start, end, count, some_scale, mean, KIND)
        scale, sum, squares, spread = _merged(
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


# ---- a tile: 64-bit pairs of words, (PAIRS,)


@triton.jit
def _rest(x, count, KIND: tl.constexpr):
    """The pair of words of which a tensor has fewer than eight bytes, padded with zeros; zero when there is none."""
    size = count << (KIND // 4)
    rest = tl.full((), 0, tl.uint64)
    if KIND < 12:
        for i in tl.static_range(7):
            byte = size // 8 * 8 + i
            octet = tl.load(x.to(tl.pointer_type(tl.uint8)) + byte, mask=byte < size, other=0)
            rest |= octet.to(tl.uint64) << (8 * i)
    return rest


@triton.jit
def _pairs(x, rest, tile, count, KIND: tl.constexpr):
    """The pairs of a tile, from an address that is a multiple of eight: zeros beyond the end, where nothing is read."""
    whole = (count << (KIND // 4)) // 8
    at = tile * PAIRS + tl.arange(0, PAIRS)
    pairs = tl.load(x.to(tl.pointer_type(tl.uint64)) + at, mask=at < whole, other=0)
    return tl.where(at == whole, rest, pairs)


@triton.jit
def _element(pairs, K: tl.constexpr, KIND: tl.constexpr):
    """Element K of every pair, as float32 where that holds all numbers of the kind, else as float64."""
    BITS: tl.constexpr = 8 << (KIND // 4)
    bits = pairs >> (K * BITS)
    if KIND % 4 == BRAIN:
        value = (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif KIND == FLOAT64:
        value = bits.to(tl.float64, bitcast=True)
    elif KIND == FLOAT32:
        value = bits.to(tl.uint32).to(tl.float32, bitcast=True)
    elif KIND % 4 == FLOAT:
        value = bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    elif BITS == 8:
        value = bits.to(tl.int8 if KIND % 4 == SIGNED else tl.uint8).to(tl.float32)
    elif BITS == 16:
        value = bits.to(tl.int16 if KIND % 4 == SIGNED else tl.uint16).to(tl.float32)
    elif BITS == 32:
        value = bits.to(tl.int32 if KIND % 4 == SIGNED else tl.uint32).to(tl.float64)
    else:
        value = bits.to(tl.int64 if KIND % 4 == SIGNED else tl.uint64).to(tl.float64)
    return value


@triton.jit
def _finite(pairs, tile, count, K: tl.constexpr, KIND: tl.constexpr):
    """Elements K of a tile; which of them are in the tensor and finite."""
    EACH: tl.constexpr = 8 >> (KIND // 4)
    value = _element(pairs, K, KIND)
    inside = tl.minimum(count - tile * (PAIRS * EACH), PAIRS * EACH).to(tl.int32)
    finite = tl.arange(0, PAIRS) * EACH + K < inside
    if KIND % 4 >= FLOAT:
        finite &= tl.abs(value) < INFINITY
    return value, finite


# ---- a chunk: tiles start … end


@triton.jit
def _extremes(x, rest, start, end, count, KIND: tl.constexpr):
    """Least and greatest finite element, as float64 (+inf and -inf when there is none), and the number of zeros."""
    WIDE: tl.constexpr = (KIND // 4 >= 2) and (KIND != FLOAT32)
    low = tl.full((PAIRS,), INFINITY, tl.float64 if WIDE else tl.float32)
    high = tl.full((PAIRS,), -INFINITY, tl.float64 if WIDE else tl.float32)
    zeros = tl.zeros((PAIRS,), tl.int32)
    for tile in range(start, end):
        pairs = _pairs(x, rest, tile, count, KIND)
        for K in tl.static_range(8 >> (KIND // 4)):
            value, finite = _finite(pairs, tile, count, K, KIND)
            low = tl.minimum(low, tl.where(finite, value, INFINITY))
            high = tl.maximum(high, tl.where(finite, value, -INFINITY))
            zeros += (finite & (value == 0)).to(tl.int32)
    return tl.min(low).to(tl.float64), tl.max(high).to(tl.float64), tl.sum(zeros)


@triton.jit
def _nonfinite(x, rest, start, end, count, KIND: tl.constexpr):
    """How many elements are NaN, +inf and -inf. What lies beyond the end is zero."""
    nan = tl.zeros((PAIRS,), tl.int32)
    posinf = tl.zeros((PAIRS,), tl.int32)
    neginf = tl.zeros((PAIRS,), tl.int32)
    if KIND % 4 >= FLOAT:
        for tile in range(start, end):
            pairs = _pairs(x, rest, tile, count, KIND)
            for K in tl.static_range(8 >> (KIND // 4)):
                value = _element(pairs, K, KIND)
                nan += (value != value).to(tl.int32)
                posinf += (value == INFINITY).to(tl.int32)
                neginf += (value == -INFINITY).to(tl.int32)
    return tl.sum(nan), tl.sum(posinf), tl.sum(neginf)


@triton.jit
def _digests(x, rest, start, end, count, KIND: tl.constexpr):
    """The sum of the digests of all tiles."""
    words = 2 * tl.arange(0, PAIRS)
    even_keys, odd_keys = _key(words), _key(words + 1)
    size = count << (KIND // 4)
    digests = tl.full((), 0, tl.uint64)
    for tile in range(start, end):
        pairs = _pairs(x, rest, tile, count, KIND)
        even = _mix(pairs.to(tl.uint32), even_keys).to(tl.uint64)
        odd = _mix((pairs >> 32).to(tl.uint32), odd_keys).to(tl.uint64)
        terms = even * odd + even + (odd << 32)
        there = tile * PAIRS + tl.arange(0, PAIRS) < (size + 7) // 8
        digests += _finish64(tl.sum(tl.where(there, terms, 0)) + _numbered(tile))
    return digests


@triton.jit
def _sketch(x, rest, start, end, count, KIND: tl.constexpr):
    """The 16 signed sums."""
    EACH: tl.constexpr = 8 >> (KIND // 4)
    GROUPS: tl.constexpr = SKETCH_SIZE // EACH  # buckets that elements K fall into
    sketch = tl.zeros((SKETCH_SIZE,), tl.float64)
    for tile in range(start, end):
        pairs = _pairs(x, rest, tile, count, KIND)
        at = (tile * PAIRS + tl.arange(0, PAIRS)) * EACH
        signs = _finish64(_numbered(at // 64))
        for K in tl.static_range(EACH):
            value, finite = _finite(pairs, tile, count, K, KIND)
            minus = (signs >> (at % 64 + K).to(tl.uint64)) & 1
            signed = tl.where(finite, tl.where(minus != 0, -value, value), 0).to(tl.float64)
            sums = tl.sum(tl.reshape(signed, (PAIRS // GROUPS, GROUPS)), axis=0)
            places = (tl.arange(0, GROUPS) * EACH + K)[:, None] == tl.arange(0, SKETCH_SIZE)[None, :]
            sketch += tl.sum(tl.where(places, sums[:, None], 0.0), axis=0)
    return sketch


@triton.jit
def _histogram(x, rest, start, end, count, KIND: tl.constexpr):
    """How many elements have each power of two; those that are not counted are in the first bucket."""
    histogram = tl.zeros((BUCKETS,), tl.int32)
    for tile in range(start, end):
        pairs = _pairs(x, rest, tile, count, KIND)
        for K in tl.static_range(8 >> (KIND // 4)):
            value, finite = _finite(pairs, tile, count, K, KIND)
            if value.dtype == tl.float64:
                exponent = ((value.to(tl.int64, bitcast=True) >> 52) & 0x7FF).to(tl.int32) - 1023
            else:
                exponent = ((value.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127
            bucket = tl.minimum(tl.maximum(exponent - LOWEST_EXPONENT, 0), BUCKETS - 1)
            histogram += tl.histogram(tl.where(finite, bucket, 0), BUCKETS)
    return histogram.to(tl.int64)


@triton.jit
def _scale(low, high, KIND: tl.constexpr):
    """The power of two that elements are multiplied by, so that squares neither overflow nor vanish."""
    one = tl.full((), 1, tl.float64)
    if KIND == FLOAT64:
        absmax = tl.where(low <= high, tl.maximum(tl.abs(low), tl.abs(high)), 0.0)
        one = tl.where(absmax > HUGE, DOWN, tl.where(absmax < TINY, UP, one))
    return one


@triton.jit
def _sums(x, rest, start, end, count, scale, KIND: tl.constexpr):
    """Sum and sum of squares of the finite elements times the scale."""
    sum = tl.zeros((PAIRS,), tl.float64)
    squares = tl.zeros((PAIRS,), tl.float64)
    for tile in range(start, end):
        pairs = _pairs(x, rest, tile, count, KIND)
        for K in tl.static_range(8 >> (KIND // 4)):
            value, finite = _finite(pairs, tile, count, K, KIND)
            wide = tl.where(finite, value, 0).to(tl.float64) * scale
            sum += wide
            squares += wide * wide
    return tl.sum(sum), tl.sum(squares)


@triton.jit
def _spread(x, rest, start, end, count, scale, mean, KIND: tl.constexpr):
    """Sum of squared distances from the mean, both of the finite elements times the scale."""
    spread = tl.zeros((PAIRS,), tl.float64)
    for tile in range(start, end):
        pairs = _pairs(x, rest, tile, count, KIND)
        for K in tl.static_range(8 >> (KIND // 4)):
            value, finite = _finite(pairs, tile, count, K, KIND)
            away = tl.where(finite, value.to(tl.float64) * scale - mean, 0)
            spread += away * away
    return tl.sum(spread)


@triton.jit
def _merged(finite, scale, sum, squares, spread, other, other_scale, other_sum, other_squares, other_spread):
    """Scale and moments of two sets of elements together (Chan, Golub and LeVeque, 1979)."""
    smaller = tl.minimum(scale, other_scale)
    ratio, other_ratio = smaller / scale, smaller / other_scale
    sum, other_sum = sum * ratio, other_sum * other_ratio
    squares = squares * ratio * ratio + other_squares * other_ratio * other_ratio
    spread = spread * ratio * ratio + other_spread * other_ratio * other_ratio
    n, other_n = finite.to(tl.float64), other.to(tl.float64)
    apart = sum / tl.maximum(n, 1.0) - other_sum / tl.maximum(other_n, 1.0)
    spread += apart * apart * (n * other_n / tl.maximum(n + other_n, 1.0))
    return smaller, sum + other_sum, squares, spread


@triton.jit
def _key(j):
    """The key of word j of a tile: MurmurHash3's 32-bit finaliser (Appleby, 2011)."""
    h = (j + 1).to(tl.uint32) * GOLDEN32
    h = (h ^ (h >> 16)) * MIX_A
    h = (h ^ (h >> 13)) * MIX_B
    return h ^ (h >> 16)


@triton.jit
def _mix(words, keys):
    h = words + keys
    return (h ^ (h >> 16)) * MIX_A


@triton.jit
def _finish64(h):
    """MurmurHash3's 64-bit finaliser."""
    h = (h ^ (h >> 33)) * FINAL_A
    h = (h ^ (h >> 33)) * FINAL_B
    return h ^ (h >> 33)


@triton.jit
def _numbered(i):
    """A number of its own for each counter."""
    return (i + tl.full((), 1, tl.int64)).to(tl.uint64) * GOLDEN64


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
        content = _finish64(digests ^ ((count << (KIND // 4)).to(tl.uint64) * GOLDEN64)).to(tl.int64, bitcast=True)
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
