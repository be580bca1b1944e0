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

The files come in page by page.  What the WAL has said by then allows to drop most dead tuples at once (`_Ends.kept`).

From R on the tracker follows the WAL.  `WindowScan` takes the records of [R, E]; `CatalogBootstrap` makes the tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
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
from walsender.xlog.record import GLOBAL_TABLESPACE, BlockRef, Record
from walsender.xlog.xact import parse_end, parse_prepare, parse_running_xacts, precedes

_FIRST_NORMAL_XID: Final = 3
_XMIN_KNOWN: Final = HEAP_XMIN_COMMITTED | HEAP_XMIN_INVALID
_XMAX_KNOWN: Final = HEAP_XMAX_COMMITTED | HEAP_XMAX_INVALID
"""Hint bits that say how the transaction ended."""
_IRRELEVANT: Final = bytes(
    kind in {Rmgr.XLOG << 4 | f.XLOG_FPI >> 4, Rmgr.XLOG << 4 | f.XLOG_FPI_FOR_HINT >> 4}
    or kind >> 4 not in {Rmgr.XLOG, Rmgr.XACT, Rmgr.STANDBY, Rmgr.DBASE, Rmgr.RELMAP, Rmgr.SMGR}
    for kind in range(4096)
)
"""Kinds of records of which `WindowScan` reads only the transaction and the blocks."""


