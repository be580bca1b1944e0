"""Find the checkpoint to begin at, so that everything from a position on is decoded whole, by searching backwards.

    R' ── list' ───── R ── list ───── start ───►
          A ran            A, B ran   B had ended, A had not

A decoder that begins at a checkpoint's redo position sees every transaction whole that begins after the first list of
running transactions there.  So the checkpoint to use is the newest one whose list names no transaction that still runs
at `start`.  Here A rules out R, and R' as well; a checkpoint before A began would serve.  The WAL is read a segment at
a time, the last one first.

A shutdown, or the end of a recovery, is as good as a list: of the transactions that were prepared by then, which are those
of the list before it and the PREPAREs since, without those that ended.  A crash leaves some on it that are neither.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pubsub.protocol.lsn import Lsn
from walsender.historic.upstream import Upstream
from walsender.hot.walk import Skim
from walsender.source.source import Source
from walsender.xlog import formats as f
from walsender.xlog.errors import WalMissing
from walsender.xlog.formats import Rmgr, WalFormat, format_of_version
from walsender.xlog.geometry import Geometry
from walsender.xlog.reader import WalReader
from walsender.xlog.record import Record, parse_record
from walsender.xlog.xact import parse_end, parse_running_xacts

_IRRELEVANT = bytes(kind >> 4 not in {Rmgr.XLOG, Rmgr.XACT, Rmgr.STANDBY} for kind in range(4096))
_OF_PREPARED = frozenset(
    Rmgr.XACT << 4 | (info | has_info) >> 4
    for info in (f.XLOG_XACT_PREPARE, f.XLOG_XACT_COMMIT_PREPARED, f.XLOG_XACT_ABORT_PREPARED)
    for has_info in (0, f.XLOG_XACT_HAS_INFO)
)
_IRRELEVANT_LATER = bytes(
    kind >> 4 not in {Rmgr.XLOG, Rmgr.STANDBY} and kind not in _OF_PREPARED for kind in range(4096)
)


async def redo_before(source: Source, server: Upstream, start: int, last: int, end: int) -> Lsn:
    """Return the redo position to begin at.

    `last`: the redo position of the server's last checkpoint; `end`: where the WAL ends.  If no checkpoint serves, it
    is the newest one before `start`: a transaction that cannot be decoded whole is then refused when it comes.  Raises
    WalMissing if there is no checkpoint at all, WalCorrupted.
    """
    geometry = Geometry(server.segment_size)
    wal_format = format_of_version(server.version)
    assert wal_format is not None
    search = _Search(start, wal_format)
    if last <= start:
        search.redos.append(last)
    size = geometry.segment_size
    first = start - start % size
    # A checkpoint's record lies after its redo position, and so perhaps after the start.
    end = min(end, start + size)
    missing: WalMissing | None = None
    while first >= 0:
        try:
            await search.read(source, geometry, first, end)
        except WalMissing as error:
            missing = error
            break
        found = search.found(first)
        if found is not None:
            return Lsn(found)
        end = first
        first -= size
    # All that is there was read.
    search.settle()
    found = search.found(0)
    if found is not None:
        return Lsn(found)
    if search.redos:
        return Lsn(max(search.redos))
    raise WalMissing(
        f"there is no checkpoint before {Lsn(start)} in the WAL that is there",
        start,
        detail=missing.message if missing is not None else None,
        hint="--wal names the directory of an archive that goes back far enough.",
    ) from missing


@dataclass(eq=False, slots=True)
class _Shutdown:
    """A shutdown or the end of a recovery.  `prepared`: transactions that were prepared before it and had not ended, as far as
    the WAL tells that was read; `ended`: those that ended before it.
    """

    lsn: int
    prepared: set[int]
    ended: set[int]


class _Segment:
    """What a segment has, in order, and what ran at its end.

    `lists`: transactions that may still run, or are prepared; None: a shutdown before which the segment has no list.
    """

    def __init__(self) -> None:
        self.lists: list[tuple[int, frozenset[int] | None]] = []
        self.shutdowns: list[_Shutdown] = []
        self.running: set[int] | None = None
        """Those of the last list that have not ended since, and those that were prepared since; None: there was no list."""
        self.prepared: set[int] = set()
        self.ended: set[int] = set()
        """Those that were prepared and have not ended, and those that have ended, since the segment's start or the last list."""
        self.ended_before_start: set[int] = set()
        """Those that ended before `start`, since the last list or shutdown before it."""

    def take_list(self, lsn: int, xids: Iterable[int]) -> None:
        self.running = set(xids)
        self.prepared.clear()
        self.ended.clear()
        self.lists.append((lsn, frozenset(self.running)))

    def take_shutdown(self, lsn: int) -> None:
        if self.running is not None:
            self.lists.append((lsn, frozenset(self.running)))
        else:
            self.lists.append((lsn, None))
            self.shutdowns.append(_Shutdown(lsn, set(self.prepared), set(self.ended)))

    def take_prepare(self, xid: int) -> None:
        self.prepared.add(xid)
        if self.running is not None:
            self.running.add(xid)

    def take_end(self, xids: Iterable[int]) -> None:
        self.ended.update(xids)
        self.prepared.difference_update(xids)
        if self.running is not None:
            self.running.difference_update(xids)


