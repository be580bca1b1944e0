"""Bytes of WAL in, records out: sans-I/O (xlogreader.c: XLogDecodeNextRecord, XLogReaderValidatePageHeader).

    reader = WalReader(geometry, start)      start: where a record begins
    reader.feed(lsn, data)                   as they come, in order, the first from the page that holds `start`
    for record in reader.records(): …        (data, position, length, lsn, xid, info, rmgr): the complete ones

Page headers are taken out as bytes come in, so that every record lies in one piece; the LSNs of the bytes are kept page
by page.  The reader holds the bytes not yet read: at most one incomplete record and the last piece that was fed.

A record that was cut off by a crash of the server, and never completed, is skipped: the page after it says so
(XLP_FIRST_IS_OVERWRITE_CONTRECORD).  At bytes that cannot be a record the reader raises `WalCorrupted` if `final` says
that they will not change any more (they came from a server).  Otherwise it waits there, and `torn` says why.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from google_crc32c import extend as crc32c_extend

from pubsub.errors import FeatureNotSupported
from pubsub.protocol.lsn import Lsn
from walsender.hot.walk import Skim, Walk
from walsender.xlog.errors import WalCorrupted, WalMissing
from walsender.xlog.formats import (
    FORMATS,
    LONG_HEADER_REST,
    MAX_RECORD_BYTES,
    PAGE_HEADER,
    RECORD_HEADER,
    RECORD_HEADER_BYTES,
    RM_MAX_BUILTIN,
    RM_MIN_CUSTOM,
    SHORT_HEADER,
    XLOG_BLCKSZ,
    XLOG_SWITCH,
    XLP_FIRST_IS_CONTRECORD,
    XLP_LONG_HEADER,
    Rmgr,
    WalFormat,
)
from walsender.xlog.geometry import Geometry

RawRecord = tuple[bytes, int, int, int, int, int, int]
"""Buffer, offset in it, total length, LSN, xid, info, resource manager.  The buffer is valid until the next `feed`."""

_MAX_INT: Final = 1 << 62


class WalReader:
    """Reads records from `start` on, inclusive: a record begins there, or right after a page header that is there.

    `final`: the bytes fed are what a server wrote and will not change.  `find_first`: `start` is the start of a page,
    and the first record is the first one that begins on or after it.
    """

    def __init__(self, geometry: Geometry, start: int, *, final: bool = True, find_first: bool = False) -> None:
        self.geometry: Final = geometry
        self.format: WalFormat | None = None
        """Known after the first page header."""
        self.system_identifier = 0
        self.timeline = 0
        self.final = final
        self.torn: WalCorrupted | None = None
        """Why the reader waits at bytes that are no record."""
        self._find_first = find_first
        self._found_from = start if find_first else -1  # where a restart searches for the first record again
        self._start_page = start - start % XLOG_BLCKSZ
        self._buffer = b""
        self._offset = 0  # of the next record in the buffer
        self._pieces: list[bytes] = []  # received, not yet in the buffer
        self._pieces_bytes = 0
        self._wanted = 0  # bytes the buffer must have before it is read again
        # The buffer as pages: (offset of the page's first byte in the buffer, its LSN less that offset, info, rem_len)
        self._pages: list[tuple[int, int, int, int]] = []
        self._page = 0  # the page that holds _offset
        self._raw = self._start_page  # LSN of the next byte to come
        self._pending = b""  # the first part of a page header
        self._bad_page: WalCorrupted | None = None
        self._held: list[bytes] = []  # the bytes of an invalid page and after it, from _held_lsn on
        self._held_lsn = 0
        self._skip_to = self._start_page  # bytes before this LSN are skipped
        self._previous = 0  # LSN of the last record, 0: not known
        self._latest_page = 0  # LSN of the page that `timeline` is from
        self._skip_in_page = geometry.to_byte_position(start) - geometry.to_byte_position(self._start_page)
        self.walk: Walk | Skim | None = None
        """Handles most records at once; `records` gives those that it leaves."""
        self.position: int = start
        """LSN of the end of the last record: where the next one is expected (EndRecPtr)."""

    @property
    def received(self) -> int:
        """LSN of the byte after the last one fed, from which `feed` goes on."""
        return self._raw + len(self._pending)

    def restart_at(self, lsn: int) -> int:
        """Forget everything not yet read; return the LSN to feed from, the start of the page that holds `lsn`.

        `lsn` must be `position`: the next record is the one there.
        """
        self._buffer = b""
        self._offset = 0
        self._pieces.clear()
        self._pieces_bytes = self._wanted = self._page = 0
        self._pages.clear()
        self._pending = b""
        self._bad_page = self.torn = None
        self._held.clear()
        page = lsn - lsn % XLOG_BLCKSZ
        self._raw = self._skip_to = page
        self._skip_in_page = self.geometry.to_byte_position(lsn) - self.geometry.to_byte_position(page)
        self._find_first = lsn == self._found_from and not self._previous
        return page

    def feed(self, lsn: int, data: bytes) -> None:
        """Take bytes that lie at `lsn`; skip those that were fed already.

        Raises WalMissing if bytes are left out, FeatureNotSupported if the WAL changes to another version's.
        """
        expected = self._raw + len(self._pending)
        if lsn > expected:
            raise WalMissing(f"WAL from {Lsn(expected)} to {Lsn(lsn)} is missing", expected)
        if lsn < expected:
            data = data[expected - lsn :]
        if self._pending:
            data = self._pending + data
            self._pending = b""
        raw = self._raw
        at = 0
        end = len(data)
        while at < end:
            if raw < self._skip_to:
                step = min(self._skip_to - raw, end - at)
                raw += step
                at += step
                continue
            if self._bad_page is not None:
                # The bytes from an invalid page on wait until the reader knows whether they matter.
                break
            in_page = raw % XLOG_BLCKSZ
            if in_page == 0:
                size = self.geometry.header_bytes(raw)
                if end - at < size:
                    break
                self._bad_page = self._page_header(data, at, raw)
                if self._bad_page is not None:
                    # The awaited record will not be completed.
                    self._wanted = 0
                    break
                at += size
                raw += size
                in_page = size
            take = min(XLOG_BLCKSZ - in_page, end - at)
            self._pieces.append(data[at : at + take])
            self._pieces_bytes += take
            at += take
            raw += take
        self._raw = raw
        if self._bad_page is not None:
            # The page may lie after a switch of segments: then the bytes after it are needed.
            if self.torn is None:
                if not self._held:
                    self._held_lsn = raw
                self._held.append(data[at:])
            self._raw = raw + end - at
        else:
            self._pending = data[at:]

    def records(self) -> Iterator[RawRecord]:
        """Yield the complete records, in order.  Raises WalCorrupted, see the module's docstring."""
        unpack = RECORD_HEADER.unpack_from
        walk = self.walk
        while True:
            self._join()
            if self._wanted:
                return
            buffer = self._buffer
            size = len(buffer)
            offset = self._offset
            pages = self._pages
            page = self._page
            if self._skip_in_page or self._find_first:
                if not self._skip_to_first():
                    return
                continue
            if not pages:
                if self._bad_page is not None:
                    self._no_record(self._bad_page, self._bad_page.lsn)
                return
            next_page = pages[page + 1][0] if page + 1 < len(pages) else _MAX_INT
            delta = pages[page][1]
            restart = skipped = False
            while True:
                if walk is not None:
                    while offset >= next_page:
                        page += 1
                        next_page = pages[page + 1][0] if page + 1 < len(pages) else _MAX_INT
                        delta = pages[page][1]
                    walk.previous = self._previous
                    walked = walk.run(buffer, offset, min(next_page, size), delta)
                    if walked != offset:
                        self._previous = walk.previous
                        self.torn = None
                        skipped = True
                        offset = walked
                        if offset >= next_page:
                            continue
                if offset + RECORD_HEADER_BYTES > size:
                    self._leave(offset, page, skipped)
                    self._incomplete(offset, RECORD_HEADER_BYTES)
                    return
                while offset >= next_page:
                    page += 1
                    next_page = pages[page + 1][0] if page + 1 < len(pages) else _MAX_INT
                    delta = pages[page][1]
                total, xid, previous, info, rmgr, crc = unpack(buffer, offset)
                lsn = offset + delta
                end = offset + total
                if (
                    total < RECORD_HEADER_BYTES
                    or (previous != self._previous and self._previous)
                    or RM_MAX_BUILTIN < rmgr < RM_MIN_CUSTOM
                    or total > MAX_RECORD_BYTES
                ):
                    self._leave(offset, page, skipped)
                    self._invalid(lsn, total, previous, rmgr)
                    return
                if end > next_page:
                    # It crosses pages: each of them must continue this record.
                    outcome = self._check_continuation(offset, end, page)
                    if outcome < 0:
                        self._leave(offset, page, skipped)
                        restart = self._overwritten()
                        if not restart:
                            return
                        break
                    if outcome > 0:
                        self._leave(offset, page, skipped)
                        self._no_record(WalCorrupted("the record's continuation is missing", lsn), lsn)
                        return
                if end > size:
                    self._leave(offset, page, skipped)
                    self._incomplete(offset, total)
                    return
                if crc32c_extend(crc32c_extend(0, buffer[offset + 24 : end]), buffer[offset : offset + 20]) != crc:
                    self._leave(offset, page, skipped)
                    self._no_record(WalCorrupted("incorrect resource manager data checksum in record", lsn), lsn)
                    return
                self._previous = lsn
                self.torn = None
                record = (buffer, offset, total, lsn, xid, info, rmgr)
                offset = (end + 7) & ~7
                if rmgr == Rmgr.XLOG and info & 0xF0 == XLOG_SWITCH:
                    self.position = self._switch(lsn)
                    yield record
                    restart = True
                    break
                if offset <= next_page:
                    self.position = offset + delta
                else:
                    self._offset, self._page = offset, page
                    self.position = self._position_of(offset, page)
                yield record
            if not restart:
                return

    # Pages

    def _page_header(self, data: bytes, at: int, lsn: int) -> WalCorrupted | None:
        """Take note of the page at `lsn`; return the error to raise if it is invalid.  Raises FeatureNotSupported."""
        magic, info, timeline, address, remaining = PAGE_HEADER.unpack_from(data, at)
        if self.format is None:
            found = FORMATS.get(magic)
            if found is None:
                return WalCorrupted(f"invalid magic number {magic:04X}", lsn, hint=_VERSIONS)
            self.format = found
        elif magic != self.format.page_magic:
            if magic in FORMATS:
                raise FeatureNotSupported(
                    f"the WAL changes to that of PostgreSQL {FORMATS[magic].version}",
                    context=f"WAL position {Lsn(lsn)}",
                )
            return WalCorrupted(f"invalid magic number {magic:04X}", lsn)
        if info & ~self.format.page_flags:
            return WalCorrupted(f"invalid info bits {info:04X}", lsn)
        is_long = lsn % self.geometry.segment_size == 0
        if bool(info & XLP_LONG_HEADER) != is_long:
            return WalCorrupted(f"invalid info bits {info:04X}", lsn)
        if address != lsn:
            return WalCorrupted(f"unexpected pageaddr {Lsn(address)}", lsn)
        if is_long:
            identifier, segment_size, block_size = LONG_HEADER_REST.unpack_from(data, at + SHORT_HEADER)
            if segment_size != self.geometry.segment_size or block_size != XLOG_BLCKSZ:
                return WalCorrupted("WAL file is from a server with other sizes of segments or pages", lsn)
            if self.system_identifier and identifier != self.system_identifier:
                return WalCorrupted(
                    f"WAL file is from different database system: its system identifier is {identifier}, "
                    f"that of what was read before is {self.system_identifier}",
                    lsn,
                )
            self.system_identifier = identifier
        if timeline < self.timeline and lsn > self._latest_page:
            return WalCorrupted(f"out-of-sequence timeline ID {timeline} (after {self.timeline})", lsn)
        self.timeline, self._latest_page = timeline, lsn
        if info & self.format.overwrites_contrecord:
            # The awaited record will not be completed.
            self._wanted = 0
        offset = len(self._buffer) + self._pieces_bytes
        size = self.geometry.header_bytes(lsn)
        self._pages.append((offset, lsn + size - offset, info, remaining))
        return None

    def _join(self) -> None:
        """Move received pieces into the buffer once there are enough of them, and drop what was read."""
        if not self._pieces or len(self._buffer) + self._pieces_bytes < self._wanted:
            if self._wanted and len(self._buffer) < self._wanted:
                return
            self._wanted = 0
            return
        self._wanted = 0
        # Alignment counts from the buffer's start; the padding after the last record may not be there yet.
        cut = min(self._offset, len(self._buffer)) & ~7
        self._buffer = b"".join((self._buffer[cut:], *self._pieces))
        self._pieces.clear()
        self._pieces_bytes = 0
        self._offset -= cut
        pages = self._pages
        first = self._page
        while first + 1 < len(pages) and pages[first + 1][0] <= cut + self._offset:
            first += 1
        self._pages = [(offset - cut, delta + cut, info, left) for offset, delta, info, left in pages[first:]]
        self._page = 0

    def _skip_to_first(self) -> bool:
        """Skip what lies before the first record; return False while not all of it is there."""
        if not self._pages or self._pages[-1][0] > len(self._buffer):
            self._incomplete(0, 0)
            return False
        if self._find_first:
            _, _, info, remaining = self._pages[0]
            if info & XLP_FIRST_IS_CONTRECORD:
                self._skip_in_page = (remaining + 7) & ~7
            self._find_first = False
            if not self._skip_in_page:
                return True
        if len(self._buffer) < self._skip_in_page:
            self._incomplete(0, self._skip_in_page)
            return False
        self._offset = self._skip_in_page
        self._skip_in_page = 0
        while self._page + 1 < len(self._pages) and self._pages[self._page + 1][0] <= self._offset:
            self._page += 1
        return True

    # Records

    def _leave(self, offset: int, page: int, skipped: bool) -> None:
        """Remember where to go on.  `skipped`: the walk took the last record, so `position` is still to be set."""
        self._offset, self._page = offset, page
        if skipped:
            # The last record ended on this page or on one before it, never on a later one.
            while self._page and self._pages[self._page][0] >= offset:
                self._page -= 1
            self.position = self._position_of(offset, self._page)

    def _position_of(self, offset: int, page: int) -> int:
        """Return the end LSN of a record that ends at `offset` of the buffer and began on `page` or before.

        At the end of a page it is the page's end, not the next page's first record.
        """
        pages = self._pages
        while page + 1 < len(pages) and pages[page + 1][0] < offset:
            page += 1
        return offset + pages[page][1]

    def _check_continuation(self, offset: int, end: int, page: int) -> int:
        """Return 0 if the pages that are there continue the record, -1 if it was overwritten, 1 if they do not."""
        pages = self._pages
        assert self.format is not None
        overwritten = self.format.overwrites_contrecord
        for begins, _, info, remaining in pages[page + 1 :]:
            if begins >= end:
                break
            if begins > len(self._buffer):
                break
            if info & overwritten:
                return -1
            if not info & XLP_FIRST_IS_CONTRECORD or remaining != end - begins:
                return 1
        return 0

    def _overwritten(self) -> bool:
        """Go on at the page that says that the record before it was never completed; return False if there is none."""
        assert self.format is not None
        for number in range(self._page + 1, len(self._pages)):
            if self._pages[number][2] & self.format.overwrites_contrecord:
                self._page = number
                self._offset = self._pages[number][0]
                self.position = self._offset + self._pages[number][1]
                return True
        return False

    def _incomplete(self, offset: int, length: int) -> None:
        """Wait for more bytes; they will never come if the next page is invalid."""
        self._wanted = offset + length
        if self._bad_page is not None:
            self._no_record(self._bad_page, self._bad_page.lsn)

    def _invalid(self, lsn: int, total: int, previous: int, rmgr: int) -> None:
        if total < RECORD_HEADER_BYTES:
            what = f"invalid record length: expected at least {RECORD_HEADER_BYTES}, got {total}"
        elif previous != self._previous:
            what = f"record with incorrect prev-link {Lsn(previous)}, expected {Lsn(self._previous)}"
        elif total > MAX_RECORD_BYTES:
            what = f"record of {total} bytes is longer than any"
        else:
            what = f"invalid resource manager ID {rmgr}"
        self._no_record(WalCorrupted(what, lsn), lsn)

    def _no_record(self, error: WalCorrupted, lsn: int) -> None:
        self.torn = error
        if self.final:
            raise error
        self._wanted = _MAX_INT

    def _switch(self, lsn: int) -> int:
        """Skip the rest of the segment after XLOG_SWITCH; return the LSN at which the next one starts."""
        segment_size = self.geometry.segment_size
        target = lsn - lsn % segment_size + segment_size
        kept = [number for number, (offset, delta, _, _) in enumerate(self._pages) if offset + delta > target]
        if kept:
            # The next segment has come in already.
            offset = self._pages[kept[0]][0]
            whole = b"".join((self._buffer, *self._pieces))
            self._buffer = whole[offset:]
            self._pages = [(o - offset, d + offset, i, r) for o, d, i, r in self._pages[kept[0] :]]
        else:
            self._buffer = b""
            self._pages = []
        self._pieces.clear()
        self._pieces_bytes = 0
        self._offset = self._page = self._wanted = 0
        if not kept:
            self._skip_to = target
            self._bad_page = None
            if self._raw < target:
                self._pending = b""
            if self._held:
                held = b"".join(self._held)
                self._held.clear()
                self._raw = self._held_lsn
                self.feed(self._held_lsn, held)
        return target


_VERSIONS: Final = f"PostgreSQL {', '.join(str(f.version) for f in FORMATS.values())} are supported."
