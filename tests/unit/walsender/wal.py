"""Handmade WAL: pages, records, blocks, rows."""

from __future__ import annotations

import struct

from google_crc32c import extend

from walsender.xlog.formats import (
    LONG_HEADER,
    LONG_HEADER_REST,
    PAGE_HEADER,
    SHORT_HEADER,
    XLOG_BLCKSZ,
    XLP_FIRST_IS_CONTRECORD,
    XLP_LONG_HEADER,
)
from walsender.xlog.geometry import Geometry

MAGIC_18 = 0xD118
SEGMENT = 1 << 20
GEOMETRY = Geometry(SEGMENT)
SYSTEM = 7_000_000_000_000_000_001


class Wal:
    """Growing WAL; `data` begins at the LSN `start`, the start of a segment."""

    def __init__(self, start: int = SEGMENT, *, magic: int = MAGIC_18, timeline: int = 1) -> None:
        self.start = start
        self.magic = magic
        self.timeline = timeline
        self.data = bytearray()
        self.previous = 0
        self.records: list[tuple[int, int, int, int, int]] = []
        """(LSN, length, xid, info, resource manager)"""

    @property
    def end(self) -> int:
        return self.start + len(self.data)

    def _header(self, remaining: int, flags: int = 0) -> None:
        info = flags | (XLP_FIRST_IS_CONTRECORD if remaining else 0)
        long = self.end % SEGMENT == 0
        page = self.end
        self.data += PAGE_HEADER.pack(
            self.magic, info | (XLP_LONG_HEADER if long else 0), self.timeline, page, remaining
        )
        self.data += bytes(4) + (LONG_HEADER_REST.pack(SYSTEM, SEGMENT, XLOG_BLCKSZ) if long else b"")
        assert self.end - page == (LONG_HEADER if long else SHORT_HEADER)

    def write(self, raw: bytes) -> int:
        """Append a record's bytes across as many pages as needed; return the LSN of the first byte."""
        if self.end % XLOG_BLCKSZ == 0:
            self._header(0)
        lsn = self.end
        left = raw
        while left:
            room = XLOG_BLCKSZ - self.end % XLOG_BLCKSZ
            self.data += left[:room]
            left = left[room:]
            if left:
                self._header(len(left))
        return lsn

    def pad(self) -> None:
        self.data += bytes(-len(self.data) % 8)

    def record(self, payload: bytes, *, xid: int = 0, info: int = 0, rmgr: int = 0, previous: int | None = None) -> int:
        """Append a record of headers and data; return its LSN."""
        raw = record_bytes(payload, xid, info, rmgr, self.previous if previous is None else previous)
        lsn = self.write(raw)
        self.pad()
        self.previous = lsn
        self.records.append((lsn, len(raw), xid, info, rmgr))
        return lsn


def record_bytes(payload: bytes, xid: int, info: int, rmgr: int, previous: int) -> bytes:
    header = struct.pack("<IIQBBxx", 24 + len(payload), xid, previous, info, rmgr)
    return header + struct.pack("<I", extend(extend(0, payload), header)) + payload


def main_data(data: bytes) -> bytes:
    return (bytes((255, len(data))) if len(data) < 256 else b"\xfe" + struct.pack("<I", len(data))) + data


def one_block(data: bytes, main: bytes, *, database: int = 5, number: int = 16400, block: int = 0) -> bytes:
    """Return the headers and data of a record with one block."""
    head = struct.pack("<BBHIIII", 0, 0x20 if data else 0, len(data), 1663, database, number, block)
    return head + bytes((255, len(main))) + data + main


def row(values: bytes, natts: int, *, bitmap: bytes = b"", infomask: int = 0) -> bytes:
    """Return an xl_heap_header and a tuple's bytes."""
    hoff = 23 + len(bitmap)
    padding = -hoff % 8
    return (
        struct.pack("<HHB", natts, infomask | (1 if bitmap else 0), hoff + padding) + bitmap + bytes(padding) + values
    )
