"""The walk over records: from header to header, cutting the rows out of most records on the way.

It handles nearly every record of a busy server in one pass.  Records that do not matter are skipped, a change of one
row of a known relation becomes a frame of its transaction (changes.py), and a change of a catalog goes to catalogs.py.
The walk stops at any other record: the first one of a transaction that may be a subtransaction, commits, images,
records that cross pages, and broken ones.  reader.py and decoder.py then parse that record anew.  `Skim` is the walk
over WAL that is only searched, before decoding begins.

Follows xlogreader.c (ValidXLogRecordHeader, ValidXLogRecord) and decode.c (DecodeInsert, DecodeUpdate, DecodeDelete).
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any, Final

from google_crc32c import extend
from librt.strings import BytesWriter, read_i16_le, read_i32_le, read_i64_le, write_i32_le, write_i64_le
from mypy_extensions import i32, i64

FRAME_OVERHEAD: Final = 48
"""Bytes that a bytes object takes beside its contents, its place in a list included."""

# The names of xlog/formats.py and decode/changes.py, written out as numbers: the compiler inlines no imported constant.
# tests/unit/walsender/test_hot.py compares them.
RECORD_HEADER_BYTES: Final = 24
XLOG: Final = 0
XLOG_FPI_FOR_HINT: Final = 0xA0
XLOG_FPI: Final = 0xB0
XACT: Final = 1
XLOG_XACT_COMMIT: Final = 0x00
XLOG_XACT_ABORT: Final = 0x20
XLOG_XACT_HAS_INFO: Final = 0x80
XACT_XINFO_HAS_DBINFO: Final = 0x01
HEAP2: Final = 9
HEAP: Final = 10
RM_MAX_BUILTIN: Final = 22
BLOCK_ID_DATA_SHORT: Final = 255
BLOCK_ID_DATA_LONG: Final = 254
BLOCK_ID_ORIGIN: Final = 253
MAX_BLOCK_ID: Final = 32
BKPBLOCK_HAS_IMAGE: Final = 0x10
BKPBLOCK_SAME_REL: Final = 0x80
BLCKSZ: Final = 8192
BKPBLOCK_IMAGE_OR_SAME_REL: Final = 0x90
BKPIMAGE_HAS_HOLE: Final = 0x01
BKPIMAGE_COMPRESSED: Final = 0x1C
BKPBLOCK_HAS_DATA: Final = 0x20
# id, flags, length of the data, locator, block, id and length of the main data
_ONE_BLOCK: Final = 22
XLOG_HEAP_OPMASK: Final = 0x70
XLOG_HEAP_INSERT: Final = 0x00
XLOG_HEAP_DELETE: Final = 0x10
XLOG_HEAP_UPDATE: Final = 0x20
XLOG_HEAP_HOT_UPDATE: Final = 0x40
XLOG_HEAP_INPLACE: Final = 0x70
XLOG_HEAP2_MULTI_INSERT: Final = 0x50
INSERT: Final = 1
UPDATE: Final = 2
DELETE: Final = 3
TOAST_CHUNK: Final = 6
XLH_INSERT_IS_SPECULATIVE: Final = 0x04
XLH_INSERT_CONTAINS_NEW_TUPLE: Final = 0x08
XLH_UPDATE_CONTAINS_NEW_TUPLE: Final = 0x10
XLH_UPDATE_CONTAINS_OLD: Final = 0x0C
XLH_UPDATE_FROM_OLD: Final = 0x60
XLH_DELETE_CONTAINS_OLD: Final = 0x06
XLH_DELETE_IS_SUPER: Final = 0x08
XLH_DELETE_NO_LOGICAL: Final = 0x20

IGNORED: Final = 0
"""`code` of a relation whose changes are not sent."""
TOAST: Final = 1
"""Added to `code`, which is twice the relation's number, for a TOAST table."""


