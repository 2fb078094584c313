"""The definition of every statistic, in torch and float64: what faster kernels are held to.

Sums run over fixed blocks of `BLOCK` elements, each reduced by one thread, in a fixed order, so that a row does not
depend on the number of threads or on strides. docs/statistics.md gives the formulas and the reasons for them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from tracehooks.core.schema import HISTOGRAM_EXPONENTS, SKETCH_SIZE
from tracehooks.stats.layout import NAN, NEGINF, POSINF, Spec

BLOCK = 4096
CHUNK = 64 * BLOCK
"""Elements measured at a time: bounds the memory that float64 and int64 copies take."""

Chunk = tuple[Tensor, Tensor, Tensor]

MASK32 = 0xFFFFFFFF
GOLDEN32 = 0x9E3779B1
MIX_A, MIX_B = 0x85EBCA6B, 0xC2B2AE35
GOLDEN64 = 0x9E3779B97F4A7C15
FINAL_A, FINAL_B = 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53
TILE = 1024
"""32-bit words under one digest of the hash."""
GROUP = 64
"""Elements whose signs in the sketch are the bits of one number."""


def summarize(x: Tensor, spec: Spec) -> Tensor:
    """Statistics of a dense real tensor, packed: int64 of shape (spec.width,) on x's device."""
    flat = x.reshape(-1)
    chunks = [_chunk(part) for part in torch.split(flat, CHUNK)] if flat.numel() else []
    counts = _counts(chunks, flat)
    content = _hash(flat) if spec.hash else counts.new_zeros(())
    parts = [counts, content.view(1), _moments(chunks, counts, flat).view(torch.int64)]
    if spec.sketch:
        parts.append(_sketch(chunks, flat).view(torch.int64))
    if spec.histogram:
        parts.append(_histogram(chunks, flat))
    return torch.cat(parts)


