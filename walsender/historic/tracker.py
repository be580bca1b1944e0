"""The catalogs followed along the WAL.

The tracker is given every record that touches a catalog's file, and every transaction's end.  In between, `find` and
`first` answer for the position reached.  A commit returns the keys (`ChangedKey`) of what it changed for everyone,
so that a cache made from the catalogs can forget them.

VACUUM FULL and CLUSTER rewrite a catalog into the file of a transient relation (pg_class.relrewrite).  That file is
followed, too, and takes the old one's place when the relation map or pg_class say so.

Everything is checked against the full-page images that come by, since a silently wrong catalog is the worst that can
happen here.  A difference raises `CatalogDiverged`: decoding must begin anew.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Set
from struct import Struct
from typing import Final

from pubsub.errors import DataCorrupted
from pubsub.protocol.lsn import Lsn
from walsender.historic.catalog_layouts import CatalogName, Toasted
from walsender.historic.heappage import (
    HEAP_XMAX_COMMITTED,
    HEAP_XMAX_INVALID,
    HEAP_XMAX_IS_MULTI,
    HEAP_XMAX_LOCK_ONLY,
    HEAP_XMIN_COMMITTED,
    HEAP_XMIN_FROZEN,
    HEAP_XMIN_INVALID,
    tuples_of,
)
from walsender.historic.tuples import changes_tuples, operations
from walsender.hot.catalogs import Catalogs, CatalogTable, Row, Value
from walsender.hot.walk import file_key
from walsender.types.layout import toast_value
from walsender.xlog import formats as f
from walsender.xlog.errors import WalCorrupted
from walsender.xlog.formats import Rmgr
from walsender.xlog.record import BlockRef, Record, RelFileLocator
from walsender.xlog.xact import RunningXacts

Prepared = dict[int, tuple[int, ...] | None]
"""Prepared transactions, each with its subtransactions; None: they are not known."""

ChangedKey = tuple[str, int]
"""A catalog and the oid that its changed rows belong to, such as a relation's or a type's; 0: it can be any."""

_EVERYTHING: Final[ChangedKey] = ("pg_publication", 0)

_RELMAP: Final = Struct("<III")
_SMGR_TRUNCATE: Final = Struct("<IIIII")
_FIRST_NORMAL_XID: Final = 3
_REMEMBERED: Final = 200_000
_MAX_TUPLES: Final = 291  # of a page (htup_details.h: MaxHeapTuplesPerPage)


class CatalogDiverged(DataCorrupted):
    """The tracked catalog differs from the server's."""

    def __init__(self, message: str, lsn: int) -> None:
        super().__init__(
            f"the historic catalog is wrong: {message}",
            hint="Decoding must be started anew, from a new consistent point.",
            context=f"WAL position {Lsn(lsn)}",
        )