class _Ends:
    """What the WAL from R on has said so far about the ends of transactions, for the tuples that are looked at."""

    def __init__(self) -> None:
        self.seen: set[int] = set()
        """Every transaction that has a record or is named in one."""
        self.undecided: set[int] = set()
        """Those of tuples without a hint bit."""
        self.oldest_running: int | None = None
        """The oldest transaction on the newest list of running ones; None: there was no list."""
        self._numbers: dict[int, int] = {}

    def kept(self, tuples: Iterable[PageTuple]) -> list[PageTuple]:
        """Return the tuples that may matter at R.

        The others were deleted, or inserted by a transaction that was rolled back, before R: the hint bits say how the
        transaction ended, it was not running at a list in [R, E], and nothing of it is in the WAL from R up to that list.
        """
        found: list[PageTuple] = []
        number_of = self._numbers.setdefault
        for number, xmin, xmax, mask, row in tuples:
            if not mask & HEAP_MOVED:
                gone = mask & HEAP_XMIN_FROZEN == HEAP_XMIN_INVALID and self._ended_before(xmin)
                deleted = (
                    mask & (HEAP_XMAX_COMMITTED | HEAP_XMAX_INVALID | HEAP_XMAX_IS_MULTI | HEAP_XMAX_LOCK_ONLY)
                    == HEAP_XMAX_COMMITTED
                )
                if gone or (deleted and self._ended_before(xmax)):
                    continue
            if not mask & _XMIN_KNOWN or not mask & _XMAX_KNOWN:  # which is rare
                self.undecided |= _unknown(xmin, xmax, mask)
            # There are few different ones of these numbers, and many tuples.
            found.append((number, number_of(xmin, xmin), number_of(xmax, xmax), number_of(mask, mask), row))
        return found

    def _ended_before(self, xid: int) -> bool:
        """Return whether a transaction that has ended did so before R."""
        oldest = self.oldest_running
        return oldest is not None and xid >= _FIRST_NORMAL_XID and precedes(xid, oldest) and xid not in self.seen


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
        self.pages: dict[tuple[bool, int, int, int], list[PageTuple]] = {}
        """The tuples at R of pages that a record touches, by whether the catalog is shared, tablespace, file number and block."""
        self.ends = _Ends()
        self.seen = self.ends.seen
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
        elif record.rmgr == Rmgr.STANDBY:
            running = parse_running_xacts(record)
            if running is not None:
                self.ends.oldest_running = running.oldest_running
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
            if key in self.pages:
                continue
            if block.will_init:
                self.pages[key] = []
            elif block.image is not None:
                if inserted is None:
                    inserted, deleted = places(record) if changes_tuples(record) else (set(), set())
                try:
                    self.pages[key] = self.ends.kept(_before(block, record.lsn, inserted, deleted))
                except DataCorrupted as error:
                    error.context = f"block {block.block} of {self._files[number].name}"
                    raise
            elif changes_tuples(record):
                raise NotInPrerequisiteState(
                    "a catalog's page was changed without having been logged whole",
                    detail="full_page_writes must have been on since the checkpoint.",
                    context=f"WAL position {Lsn(record.lsn)}",
                )

    def touched(self, file: CatalogFile, tablespace: int) -> dict[int, list[PageTuple]]:
        """Return the pages of a catalog that were touched, by block.  `tablespace`: the database's default one at E."""
        found: dict[int, list[PageTuple]] = {}
        for of_file in self._keys(file, tablespace):
            for (*place, block), page in self.pages.items():
                if tuple(place) == of_file:
                    found.setdefault(block, page)
        return found

    def touches(self, file: CatalogFile, tablespace: int, block: int) -> bool:
        """Return whether a page of a catalog was touched."""
        return any((*of_file, block) in self.pages for of_file in self._keys(file, tablespace))

    def _keys(self, file: CatalogFile, tablespace: int) -> list[tuple[bool, int, int]]:
        """Return what the keys of a catalog's pages begin with, in the order of the database's tablespaces."""
        shared = _is_shared(file)
        return [
            (shared, space, file.number) for space in ([GLOBAL_TABLESPACE] if shared else [*self.spaces, tablespace])
        ]

    def _level(self, record: Record) -> None:
        """Find out whether the WAL so far was written with wal_level = logical.

        wal_level is logical now but may have been lower at R; up to 16 no record at R says so.  It changes only with a
        restart.  A restart that changes this or another setting is logged, and the changes before it show the level:
        only WAL for logical decoding has rows, command ids and invalidations.  Raises NotInPrerequisiteState if the
        requested WAL has none, since its rows would silently be missing.
        """
        kind = record.info & f.XLOG_HEAP_OPMASK
        if record.rmgr == Rmgr.XLOG and (
            record.info & 0xF0 == f.XLOG_PARAMETER_CHANGE
            or (record.info & 0xF0 == f.XLOG_LOGICAL_DECODING_STATUS_CHANGE and record.main[:1] != b"\0")
        ):
            if self._changed_at and self._start < record.lsn:
                raise NotInPrerequisiteState(
                    'logical decoding requires "wal_level" >= "logical" on the primary',
                    detail="It was lower when what was asked for was written.",
                    hint=f"Begin behind {Lsn(record.lsn)}, where the server began to write what decoding needs.",
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

    def __init__(self, files: list[CatalogFile], server: Upstream, scan: WindowScan) -> None:
        self._files = files
        self._server = server
        self._scan = scan
        self._pages: dict[CatalogName, dict[int, list[PageTuple] | DataCorrupted]] = {}
        """The tuples of pages as the files had them, by block, or what is wrong with them: they were being written, then."""

    def take(self, file: CatalogFile, first: int, pages: bytes) -> int:
        """Take pages of a file, from the block `first` on; return the next block.

        Give the WAL from R on to the scan first: what that knows of already takes no memory.
        """
        taken = self._pages.setdefault(file.name, {})
        for block in range(first, first + len(pages) // BLCKSZ):
            if self._scan.touches(file, self._server.tablespace, block):
                continue
            start = (block - first) * BLCKSZ
            try:
                found = self._scan.ends.kept(tuples_of(pages[start : start + BLCKSZ]))
            except DataCorrupted as error:
                taken[block] = error
                continue
            if found:
                taken[block] = found
        return first + len(pages) // BLCKSZ

    def undecided(self) -> set[int]:
        """Return the transactions whose fate only the server knows."""
        return self._scan.ends.undecided - self._scan.seen

    def tables(
        self, status: dict[int, str | None]
    ) -> tuple[dict[CatalogName, CatalogTable], dict[int, list[tuple[CatalogTable, int, bool]]]]:
        """Return the tables, and what each transaction in progress at R had done to them; call it once.

        `status`: the fates as the server reported them.  Raises DataCorrupted, NotInPrerequisiteState.
        """
        tables: dict[CatalogName, CatalogTable] = {}
        pending: dict[int, list[tuple[CatalogTable, int, bool]]] = {}
        open_ones = self._scan.seen | {xid for xid, said in status.items() if said == "in progress"}
        aborted = {xid for xid, said in status.items() if said == "aborted"}
        for file in self._files:
            table = tables[file.name] = CatalogTable(layout_of(file, self._server))
            for block, (number, xmin, xmax, mask, row) in self._tuples(file, forget=True):
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

    def needed(self, xids: set[int]) -> set[int]:
        """Return those of the transactions whose fate a tuple at R depends on: pages were touched after they had been taken."""
        found: set[int] = set()
        for file in self._files if xids else ():
            for _, (_, xmin, xmax, mask, _) in self._tuples(file):
                found |= _unknown(xmin, xmax, mask) & xids
        return found

    def _tuples(self, file: CatalogFile, *, forget: bool = False) -> Iterator[tuple[int, PageTuple]]:
        """Yield the tuples at R, each with its block."""
        touched = self._scan.touched(file, self._server.tablespace)
        taken = self._pages.get(file.name, {})
        for block in sorted({*taken, *touched}):
            found = taken.pop(block, []) if forget else taken.get(block, [])
            if block in touched:
                found = touched[block]
            if isinstance(found, DataCorrupted):
                found.context = f"block {block} of {file.name}"
                raise found
            for one in found:
                yield block, one


def _before(
    block: BlockRef, lsn: int, inserted: set[tuple[int, int]], deleted: set[tuple[int, int]]
) -> Iterator[PageTuple]:
    """Yield a page's tuples from before the record with its image; that inserted and deleted tuples at these places."""
    for number, xmin, xmax, mask, row in tuples_of(block.full_page(lsn)):
        if (block.block, number) in inserted:
            continue
        if (block.block, number) in deleted:
            yield number, xmin, 0, mask | HEAP_XMAX_INVALID, row
        else:
            yield number, xmin, xmax, mask, row


def _is_shared(file: CatalogFile) -> bool:
    return definition_of(file.name).shared


def _unknown(xmin: int, xmax: int, mask: int) -> set[int]:
    """Return the transactions of a tuple whose fate its hint bits do not tell."""
    found: set[int] = set()
    if xmin >= _FIRST_NORMAL_XID and not mask & _XMIN_KNOWN:
        found.add(xmin)
    if xmax >= _FIRST_NORMAL_XID and not mask & (_XMAX_KNOWN | HEAP_XMAX_LOCK_ONLY | HEAP_XMAX_IS_MULTI):
        found.add(xmax)
    return found


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
