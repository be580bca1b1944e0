"""The catalogs at the position that decoding has reached: for each one a map from (block, offset) to a tuple.

Following the WAL keeps the maps small and fast: only the tuples that are committed and those of transactions in
progress matter at any moment.  So

    insert by xid    a tuple with xmin = xid
    delete by xid    the tuple's xmax = xid
    commit of xid    its inserted tuples get xmin = 0 ("everyone's"), its deleted ones go
    abort of xid     the reverse

and a tuple is visible to a transaction if its xmin is 0 or one of the transaction's, and its xmax is 0 or none of the
transaction's: the snapshot that PostgreSQL would build for this position (snapbuild.c), with the transaction's own
changes over it.

Nearly every heap record of a catalog is handled here, straight from its bytes (`Catalogs.change`, `several`).  Records
with images, records that cross pages and broken ones are left to tracker.py, which does the same with the parsed
record.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from typing import Any, Final

from librt.strings import read_i16_le, read_i32_le
from mypy_extensions import i64

# heapam_xlog.h, as constants that the compiler sees.
XLOG_HEAP_INSERT: Final = 0x00
XLOG_HEAP_DELETE: Final = 0x10
XLOG_HEAP_UPDATE: Final = 0x20
XLOG_HEAP_HOT_UPDATE: Final = 0x40
XLOG_HEAP_INPLACE: Final = 0x70
XLOG_HEAP_INIT_PAGE: Final = 0x80
XLH_DELETE_IS_SUPER: Final = 0x08
XLH_UPDATE_PREFIX_FROM_OLD: Final = 0x20
XLH_UPDATE_SUFFIX_FROM_OLD: Final = 0x40
_ROW_HEADER: Final = 5
ROW_IN_TUPLE: Final = 18

# What `change` and `several` return.
LEFT: Final = 0
"""Nothing was done: the record takes the general path."""
DONE: Final = 1
"""Done, in place: no relation has to be looked up anew."""
CHANGED: Final = 2

# Which relation cache entries PostgreSQL invalidates when a catalog's row changes.
NOBODY: Final = 0
RELATION: Final = 1
"""Those of the relation that the row's first key names."""
EVERYBODY: Final = 2


# How a column at a fixed place is read.
UINT4: Final = 0
INT4: Final = 1
INT2: Final = 2
BOOL: Final = 3
CHAR: Final = 4
NAME: Final = 5

Value = int | str | bool | bytes | tuple[int, ...] | None
"""A column's value: oids and integers as int, names and texts as str, "char" as str of one character, vectors as
tuples."""


class Row:
    """A row's values by column name: `row["relname"]`.

    A value is decoded when it is asked for: of most rows few ever are.  `places`: kind << 16 | offset from the first
    column, for the columns at a fixed place; `layout` reads the others (historic/catalogs.py).
    """

    def __init__(self, layout: Any, places: dict[str, int], encoding: str, row: bytes) -> None:
        self._layout = layout
        self._places = places
        self._encoding = encoding
        self._row = row
        self._base: i64 = row[4] - ROW_IN_TUPLE
        self._raw: Any = None

    def __getitem__(self, name: str) -> Value:
        place = self._places.get(name)
        if place is not None:
            at: i64 = self._base + (place & 0xFFFF)
            kind: i64 = place >> 16
            if kind < BOOL:
                return self._integer(kind, at)
            if kind == BOOL:
                return self._row[at] != 0
            return self._text(kind, at)
        if self._raw is None:
            self._raw = self._layout.deform(self._row)
        value: Value = self._layout.value(self._raw, name)
        return value

    def number(self, name: str) -> int:
        """Return an oid or integer; 0 for NULL and for columns that the version lacks."""
        place = self._places.get(name)
        if place is not None:
            return self._integer(place >> 16, self._base + (place & 0xFFFF))
        value = self[name]
        return value if isinstance(value, int) else 0

    def text(self, name: str) -> str:
        """Return a name, text or "char"; empty for NULL."""
        place = self._places.get(name)
        if place is not None:
            return self._text(place >> 16, self._base + (place & 0xFFFF))
        value = self[name]
        return value if isinstance(value, str) else ""

    def flag(self, name: str) -> bool:
        place = self._places.get(name)
        if place is not None:
            return self._row[self._base + (place & 0xFFFF)] != 0
        return self[name] is True

    def numbers(self, name: str) -> tuple[int, ...] | None:
        """Return an int2vector or oidvector."""
        value = self[name]
        return value if isinstance(value, tuple) else None

    def raw(self, name: str) -> bytes | None:
        value = self[name]
        return value if isinstance(value, bytes) else None

    def _integer(self, kind: i64, at: i64) -> int:
        if kind == UINT4:
            return i64(read_i32_le(self._row, at)) & 0xFFFFFFFF
        if kind == INT4:
            return i64(read_i32_le(self._row, at))
        return i64(read_i16_le(self._row, at))

    def _text(self, kind: i64, at: i64) -> str:
        row = self._row
        if kind == CHAR:
            return row[at : at + 1].decode("latin-1") if row[at] != 0 else ""
        return row[at : row.index(b"\0", at)].decode(self._encoding)


