"""Tuples on a page of a table (bufpage.h, htup_details.h)."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from struct import Struct
from typing import Final

from pubsub.errors import DataCorrupted
from walsender.types.layout import ROW_IN_TUPLE
from walsender.xlog.formats import BLCKSZ

_PAGE: Final = Struct("<HHH")  # lower, upper, special, at byte 12
_XIDS: Final = Struct("<II")
_MASKS: Final = Struct("<HH")
_ITEMS: Final = 24
LP_NORMAL: Final = 1

HEAP_XMAX_LOCK_ONLY: Final = 0x0080
HEAP_XMIN_COMMITTED: Final = 0x0100
HEAP_XMIN_INVALID: Final = 0x0200
HEAP_XMIN_FROZEN: Final = HEAP_XMIN_COMMITTED | HEAP_XMIN_INVALID
HEAP_XMAX_COMMITTED: Final = 0x0400
HEAP_XMAX_INVALID: Final = 0x0800
HEAP_XMAX_IS_MULTI: Final = 0x1000
HEAP_MOVED: Final = 0xC000

PageTuple = tuple[int, int, int, int, bytes]
"""offset number, xmin, xmax, infomask, row"""


def tuples_of(page: bytes) -> Iterator[PageTuple]:
    """Yield the tuples of a page, including dead ones that are still there.  Raises DataCorrupted."""
    try:
        lower, upper, special = _PAGE.unpack_from(page, 12)
        if upper == 0:
            return  # a new page
        if len(page) != BLCKSZ or not _ITEMS <= lower <= upper <= special <= BLCKSZ:
            raise DataCorrupted("a page's header is corrupted")
        for number, (item,) in enumerate(struct.iter_unpack("<I", page[_ITEMS : lower - (lower - _ITEMS) % 4]), 1):
            if (item >> 15) & 3 != LP_NORMAL:
                continue
            start = item & 0x7FFF
            length = item >> 17
            if start + length > BLCKSZ or length < ROW_IN_TUPLE + 5:
                raise DataCorrupted(f"item {number} of a page reaches past it")
            xmin, xmax = _XIDS.unpack_from(page, start)
            _, infomask = _MASKS.unpack_from(page, start + ROW_IN_TUPLE)
            yield number, xmin, xmax, infomask, page[start + ROW_IN_TUPLE : start + length]
    except struct.error as error:
        raise DataCorrupted("a page's header is corrupted") from error


def tuple_at(page: bytes, number: int) -> PageTuple:
    """Return the tuple with the offset number `number`.  Raises DataCorrupted if there is none."""
    try:
        (item,) = struct.unpack_from("<I", page, _ITEMS + 4 * (number - 1))
        start = item & 0x7FFF
        length = item >> 17
        if (item >> 15) & 3 == LP_NORMAL and start + length <= len(page) and length >= ROW_IN_TUPLE + 5:
            xmin, xmax = _XIDS.unpack_from(page, start)
            _, infomask = _MASKS.unpack_from(page, start + ROW_IN_TUPLE)
            return number, xmin, xmax, infomask, page[start + ROW_IN_TUPLE : start + length]
    except struct.error:
        pass
    raise DataCorrupted(f"item {number} of a page is not there")
