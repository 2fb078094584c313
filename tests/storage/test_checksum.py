"""Specification of `storage.checksum`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracehooks.storage import checksum


def stamped(before: bytes, after: bytes) -> bytes:
    data = bytearray(before + checksum.BLANK.encode() + after)
    checksum.stamp(data, len(before) + len(checksum.BLANK))
    return bytes(data)


@given(st.binary(max_size=40), st.binary(max_size=40), st.data())
def test_any_changed_bit_is_noticed(before: bytes, after: bytes, data: st.DataObject) -> None:
    """Stamped data is intact, and is not with any one bit of it changed."""
    whole = stamped(before, after)
    head = len(before) + len(checksum.BLANK)
    assert checksum.intact(whole, head)
    changed = bytearray(whole)
    changed[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert not checksum.intact(bytes(changed), head)


@given(st.binary(max_size=40), st.binary(min_size=1, max_size=40))
def test_missing_and_added_bytes_are_noticed(before: bytes, after: bytes) -> None:
    """Stamped data that lost its last byte or gained one is not intact."""
    whole = stamped(before, after)
    head = len(before) + len(checksum.BLANK)
    assert not checksum.intact(whole[:-1], head)
    assert not checksum.intact(whole + b"\0", head)


def test_the_length_can_be_read_before_the_rest() -> None:
    """The mark says how many bytes it speaks for; without a legible mark there is no answer."""
    assert checksum.claimed_length(stamped(b"a", b"bcd")[:30]) == 1 + len(checksum.BLANK) + 3
    assert checksum.claimed_length(b"nothing here") is None
    assert checksum.claimed_length(b"crc32:00000000:notanumber!!") is None


def test_a_stamp_needs_a_mark() -> None:
    """Data without a place for the mark cannot be stamped."""
    with pytest.raises(ValueError, match="no mark"):
        checksum.stamp(bytearray(b"none"))
    assert not checksum.intact(b"none")
