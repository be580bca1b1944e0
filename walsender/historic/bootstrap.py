"""The catalogs as they were at a checkpoint's redo position, from files that were read later and the WAL in between.

No session is stopped.  Between the redo position R and the position E that was reached when everything had been read:

  a page that no record in [R, E] touches    is as it was at R, and the file has it
  a page that one does touch                 was logged whole at its first touch after R (full_page_writes): the image,
                                             less what that very record did, is the page at R
  a page whose first touch initialises it    was empty at R

and a transaction's fate at R:

  it has a record in [R, E], or one names it as     in progress at R (or not begun)
  its subtransaction, or as the one that it ends
  else                                             as the hint bits say, or as the server said before E

A list of running transactions does not tell: one that waits for a synchronous standby is on it after its commit.  The
server says of it "in progress", too, but its commit is in pg_xact, whose pages are on disk since the checkpoint.

From R on the tracker follows the WAL.  `WindowScan` takes the records of [R, E]; `CatalogBootstrap` makes the tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Final

from pubsub.errors import DataCorrupted, NotInPrerequisiteState
from pubsub.protocol.lsn import Lsn
from walsender.historic.catalog_layouts import CatalogName, definition_of
from walsender.historic.heappage import (
    HEAP_MOVED,
    HEAP_XMAX_COMMITTED,
    HEAP_XMAX_INVALID,
    HEAP_XMAX_IS_MULTI,
    HEAP_XMAX_LOCK_ONLY,
    HEAP_XMIN_COMMITTED,
    HEAP_XMIN_FROZEN,
    HEAP_XMIN_INVALID,
    PageTuple,
    tuples_of,
)
from walsender.historic.state import layout_of
from walsender.historic.tuples import changes_tuples, logs_rows, places
from walsender.historic.upstream import CatalogFile, Upstream
from walsender.hot.catalogs import CatalogTable
from walsender.hot.walk import Skim
from walsender.xlog import formats as f
from walsender.xlog.formats import BLCKSZ, Rmgr, WalFormat
from walsender.xlog.record import GLOBAL_TABLESPACE, Record
from walsender.xlog.xact import parse_end, parse_prepare

_FIRST_NORMAL_XID: Final = 3
_EMPTY: Final = b""
_IRRELEVANT: Final = bytes(
    kind in {Rmgr.XLOG << 4 | f.XLOG_FPI >> 4, Rmgr.XLOG << 4 | f.XLOG_FPI_FOR_HINT >> 4}
    or kind >> 4 not in {Rmgr.XLOG, Rmgr.XACT, Rmgr.DBASE, Rmgr.RELMAP, Rmgr.SMGR}
    for kind in range(4096)
)
"""Kinds of records of which `WindowScan` reads only the transaction and the blocks."""


@dataclass(slots=True)
class _Page:
    """A page at R: its image at the first touch, and the offset numbers where that touch inserted and deleted."""

    image: bytes
    inserted: frozenset[int]
    deleted: frozenset[int]


class WindowScan:
    """Collects from the records of [R, E] what held at R."""

    def __init__(self, database: int, files: list[CatalogFile], start: int = 0) -> None:
        """`start`: LSN from which decoding was requested; 0: after the window."""
        self._database = database
        self._start = start
        self._changed_at = 0
        """LSN of the first change of a row; 0: none so far."""
        self._is_logical = start == 0
        """Whether the window's WAL so far is known to have been written with wal_level = logical."""
        self._files = {file.number: file for file in files}
        self._local = {file.number for file in files if not _is_shared(file)}
        self._shared = {file.number for file in files if _is_shared(file)}
        self.spaces: list[int] = []
        """The database's default tablespaces before the one that it has at E, in order."""
        self._oids = {file.oid for file in files}
        self._pages: dict[tuple[bool, int, int, int], _Page] = {}
        """By whether the catalog is shared, tablespace, file number and block."""
        self.seen: set[int] = set()
        """Every transaction that has a record or is named in one, but in a list of running ones."""
        self._prepared: set[int] = set()
        self._finished: set[int] = set()
        """Transactions that were prepared in the window, and prepared ones that ended there."""
        self._skim = Skim(_IRRELEVANT, self._files.keys(), self.seen)
        self._creator = 0
        """The transaction that created the database, if that was in the window: it logs the catalogs whole
        (dbcommands.c: CreateDatabaseUsingWalLog), so what they are at R does not matter."""

    @property
    def skim(self) -> Skim | None:
        """The walk over records that `add` need not see; None: for now it must see all."""
        return self._skim if self._is_logical else None

    def add(self, record: Record, wal_format: WalFormat) -> None:
        """Take the next record.  Raises WalCorrupted; NotInPrerequisiteState if the window cannot serve."""
        if record.xid:
            self.seen.add(record.xid)
        if record.top_xid:
            self.seen.add(record.top_xid)
        if not self._is_logical:
            self._level(record)
        if record.rmgr == Rmgr.XACT:
            self._transaction(record, wal_format)
        elif record.rmgr == Rmgr.DBASE:
            if int.from_bytes(record.main[:4], "little") == self._database:
                if record.info & 0xF0 == f.XLOG_DBASE_CREATE_WAL_LOG:
                    self._creator = record.xid
                elif record.info & 0xF0 == f.XLOG_DBASE_CREATE_FILE_COPY and record.main[8:12] == record.main[:4]:
                    # It moves to another tablespace, with the numbers that its files have (dbcommands.c: movedb).
                    self.spaces.append(int.from_bytes(record.main[12:16], "little"))
        elif record.rmgr == Rmgr.RELMAP:
            if self._moves(record, int.from_bytes(record.main[:4], "little")):
                raise _moved(record.lsn)
        elif record.rmgr == Rmgr.SMGR and record.info & 0xF0 == f.XLOG_SMGR_CREATE:
            _, database, number = _locator(record.main)
            if number in self._files and self._moves(record, database):
                raise _moved(record.lsn)
        inserted: set[tuple[int, int]] | None = None
        deleted: set[tuple[int, int]] = set()
        for block in record.blocks:
            space, database, number = block.locator
            shared = database == 0
            if block.fork or number not in (self._shared if shared else self._local):
                continue
            if not shared and database != self._database:
                continue
            key = (shared, space, number, block.block)
            if key in self._pages:
                continue
            if block.will_init:
                self._pages[key] = _Page(_EMPTY, frozenset(), frozenset())
            elif block.image is not None:
                if inserted is None:
                    inserted, deleted = places(record) if changes_tuples(record) else (set(), set())
                self._pages[key] = _Page(
                    block.full_page(record.lsn),
                    frozenset(o for b, o in inserted if b == block.block),
                    frozenset(o for b, o in deleted if b == block.block),
                )
            elif changes_tuples(record):
                raise NotInPrerequisiteState(
                    "a catalog's page was changed without having been logged whole",
                    detail="full_page_writes must have been on since the checkpoint.",
                    context=f"WAL position {Lsn(record.lsn)}",
                )

    def touched(self, file: CatalogFile, tablespace: int) -> dict[int, _Page]:
        """Return the pages of a catalog that were touched, by block.  `tablespace`: the database's default one at E."""
        shared = _is_shared(file)
        found: dict[int, _Page] = {}
        for space in [GLOBAL_TABLESPACE] if shared else [*self.spaces, tablespace]:
            for (is_shared, where, number, block), page in self._pages.items():
                if (is_shared, where, number) == (shared, space, file.number):
                    found.setdefault(block, page)
        return found

    def _level(self, record: Record) -> None:
        """Find out whether the WAL so far was written with wal_level = logical.

        wal_level is logical now but may have been lower at R; up to 16 no record at R says so.  It changes only with a
        restart.  A restart that changes this or another setting is logged, and the changes before it show the level:
        only WAL for logical decoding has rows, command ids and invalidations.  Raises NotInPrerequisiteState if the
        requested WAL has none, since its rows would silently be missing.
        """
        kind = record.info & f.XLOG_HEAP_OPMASK
        if record.rmgr == Rmgr.XLOG and record.info & 0xF0 == f.XLOG_PARAMETER_CHANGE:
            if self._changed_at and self._start < record.lsn:
                raise NotInPrerequisiteState(
                    'logical decoding requires "wal_level" >= "logical" on the primary',
                    detail="It was lower when what was asked for was written.",
                    hint=f"Begin behind {Lsn(record.lsn)}, where the server was started with another wal_level.",
                    context=f"WAL position {Lsn(self._changed_at)}",
                )
            self._is_logical = True
        elif record.rmgr == Rmgr.XACT:
            self._is_logical = kind == f.XLOG_XACT_INVALIDATIONS
        elif record.rmgr == Rmgr.HEAP2 and kind == f.XLOG_HEAP2_NEW_CID:
            self._is_logical = True
        elif changes_tuples(record) and not (record.rmgr == Rmgr.HEAP and kind == f.XLOG_HEAP_INPLACE):
            self._is_logical = logs_rows(record)
            self._changed_at = self._changed_at or record.lsn

    def _moves(self, record: Record, database: int) -> bool:
        """Return whether a new file or relation map of `database` takes the place of one that was there at R."""
        return database == 0 or (database == self._database and (not self._creator or record.xid != self._creator))

    def _transaction(self, record: Record, wal_format: WalFormat) -> None:
        operation = record.info & f.XLOG_XACT_OPMASK
        if operation in {
            f.XLOG_XACT_COMMIT,
            f.XLOG_XACT_ABORT,
            f.XLOG_XACT_COMMIT_PREPARED,
            f.XLOG_XACT_ABORT_PREPARED,
        }:
            end = parse_end(record, wal_format)
            self.seen.update(end.subxids)
            if end.twophase_xid:
                self.seen.add(end.twophase_xid)
                self._finished.add(end.twophase_xid)
        elif operation == f.XLOG_XACT_PREPARE:
            self.seen.update(parse_prepare(record).subxids)
            self._prepared.add(record.xid)

    def prepared_before(self, at_end: Set[int]) -> set[int]:
        """Return the transactions that were prepared at R.  `at_end`: those that the server said are prepared, before E."""
        return {*at_end, *self._finished} - self._prepared


