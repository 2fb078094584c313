"""Specification of the content hash: which changes it must see, and that its values look random."""

from __future__ import annotations

from itertools import combinations, permutations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tracehooks.stats import Spec, fingerprints, summarize

from .measuring import finish32, hash_of


def content_hash(x: Tensor) -> int:
    """The hash column of a tensor's row."""
    return int(summarize(x, Spec())[5])


def distinct(rows: Tensor) -> bool:
    """Whether no two of the rows have one hash."""
    return len(torch.unique(fingerprints(rows))) == len(rows)


@given(words=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40), at=st.data())
def test_a_change_of_one_word_is_always_seen(words: list[int], at: st.DataObject) -> None:
    """Two contents that differ in one word of 32 bits never have the same hash."""
    i = at.draw(st.integers(0, len(words) - 1))
    other = [*words]
    other[i] = at.draw(st.integers(0, 2**32 - 1).filter(lambda word: word != words[i]))
    assert hash_of(np.array(words, "<u4").tobytes()) != hash_of(np.array(other, "<u4").tobytes())


def test_a_word_that_its_key_cancels_does_not_hide_its_neighbour() -> None:
    """The other word of a pair is seen even where the first one mixes to zero, which a plain product would not see."""
    cancelling = -finish32(0x9E3779B1) % 2**32
    for neighbour in (0, 1, 1000):
        contents = [np.array([cancelling, neighbour + step], "<u4").tobytes() for step in (0, 1)]
        assert hash_of(contents[0]) != hash_of(contents[1])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64], ids=str)
def test_order_matters(dtype: torch.dtype) -> None:
    """All orders of seven values have hashes of their own."""
    assert distinct(torch.tensor(list(permutations(range(1, 8))), dtype=torch.float32).to(dtype))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64], ids=str)
def test_swaps_and_shifts(dtype: torch.dtype) -> None:
    """Any swap of two elements and any rotation of a ramp changes the hash, across tiles as inside one."""
    n = 5000 if dtype is not torch.uint8 else 251
    ramp = torch.arange(n, dtype=torch.float32).to(dtype)
    shifted = [ramp.roll(k) for k in range(1, min(n, 200))]
    swapped = []
    for i, j in combinations([0, 1, 2, 3, 64, n // 2, n - 2, n - 1], 2):
        other = ramp.clone()
        other[i], other[j] = ramp[j], ramp[i]
        swapped.append(other)
    unequal = {tuple(row.tolist()) for row in (ramp, *shifted, *swapped)}
    assert len({content_hash(row) for row in (ramp, *shifted, *swapped)}) == len(unequal)


@pytest.mark.parametrize("base", [0.0, 1.0, -3.5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64], ids=str)
def test_differences_of_second_order_do_not_cancel(dtype: torch.dtype, base: float) -> None:
    """(+d, −2d, +d) at equal distances in a constant, which linear sums with linear weights cannot see, is seen."""
    rows = [torch.full((96,), base)]
    for start in range(0, 60, 3):
        for gap in (1, 2, 8, 16):
            for d in (1.0, 2.0, -1.0, 0.5, 0.25):
                row = torch.full((96,), base)
                row[start] += d
                row[start + gap] -= 2 * d
                row[start + 2 * gap] += d
                rows.append(row)
    unequal = torch.unique(torch.stack(rows).to(dtype), dim=0)
    assert distinct(unequal)


def test_flipped_signs_are_seen() -> None:
    """Flipping the signs of any set of twelve neighbouring elements changes the hash."""
    signs = (torch.arange(1 << 12).unsqueeze(1) >> torch.arange(12)) & 1
    assert distinct(torch.linspace(1, 2, 12) * (1 - 2 * signs))


def test_length_is_part_of_the_content() -> None:
    """Zeros at the end, and no content at all, are told apart by their number."""
    assert len({content_hash(torch.zeros(n)) for n in range(3000)}) == 3000
    assert len({content_hash(torch.zeros(n, dtype=torch.uint8)) for n in range(3000)}) == 3000


@pytest.mark.parametrize("family", ["one hot", "few bits", "tokens", "pixels", "half precision"])
def test_halves_of_the_hash_collide_as_often_as_random_numbers(family: str) -> None:
    """For 2**17 tensors of a structured family, each half of the bits collides about as often as random bits would."""
    count = 1 << 17
    number = torch.arange(count)
    generator = torch.Generator().manual_seed(0)
    rows = {
        "one hot": lambda: torch.zeros(count, 64).scatter_(1, (number % 64).unsqueeze(1), number.unsqueeze(1) + 1.0),
        "few bits": lambda: ((number.unsqueeze(1) >> torch.arange(17)) & 1).float(),
        "tokens": lambda: torch.randint(0, 50, (count, 8), generator=generator),
        "pixels": lambda: torch.randint(0, 256, (count, 12), generator=generator, dtype=torch.uint8),
        "half precision": lambda: torch.randn(count, 8, generator=generator).bfloat16().float(),
    }[family]()
    rows = torch.unique(rows, dim=0)
    hashes = fingerprints(rows).numpy().astype(np.uint64)
    assert len(np.unique(hashes)) == len(rows)
    by_chance = len(rows) ** 2 / 2**33
    for half in (hashes >> np.uint64(32), hashes & np.uint64(0xFFFFFFFF)):
        assert len(rows) - len(np.unique(half)) < by_chance + 6 * by_chance**0.5 + 6
