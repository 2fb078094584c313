"""Specification of the definition: `stats.reference`, against Python integers and exactly rounded sums."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tracehooks.stats import Spec, reference
from tracehooks.stats.plain import plain

from .measuring import (
    EIGHT_BIT,
    EVERYTHING,
    FLOATING,
    INTEGRAL,
    agree,
    any_bits,
    content_of,
    expected,
    hash_of,
    of_kind,
    row_of,
    sign_of,
    values_of,
)


def measured(x: Tensor) -> dict[str, Any]:
    """The reference's row of a tensor, by name."""
    return row_of(reference.summarize(plain(x), EVERYTHING))


@pytest.mark.parametrize("dtype", FLOATING + INTEGRAL, ids=str)
@given(data=st.data())
def test_every_bit_pattern_of_every_dtype(dtype: torch.dtype, data: st.DataObject) -> None:
    """All statistics of any bits (NaN, infinities, negative zero, subnormals, extremes) are the exact ones."""
    x = data.draw(any_bits(dtype))
    agree(measured(x), expected(values_of(x), content_of(x)))


@pytest.mark.parametrize("dtype", EIGHT_BIT, ids=str)
def test_eight_bit_floats(dtype: torch.dtype) -> None:
    """All 256 values of every eight-bit float are measured as what they stand for, and hashed as bytes."""
    x = torch.arange(256, dtype=torch.uint8).view(dtype)
    agree(measured(x), expected(values_of(x.to(torch.float32)), content_of(x.view(torch.uint8))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["normal", "shifted", "holes", "tiny", "constant"])
@pytest.mark.parametrize("count", [4095, 4096, 4097, 3 * 4096 + 5])
def test_more_than_a_block(kind: str, dtype: torch.dtype, count: int) -> None:
    """The statistics of several blocks are those of the whole, also where the mean is far above the deviation."""
    x = of_kind(kind, count, dtype)
    agree(measured(x), expected(values_of(x), content_of(x)))


def test_more_than_a_chunk() -> None:
    """Sums, sketch and hash go on from one chunk of the reference to the next."""
    x = of_kind("holes", reference.CHUNK + 77, torch.bfloat16)
    agree(measured(x), expected(values_of(x), content_of(x)))


def test_nothing_finite() -> None:
    """Where no element is finite, counts are counts and the moments are NaN, in an empty tensor as in one of NaN."""
    for x in (torch.empty(0), torch.full((5,), math.nan), torch.tensor([math.inf, -math.inf])):
        row = measured(x)
        assert all(math.isnan(row[name]) for name in ("min", "max", "mean", "std", "rms", "absmax"))
        assert not row["sketch"].any()
        assert not row["histogram"].any()
        assert row["count"] == x.numel() == row["nan"] + row["posinf"] + row["neginf"]


def test_a_zero_has_no_sign() -> None:
    """The minimum of negative zeros is zero, a zero is counted as one whatever its sign, and its sign is hashed."""
    negative, positive = torch.tensor([-0.0, -0.0, -0.0]), torch.zeros(3)
    row = measured(negative)
    assert math.copysign(1, row["min"]) == math.copysign(1, row["max"]) == math.copysign(1, row["absmax"]) == 1
    assert row["zeros"] == 3
    assert row["hash"] != measured(positive)["hash"]


@pytest.mark.parametrize(
    "like",
    [
        lambda x: x.t(),
        lambda x: x.t().contiguous().t(),
        lambda x: x[:, ::2],
        lambda x: x[1:, 1:],
        lambda x: x[0, 0],
        lambda x: x[:, :1].expand(-1, 9),
        lambda x: x.view(6, 2, 3).permute(2, 0, 1),
        lambda x: x.flip(0),
        lambda x: x.view(1, 1, 6, 6).to(memory_format=torch.channels_last),
    ],
)
def test_strides_do_not_matter(like: Any) -> None:
    """A view has the row of its contiguous copy, bit for bit."""
    x = like(torch.randn(6, 6))
    assert torch.equal(reference.summarize(x, EVERYTHING), reference.summarize(x.contiguous(), EVERYTHING))


def test_complex_tensors_by_component() -> None:
    """A complex tensor, conjugated or not, has the row of its components."""
    x = torch.randn(7, dtype=torch.complex64)
    for given_x in (x, x.conj(), x.to(torch.complex128), x[::2]):
        parts = torch.view_as_real(given_x.resolve_conj().contiguous())
        agree(measured(given_x), expected(values_of(parts), content_of(parts)))
    imaginary = x.conj().imag
    agree(measured(imaginary), expected(values_of(imaginary), content_of(imaginary.resolve_neg())))


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors_by_stored_values() -> None:
    """A sparse tensor has the row of its coalesced values, in the order in which its layout stores them."""
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    twice = torch.sparse_coo_tensor(torch.tensor([[0, 1, 1], [1, 0, 0]]), torch.tensor([2.0, 1.0, 2.0]), (2, 2))
    wanted = expected([2.0, 3.0], content_of(torch.tensor([2.0, 3.0])))
    for x in (dense.to_sparse_coo(), twice, dense.to_sparse_csr(), dense.to_sparse_bsr((1, 1))):
        agree(measured(x), wanted)
    agree(measured(dense.to_sparse_csc()), expected([3.0, 2.0], content_of(torch.tensor([3.0, 2.0]))))


@pytest.mark.filterwarnings("ignore")  # quantised and nested tensors announce that they are old or new
def test_quantised_and_nested_tensors() -> None:
    """A quantised tensor has the row of its values, a nested one that of its parts one after the other."""
    quantised = torch.quantize_per_tensor(torch.tensor([-1.0, 0.0, 1.5]), 0.5, 10, torch.quint8)
    agree(measured(quantised), expected([-1.0, 0.0, 1.5], content_of(torch.tensor([-1.0, 0.0, 1.5]))))
    parts = [torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0]])]
    wanted = expected([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], content_of(torch.arange(1.0, 7.0)))
    for layout in (torch.strided, torch.jagged):
        agree(measured(torch.nested.nested_tensor(parts, layout=layout)), wanted)