class CatalogTracker:
    """The catalogs from a starting position on.

    `space`: the database's default tablespace, and `tables`: the catalogs by file (file_key), both at that position.  `oids`:
    the catalogs' own oids.  `in_progress` says whether a transaction that has written since has not ended yet.  `aborted`:
    transactions known to have been rolled back before the starting position; `prepared`: those that were prepared before it
    and had not ended.
    """

    def __init__(
        self,
        database: int,
        space: int,
        tables: dict[int, CatalogTable],
        oids: dict[CatalogName, int],
        in_progress: Callable[[int], bool],
        aborted: Iterable[int] = (),
        prepared: Prepared | None = None,
    ) -> None:
        self._database = database
        self.space = space
        """The database's default tablespace."""
        self.identity = object()
        """Stands for this tracker where the catalogs themselves must not be kept."""
        self.catalogs = Catalogs(tables, frozenset(oids.values()))
        """The tables; the walk over records changes them, too (walk.py)."""
        self._files = tables
        self._active: dict[str, CatalogTable] = {table.name: table for table in tables.values()}
        self._by_oid = {oid: name for name, oid in oids.items()}
        self._in_progress = in_progress
        # By transaction in progress: the files into which it rewrites catalogs, and the rewritten catalogs that it
        # sees once it has changed them.
        self._begun: dict[int, list[int]] = {}
        self._rewritten: dict[int, dict[str, CatalogTable]] = {}
        # Transactions that changed a catalog and were rolled back: rows may have their xids without a hint bit.
        self._aborted: dict[int, None] = dict.fromkeys(aborted)
        self.prepared: Prepared = dict(prepared or {})
        """The transactions of all databases that are prepared now.  They are saved with the catalogs, whose changes they count as."""

    @property
    def settled(self) -> bool:
        """Whether no catalog is being rewritten into another file."""
        return not self._begun and not self._rewritten and len(self._files) == len(self._active)

    def active(self, name: CatalogName) -> tuple[int, CatalogTable]:
        """Return a catalog's file number and table."""
        table = self._active[name]
        return next(key for key, one in self._files.items() if one is table) & 0xFFFFFFFF, table

    def aborted(self) -> list[int]:
        """Return the transactions that changed a catalog, or may have, and were rolled back."""
        return list(self._aborted)

    # Looking things up

    def find(self, name: CatalogName, key: int | bytes, own: Set[int], index: int = 0) -> Iterable[Row]:
        """Return rows by the index-th key of the catalog's definition, as seen by a transaction with the ids `own`."""
        return self._seen_by(name, own).find(key, own, index)

    def first(self, name: CatalogName, key: int | bytes, own: Set[int], index: int = 0) -> Row | None:
        return self._seen_by(name, own).first(key, own, index)

    def all(self, name: CatalogName, own: Set[int]) -> Iterable[Row]:
        return self._seen_by(name, own).all(own)

    def value_of_publication(self, row: Row, column: str, own: Set[int]) -> Value:
        """Return a column of a row of pg_publication_rel, from the TOAST table if it lies there.

        Raises DataCorrupted.
        """
        value = row[column]
        if not isinstance(value, Toasted):
            return value
        rows = self.find("pg_toast_6106", value.pointer.value_id, own)
        chunks = {chunk.number("chunk_seq"): chunk.raw("chunk_data") or b"" for chunk in rows}
        return value.read(toast_value(value.pointer, b"".join(chunks[number] for number in sorted(chunks))))

    def _seen_by(self, name: CatalogName, own: Set[int]) -> CatalogTable:
        for xid, tables in self._rewritten.items():
            if xid in own and name in tables:
                return tables[name]
        return self._active[name]

    def generation(self, oid: int, own: Set[int]) -> tuple[int, ...]:
        """Return the relation's generation, which changes whenever PostgreSQL would invalidate its cache entry.

        A transaction that has changed the relation itself has another generation than everyone else.
        """
        generations = self.catalogs.generations
        found = [generations.get(0, 0), generations.get(oid, 0)]
        redefined = self.catalogs.redefined
        # Few transactions change a catalog; one may have millions of subtransactions.
        few = [xid for xid in redefined if xid in own] if len(redefined) < len(own) else redefined.keys() & own
        for xid in sorted(few):
            changed = redefined[xid]
            if 0 in changed or oid in changed:
                found += (changed.get(0, 0), changed.get(oid, 0))
        return tuple(found)

    def has_changes(self, xid: int) -> bool:
        """Return whether a transaction in progress has changed a catalog."""
        return xid in self.catalogs.touched

    def is_file(self, locator: RelFileLocator) -> bool:
        """Return whether the file is a catalog's, of the database or shared."""
        return locator[1] in {self._database, 0} and file_key(locator[0], locator[2]) in self._files

    def _table(self, locator: RelFileLocator) -> CatalogTable:
        return self._files[file_key(locator[0], locator[2])]

    # Following the WAL

    def apply(self, record: Record) -> bool:
        """Apply a heap record, or one with images; return whether its own transaction sees another catalog now.

        Raises WalCorrupted, CatalogDiverged.
        """
        changed = False
        if changes_tuples(record) and record.blocks and self.is_file(record.blocks[0].locator):
            changed = self._apply_operations(record)
        for block in record.blocks:
            if block.image is not None and block.fork == 0 and self.is_file(block.locator):
                self._check_image(record, block)
        return changed

    def _apply_operations(self, record: Record) -> bool:
        changed = False
        table = self._table(record.blocks[0].locator)
        xid = record.xid
        if xid and table.stands_in:
            # Its pages were copied before, as images; from here on the transaction sees this table.
            self._rewritten.setdefault(xid, {})[table.name] = table
        for operation in operations(record, self._old_row):
            tid = operation.block << 16 | operation.offset
            try:
                if operation.kind == "insert":
                    self.catalogs.insert(table, tid, operation.row, xid)
                    changed = True
                    if table.name == "pg_class":
                        self._follow_rewrite(operation.row, xid)
                elif operation.kind == "delete":
                    if not self.catalogs.delete(table, tid, xid):
                        raise CatalogDiverged(
                            f"{table.name} ({tid >> 16},{tid & 0xFFFF}) is deleted but not known", record.lsn
                        )
                    changed = True
                elif operation.kind == "inplace":
                    if tid not in table.tuples:
                        raise CatalogDiverged(
                            f"{table.name} ({tid >> 16},{tid & 0xFFFF}) is changed but not known", record.lsn
                        )
                    table.change_in_place(tid, operation.row)
                    self.catalogs.changes += 1
                else:
                    table.remove(tid)
                    self.catalogs.changes += 1
            except (IndexError, ValueError) as error:
                raise DataCorrupted(
                    f"a row of {table.name} is too short", context=f"WAL position {Lsn(record.lsn)}"
                ) from error
        return changed

    def _old_row(self, locator: RelFileLocator, block: int, offset: int) -> bytes | None:
        found = self._table(locator).tuples.get(block << 16 | offset)
        return None if found is None else found.row

    def _follow_rewrite(self, row: bytes, xid: int) -> None:
        """Follow the file of a transient relation into which a catalog is rewritten (cluster.c: make_new_heap)."""
        layout = self._active["pg_class"].layout
        values = Row(layout, layout.places, layout.encoding, row)
        name = self._by_oid.get(values.number("relrewrite"))
        if name is None:
            return
        # For a mapped catalog the transient relation is mapped, too: it is new, so that its file number is its oid.
        number = values.number("relfilenode") or values.number("oid")
        key = file_key(values.number("reltablespace") or self.space, number)
        if key not in self._files:
            table = self._files[key] = CatalogTable(self._active[name].layout)
            table.stands_in = True
            self._begun.setdefault(xid, []).append(key)

    def _check_image(self, record: Record, block: BlockRef) -> None:
        table = self._table(block.locator)
        page = block.full_page(record.lsn)
        try:
            found = {number: (xmin, xmax, mask, row) for number, xmin, xmax, mask, row in tuples_of(page)}
        except DataCorrupted as error:
            raise WalCorrupted(error.message, record.lsn) from error
        if record.rmgr == Rmgr.XLOG and record.info & 0xF0 == f.XLOG_FPI and table is not self._active[table.name]:
            self._adopt(table, block.block, found, record)
            return
        base = block.block << 16
        for number, (_, _, mask, row) in found.items():
            known = table.tuples.get(base | number)
            if known is None:
                if mask & HEAP_XMIN_FROZEN == HEAP_XMIN_COMMITTED and mask & HEAP_XMAX_INVALID:
                    raise CatalogDiverged(f"{table.name} ({block.block},{number}) is not known", record.lsn)
            elif known.row[5:] != row[5:]:
                raise CatalogDiverged(f"{table.name} ({block.block},{number}) has other bytes", record.lsn)
        for number in range(1, _MAX_TUPLES + 1):
            if base | number in table.tuples and number not in found:
                raise CatalogDiverged(f"{table.name} ({block.block},{number}) is gone from its page", record.lsn)

    def _adopt(
        self, table: CatalogTable, block: int, found: dict[int, tuple[int, int, int, bytes]], record: Record
    ) -> None:
        """Take over a page of a catalog that is being rewritten; its tuples keep their transactions (rewriteheap.c)."""
        self.catalogs.changes += 1
        for number, (xmin, xmax, mask, row) in found.items():
            if mask & HEAP_XMIN_FROZEN == HEAP_XMIN_INVALID or (not mask & HEAP_XMIN_FROZEN and xmin in self._aborted):
                continue
            creator = xmin if self._in_progress(xmin) or xmin in self.catalogs.touched else 0
            deleter = 0
            if not mask & HEAP_XMAX_INVALID and not mask & HEAP_XMAX_LOCK_ONLY and xmax >= _FIRST_NORMAL_XID:
                if mask & HEAP_XMAX_IS_MULTI:
                    raise CatalogDiverged(f"a tuple of {table.name} has several lockers and was updated", record.lsn)
                if self._in_progress(xmax) or xmax in self.catalogs.touched:
                    deleter = xmax
                elif mask & HEAP_XMAX_COMMITTED or xmax not in self._aborted:
                    continue
            try:
                table.insert(block << 16 | number, row, creator, deleter)
            except (IndexError, ValueError) as error:
                raise WalCorrupted(f"a row of {table.name} is too short", record.lsn) from error
            self.catalogs.touch(creator, table, block << 16 | number, True)
            self.catalogs.touch(deleter, table, block << 16 | number, False)

    def truncate(self, record: Record) -> None:
        """Apply the truncation of a file (storage.c: xl_smgr_truncate).  Raises WalCorrupted."""
        try:
            blocks, space, database, number, flags = _SMGR_TRUNCATE.unpack_from(record.main)
        except struct.error as error:
            raise WalCorrupted("a truncation's record is too short", record.lsn) from error
        if flags & 1 and self.is_file((space, database, number)):
            self._table((space, database, number)).truncate(blocks)
            self.catalogs.changes += 1

    def relmap_update(self, record: Record) -> list[ChangedKey]:
        """Apply an update of the relation map, the files of catalogs that pg_class cannot name (relmapper.c).

        Returns what changed.  Raises WalCorrupted, CatalogDiverged.
        """
        try:
            database, space, size = _RELMAP.unpack_from(record.main)
            if database not in {self._database, 0}:
                return []
            _, count = struct.unpack_from("<II", record.main, 12)
            if count * 8 + 8 > size or size + 12 > len(record.main):
                raise WalCorrupted("a relation map with an impossible length", record.lsn)
            mappings = list(struct.iter_unpack("<II", record.main[20 : 20 + count * 8]))
        except struct.error as error:
            raise WalCorrupted("a relation map's record is too short", record.lsn) from error
        changed: list[ChangedKey] = []
        for oid, number in mappings:
            name = self._by_oid.get(oid)
            if name is not None:
                changed += self._activate(name, file_key(space, number), record.lsn)
        return changed

    def _activate(self, name: str, key: int, lsn: int) -> list[ChangedKey]:
        table = self._files.get(key)
        old = self._active[name]
        if table is old:
            return []
        if table is None:
            raise CatalogDiverged(f"{name} moved to a file that was not followed", lsn)
        self._active[name] = table
        self.catalogs.changes += 1
        table.stands_in = False
        for other, kept in list(self._files.items()):
            if kept is old:
                del self._files[other]
        self.catalogs.generations[0] = self.catalogs.generations.get(0, 0) + 1
        return [_EVERYTHING]

    # Ends of transactions

    def commit(self, xids: Iterable[int], lsn: int) -> list[ChangedKey]:
        """Make the transactions' changes visible to everyone; return what they changed.  Raises CatalogDiverged."""
        xids = list(xids)
        changed, moved = self.catalogs.commit(xids)
        self._rewrites_ended(xids)
        for oid, number in moved:
            if number:
                changed += self._activate(self._by_oid[oid], file_key(self.space, number), lsn)
        if ("pg_database", self._database) in changed:
            changed += self._follow_database()
        return changed

    def _follow_database(self) -> list[ChangedKey]:
        """Follow the database to another tablespace, where its files have the numbers that they had (dbcommands.c: movedb)."""
        row = self.first("pg_database", self._database, frozenset())
        if row is None or row.number("dattablespace") == self.space:
            return []
        own = {key: table for key, table in self._files.items() if not table.layout.shared}
        for key in own:
            del self._files[key]
        self.space = row.number("dattablespace")
        self._files.update((file_key(self.space, key & 0xFFFFFFFF), table) for key, table in own.items())
        self.catalogs.changes += 1
        return [_EVERYTHING]

    def abort(self, xids: Iterable[int]) -> None:
        """Undo the transactions' changes."""
        xids = list(xids)
        for number in self._rewrites_ended(xids):
            if self._files[number].stands_in:
                del self._files[number]
        for xid in self.catalogs.abort(xids):
            self._aborted[xid] = None
            if len(self._aborted) > _REMEMBERED:
                del self._aborted[next(iter(self._aborted))]

    def prepare(self, xid: int, subxids: tuple[int, ...]) -> None:
        """Note that a transaction is prepared now."""
        self.prepared[xid] = subxids
        self.catalogs.changes += 1

    def finish_prepared(self, xid: int) -> None:
        """Note that a transaction, if it was prepared, has ended."""
        if xid in self.prepared:
            del self.prepared[xid]
            self.catalogs.changes += 1

    def server_ended(self) -> None:
        """Undo the changes of transactions that a shutdown or a crash of the server has ended: all but prepared ones.

        Of a crash no record tells whom it ended, and the rows may be gone from their pages before the next list of running
        transactions comes.
        """
        kept = {*self.prepared, *(xid for subxids in self.prepared.values() for xid in subxids or ())}
        # A subtransaction of one that was prepared before the starting position has written nothing since.
        unsure = None in self.prepared.values()
        touched = self.catalogs.touched
        self.abort([xid for xid in touched if xid not in kept and not (unsure and not self._in_progress(xid))])

    def running(self, running: RunningXacts) -> None:
        """Undo the changes of transactions that have ended, by a list of running ones, although no record told it."""
        for xid in self.prepared.keys() - running.xids:
            # Its COMMIT PREPARED waited for a synchronous standby when the starting position was read.
            self.finish_prepared(xid)
        self.abort(running.ended(self.catalogs.touched))

    def _rewrites_ended(self, xids: Iterable[int]) -> list[int]:
        """End the transactions' rewrites; return the files into which they rewrote catalogs."""
        found: list[int] = []
        if self._begun:
            for xid in xids:
                self._rewritten.pop(xid, None)
                found += self._begun.pop(xid, ())
        return [number for number in found if number in self._files]

    def remember(self, xid: int, table: CatalogTable, tid: int, inserted: bool) -> None:
        """Note a change that a transaction in progress made before the starting position."""
        self.catalogs.touch(xid, table, tid, inserted)
