"""What the GPU's kernel computes of a chunk of a tensor, in Triton.

A chunk is some tiles, and a tile the 64-bit pairs of words under one digest of the hash. One statistic after another
reads the tiles, the first from memory, the others from the nearest cache, so that registers hold a tile alone and many
programs fit beside one another. ``x`` is the tensor's address, ``rest`` what `rest_of` made of its last bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

PAIRS = tl.constexpr(512)
"""Pairs of words under one digest of the hash: a tile."""

SIGNED = tl.constexpr(0)
UNSIGNED = tl.constexpr(1)
FLOAT = tl.constexpr(2)
BRAIN = tl.constexpr(3)
KINDS = tl.constexpr(16)
"""A kind of element is four times the binary logarithm of its bytes, plus one of the four above."""
FLOAT32 = tl.constexpr(4 * 2 + 2)
FLOAT64 = tl.constexpr(4 * 3 + 2)

SKETCH_SIZE = tl.constexpr(16)
BUCKETS = tl.constexpr(64)
LOWEST_EXPONENT = tl.constexpr(-32)

GOLDEN32 = tl.constexpr(0x9E3779B1)
MIX_A = tl.constexpr(0x85EBCA6B)
MIX_B = tl.constexpr(0xC2B2AE35)
GOLDEN64 = tl.constexpr(0x9E3779B97F4A7C15)
FINAL_A = tl.constexpr(0xFF51AFD7ED558CCD)
FINAL_B = tl.constexpr(0xC4CEB9FE1A85EC53)

INFINITY = tl.constexpr(float("inf"))
HUGE = tl.constexpr(2.0**400)
TINY = tl.constexpr(2.0**-400)
UP = tl.constexpr(2.0**600)
DOWN = tl.constexpr(2.0**-600)
"""float64 beyond these magnitudes is scaled up or down before it is squared."""


# ---- a tile: 64-bit pairs of words, (PAIRS,)


@triton.jit
def rest_of(x, count, KIND: tl.constexpr):
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
def extremes(x, rest, start, end, count, KIND: tl.constexpr):
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
def nonfinite(x, rest, start, end, count, KIND: tl.constexpr):
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
def digests_of(x, rest, start, end, count, KIND: tl.constexpr):
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
        digests += finish64(tl.sum(tl.where(there, terms, 0)) + _numbered(tile))
    return digests


@triton.jit
def sketch_of(x, rest, start, end, count, KIND: tl.constexpr):
    """The 16 signed sums."""
    EACH: tl.constexpr = 8 >> (KIND // 4)
    GROUPS: tl.constexpr = SKETCH_SIZE // EACH  # buckets that elements K fall into
    sketch = tl.zeros((SKETCH_SIZE,), tl.float64)
    for tile in range(start, end):
        pairs = _pairs(x, rest, tile, count, KIND)
        at = (tile * PAIRS + tl.arange(0, PAIRS)) * EACH
        signs = finish64(_numbered(at // 64))
        for K in tl.static_range(EACH):
            value, finite = _finite(pairs, tile, count, K, KIND)
            minus = (signs >> (at % 64 + K).to(tl.uint64)) & 1
            signed = tl.where(finite, tl.where(minus != 0, -value, value), 0).to(tl.float64)
            sums = tl.sum(tl.reshape(signed, (PAIRS // GROUPS, GROUPS)), axis=0)
            places = (tl.arange(0, GROUPS) * EACH + K)[:, None] == tl.arange(0, SKETCH_SIZE)[None, :]
            sketch += tl.sum(tl.where(places, sums[:, None], 0.0), axis=0)
    return sketch


@triton.jit
def histogram_of(x, rest, start, end, count, KIND: tl.constexpr):
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
def scale_for(low, high, KIND: tl.constexpr):
    """The power of two that elements are multiplied by, so that squares neither overflow nor vanish."""
    one = tl.full((), 1, tl.float64)
    if KIND == FLOAT64:
        absmax = tl.where(low <= high, tl.maximum(tl.abs(low), tl.abs(high)), 0.0)
        one = tl.where(absmax > HUGE, DOWN, tl.where(absmax < TINY, UP, one))
    return one


@triton.jit
def sums_of(x, rest, start, end, count, scale, KIND: tl.constexpr):
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
def spread_about(x, rest, start, end, count, scale, mean, KIND: tl.constexpr):
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
def merged(finite, scale, sum, squares, spread, other, other_scale, other_sum, other_squares, other_spread):
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
def finish64(h):
    """MurmurHash3's 64-bit finaliser."""
    h = (h ^ (h >> 33)) * FINAL_A
    h = (h ^ (h >> 33)) * FINAL_B
    return h ^ (h >> 33)


@triton.jit
def _numbered(i):
    """A number of its own for each counter."""
    return (i + tl.full((), 1, tl.int64)).to(tl.uint64) * GOLDEN64