class CatalogTuple:
    """A tuple of a catalog; `xmin` 0: committed, `xmax` 0: not deleted."""

    def __init__(self, row: bytes, xmin: int, xmax: int) -> None:
        self.row = row
        self.xmin = xmin
        self.xmax = xmax
        self.read: Row | None = None


class CatalogTable:
    """The tuples of one catalog and the indexes on them.  A tuple's place (tid) is block << 16 | offset number.

    `layout` (historic/catalogs.py: CatalogLayout) has the name; how rows are read (see Row); where the keys lie in
    them, from the first column on, and whether each is a name; how many bytes the columns up to the last at a fixed
    place take; whether the first key says what a row belongs to; where an oid lies that makes a row unusual unless it
    is 0 (-1: nowhere); and whose cache entries changes invalidate.
    """

    def __init__(self, layout: Any) -> None:
        self.layout = layout
        self.name: str = layout.name
        self.owned: bool = layout.owned
        self.invalidates: int = layout.invalidates
        self.tuples: dict[int, CatalogTuple] = {}
        self.stands_in = False
        """A transaction is rewriting the catalog into this table."""
        self._fixed_places: dict[str, int] = layout.places
        self._encoding: str = layout.encoding
        self._places: list[int] = [place for place, _ in layout.key_places]
        self._names: list[bool] = [named for _, named in layout.key_places]
        self._fixed: i64 = layout.fixed_bytes
        self._unusual: i64 = layout.unusual_place
        self._has_names = any(named for _, named in layout.key_places)
        # The tids of each key: of most keys there is only one, which needs no dict of its own.
        self._indexes: list[dict[Any, Any]] = [{} for _ in layout.key_places]

    def insert(self, tid: int, row: bytes, xmin: int, xmax: int = 0) -> CatalogTuple:
        """Put a tuple at `tid`, over any that is there.

        Raises IndexError if the row is too short, ValueError if a name does not end.
        """
        keys = self.keys(row)
        if tid in self.tuples:
            self.remove(tid)
        found = CatalogTuple(row, xmin, xmax)
        self.tuples[tid] = found
        for number, key in enumerate(keys):
            index = self._indexes[number]
            tids = index.get(key)
            if tids is None:
                index[key] = tid
            elif isinstance(tids, dict):
                tids[tid] = None
            else:
                index[key] = {tids: None, tid: None}
        return found

    def keys(self, row: bytes) -> list[Any]:
        """Return the row's key in each index: an oid, or a name's bytes."""
        size: i64 = len(row)
        if size < _ROW_HEADER:
            raise IndexError
        base: i64 = row[4] - ROW_IN_TUPLE
        if base < 0 or size < base + self._fixed:
            raise IndexError
        keys: list[Any] = []
        for number, place in enumerate(self._places):
            at: i64 = base + place
            if self._names[number]:
                keys.append(row[at : row.index(b"\0", at)])
            else:
                keys.append(i64(read_i32_le(row, at)) & 0xFFFFFFFF)
        return keys

    def takes(self, row: bytes) -> bool:
        """Return whether the row needs no closer look: long enough, not unusual, no name as a key, no rewrite."""
        size: i64 = len(row)
        if size < _ROW_HEADER or self._has_names or self.stands_in:
            return False
        base: i64 = row[4] - ROW_IN_TUPLE
        if base < 0 or size < base + self._fixed:
            return False
        return self._unusual < 0 or read_i32_le(row, base + self._unusual) == 0

    def remove(self, tid: int) -> None:
        """Remove the tuple at `tid` if there is one."""
        found = self.tuples.pop(tid, None)
        if found is None:
            return
        for number, key in enumerate(self.keys(found.row)):
            index = self._indexes[number]
            tids = index.get(key)
            if isinstance(tids, dict):
                tids.pop(tid, None)
                if not tids:
                    del index[key]
            elif tids == tid:
                del index[key]

    def change_in_place(self, tid: int, row: bytes) -> None:
        """Replace the bytes of the tuple at `tid`; its visibility stays."""
        old = self.tuples[tid]
        self.insert(tid, row, old.xmin, old.xmax)

    def truncate(self, blocks: int) -> None:
        """Remove all tuples but those of the first `blocks` blocks."""
        for tid in [tid for tid in self.tuples if tid >> 16 >= blocks]:
            self.remove(tid)

    def find(self, key: Any, own: Set[int], index: int = 0) -> list[Row]:
        """Return the rows with `key` that a transaction with the ids `own` sees (empty: the committed rows)."""
        rows: list[Row] = []
        for tid in self._tids(key, index):
            found = self.tuples[tid]
            if (found.xmin == 0 or found.xmin in own) and (found.xmax == 0 or found.xmax not in own):
                rows.append(self.read(found))
        return rows

    def first(self, key: Any, own: Set[int], index: int = 0) -> Row | None:
        """Return one of them, or None."""
        for tid in self._tids(key, index):
            found = self.tuples[tid]
            if (found.xmin == 0 or found.xmin in own) and (found.xmax == 0 or found.xmax not in own):
                return self.read(found)
        return None

    def _tids(self, key: Any, index: int) -> Iterable[int]:
        tids = self._indexes[index].get(key)
        if tids is None:
            return ()
        return tids if isinstance(tids, dict) else (tids,)

    def all(self, own: Set[int]) -> Iterator[Row]:
        for found in self.tuples.values():
            if (found.xmin == 0 or found.xmin in own) and (found.xmax == 0 or found.xmax not in own):
                yield self.read(found)

    def read(self, found: CatalogTuple) -> Row:
        """Return the tuple's values."""
        row = found.read
        if row is None:
            row = found.read = Row(self.layout, self._fixed_places, self._encoding, found.row)
        return row

    def key(self, found: CatalogTuple) -> int:
        """Return the oid that the row belongs to; 0: it can be any."""
        if not self.owned:
            return 0
        key: int = self.keys(found.row)[0]
        return key