def file_key(space: int, number: int) -> int:
    """Return what names a file of the decoded database, or a shared one: its number is unique only in its tablespace.

    It is the same only within a process.
    """
    key: i64 = (i64(number) & 0xFFFFFFFF) | ((i64(space) & 0xFFFFFFFF) << 32)
    return key


class Walk:
    """The walk while decoding, with the decoder's state that it needs.

    `irrelevant`: a byte for each kind of record (16 * resource manager + the upper four bits of its info), not 0 if only
    the transaction ids of such records matter.
    `by_xid`: the transactions in progress; `begin` makes one, from its id and the LSN of its first record.
    `by_file`: relations by file (file_key); `code` says what is done with their changes.  `ignored_files`: files whose
    changes are not sent, whatever a transaction does to the catalogs.
    `catalogs`: see catalogs.py; `sees_changes` is called with a transaction that has changed them, and the LSN.
    `rows`: whether rows may be handled here at all.  A transaction's part of `enough` bytes is handed over (assembly.py).
    """

    def __init__(
        self,
        database: int,
        irrelevant: bytes,
        by_xid: dict[int, Any],
        by_file: dict[int, Any],
        ignored_files: set[int],
        catalogs: Any,
        begin: Callable[[int, int], Any],
        sees_changes: Callable[[Any, int], None],
        enough: int,
        rows: bool,
    ) -> None:
        self.database: i64 = database
        self.irrelevant = irrelevant
        self.by_xid = by_xid
        self.by_file = by_file
        self.ignored_files = ignored_files
        self.catalogs = catalogs
        self.tables: dict[int, Any] = catalogs.files
        self.begin = begin
        self.sees_changes = sees_changes
        self.enough: i64 = enough
        self.rows = rows
        self.stop: i64 = 0
        """LSN at which decoding ends; 0: never."""
        self.held: i64 = 0
        """Bytes added to transactions since it was last set to 0."""
        self.previous: i64 = 0
        """LSN of the last record; 0: not known."""
        self.taken: i64 = 0
        """Number of records handled."""

    def run(self, buffer: bytes, begin: int, end: int, delta: int) -> int:
        """Handle records from `begin` on, as long as they end by `end`; return where the first one not handled starts.

        A record must start at `begin`.  `delta`: a byte's LSN less its offset in the buffer.
        """
        offset: i64 = begin
        limit: i64 = end
        shift: i64 = delta
        previous: i64 = self.previous
        irrelevant = self.irrelevant
        by_xid = self.by_xid
        stop: i64 = self.stop
        while offset + RECORD_HEADER_BYTES <= limit:
            word: i64 = read_i64_le(buffer, offset)
            total: i64 = word & 0xFFFFFFFF
            after: i64 = offset + total
            if total < RECORD_HEADER_BYTES or after > limit:
                break
            if previous != 0 and read_i64_le(buffer, offset + 8) != previous:
                break
            lsn: i64 = offset + shift
            if stop != 0 and lsn >= stop:
                break
            xid: i64 = (word >> 32) & 0xFFFFFFFF
            word = read_i64_le(buffer, offset + 16)
            rmgr: i64 = (word >> 8) & 0xFF
            if irrelevant[(rmgr << 4) | ((word >> 4) & 15)] != 0:
                if xid != 0 and xid not in by_xid and not self._begins(buffer, offset, total, lsn, xid):
                    break
                if rmgr > RM_MAX_BUILTIN and rmgr < 128:
                    break
                if not _right(buffer, offset, after, (word >> 32) & 0xFFFFFFFF):
                    break
            elif rmgr == XLOG:
                kind: i64 = word & 0xF0
                if kind != XLOG_FPI and kind != XLOG_FPI_FOR_HINT:
                    break
                if not self._foreign_image(buffer, offset, after) or (xid != 0 and xid not in by_xid):
                    break
                if not _right(buffer, offset, after, (word >> 32) & 0xFFFFFFFF):
                    break
            elif not self.rows:
                break
            elif rmgr == HEAP:
                if not self._row(buffer, offset, after, lsn, xid, word):
                    break
            elif rmgr == HEAP2:
                # Prunes and the like do not matter, but an image may be of a catalog's page.
                if total < RECORD_HEADER_BYTES + _ONE_BLOCK or buffer[offset + RECORD_HEADER_BYTES] != 0:
                    break
                if buffer[offset + RECORD_HEADER_BYTES + 1] & BKPBLOCK_IMAGE_OR_SAME_REL != 0:
                    break
                if xid != 0 and xid not in by_xid:
                    break
                checked = False
                if word & XLOG_HEAP_OPMASK == XLOG_HEAP2_MULTI_INSERT:
                    if xid == 0:
                        break
                    file = _file(buffer, offset + RECORD_HEADER_BYTES + 4)
                    if file not in self.ignored_files:
                        if file not in self.tables or not self._several(buffer, offset, after, lsn, xid, word, file):
                            break
                        checked = True
                    by_xid[xid].has_base = True
                if not checked and not _right(buffer, offset, after, (word >> 32) & 0xFFFFFFFF):
                    break
            else:
                break
            previous = lsn
            self.taken += 1
            offset = (after + 7) & ~7
        self.previous = previous
        return offset

    def _begins(self, buffer: bytes, offset: i64, total: i64, lsn: i64, xid: i64) -> bool:
        """Begin the transaction whose first record this is; return False if it may be a subtransaction.

        A record of main data alone names no top-level transaction: its own is one.
        """
        if total < RECORD_HEADER_BYTES + 2 or buffer[offset + RECORD_HEADER_BYTES] != BLOCK_ID_DATA_SHORT:
            return False
        if buffer[offset + RECORD_HEADER_BYTES + 1] != total - RECORD_HEADER_BYTES - 2:
            return False
        word: i64 = read_i64_le(buffer, offset + 16)
        if not _right(buffer, offset, offset + total, (word >> 32) & 0xFFFFFFFF):
            return False
        self.begin(xid, lsn)
        return True

    def _foreign_image(self, buffer: bytes, offset: i64, after: i64) -> bool:
        """Return whether a record has the image of one page and nothing else, and the page is no catalog's."""
        at: i64 = offset + RECORD_HEADER_BYTES
        if (
            at + 9 > after
            or buffer[at] != 0
            or buffer[at + 1] & (BKPBLOCK_IMAGE_OR_SAME_REL | BKPBLOCK_HAS_DATA) != BKPBLOCK_HAS_IMAGE
        ):
            return False
        size: i64 = i64(read_i16_le(buffer, at + 4)) & 0xFFFF
        kind: i64 = buffer[at + 8]
        at += 9
        if kind & BKPIMAGE_COMPRESSED != 0 and kind & BKPIMAGE_HAS_HOLE != 0:
            at += 2
        if at + 16 + size != after:
            return False
        return _file(buffer, at) not in self.tables

    def _row(self, buffer: bytes, offset: i64, after: i64, lsn: i64, xid: i64, word: i64) -> bool:
        """Handle a heap record; return False to leave it."""
        operation: i64 = word & XLOG_HEAP_OPMASK
        data: i64 = offset + RECORD_HEADER_BYTES + _ONE_BLOCK
        if xid == 0 or data > after:
            return False
        # One block without an image in place of its data, and short main data: all but a few records.
        block: i64 = read_i64_le(buffer, offset + RECORD_HEADER_BYTES)
        if (
            block & 0xFF != 0
            or (block >> 8) & BKPBLOCK_IMAGE_OR_SAME_REL != 0
            or buffer[data - 2] != BLOCK_ID_DATA_SHORT
        ):
            return False
        size: i64 = (block >> 16) & 0xFFFF
        if ((block >> 8) & BKPBLOCK_HAS_DATA != 0) != (size != 0):
            return False
        main: i64 = data + size
        main_size: i64 = buffer[data - 1]
        if main + main_size != after or main_size < 2:
            return False
        file = _file(buffer, offset + RECORD_HEADER_BYTES + 4)
        database: i64 = i64(read_i32_le(buffer, offset + RECORD_HEADER_BYTES + 8)) & 0xFFFFFFFF
        txn = self.by_xid.get(xid)
        code: i64 = IGNORED
        if file in self.ignored_files:
            pass
        elif database == self.database or database == 0:
            by_file = self.by_file if txn is None or txn.cache is None else txn.cache
            found = by_file.get(file)
            if found is None:
                return file in self.tables and self._catalog(buffer, offset, data, main, after, lsn, xid, word, file)
            code = found.code
            if code < 0:
                return False
        if (
            operation != XLOG_HEAP_INSERT
            and operation != XLOG_HEAP_UPDATE
            and operation != XLOG_HEAP_HOT_UPDATE
            and operation != XLOG_HEAP_DELETE
        ):
            return False
        if main_size < 3:
            return False
        flags: i64 = buffer[main + 2]
        kind: i64 = INSERT
        old = b""
        if operation == XLOG_HEAP_INSERT:
            # Leave speculative insertions; ignore those that log no row.
            if flags & XLH_INSERT_IS_SPECULATIVE != 0:
                return False
            if flags & XLH_INSERT_CONTAINS_NEW_TUPLE == 0:
                code = IGNORED
            if code & TOAST != 0:
                kind = TOAST_CHUNK
        else:
            if main_size < 8:
                return False
            flags = buffer[main + 7]
            if operation == XLOG_HEAP_DELETE:
                kind = DELETE
                if flags & XLH_DELETE_IS_SUPER != 0:
                    return False
                if flags & XLH_DELETE_NO_LOGICAL != 0:
                    code = IGNORED
                elif flags & XLH_DELETE_CONTAINS_OLD != 0:
                    old = buffer[main + 8 : after]
            else:
                kind = UPDATE
                if flags & XLH_UPDATE_FROM_OLD != 0 or main_size < 14:
                    return False
                if flags & XLH_UPDATE_CONTAINS_NEW_TUPLE == 0 or main == data:
                    code = IGNORED
                elif flags & XLH_UPDATE_CONTAINS_OLD != 0:
                    old = buffer[main + 14 : after]
            if code & TOAST != 0:
                code = IGNORED
        if not _right(buffer, offset, after, (word >> 32) & 0xFFFFFFFF):
            return False
        if txn is None:
            # The record names no top-level transaction, so this is one.
            txn = self.begin(xid, lsn)
        txn.has_base = True
        if code == IGNORED:
            return True
        number: i64 = code >> 1
        writer = BytesWriter()
        writer.append(kind)
        write_i64_le(writer, xid | number << 32)
        write_i64_le(writer, lsn)
        if kind in (UPDATE, DELETE):
            write_i32_le(writer, i32(len(old)))
            writer.write(old)
        if kind != DELETE:
            writer.write(buffer[data:main])
        frame = writer.getvalue()
        size = len(frame) + FRAME_OVERHEAD
        self.held += size
        for part in txn.parts:
            part.frames.append(frame)
            held: i64 = part.held
            held += size
            part.held = held
            if held >= self.enough:
                part.assembly.hand_over(part)
        return True

    def _catalog(
        self, buffer: bytes, offset: i64, data: i64, main: i64, after: i64, lsn: i64, xid: i64, word: i64, file: int
    ) -> bool:
        """Handle a change of a catalog's tuple, `main` as in _row; return False to leave it."""
        if not _right(buffer, offset, after, (word >> 32) & 0xFFFFFFFF):
            return False
        block: i64 = i64(read_i32_le(buffer, offset + RECORD_HEADER_BYTES + 16)) & 0xFFFFFFFF
        done: int = self.catalogs.change(
            self.tables[file], buffer, word & XLOG_HEAP_OPMASK, block, data, main, after, xid
        )
        if done == 0:
            return False
        txn = self.by_xid.get(xid)
        if txn is None:
            txn = self.begin(xid, lsn)
        txn.has_base = True
        if done > 1 and txn.cache != {}:
            self.sees_changes(txn, lsn)
        return True

    def _several(self, buffer: bytes, offset: i64, after: i64, lsn: i64, xid: i64, word: i64, file: int) -> bool:
        """Handle a multi-insert into a catalog whose one block has no image; return False to leave it."""
        head: i64 = read_i64_le(buffer, offset + RECORD_HEADER_BYTES)
        data: i64 = offset + RECORD_HEADER_BYTES + _ONE_BLOCK
        size: i64 = (head >> 16) & 0xFFFF
        main: i64 = data + size
        if ((head >> 8) & BKPBLOCK_HAS_DATA != 0) != (size != 0):
            return False
        database: i64 = read_i64_le(buffer, offset + RECORD_HEADER_BYTES + 8) & 0xFFFFFFFF
        if database != self.database and database != 0:
            return False
        if buffer[data - 2] != BLOCK_ID_DATA_SHORT or main + i64(buffer[data - 1]) != after:
            return False
        if not _right(buffer, offset, after, (word >> 32) & 0xFFFFFFFF):
            return False
        block: i64 = i64(read_i32_le(buffer, offset + RECORD_HEADER_BYTES + 16)) & 0xFFFFFFFF
        table = self.tables[file]
        done: int = self.catalogs.several(table, buffer, word & 0xF0, block, data, main, after, xid)
        if done == 0:
            return False
        txn = self.by_xid[xid]
        if txn.cache != {}:
            self.sees_changes(txn, lsn)
        return True


