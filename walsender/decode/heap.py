"""Heap records decoded into changes of their transactions or of the catalogs (decode.c: heap_decode, heap2_decode).

Most rows never come here: the walk over records makes their frames (walk.py).  This is the general path for all
records.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Sequence
from struct import Struct
from typing import Any, Final

from pubsub.errors import PubsubError
from walsender.decode import changes as c
from walsender.decode.accounting import CHANGE, ROW
from walsender.decode.relations import IGNORED, Decoded, Registry, Unknown
from walsender.decode.transactions import Part, Txn
from walsender.historic.tracker import CatalogTracker
from walsender.historic.tuples import logs_rows
from walsender.hot.walk import file_key
from walsender.xlog import formats as f
from walsender.xlog.errors import WalCorrupted
from walsender.xlog.formats import WalFormat
from walsender.xlog.record import Record, RelFileLocator

_U16: Final = Struct("<H")
_INSERT: Final = Struct("<HB")
_UPDATE: Final = Struct("<IHBBIH")
_DELETE: Final = Struct("<IHBB")
_TRUNCATE: Final = Struct("<IIB")
_TRUNCATE_FLAGS: Final = f.XLH_TRUNCATE_CASCADE | f.XLH_TRUNCATE_RESTART_SEQS
_MULTI: Final = Struct("<BxH")
_MULTI_TUPLE: Final = Struct("<HHHB")


class HeapDecoder:
    """Decodes heap records.  Assemblies whose transactions may be streamed count what a server would hold.

    Its methods raise WalCorrupted, CatalogDiverged, and struct.error if a record is too short.
    """

    def __init__(
        self,
        database: int,
        tracker: CatalogTracker,
        registry: Registry,
        wal_format: WalFormat,
    ) -> None:
        self._database = database
        self._tracker = tracker
        self._registry = registry
        self._counts_bare_updates = wal_format.counts_bare_updates

    def heap(self, record: Record, txn: Txn | None) -> None:
        """Decode a record of the resource manager Heap (decode.c: heap_decode).

        `txn`: None if the record has no xid.
        """
        operation = record.info & f.XLOG_HEAP_OPMASK
        if txn is None:
            if operation == f.XLOG_HEAP_INPLACE:
                self._catalog(record, None)
            return
        if operation == f.XLOG_HEAP_LOCK:
            return
        txn.has_base = True
        if operation == f.XLOG_HEAP_INPLACE:
            self._catalog(record, txn)
            return
        if operation == f.XLOG_HEAP_TRUNCATE:
            self._truncate(record, txn)
            return
        if not record.blocks:
            return
        locator = record.blocks[0].locator
        if locator[1] != self._database and locator[1] != 0:
            return
        if self._tracker.is_file(locator):
            if operation != f.XLOG_HEAP_INSERT and not self._is_dropped(record, operation):
                for part in self._parts(txn, record.origin):
                    if part.assembly.memory is not None:
                        part.assembly.memory.queue(part, record.xid, record.lsn, CHANGE, origin=record.origin)
            self._catalog(record, txn)
            return
        parts = self._parts(txn, record.origin)
        if not parts:
            return
        found = self._find(txn, locator)
        # While a catalog is rewritten, rows that are not logged go into a file that no relation has yet, or any more.
        unlogged = isinstance(found, Unknown) and not logs_rows(record)
        if found is not IGNORED and not unlogged and self._usable(parts, found, record.xid, record.lsn):
            frame = heap_frame(record, found.number, is_toast=found.is_toast)
            if frame is not None:
                for part in parts:
                    part.assembly.append(part, frame)
                if found.code < 0:
                    _find_names(found, frame)
        self._account(record, parts)

    def heap2(self, record: Record, txn: Txn | None) -> None:
        """Decode a record of the resource manager Heap2 (decode.c: heap2_decode)."""
        operation = record.info & f.XLOG_HEAP_OPMASK
        if operation == f.XLOG_HEAP2_MULTI_INSERT:
            if txn is not None:
                txn.has_base = True
                self._multi_insert(record, txn)
        elif operation == f.XLOG_HEAP2_NEW_CID:
            if txn is not None:
                txn.catalog_xids.add(record.xid)
                for part in txn.parts:
                    if part.assembly.memory is not None:
                        part.assembly.memory.queue(part, record.xid, record.lsn, CHANGE, streamable=False)
        elif any(block.image is not None and self._tracker.is_file(block.locator) for block in record.blocks):
            # Compare the image of a catalog's page with the tracked catalog.
            self._tracker.apply(record)

    # Rows

    def _multi_insert(self, record: Record, txn: Txn) -> None:
        """Append a frame for each row of a multi-insert (decode.c: DecodeMultiInsert)."""
        if not record.blocks:
            return
        xid, lsn = record.xid, record.lsn
        locator = record.blocks[0].locator
        if locator[1] != self._database and locator[1] != 0:
            return
        if self._tracker.is_file(locator):
            self._catalog(record, txn)
            return
        parts = self._parts(txn, record.origin)
        if not parts:
            return
        flags, count = _MULTI.unpack_from(record.main)
        rows = record.blocks[0].data
        if not flags & f.XLH_INSERT_CONTAINS_NEW_TUPLE or rows is None:
            return
        found = self._find(txn, locator)
        wanted = self._usable(parts, found, xid, lsn)
        counted = [part for part in parts if part.assembly.memory is not None]
        if not wanted and not counted:
            return
        position = 0
        last = count - 1 if flags & f.XLH_INSERT_LAST_IN_MULTI else count
        more = final = b""
        if wanted:
            more = c.HEAD.pack(c.TOAST_CHUNK if found.is_toast else c.INSERT_MORE, xid, found.number, lsn)
            final = c.HEAD.pack(c.TOAST_CHUNK if found.is_toast else c.INSERT, xid, found.number, lsn)
        for index in range(count):
            position = (position + 1) & ~1
            (size,) = _U16.unpack_from(rows, position)
            end = position + _MULTI_TUPLE.size + size
            if end > len(rows):
                raise WalCorrupted("a tuple reaches past its record", lsn)
            if wanted:
                frame = (final if index == last else more) + rows[position + 2 : end]
                for part in parts:
                    part.assembly.append(part, frame)
                if found.code < 0:
                    _find_names(found, frame)
            if counted:
                toast = bool(flags & f.XLH_INSERT_ON_TOAST_RELATION)
                size = CHANGE + ROW + end - position - 2
                ends = not toast and index == last
                for part in counted:
                    part.assembly.memory.queue(
                        part, xid, lsn, size, origin=record.origin, begins_partial=toast, ends_partial=ends
                    )
            position = end

    def _truncate(self, record: Record, txn: Txn) -> None:
        """Append a TRUNCATE of the relations that are sent (decode.c: DecodeTruncate)."""
        database, count, flags = _TRUNCATE.unpack_from(record.main)
        parts = self._parts(txn, record.origin)
        if database != self._database or not parts:
            return
        relids = struct.unpack_from(f"<{count}I", record.main, 12)
        numbers: list[int] = []
        for relid in relids:
            found: Any = self._registry.oid(relid, txn.xids, shared=txn.cache is None)
            if self._usable(parts, found, record.xid, record.lsn) and not found.is_toast:
                numbers.append(found.number)
        if numbers:
            head = c.HEAD.pack(c.TRUNCATE, record.xid, 0, record.lsn)
            frame = head + bytes((flags & _TRUNCATE_FLAGS,)) + struct.pack(f"<{len(numbers)}I", *numbers)
            for part in parts:
                part.assembly.append(part, frame)
        for part in parts:
            if part.assembly.memory is not None:
                part.assembly.memory.queue(part, record.xid, record.lsn, CHANGE + 4 * count, origin=record.origin)

    def _is_dropped(self, record: Record, operation: int) -> bool:
        """Return whether decoding drops a record at once, instead of queueing a change without rows."""
        if operation in {f.XLOG_HEAP_UPDATE, f.XLOG_HEAP_HOT_UPDATE}:
            flags = _UPDATE.unpack_from(record.main)[3]
            return not self._counts_bare_updates and not flags & f.XLH_UPDATE_CONTAINS_NEW_TUPLE
        if operation == f.XLOG_HEAP_DELETE:
            return bool(_DELETE.unpack_from(record.main)[3] & f.XLH_DELETE_NO_LOGICAL)
        return False

    def _account(self, record: Record, parts: Sequence[Part]) -> None:
        """Count what the server would hold for the record; this may stream transactions."""
        counted = [part for part in parts if part.assembly.memory is not None]
        if not counted:
            return
        operation = record.info & f.XLOG_HEAP_OPMASK
        if self._is_dropped(record, operation):
            return
        size = CHANGE
        begins = ends = False
        streamable = True
        if operation == f.XLOG_HEAP_INSERT:
            flags = _INSERT.unpack_from(record.main)[1]
            if not flags & f.XLH_INSERT_CONTAINS_NEW_TUPLE:
                return
            size += ROW + len(record.blocks[0].data or b"")
            begins = bool(flags & (f.XLH_INSERT_ON_TOAST_RELATION | f.XLH_INSERT_IS_SPECULATIVE))
            ends = not begins
        elif operation in {f.XLOG_HEAP_UPDATE, f.XLOG_HEAP_HOT_UPDATE}:
            flags = _UPDATE.unpack_from(record.main)[3]
            ends = True
            if flags & f.XLH_UPDATE_CONTAINS_NEW_TUPLE:
                size += ROW + len(record.blocks[0].data or b"")
            if flags & f.XLH_UPDATE_CONTAINS_OLD:
                size += ROW + len(record.main) - _UPDATE.size
        elif operation == f.XLOG_HEAP_DELETE:
            flags = _DELETE.unpack_from(record.main)[3]
            ends = bool(flags & f.XLH_DELETE_IS_SUPER)
            streamable = not ends
            if flags & f.XLH_DELETE_CONTAINS_OLD:
                size += ROW + len(record.main) - _DELETE.size
        else:
            ends, streamable = True, False  # confirms a speculative insertion
        for part in counted:
            part.assembly.memory.queue(
                part,
                record.xid,
                record.lsn,
                size,
                origin=record.origin,
                streamable=streamable,
                begins_partial=begins,
                ends_partial=ends,
            )

    # Relations

    def _find(self, txn: Txn, locator: RelFileLocator) -> Any:
        """Return the relation with a file as the transaction sees it now: Decoded, IGNORED or Unknown."""
        key = file_key(locator[0], locator[2])
        if key in self._registry.ignored_files:
            return IGNORED
        cache = txn.cache
        found = (self._registry.by_file if cache is None else cache).get(key)
        if found is None:
            if cache is None and any(self._tracker.has_changes(xid) for xid in txn.xids):
                # It changed the catalog before the position at which decoding began.
                cache = txn.cache = {}
            found = self._registry.file(locator, txn.xids, cache)
        return found

    @staticmethod
    def _parts(txn: Txn, origin: int) -> Sequence[Part]:
        """Return the parts that take changes from this origin."""
        if not origin:
            return txn.parts
        return [part for part in txn.parts if not part.assembly.rules.skips_origin(origin)]

    def _usable(self, parts: Sequence[Part], found: Any, xid: int, lsn: int) -> bool:
        """Return whether changes of the relation are kept.

        An unknown relation is an error when the transaction is sent, unless the subtransaction `xid` is rolled back
        first.
        """
        if found is IGNORED:
            return False
        if isinstance(found, Unknown):
            for part in parts:
                part.errors.setdefault((0, xid), (lsn, found.error))
            return False
        for number, error in found.errors.items():
            for part in parts:
                part.errors.setdefault((number, xid), (lsn, error))
        return bool(found.views)

    def _catalog(self, record: Record, txn: Txn | None) -> None:
        """Apply a change of a catalog; the transaction sees it from here on."""
        if self._tracker.apply(record) and txn is not None:
            self.sees_changes(txn, record.lsn)

    def sees_changes(self, txn: Txn, lsn: int) -> None:
        """Make a transaction that has changed the catalogs look up its relations anew."""
        if txn.cache:
            self._registry.retire(txn.cache, lsn)
        txn.cache = {}


def _find_names(found: Decoded, frame: bytes) -> None:
    """Resolve values that name catalog objects, while the catalog is as it was when they were written.

    Values in a TOAST table are not there yet; they are resolved at the commit.
    """
    rows = [frame[c.HEAD_BYTES :]]
    if frame[0] in {c.UPDATE, c.DELETE}:
        end = c.PAYLOAD + c.OLD_LENGTH.unpack_from(frame, c.HEAD_BYTES)[0]
        rows = [row for row in (frame[c.PAYLOAD : end], frame[end:]) if row]
    # A row that cannot be read is an error once it is sent.
    with contextlib.suppress(PubsubError, struct.error, IndexError, ValueError, KeyError):
        for view in found.views.values():
            for row in rows if view.names else ():
                values = view.relation.row.deform(row)
                for index, out in view.names:
                    value = values[index]
                    if isinstance(value, bytes):
                        out(value)


def heap_frame(record: Record, number: int, *, is_toast: bool) -> bytes | None:
    """Return the frame of an insert, update, delete or confirmation; None if no row is logged.

    The relation is one that is sent.  Raises WalCorrupted.  Follows decode.c: DecodeInsert, DecodeUpdate, DecodeDelete.
    """
    operation = record.info & f.XLOG_HEAP_OPMASK
    xid, lsn, main = record.xid, record.lsn, record.main
    new = record.blocks[0].data or b""
    if operation == f.XLOG_HEAP_INSERT:
        _, flags = _INSERT.unpack_from(main)
        if not flags & f.XLH_INSERT_CONTAINS_NEW_TUPLE:
            return None
        if is_toast:
            kind = c.TOAST_CHUNK
        elif flags & f.XLH_INSERT_IS_SPECULATIVE:
            kind = c.SPEC_INSERT
        else:
            kind = c.INSERT
        return c.HEAD.pack(kind, xid, number, lsn) + new
    if operation == f.XLOG_HEAP_DELETE:
        _, _, _, flags = _DELETE.unpack_from(main)
        if flags & f.XLH_DELETE_NO_LOGICAL:
            return None
        if flags & f.XLH_DELETE_IS_SUPER:
            return c.HEAD.pack(c.SPEC_ABORT, xid, number, lsn)
        if is_toast:
            return None
        old = main[_DELETE.size :] if flags & f.XLH_DELETE_CONTAINS_OLD else b""
        return c.HEAD_OLD.pack(c.DELETE, xid, number, lsn, len(old)) + old
    if operation == f.XLOG_HEAP_CONFIRM:
        return c.HEAD.pack(c.SPEC_CONFIRM, xid, number, lsn)
    _, _, _, flags, _, _ = _UPDATE.unpack_from(main)
    if not flags & f.XLH_UPDATE_CONTAINS_NEW_TUPLE or not new or is_toast:
        return None
    if flags & (f.XLH_UPDATE_PREFIX_FROM_OLD | f.XLH_UPDATE_SUFFIX_FROM_OLD):
        raise WalCorrupted("an update of a logged relation leaves bytes out", lsn)
    old = main[_UPDATE.size :] if flags & f.XLH_UPDATE_CONTAINS_OLD else b""
    return c.HEAD_OLD.pack(c.UPDATE, xid, number, lsn, len(old)) + old + new