@given(x=any_bits(torch.float32), cut=st.integers(0, 300))
def test_parts_merge_into_the_whole(x: Tensor, cut: int) -> None:
    """Counts and histograms of parts add up, extremes are the extremes, moments combine by counts of finite elements."""
    left, right, whole = (measured(part) for part in (x[:cut], x[cut:], x))
    for name in ("count", "nan", "posinf", "neginf", "zeros", "histogram"):
        assert np.array_equal(left[name] + right[name], whole[name])
    sizes = [part["count"] - part["nan"] - part["posinf"] - part["neginf"] for part in (left, right)]
    pairs = [(part, size) for part, size in zip((left, right), sizes, strict=True) if size]
    if not pairs:
        return
    n = sum(sizes)
    assert whole["min"] == min(part["min"] for part, _ in pairs)
    assert whole["max"] == max(part["max"] for part, _ in pairs)
    mean = sum(part["mean"] * size for part, size in pairs) / n
    spread = sum((part["std"] ** 2 + (part["mean"] - mean) ** 2) * size for part, size in pairs)
    assert mean == pytest.approx(whole["mean"], rel=1e-9, abs=1e-12 * whole["rms"])
    assert math.sqrt(spread / n) == pytest.approx(whole["std"], rel=1e-9, abs=1e-9 * whole["rms"])


def test_threads_do_not_matter() -> None:
    """The row is the same bit for bit with one thread and with two."""
    x = of_kind("holes", 3_000_001, torch.float32)
    before = torch.get_num_threads()
    try:
        rows = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            rows.append(reference.summarize(x, EVERYTHING))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*rows)


@given(x=any_bits(torch.int16, most=60), rows=st.integers(0, 5))
def test_rows_are_hashed_as_tensors(x: Tensor, rows: int) -> None:
    """The hash of a row is the content hash of that row alone."""
    batch = x[: len(x) // max(rows, 1) * rows].reshape(rows, -1) if rows else x.reshape(1, -1)
    found = reference.hash_rows(batch).numpy().astype(np.uint64).tolist()
    assert found == [hash_of(content_of(row)) for row in batch]


def test_signs_of_the_sketch_are_those_documented() -> None:
    """The sketch of a one at position i is the sign of i in bucket i mod 16."""
    for i in [*range(70), 4095, 4096, 100_000, 262_144]:
        sketch = measured(torch.nn.functional.one_hot(torch.tensor(i), i + 1).to(torch.uint8))["sketch"]
        assert sketch[i % 16] == sign_of(i)
        assert np.count_nonzero(sketch) == 1


def test_sketches_estimate_distances_without_bias() -> None:
    """Over many tensors, the squared distance of sketches is on average that of the tensors, to its standard error."""
    generator = torch.Generator().manual_seed(0)
    ratios = []
    for _ in range(400):
        x, y = torch.randn(2, 500, generator=generator, dtype=torch.float64)
        apart = measured(x)["sketch"] - measured(y)["sketch"]
        ratios.append(float((apart**2).sum() / (x - y).square().sum()))
    error = np.std(ratios) / math.sqrt(len(ratios))
    assert abs(np.mean(ratios) - 1) < 4 * error
    assert np.std(ratios) == pytest.approx(math.sqrt(2 / 16), rel=0.2)


def test_what_is_not_asked_for_is_not_there() -> None:
    """A row has exactly the width of its spec, and a hash that nobody asked for is zero."""
    x = torch.randn(100)
    for spec in (Spec(False), Spec(), Spec(sketch=True), Spec(histogram=True), EVERYTHING):
        row = reference.summarize(x, spec)
        assert row.shape == (spec.width,)
        assert (int(row[5]) == 0) == (not spec.hash)
