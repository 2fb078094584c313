"""The statistics once more, from their documentation: Python integers, `math.fsum` and NumPy, without torch's arithmetic."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from tracehooks.stats import Spec, unpack
from tracehooks.stats.layout import BASE_WIDTH, FLOATS, INTEGERS

EVERYTHING = Spec(hash=True, sketch=True, histogram=True)
MASK64 = (1 << 64) - 1
GOLDEN64 = 0x9E3779B97F4A7C15

FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGRAL = (
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64, torch.int64,
)  # fmt: skip
EIGHT_BIT = (
    torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
)  # fmt: skip


def finish32(h: int) -> int:
    """MurmurHash3's 32-bit finaliser."""
    h = ((h ^ h >> 16) * 0x85EBCA6B) & 0xFFFFFFFF
    h = ((h ^ h >> 13) * 0xC2B2AE35) & 0xFFFFFFFF
    return h ^ h >> 16


def finish64(h: int) -> int:
    """MurmurHash3's 64-bit finaliser."""
    h = ((h ^ h >> 33) * 0xFF51AFD7ED558CCD) & MASK64
    h = ((h ^ h >> 33) * 0xC4CEB9FE1A85EC53) & MASK64
    return h ^ h >> 33


def hash_of(content: bytes) -> int:
    """The content hash of some bytes, word by word."""
    padded = content + bytes(-len(content) % 8)
    words = struct.unpack(f"<{len(padded) // 4}I", padded)
    total = 0
    for tile in range(0, len(words), 1024):
        digest = (tile // 1024 + 1) * GOLDEN64
        mixed = []
        for j, word in enumerate(words[tile : tile + 1024]):
            h = (word + finish32((j + 1) * 0x9E3779B1 & 0xFFFFFFFF)) & 0xFFFFFFFF
            mixed.append((h ^ h >> 16) * 0x85EBCA6B & 0xFFFFFFFF)
        for a, b in zip(mixed[::2], mixed[1::2], strict=True):
            digest += (a + (1 << 32)) * (b + 1) - (1 << 32)
        total += finish64(digest & MASK64)
    return finish64(total & MASK64 ^ len(content) * GOLDEN64 & MASK64)


def sign_of(i: int) -> int:
    """The sign of element i in the sketch."""
    return 1 - 2 * (finish64((i // 64 + 1) * GOLDEN64 & MASK64) >> i % 64 & 1)


def content_of(x: Tensor) -> bytes:
    """The elements' bytes in logical order."""
    return x.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()


def values_of(x: Tensor) -> list[float]:
    """The elements as Python floats (integers beyond 2**53 rounded to nearest, as float does)."""
    return [float(value) for value in x.reshape(-1).tolist()]


def row_of(row: Tensor, spec: Spec = EVERYTHING) -> dict[str, Any]:
    """A packed row by name: Python numbers, and arrays for sketch (float64, before rounding) and histogram."""
    columns = unpack(row.numpy()[None], spec)
    found = {name: column[0] for name, column in columns.items() if column is not None}
    found |= {name: int(found[name]) for name in INTEGERS if name in found}
    found |= {name: float(found[name]) for name in FLOATS}
    if spec.sketch:
        found["sketch"] = row[BASE_WIDTH : BASE_WIDTH + 16].view(torch.float64).numpy()
    return found


def expected(values: list[float], content: bytes) -> dict[str, Any]:
    """Every statistic of some values, exactly rounded."""
    finite = [value for value in values if math.isfinite(value)]
    top = max((abs(value) for value in finite), default=0.0)
    scale = 2.0 ** (math.frexp(top)[1] - 1) if top else 1.0
    scaled = [value / scale for value in finite]
    n = len(finite) or math.nan
    mean = math.fsum(scaled) / n
    signed = [value * sign_of(i) if math.isfinite(value) else 0.0 for i, value in enumerate(values)]
    histogram = np.zeros(64, np.int64)
    for value in finite:
        if value:
            histogram[min(max(math.frexp(value)[1] - 1 + 32, 0), 63)] += 1
    return {
        "count": len(values),
        "nan": sum(math.isnan(value) for value in values),
        "posinf": values.count(math.inf),
        "neginf": values.count(-math.inf),
        "zeros": values.count(0.0),
        "hash": hash_of(content),
        "min": min(finite, default=math.nan),
        "max": max(finite, default=math.nan),
        "mean": mean * scale,
        "std": math.sqrt(math.fsum((value - mean) ** 2 for value in scaled) / n) * scale,
        "rms": math.sqrt(math.fsum(value * value for value in scaled) / n) * scale,
        "absmax": top if finite else math.nan,
        "sketch": np.array([math.fsum(value / scale for value in signed[b::16]) * scale for b in range(16)]),
        "histogram": histogram,
    }


def agree(found: dict[str, Any], wanted: dict[str, Any], tolerance: float = 1e-12, *, sketch: bool = True) -> None:
    """Counts, extremes, hash and histogram equal; moments and sketch within a relative tolerance of their scale."""
    for name in (*INTEGERS, "min", "max", "absmax"):
        assert found[name] == wanted[name] or (found[name] != found[name] and wanted[name] != wanted[name]), name
    assert np.array_equal(found["histogram"], wanted["histogram"])
    size = wanted["rms"]
    if size != size:
        assert all(found[name] != found[name] for name in ("mean", "std", "rms"))
        return
    ulp = 2.0**-1074
    assert abs(found["rms"] - size) <= tolerance * size + ulp
    # The mean is a sum of terms as large as the largest: its error, and so std's, is in proportion to rms.
    assert abs(found["mean"] - wanted["mean"]) <= tolerance * size + ulp
    assert abs(found["std"] - wanted["std"]) <= tolerance * wanted["std"] + 1e-15 * size + ulp
    if sketch and wanted["absmax"] * wanted["count"] < 1e308:  # beyond, a sum may overflow on its way
        margin = tolerance * wanted["count"] ** 0.5 * size + ulp
        assert np.all(np.abs(found["sketch"] - wanted["sketch"]) <= margin)


def any_bits(dtype: torch.dtype, most: int = 300) -> st.SearchStrategy[Tensor]:
    """Tensors of all bit patterns of a dtype, NaN, infinities, negative zero and subnormals among them."""
    size = torch.empty(0, dtype=dtype).element_size()
    if dtype is torch.bool:
        return st.lists(st.booleans(), max_size=most).map(lambda values: torch.tensor(values, dtype=torch.bool))
    width = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[size]
    special = [0, 1, (1 << 8 * size) - 1, 1 << 8 * size - 1]
    if dtype in FLOATING:
        kinds = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, torch.finfo(dtype).max, torch.finfo(dtype).tiny]
        special += [int.from_bytes(content_of(torch.tensor(kind, dtype=dtype)), "little") for kind in kinds]
    bits = st.sampled_from(special) | st.integers(0, (1 << 8 * size) - 1)
    return st.lists(bits, max_size=most).map(
        lambda values: torch.from_numpy(np.array(values, width).view(np.uint8)).view(dtype)
    )


def of_kind(kind: str, count: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random tensors: ``normal``, ``shifted`` (mean >> std), ``holes`` (NaN, infinities, zeros), ``tiny``, ``constant``."""
    x = torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if kind == "shifted":
        x = 1000 + x * 1e-3
    elif kind == "tiny":
        x = x * 2.0**-140
    elif kind == "constant":
        x = torch.full_like(x, 0.1)
    elif kind == "holes":
        x[::3], x[1::5], x[2::7], x[3::4] = math.nan, math.inf, -math.inf, 0.0
    if not dtype.is_floating_point:
        signed = dtype in (torch.int8, torch.int16, torch.int32, torch.int64)
        x = torch.nan_to_num(x * 10, 0.0, 5.0, 7.0).clamp(-100 if signed else 0, 100)
    return x.to(dtype)
