"""One catalog as it is at the position that decoding has reached: a map from (block, offset) to a tuple.

What makes it small and quick is that it follows the WAL: at any moment only these tuples matter: those that are
committed, and those of transactions in progress.  So

    insert by xid    a tuple with xmin = xid
    delete by xid    the tuple's xmax = xid
    commit of xid    its inserted tuples get xmin = 0 ("everyone's"), its deleted ones go
    abort of xid     the reverse

and a tuple is visible to a transaction if its xmin is 0 or one of the transaction's, and its xmax is 0 or none of the
transaction's: the snapshot that PostgreSQL would build for this position (snapbuild.c), with the transaction's own
changes over it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Set
from typing import Final

from pubsub.errors import DataCorrupted
from walsender.historic.catalogs import CatalogLayout, CatalogName, Row

Tid = int
"""block << 16 | offset number"""


class CatalogTuple:
    """A tuple of a catalog; `xmin` 0: committed, `xmax` 0: not deleted."""

    __slots__ = ("_read", "keys", "row", "xmax", "xmin")

    def __init__(self, row: bytes, xmin: int, xmax: int, keys: list[int | bytes]) -> None:
        self.row = row
        self.xmin = xmin
        self.xmax = xmax
        self.keys = keys
        self._read: Row | None = None


class CatalogTable:
    """The tuples of one catalog and the indexes on them."""

    def __init__(self, layout: CatalogLayout) -> None:
        self.layout: Final = layout
        self.name: Final[CatalogName] = layout.definition.name
        self.tuples: dict[Tid, CatalogTuple] = {}
        self._indexes: list[dict[int | bytes, dict[Tid, None]]] = [{} for _ in layout.definition.keys]

    def insert(self, tid: Tid, row: bytes, xmin: int, xmax: int = 0) -> CatalogTuple:
        """Put a tuple at `tid`, over whatever was there.  Raises DataCorrupted."""
        if tid in self.tuples:
            self.remove(tid)
        try:
            keys = self.layout.keys(row)
        except (IndexError, ValueError, struct.error) as error:
            raise DataCorrupted(f"a row of {self.name} is too short") from error
        found = CatalogTuple(row, xmin, xmax, keys)
        self.tuples[tid] = found
        for index, key in zip(self._indexes, keys, strict=True):
            tids = index.get(key)
            if tids is None:
                index[key] = {tid: None}
            else:
                tids[tid] = None
        return found

    def remove(self, tid: Tid) -> None:
        """Take the tuple at `tid` away; none there is no error."""
        found = self.tuples.pop(tid, None)
        if found is None:
            return
        for index, key in zip(self._indexes, found.keys, strict=True):
            tids = index.get(key)
            if tids is not None:
                tids.pop(tid, None)
                if not tids:
                    del index[key]

    def change_in_place(self, tid: Tid, row: bytes) -> None:
        """Other bytes for the tuple at `tid`: its visibility stays."""
        old = self.tuples[tid]
        self.insert(tid, row, old.xmin, old.xmax)

    def truncate(self, blocks: int) -> None:
        """Only the first `blocks` blocks are left."""
        for tid in [tid for tid in self.tuples if tid >> 16 >= blocks]:
            self.remove(tid)

    def copy_into(self, other: CatalogTable) -> None:
        for tid, found in self.tuples.items():
            other.insert(tid, found.row, found.xmin, found.xmax)

    def find(self, key: int | bytes, own: Set[int], index: int = 0) -> Iterator[Row]:
        """The rows visible to a transaction with the ids `own` (empty: to none in particular) that have `key`."""
        for tid in self._indexes[index].get(key, ()):
            found = self.tuples[tid]
            if (found.xmin == 0 or found.xmin in own) and (found.xmax == 0 or found.xmax not in own):
                yield self.read(found)

    def first(self, key: int | bytes, own: Set[int], index: int = 0) -> Row | None:
        return next(self.find(key, own, index), None)

    def all(self, own: Set[int]) -> Iterator[Row]:
        for found in self.tuples.values():
            if (found.xmin == 0 or found.xmin in own) and (found.xmax == 0 or found.xmax not in own):
                yield self.read(found)

    def read(self, found: CatalogTuple) -> Row:
        """The tuple's values.  Raises DataCorrupted."""
        read = found._read
        if read is None:
            read = found._read = self.layout.read(found.row)
        return read