class Skim:
    """The walk over WAL that is searched for a few kinds of records, before decoding begins.

    It skips the kinds of records that are `irrelevant`, as Walk has them.  XLOG_SWITCH must not be one: no record follows
    it in its segment.  With `seen` it adds the records' transactions there and also skips ends of transactions that
    name no others, but stops at records that have a block of one of `files` (by number alone) or name a top-level
    transaction.
    """

    def __init__(self, irrelevant: bytes, files: Set[int] | None = None, seen: set[int] | None = None) -> None:
        self.irrelevant = irrelevant
        self.files = files
        self.seen = seen
        self.stop: i64 = 0
        self.previous: i64 = 0
        """Both as in Walk."""

    def run(self, buffer: bytes, begin: int, end: int, delta: int) -> int:
        """Skip records from `begin` on; arguments and result as for Walk.run."""
        offset: i64 = begin
        limit: i64 = end
        shift: i64 = delta
        previous: i64 = self.previous
        stop: i64 = self.stop
        irrelevant = self.irrelevant
        seen = self.seen
        last: i64 = 0
        while offset + RECORD_HEADER_BYTES <= limit:
            word: i64 = read_i64_le(buffer, offset)
            total: i64 = word & 0xFFFFFFFF
            after: i64 = offset + total
            if total < RECORD_HEADER_BYTES or after > limit:
                break
            if previous != 0 and read_i64_le(buffer, offset + 8) != previous:
                break
            if stop != 0 and offset + shift >= stop:
                break
            xid: i64 = (word >> 32) & 0xFFFFFFFF
            word = read_i64_le(buffer, offset + 16)
            rmgr: i64 = (word >> 8) & 0xFF
            if rmgr > RM_MAX_BUILTIN and rmgr < 128:
                break
            if irrelevant[(rmgr << 4) | ((word >> 4) & 15)] == 0:
                if rmgr != XACT or seen is None or not _ends_alone(buffer, offset, after, word):
                    break
            elif seen is not None and not self._elsewhere(buffer, offset + RECORD_HEADER_BYTES, after):
                break
            if not _right(buffer, offset, after, (word >> 32) & 0xFFFFFFFF):
                break
            if seen is not None and xid != 0 and xid != last:
                seen.add(xid)
                last = xid
            previous = offset + shift
            offset = (after + 7) & ~7
        self.previous = previous
        return offset

    def _elsewhere(self, buffer: bytes, begin: i64, after: i64) -> bool:
        """Return whether the headers from `begin` are well-formed and name neither a top-level transaction nor `files`.

        Follows record.py: _parse.
        """
        files = self.files
        at: i64 = begin
        behind: i64 = 0
        last: i64 = -1
        named = False
        while at + behind < after:
            kind: i64 = buffer[at]
            if kind == BLOCK_ID_DATA_SHORT:
                if at + 2 > after:
                    return False
                behind += buffer[at + 1]
                at += 2
                break
            if kind == BLOCK_ID_DATA_LONG:
                if at + 5 > after:
                    return False
                behind += i64(read_i32_le(buffer, at + 1)) & 0xFFFFFFFF
                at += 5
                break
            if kind == BLOCK_ID_ORIGIN:
                at += 3
                continue
            if kind > MAX_BLOCK_ID or kind <= last or at + 11 > after:
                return False
            last = kind
            flags: i64 = buffer[at + 1]
            size: i64 = i64(read_i16_le(buffer, at + 2)) & 0xFFFF
            if (flags & BKPBLOCK_HAS_DATA != 0) != (size != 0):
                return False
            behind += size
            at += 4
            if flags & BKPBLOCK_HAS_IMAGE != 0:
                image: i64 = i64(read_i16_le(buffer, at)) & 0xFFFF
                hole: i64 = BLCKSZ - image
                info: i64 = buffer[at + 4]
                before: i64 = i64(read_i16_le(buffer, at + 2)) & 0xFFFF
                at += 5
                if info & BKPIMAGE_COMPRESSED != 0:
                    hole = 0
                    if info & BKPIMAGE_HAS_HOLE != 0:
                        if at + 2 > after:
                            return False
                        hole = i64(read_i16_le(buffer, at)) & 0xFFFF
                        at += 2
                if (
                    image > BLCKSZ
                    or hole < 0
                    or before + hole > BLCKSZ
                    or (info & BKPIMAGE_HAS_HOLE != 0) != (hole != 0)
                ):
                    return False
                behind += image
            if flags & BKPBLOCK_SAME_REL == 0:
                if at + 12 > after:
                    return False
                if files is not None and (i64(read_i32_le(buffer, at + 8)) & 0xFFFFFFFF) in files:
                    return False
                named = True
                at += 12
            elif not named:
                return False
            at += 4
        return at + behind == after


