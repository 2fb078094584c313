"""Checksums that live inside what they protect: a fixed-width mark is written blank and filled in afterwards.

Journal messages and Parquet footers both have a place for free metadata. The mark there holds a CRC-32 of all the bytes
(its own eight digits read as zeros) and their number, so that any changed, missing or added byte is noticed. Parquet
pages have checksums of their own; the footer, which the Parquet format leaves unprotected, has this one.
"""

from __future__ import annotations

import zlib

KEY = "tracehooks.checksum"
"""The metadata key of the mark."""

BLANK = "crc32:00000000:000000000000"
"""The value to write under `KEY` before `stamp`: CRC-32 and length, both in lower-case hexadecimal."""

_START = b"crc32:"
_ZEROS = b"00000000"


def stamp(data: bytearray, head: int | None = None) -> None:
    """Fill in the last mark that starts in the first ``head`` bytes of ``data`` (all of them by default), in place."""
    at = data.rfind(_START, 0, head)
    if at < 0:
        raise ValueError("no mark to stamp")
    data[at + 15 : at + 27] = b"%012x" % len(data)
    data[at + 6 : at + 14] = b"%08x" % _crc(memoryview(data), at + 6)


def claimed_length(head: bytes) -> int | None:
    """The number of bytes that the last mark in ``head`` speaks for; None without a legible mark. Not yet verified."""
    at = head.rfind(_START)
    try:
        return int(head[at + 15 : at + 27], 16) if at >= 0 else None
    except ValueError:
        return None


def intact(data: bytes, head: int | None = None) -> bool:
    """Whether the last mark in the first ``head`` bytes is that of ``data``."""
    at = data.rfind(_START, 0, head)
    if at < 0 or len(data) < at + 27:
        return False
    crc, length = data[at + 6 : at + 14], data[at + 15 : at + 27]
    return length == b"%012x" % len(data) and crc == b"%08x" % _crc(memoryview(data), at + 6)


def _crc(data: memoryview, digits: int) -> int:
    before = zlib.crc32(_ZEROS, zlib.crc32(data[:digits]))
    return zlib.crc32(data[digits + len(_ZEROS) :], before)
