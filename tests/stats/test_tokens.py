"""Specification of `stats.tokens`: what sequences of ids hold, against loops in Python."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tracehooks.stats.tokens import GRAM, LARGEST, summarize_tokens

PAD = 0


def stretches(row: list[int], length: int) -> list[tuple[int, ...]]:
    """Every stretch of a length without padding."""
    found = (tuple(row[i : i + length]) for i in range(len(row) - length + 1))
    return [stretch for stretch in found if PAD not in stretch]


def longest(row: list[int]) -> int:
    """Length of the longest stretch that occurs twice."""
    return max(
        (n for n in range(1, len(row)) if any(count > 1 for count in Counter(stretches(row, n)).values())), default=0
    )


BATCHES = st.integers(1, 12).flatmap(
    lambda length: st.lists(st.lists(st.integers(0, 4), min_size=length, max_size=length), min_size=1, max_size=4)
)


@given(batch=BATCHES)
def test_against_loops(batch: list[list[int]]) -> None:
    """Padding, distinct ids, ids out of the vocabulary, the longest repeat and distinct 4-grams are those of a loop."""
    found = summarize_tokens(torch.tensor(batch), vocab_size=3, pad=PAD)
    flat = [token for row in batch for token in row]
    assert found["padding"].item() == pytest.approx(flat.count(PAD) / len(flat))
    assert found["distinct"].item() == len(set(flat) - {PAD})
    assert found["out_of_vocabulary"].item() == sum(token >= 3 for token in flat)
    assert found["longest_repeat"].item() == max(longest(row) for row in batch)
    grams = [stretches(row, GRAM) for row in batch]
    count = sum(map(len, grams))
    if len(batch[0]) < GRAM:
        assert "distinct_4grams" not in found
    else:
        share = sum(len(set(row)) for row in grams) / count if count else 1
        assert found["distinct_4grams"].item() == pytest.approx(share)


def test_a_loop_is_found_whatever_its_period() -> None:
    """A sequence that repeats a stretch of any length repeats all of itself but that stretch."""
    for period in (1, 7, 100):
        loop = torch.randperm(500)[:period].repeat(400 // period + 1)[:400]
        assert summarize_tokens(loop[None])["longest_repeat"].item() == 400 - period


def test_padding_that_lies_outside_the_vocabulary() -> None:
    """The id that fills up sequences is no token: -100 is not out of the vocabulary, other negative ids are."""
    ids = torch.tensor([[1, 2, -100, -100], [5, -1, 9, -100]])
    found = summarize_tokens(ids, vocab_size=9, pad=-100)
    assert found["out_of_vocabulary"].item() == 2
    assert found["padding"].item() == 0.375
    assert found["longest_repeat"].item() == 0


def test_what_was_not_asked_is_left_out() -> None:
    """Without a vocabulary or a padding id nothing is said of them, and nothing at all of no ids."""
    assert set(summarize_tokens(torch.arange(6))) == {"distinct", "longest_repeat", "distinct_4grams"}
    assert summarize_tokens(torch.zeros(2, 0, dtype=torch.int64), 3, 0) == {}
    assert summarize_tokens(torch.tensor(4))["distinct"].item() == 1


def test_repeats_are_looked_for_in_so_many_ids_at_most() -> None:
    """In a long sequence repeats are looked for at its beginning, counts are of all of it."""
    ids = torch.cat([torch.arange(LARGEST), torch.zeros(100, dtype=torch.int64)])
    found = summarize_tokens(ids)
    assert found["longest_repeat"].item() == 0
    assert found["distinct"].item() == LARGEST