class _Search:
    """The checkpoints and transactions found in the WAL read so far."""

    def __init__(self, start: int, wal_format: WalFormat) -> None:
        self.redos: list[int] = []
        """Redo positions of checkpoints, up to `start`."""
        self._start = start
        self._format = wal_format
        self._lists: list[tuple[int, frozenset[int] | None]] = []
        self._shutdowns: list[_Shutdown] = []
        """Those in the segments read so far before which no list was found yet: `_lists` has None for them."""
        self._alive: frozenset[int] | None = None
        """Transactions on the last list before `start` that still run at `start`; None: the list was not found yet."""
        self._ended: set[int] = set()
        """The transactions that ended before `start` and after that list, in the segments read until it is found."""

    async def read(self, source: Source, geometry: Geometry, first: int, end: int) -> None:
        """Read the records that begin between `first`, the start of a segment, and `end`."""
        reader = WalReader(geometry, first, find_first=True)
        # Ends of all transactions matter until it is known which ones run at the start.
        irrelevant = _IRRELEVANT if self._alive is None else _IRRELEVANT_LATER
        reader.walk = skim = Skim(irrelevant)
        skim.stop = end
        segment = _Segment()
        feeding = source.feed(reader)
        try:
            while geometry.to_byte_position(reader.position) < geometry.to_byte_position(end):
                await anext(feeding)
                for data, offset, length, lsn, xid, info, rmgr in reader.records():
                    if lsn >= end:
                        break
                    if not irrelevant[rmgr << 4 | info >> 4]:
                        self._record(parse_record(data, offset, length, lsn, lsn, xid, info, rmgr), segment)
        finally:
            await feeding.aclose()
            await source.close()
        self.add(segment)

    def add(self, segment: _Segment) -> None:
        """Add a segment, which lies before all others."""
        for shutdown in self._shutdowns:
            shutdown.prepared |= (segment.running or segment.prepared) - shutdown.ended
            shutdown.ended |= segment.ended
        if segment.running is not None:
            self.settle()
        if not any(lsn < self._start for lsn, _ in self._lists):
            self._ended |= segment.ended_before_start
        self._lists = segment.lists + self._lists
        self._shutdowns = segment.shutdowns + self._shutdowns
        self._find_alive()

    def settle(self) -> None:
        """Take for prepared at shutdowns what the WAL tells that was read: there is a list before them, or no more WAL."""
        known = {one.lsn: frozenset(one.prepared) for one in self._shutdowns}
        self._lists = [(lsn, known.get(lsn, xids)) for lsn, xids in self._lists]
        self._shutdowns = []
        self._find_alive()

    def _find_alive(self) -> None:
        before = [xids for lsn, xids in self._lists if lsn < self._start]
        if self._alive is None and before and before[-1] is not None:
            self._alive = before[-1] - self._ended

    def _record(self, record: Record, segment: _Segment) -> None:
        lsn = record.lsn
        kind = record.info & f.XLR_RMGR_INFO_MASK
        if record.rmgr == Rmgr.XLOG:
            if kind in {f.XLOG_CHECKPOINT_ONLINE, f.XLOG_CHECKPOINT_SHUTDOWN}:
                redo = int.from_bytes(record.main[:8], "little")
                if redo <= self._start:
                    self.redos.append(redo)
            if kind in {f.XLOG_CHECKPOINT_SHUTDOWN, f.XLOG_END_OF_RECOVERY}:
                segment.take_shutdown(lsn)
                if lsn < self._start:
                    segment.ended_before_start.clear()
        elif record.rmgr == Rmgr.STANDBY:
            running = parse_running_xacts(record)
            if running is not None:
                segment.take_list(lsn, running.xids)
                if lsn < self._start:
                    segment.ended_before_start.clear()
        elif record.info & f.XLOG_XACT_OPMASK == f.XLOG_XACT_PREPARE:
            segment.take_prepare(record.xid)
        elif record.info & f.XLOG_XACT_OPMASK in _ENDS:
            end = parse_end(record, self._format)
            xids = (end.twophase_xid or record.xid, *end.subxids)
            segment.take_end(xids)
            if lsn < self._start:
                segment.ended_before_start.update(xids)

    def found(self, first: int) -> int | None:
        """Return the newest redo position from `first` on that serves, or None; all WAL from `first` on was read."""
        for redo in sorted({redo for redo in self.redos if redo >= first}, reverse=True):
            for lsn, xids in self._lists:
                if lsn >= redo:
                    # Nothing that ends before the first list is decoded, so one after the start comes too late.
                    if xids is None:
                        break
                    if lsn <= self._start and not xids:
                        return redo
                    if lsn < self._start and self._alive is not None and not xids & self._alive:
                        return redo
                    break
        return None


_ENDS = frozenset({f.XLOG_XACT_COMMIT, f.XLOG_XACT_COMMIT_PREPARED, f.XLOG_XACT_ABORT, f.XLOG_XACT_ABORT_PREPARED})
