"""The definition of every statistic, in torch and float64: what faster kernels are held to.

Sums run over fixed blocks of `BLOCK` elements, each reduced by one thread, in a fixed order, so that a row does not
depend on the number of threads or on strides. The hash and the sketch are defined in docs/trace-format.md.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from tracehooks.core.schema import HISTOGRAM_EXPONENTS, SKETCH_SIZE
from tracehooks.stats.layout import Spec

BLOCK = 4096
CHUNK = 64 * BLOCK
"""Elements measured at a time: bounds the memory that float64 and int64 copies take."""

Chunk = tuple[Tensor, Tensor, Tensor]

MASK32 = 0xFFFFFFFF
GOLDEN32 = 0x9E3779B1
MIX_A, MIX_B = 0x85EBCA6B, 0xC2B2AE35
ROTATION_KEY = 0x9E3779B9
GOLDEN64 = 0x9E3779B97F4A7C15
FINAL_A, FINAL_B = 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53


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
    if x.shape[1] == 0:
        return _finish(torch.zeros(x.shape[0], dtype=torch.int64, device=x.device), 0)
    step = max(1, CHUNK // x.shape[1])
    sums = [_terms(_words(rows), 0).sum(1) for rows in torch.split(x, step)]
    words = max(1, x.element_size() // 4) * x.shape[1]
    return _finish(torch.cat(sums) if sums else torch.zeros(0, dtype=torch.int64, device=x.device), words)


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
    words = max(1, flat.element_size() // 4)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for i, part in enumerate(torch.split(flat, CHUNK) if flat.numel() else ()):
        total = total + _terms(_words(part), i * CHUNK * words).sum()
    return _finish(total, words * flat.numel())


def _words(x: Tensor) -> Tensor:
    """The elements' bits as unsigned 32-bit words in int64, along the last dimension; 64-bit elements give two."""
    x = x.contiguous()
    if x.element_size() == 1:
        return x.view(torch.uint8).to(torch.int64)
    if x.element_size() == 2:
        return x.view(torch.int16).to(torch.int64) & 0xFFFF
    return x.view(torch.int32).to(torch.int64) & MASK32


def _terms(words: Tensor, start: int) -> Tensor:
    """What each word adds to the hash: a product of its mixed value with that value rotated, modulo 2**64."""
    index = torch.arange(start, start + words.shape[-1], dtype=torch.int64, device=words.device)
    mixed = _mix((words + (index * GOLDEN32 & MASK32)) & MASK32)
    rotated = ((mixed << 16) | (mixed >> 16)) & MASK32
    return mixed * (rotated ^ ROTATION_KEY)


def _mix(h: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finaliser (Appleby, 2011) on values below 2**32."""
    h = h ^ (h >> 16)
    h = (h * MIX_A) & MASK32
    h = h ^ (h >> 13)
    h = (h * MIX_B) & MASK32
    return h ^ (h >> 16)


def _finish(total: Tensor, words: int) -> Tensor:
    """MurmurHash3's 64-bit finaliser over the sum and the number of words."""
    h = total ^ _signed(words * GOLDEN64)
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
        index = torch.arange(i * CHUNK, i * CHUNK + values.numel(), dtype=torch.int64, device=flat.device)
        signed = values * (1 - 2 * (_mix(index & MASK32) & 1)).to(torch.float64)
        total = total + pad(signed, (0, -signed.numel() % SKETCH_SIZE)).view(-1, SKETCH_SIZE).sum(0)
    return total


def _histogram(chunks: list[Chunk], flat: Tensor) -> Tensor:
    """Counts by power of two of the magnitude: int64 of shape (buckets,)."""
    buckets = len(HISTOGRAM_EXPONENTS)
    total = torch.zeros(buckets, dtype=torch.int64, device=flat.device)
    for values, _, _ in chunks:
        exponent = torch.frexp(values[values != 0]).exponent.to(torch.int64) - 1
        total = total + torch.bincount((exponent - HISTOGRAM_EXPONENTS[0]).clamp(0, buckets - 1), minlength=buckets)
    return total