class CatalogBootstrap:
    """Makes the tables at R from the catalogs' files as they were read."""

    def __init__(self, files: list[CatalogFile], contents: dict[CatalogName, bytes], server: Upstream) -> None:
        self._files = files
        self._contents = contents
        self._server = server

    def undecided(self, scan: WindowScan) -> set[int]:
        """Return the transactions whose fate only the server knows."""
        found: set[int] = set()
        for file in self._files:
            for _, (_, xmin, xmax, mask, _) in self._tuples(file, scan):
                if _fate_unknown(xmin, mask, HEAP_XMIN_COMMITTED, HEAP_XMIN_INVALID):
                    found.add(xmin)
                if not mask & (HEAP_XMAX_LOCK_ONLY | HEAP_XMAX_IS_MULTI) and _fate_unknown(
                    xmax, mask, HEAP_XMAX_COMMITTED, HEAP_XMAX_INVALID
                ):
                    found.add(xmax)
        return found - scan.seen

    def tables(
        self, scan: WindowScan, status: dict[int, str | None]
    ) -> tuple[dict[CatalogName, CatalogTable], dict[int, list[tuple[CatalogTable, int, bool]]]]:
        """Return the tables, and what each transaction in progress at R had done to them.

        `status`: the fates as the server reported them.  Raises DataCorrupted, NotInPrerequisiteState.
        """
        tables: dict[CatalogName, CatalogTable] = {}
        pending: dict[int, list[tuple[CatalogTable, int, bool]]] = {}
        open_ones = scan.seen | {xid for xid, said in status.items() if said == "in progress"}
        aborted = {xid for xid, said in status.items() if said == "aborted"}
        for file in self._files:
            table = tables[file.name] = CatalogTable(layout_of(file, self._server))
            for block, (number, xmin, xmax, mask, row) in self._tuples(file, scan):
                if mask & HEAP_MOVED:
                    raise NotInPrerequisiteState(f"{file.name} was last written by a version before 9.0")
                creator = 0
                if mask & HEAP_XMIN_FROZEN != HEAP_XMIN_FROZEN and xmin >= _FIRST_NORMAL_XID:
                    if xmin in open_ones:
                        creator = xmin
                    elif mask & HEAP_XMIN_INVALID or (not mask & HEAP_XMIN_COMMITTED and xmin in aborted):
                        continue
                deleter = 0
                if not mask & HEAP_XMAX_LOCK_ONLY and xmax >= _FIRST_NORMAL_XID:
                    if mask & HEAP_XMAX_IS_MULTI:
                        if not mask & HEAP_XMAX_INVALID:
                            raise NotInPrerequisiteState(
                                f"a row of {file.name} was changed while others had it locked",
                                detail="Its xmax is a multixact, which is not in the WAL's reach.",
                                hint=f"VACUUM {file.name}, and start again.",
                            )
                    elif xmax in open_ones:
                        deleter = xmax
                    elif mask & HEAP_XMAX_INVALID or (not mask & HEAP_XMAX_COMMITTED and xmax in aborted):
                        pass
                    else:
                        continue
                tid = block << 16 | number
                try:
                    table.insert(tid, row, creator, deleter)
                except (IndexError, ValueError) as error:
                    raise DataCorrupted(f"a row of {file.name} is too short", context=f"block {block}") from error
                if creator:
                    pending.setdefault(creator, []).append((table, tid, True))
                if deleter:
                    pending.setdefault(deleter, []).append((table, tid, False))
        return tables, pending

    def _tuples(self, file: CatalogFile, scan: WindowScan) -> Iterator[tuple[int, PageTuple]]:
        """Yield the tuples at R, each with its block."""
        content = self._contents[file.name]
        blocks = len(content) // BLCKSZ
        touched = scan.touched(file, self._server.tablespace)
        for block in sorted({*range(blocks), *touched}):
            page = touched.get(block)
            try:
                if page is None:
                    for found in tuples_of(content[block * BLCKSZ : (block + 1) * BLCKSZ]):
                        yield block, found
                    continue
                for number, xmin, xmax, mask, row in tuples_of(page.image) if page.image else ():
                    if number in page.inserted:
                        continue
                    if number in page.deleted:
                        yield block, (number, xmin, 0, mask | HEAP_XMAX_INVALID, row)
                    else:
                        yield block, (number, xmin, xmax, mask, row)
            except DataCorrupted as error:
                error.context = f"block {block} of {file.name}"
                raise


def _is_shared(file: CatalogFile) -> bool:
    return definition_of(file.name).shared


def _fate_unknown(xid: int, mask: int, committed: int, invalid: int) -> bool:
    return xid >= _FIRST_NORMAL_XID and not mask & (committed | invalid)


def _locator(main: bytes) -> tuple[int, int, int]:
    if len(main) < 12:
        return 0, 0, 0
    return tuple(int.from_bytes(main[i : i + 4], "little") for i in (0, 4, 8))  # type: ignore[return-value]


def _moved(lsn: int) -> NotInPrerequisiteState:
    return NotInPrerequisiteState(
        "a catalog was written anew while decoding began",
        detail="VACUUM FULL or CLUSTER moved it to another file.",
        hint="Start again.",
        context=f"WAL position {Lsn(lsn)}",
    )