class Catalogs:
    """All catalogs.  `files`: by file (walk.py: file_key); `oids`: the catalogs' own."""

    def __init__(self, files: dict[int, CatalogTable], oids: Set[int]) -> None:
        self.files = files
        self._oids = oids
        self.changes: i64 = 0
        """How often anything was changed."""
        self.touched: dict[int, list[tuple[CatalogTable, int, bool]]] = {}
        """The tuples that each transaction in progress has inserted (True) and deleted (False)."""
        self.generations: dict[int, int] = {}
        """How often PostgreSQL would have invalidated a relation's cache entry, by oid (0: those of all relations)."""
        self.redefined: dict[int, dict[int, int]] = {}
        """The relations that each transaction in progress has changed, with the generation after the change."""

    # One tuple

    def insert(self, table: CatalogTable, tid: int, row: bytes, xid: int) -> None:
        """Insert a tuple for transaction `xid`.  Raises as CatalogTable.insert does."""
        self.changes += 1
        self.tell(table, table.insert(tid, row, xid), xid)
        self.touch(xid, table, tid, True)

    def delete(self, table: CatalogTable, tid: int, xid: int) -> bool:
        """Mark a tuple as deleted by `xid`; return False if there is none."""
        found = table.tuples.get(tid)
        if found is None:
            return False
        found.xmax = xid
        self.changes += 1
        self.tell(table, found, xid)
        self.touch(xid, table, tid, False)
        return True

    def touch(self, xid: int, table: CatalogTable, tid: int, inserted: bool) -> None:
        """Note a change that the end of transaction `xid` makes final or undoes."""
        if xid == 0:
            return
        touched = self.touched.get(xid)
        if touched is None:
            self.touched[xid] = [(table, tid, inserted)]
        else:
            touched.append((table, tid, inserted))

    def tell(self, table: CatalogTable, found: CatalogTuple, xid: int) -> None:
        """Count the relcache invalidations of a changed row: by transaction `xid` in progress, or for everyone (0)."""
        if table.invalidates == NOBODY:
            return
        key = table.key(found) if table.invalidates == RELATION else 0
        generation = self.generations.get(key, 0) + 1
        self.generations[key] = generation
        if xid != 0:
            changed = self.redefined.get(xid)
            if changed is None:
                self.redefined[xid] = {key: generation}
            else:
                changed[key] = generation

    # A record, straight from its bytes

    def change(
        self,
        table: CatalogTable,
        buffer: bytes,
        operation: int,
        block: int,
        data: int,
        main: int,
        end: int,
        xid: int,
    ) -> int:
        """Apply an insert, update, delete or change in place of one block; return LEFT, DONE or CHANGED.

        The block has no image.  Its data is buffer[data:main], the main data is buffer[main:end], at least 2 bytes.
        """
        head: i64 = main
        size: i64 = end - head
        body: i64 = data
        base: i64 = block << 16
        if operation == XLOG_HEAP_INSERT:
            row = buffer[body:head]
            if not table.takes(row):
                return LEFT
            self.insert(table, base | _u16(buffer, head), row, xid)
            return CHANGED
        if operation == XLOG_HEAP_DELETE:
            if size < 8 or buffer[head + 7] & XLH_DELETE_IS_SUPER != 0 or table.stands_in:
                return LEFT
            return CHANGED if self.delete(table, base | _u16(buffer, head + 4), xid) else LEFT
        if operation == XLOG_HEAP_INPLACE:
            tid: i64 = base | _u16(buffer, head)
            found = table.tuples.get(tid)
            if found is None or body == head:
                return LEFT
            old = found.row
            row = old[: old[4] - ROW_IN_TUPLE] + buffer[body:head]
            if not table.takes(row):
                return LEFT
            table.insert(tid, row, found.xmin, found.xmax)
            self.changes += 1
            return DONE
        if operation != XLOG_HEAP_UPDATE and operation != XLOG_HEAP_HOT_UPDATE:
            return LEFT
        if size < 14:
            return LEFT
        place: i64 = base | _u16(buffer, head + 4)
        found = table.tuples.get(place)
        if found is None:
            return LEFT
        flags: i64 = buffer[head + 7]
        prefix: i64 = 0
        suffix: i64 = 0
        if flags & XLH_UPDATE_PREFIX_FROM_OLD != 0:
            prefix = _u16(buffer, body)
            body += 2
        if flags & XLH_UPDATE_SUFFIX_FROM_OLD != 0:
            suffix = _u16(buffer, body)
            body += 2
        if body + _ROW_HEADER > head:
            return LEFT
        row = buffer[body:head]
        if prefix != 0 or suffix != 0:
            old = found.row
            begin: i64 = old[4] - ROW_IN_TUPLE
            length: i64 = len(old)
            header: i64 = row[4] - ROW_IN_TUPLE
            if header < _ROW_HEADER or header > len(row) or begin + prefix > length or begin + suffix > length:
                return LEFT
            row = row[:header] + old[begin : begin + prefix] + row[header:] + old[length - suffix :]
        if not table.takes(row):
            return LEFT
        self.delete(table, place, xid)
        self.insert(table, base | _u16(buffer, head + 12), row, xid)
        return CHANGED

    def several(
        self, table: CatalogTable, buffer: bytes, info: int, block: int, data: int, main: int, end: int, xid: int
    ) -> int:
        """Apply a multi-insert; otherwise like `change`."""
        head: i64 = main
        body: i64 = data
        size: i64 = end - head
        base: i64 = block << 16
        if size < 4:
            return LEFT
        count: i64 = _u16(buffer, head + 2)
        listed = info & XLOG_HEAP_INIT_PAGE == 0
        if count == 0 or (listed and size < 4 + 2 * count):
            return LEFT
        rows: list[bytes] = []
        number: i64 = 0
        at: i64 = 0
        while number < count:
            at = (at + 1) & ~1
            start: i64 = body + at
            if start + 7 > head:
                return LEFT
            length: i64 = _u16(buffer, start)
            if start + 7 + length > head:
                return LEFT
            row = buffer[start + 2 : start + 7 + length]
            if not table.takes(row):
                return LEFT
            rows.append(row)
            at += 7 + length
            number += 1
        for place, row in enumerate(rows):
            offset: i64 = _u16(buffer, head + 4 + 2 * place) if listed else place + 1
            self.insert(table, base | offset, row, xid)
        return CHANGED

    # Ends of transactions

    def commit(self, xids: Iterable[int]) -> tuple[list[tuple[str, int]], list[tuple[int, int]]]:
        """Make the transactions' changes visible to everyone.

        Returns the changed catalogs, each with an oid that changed rows belong to; and the oid and new file number of
        each catalog that has another file.
        """
        changed: dict[tuple[str, int], None] = {}
        moved: list[tuple[int, int]] = []
        for xid in xids:
            touched = self.touched.pop(xid, None)
            if touched is None:
                continue
            self.changes += 1
            self.redefined.pop(xid, None)
            last: CatalogTable | None = None
            last_key = 0
            for table, tid, inserted in touched:
                found = table.tuples.get(tid)
                if found is None:
                    continue
                key = table.key(found)
                if table is not last or key != last_key:
                    changed[(table.name, key)] = None
                    last = table
                    last_key = key
                self.tell(table, found, 0)
                if inserted:
                    if found.xmin == xid:
                        found.xmin = 0
                        if found.xmax == 0 and table.name == "pg_class" and key in self._oids:
                            moved.append((key, table.keys(found.row)[1]))
                elif found.xmax == xid:
                    table.remove(tid)
        return list(changed), moved

    def abort(self, xids: Iterable[int]) -> list[int]:
        """Undo the transactions' changes; return those that had made any."""
        aborted: list[int] = []
        for xid in xids:
            touched = self.touched.pop(xid, None)
            if touched is None:
                continue
            self.changes += 1
            self.redefined.pop(xid, None)
            aborted.append(xid)
            touched.reverse()
            for table, tid, inserted in touched:
                found = table.tuples.get(tid)
                if found is None:
                    continue
                self.tell(table, found, 0)
                if inserted:
                    if found.xmin == xid:
                        table.remove(tid)
                elif found.xmax == xid:
                    found.xmax = 0
        return aborted


def _u16(buffer: bytes, at: i64) -> i64:
    return i64(read_i16_le(buffer, at)) & 0xFFFF
