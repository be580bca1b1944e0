"""Where bytes lie in the WAL: segments, pages, and the stream of bytes that is left when page headers are taken out.

Records are read from that stream: a record that crosses pages is in one piece there.  Its positions are "byte
positions" (xlog.c: XLogBytePosToRecPtr, XLogRecPtrToBytePos).  Page headers are multiples of 8 bytes, so alignment is
the same in both.
"""

from __future__ import annotations

from typing import Final

from pubsub.errors import FeatureNotSupported
from walsender.xlog.formats import LONG_HEADER, SHORT_HEADER, XLOG_BLCKSZ

_USABLE: Final = XLOG_BLCKSZ - SHORT_HEADER
_LONG_EXTRA: Final = LONG_HEADER - SHORT_HEADER
MIN_SEGMENT: Final = 1 << 20
MAX_SEGMENT: Final = 1 << 30


class Geometry:
    """The arithmetic of one segment size (bytes, a power of two from 1 MB to 1 GB)."""

    __slots__ = ("_usable_segment", "segment_size")

    def __init__(self, segment_size: int) -> None:
        if not MIN_SEGMENT <= segment_size <= MAX_SEGMENT or segment_size & (segment_size - 1):
            raise FeatureNotSupported(f"WAL segments of {segment_size} bytes are not supported")
        self.segment_size = segment_size
        self._usable_segment = segment_size // XLOG_BLCKSZ * _USABLE - _LONG_EXTRA

    def header_bytes(self, page_lsn: int) -> int:
        """Return the bytes that the header of the page at `page_lsn` takes."""
        return LONG_HEADER if page_lsn % self.segment_size == 0 else SHORT_HEADER

    def to_byte_position(self, lsn: int) -> int:
        """Return the byte position of `lsn`; a place inside a page header counts as the first byte after it."""
        segment, offset = divmod(lsn, self.segment_size)
        page, in_page = divmod(offset, XLOG_BLCKSZ)
        if page == 0:
            return segment * self._usable_segment + max(in_page - LONG_HEADER, 0)
        start = segment * self._usable_segment + page * _USABLE - _LONG_EXTRA
        return start + max(in_page - SHORT_HEADER, 0)

    def segment_name(self, timeline: int, lsn: int) -> str:
        """Return the name of a segment's file (xlog_internal.h: XLogFileName)."""
        per_id = 0x1_0000_0000 // self.segment_size
        number = lsn // self.segment_size
        return f"{timeline:08X}{number // per_id:08X}{number % per_id:08X}"

    def segment_start(self, name: str) -> tuple[int, int]:
        """Return a file name's timeline and first LSN.  Raises ValueError."""
        if len(name) != 24:
            raise ValueError(f'"{name}" is not the name of a WAL segment')
        timeline, high, low = (int(name[i : i + 8], 16) for i in (0, 8, 16))
        per_id = 0x1_0000_0000 // self.segment_size
        if low >= per_id:
            raise ValueError(f'"{name}" is not the name of a segment of {self.segment_size} bytes')
        return timeline, (high * per_id + low) * self.segment_size