def hash_rows(x: Tensor) -> Tensor:
    """Content hash of each row of a dense real (rows, elements) tensor: int64 (rows,), the bits of a uint64."""
    size = x.shape[1] * x.element_size()
    total = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
    step = max(1, CHUNK // max(1, x.shape[1]))
    for i, rows in enumerate(torch.split(x, step) if x.numel() else ()):
        total[i * step : i * step + len(rows)] = _digests(_words(rows), 0)
    return finish64(total ^ _signed(size * GOLDEN64))


def nonfinite(x: Tensor) -> int:
    """Which non-finite values a dense real tensor holds: bits as `layout` names them. Reads back to the host."""
    if not x.is_floating_point() or bool(torch.isfinite(x).all()):
        return 0
    kinds = (torch.isnan(x), NAN), (x == math.inf, POSINF), (x == -math.inf, NEGINF)
    return sum(bit for found, bit in kinds if bool(found.any()))


def _chunk(part: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """float64 values with zeros in place of what is not finite, the mask of what is finite, and the counts of NaN,
    +inf, -inf and zeros as int64 of shape (4,)."""
    wide = part.to(torch.float64)
    finite = torch.isfinite(wide)
    counts = [torch.isnan(wide).sum(), (wide == math.inf).sum(), (wide == -math.inf).sum(), (wide == 0).sum()]
    return torch.where(finite, wide, 0.0), finite, torch.stack(counts)


def _counts(chunks: list[Chunk], flat: Tensor) -> Tensor:
    """count, nan, posinf, neginf, zeros: int64 of shape (5,)."""
    total = torch.full((1,), flat.numel(), dtype=torch.int64, device=flat.device)
    found = [counts for _, _, counts in chunks] or [total.new_zeros(4)]
    return torch.cat([total, torch.stack(found).sum(0)])


def _moments(chunks: list[Chunk], counts: Tensor, flat: Tensor) -> Tensor:
    """min, max, mean, std, rms, absmax over the finite elements: float64 of shape (6,), NaN when there is none.

    float64 input is divided by a power of two near its absmax first, so that squares neither overflow nor vanish.
    """
    n = (counts[0] - counts[1:4].sum()).to(torch.float64)
    if not chunks:
        return torch.full((6,), math.nan, dtype=torch.float64, device=flat.device)
    low = torch.stack([torch.where(finite, values, math.inf).amin() for values, finite, _ in chunks]).amin()
    high = torch.stack([torch.where(finite, values, -math.inf).amax() for values, finite, _ in chunks]).amax()
    absmax = torch.maximum(low.abs(), high.abs())
    scale = _power_of_two(absmax) if flat.dtype == torch.float64 else torch.ones_like(absmax)
    scaled = [(values / scale, finite) for values, finite, _ in chunks]
    mean = _sum([values for values, _ in scaled]) / n
    square = _sum([values * values for values, _ in scaled]) / n
    spread = _sum([torch.where(finite, values - mean, 0.0).square() for values, finite in scaled]) / n
    low, high = low + 0.0, high + 0.0  # no negative zero: which zero is found depends on the order of comparing
    moments = torch.stack([low, high, mean * scale, spread.sqrt() * scale, square.sqrt() * scale, absmax])
    return torch.where(n > 0, moments, math.nan)


def _power_of_two(absmax: Tensor) -> Tensor:
    """The largest power of two not above absmax (1/2 for zero), as float64."""
    exponent = torch.frexp(torch.where(torch.isfinite(absmax), absmax, 1.0)).exponent - 1
    return torch.pow(torch.full_like(absmax, 2.0), exponent.to(torch.float64))


def _sum(parts: list[Tensor]) -> Tensor:
    """The sum of float64 vectors in a fixed order: blocks, then blocks of block sums, down to one number."""
    sums = torch.cat([_blocks(part) for part in parts])
    while sums.numel() > 1:
        sums = _blocks(sums)
    return sums.reshape(())


def _blocks(values: Tensor) -> Tensor:
    return pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK).sum(1)


def _hash(flat: Tensor) -> Tensor:
    size = flat.element_size()
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for i, part in enumerate(torch.split(flat, CHUNK) if flat.numel() else ()):
        total = total + _digests(_words(part.unsqueeze(0)), i * CHUNK * size // (4 * TILE)).sum()
    return finish64(total ^ _signed(flat.numel() * size * GOLDEN64))


def _words(rows: Tensor) -> Tensor:
    """The bytes of each row as little-endian 32-bit words in int64, padded with zeros to an even number of words."""
    octets = rows.contiguous().view(torch.uint8)
    return pad(octets, (0, -octets.shape[1] % 8)).view(torch.int32).to(torch.int64) & MASK32


def _digests(words: Tensor, first: int) -> Tensor:
    """Sum of the digests of each row's tiles, of which the first has number `first`: int64 (rows,).

    A pair of words becomes a product that cannot vanish: a change of one word always changes its tile's sum. The
    finaliser over the sum and the number of the tile makes what adds up in different tiles unrelated.
    """
    keys = _finish32(((torch.arange(TILE, dtype=torch.int64, device=words.device) + 1) * GOLDEN32) & MASK32)
    tiles = -(-words.shape[1] // TILE)
    mixed = (words + keys.repeat(tiles)[: words.shape[1]]) & MASK32
    mixed = ((mixed ^ (mixed >> 16)) * MIX_A) & MASK32
    even, odd = mixed[:, ::2], mixed[:, 1::2]
    terms = even * odd + even + (odd << 32)
    sums = pad(terms, (0, tiles * TILE // 2 - terms.shape[1])).view(len(words), tiles, TILE // 2).sum(2)
    return finish64(sums + _numbered(first, tiles, words.device)).sum(1)


def _numbered(first: int, count: int, device: torch.device) -> Tensor:
    """A number of its own for each of the counters first, first + 1 …: multiples of the golden ratio's bits."""
    return torch.arange(first + 1, first + 1 + count, dtype=torch.int64, device=device) * _signed(GOLDEN64)


def _finish32(h: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finaliser (Appleby, 2011) on values below 2**32."""
    h = h ^ (h >> 16)
    h = (h * MIX_A) & MASK32
    h = h ^ (h >> 13)
    h = (h * MIX_B) & MASK32
    return h ^ (h >> 16)


def finish64(h: Tensor) -> Tensor:
    """MurmurHash3's 64-bit finaliser on uint64 held in int64."""
    for factor in (FINAL_A, FINAL_B):
        h = (h ^ _shift33(h)) * _signed(factor)
    return h ^ _shift33(h)


def _shift33(h: Tensor) -> Tensor:
    """Logical shift right by 33 of 64-bit values held in int64."""
    return (h >> 33) & 0x7FFFFFFF


def _signed(value: int) -> int:
    value &= 0xFFFFFFFFFFFFFFFF
    return value - (1 << 64) if value >= 1 << 63 else value


def _sketch(chunks: list[Chunk], flat: Tensor) -> Tensor:
    """Signed sums over buckets i mod 16: float64 of shape (16,)."""
    total = torch.zeros(SKETCH_SIZE, dtype=torch.float64, device=flat.device)
    for i, (values, _, _) in enumerate(chunks):
        signed = values * signs(i * CHUNK, values.numel(), flat.device)
        total = total + pad(signed, (0, -signed.numel() % SKETCH_SIZE)).view(-1, SKETCH_SIZE).sum(0)
    return total


def signs(start: int, count: int, device: torch.device) -> Tensor:
    """float64 signs of elements start …, a multiple of GROUP: bit i mod GROUP of a finaliser of i div GROUP."""
    bits = finish64(_numbered(start // GROUP, -(-count // GROUP), device))
    shifts = torch.arange(GROUP, dtype=torch.int64, device=device)
    return (1 - 2 * ((bits.unsqueeze(1) >> shifts) & 1)).view(-1)[:count].to(torch.float64)


def _histogram(chunks: list[Chunk], flat: Tensor) -> Tensor:
    """Counts by power of two of the magnitude: int64 of shape (buckets,). Zeros go to one bucket more, which is dropped:
    to leave them out before would wait for a GPU to say how many remain."""
    buckets = len(HISTOGRAM_EXPONENTS)
    total = torch.zeros(buckets + 1, dtype=torch.int64, device=flat.device)
    for values, _, _ in chunks:
        exponent = torch.frexp(values).exponent.to(torch.int64) - 1
        bucket = torch.where(values == 0, buckets, (exponent - HISTOGRAM_EXPONENTS[0]).clamp(0, buckets - 1))
        total.index_add_(0, bucket, torch.ones_like(bucket))
    return total[:buckets]