def _ends_alone(buffer: bytes, offset: i64, after: i64, word: i64) -> bool:
    """Return whether a transaction's end names no other transaction: it holds its time and at most its database."""
    operation: i64 = word & XLOG_HEAP_OPMASK
    data: i64 = offset + RECORD_HEADER_BYTES + 2
    if (operation != XLOG_XACT_COMMIT and operation != XLOG_XACT_ABORT) or data + 8 > after:
        return False
    if buffer[data - 2] != BLOCK_ID_DATA_SHORT or data + i64(buffer[data - 1]) != after:
        return False
    if word & XLOG_XACT_HAS_INFO == 0:
        return after == data + 8
    return after == data + 20 and read_i32_le(buffer, data + 8) == XACT_XINFO_HAS_DBINFO


def _file(buffer: bytes, at: i64) -> int:
    """Return the file_key of the locator at `at`: tablespace, database, number."""
    key: i64 = (i64(read_i32_le(buffer, at + 8)) & 0xFFFFFFFF) | ((i64(read_i32_le(buffer, at)) & 0xFFFFFFFF) << 32)
    return key


def _right(buffer: bytes, offset: i64, after: i64, crc: i64) -> bool:
    """Return whether the record's checksum is that of its bytes."""
    found: i64 = extend(extend(0, buffer[offset + RECORD_HEADER_BYTES : after]), buffer[offset : offset + 20])
    return found == crc
