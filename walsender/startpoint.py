"""Find the checkpoint to begin at, so that everything from a position on is decoded whole, by searching backwards.

    R' ── list' ───── R ── list ───── start ───►
          A ran            A, B ran   B had ended, A had not

A decoder that begins at a checkpoint's redo position sees every transaction whole that begins after the first list of
running transactions there.  So the checkpoint to use is the newest one whose list names no transaction that still runs
at `start`.  Here A rules out R, and R' as well; a checkpoint before A began would serve.  The WAL is read a segment at
a time, the last one first.
"""

from __future__ import annotations

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
_IRRELEVANT_LATER = bytes(kind >> 4 not in {Rmgr.XLOG, Rmgr.STANDBY} for kind in range(4096))


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
    if search.redos:
        return Lsn(max(search.redos))
    raise WalMissing(
        f"there is no checkpoint before {Lsn(start)} in the WAL that is there",
        start,
        detail=missing.message if missing is not None else None,
        hint="--wal names the directory of an archive that goes back far enough.",
    ) from missing


class _Search:
    """The checkpoints and transactions found in the WAL read so far."""

    def __init__(self, start: int, wal_format: WalFormat) -> None:
        self.redos: list[int] = []
        """Redo positions of checkpoints, up to `start`."""
        self._start = start
        self._format = wal_format
        self._lists: list[tuple[int, frozenset[int]]] = []
        self._alive: frozenset[int] | None = None
        """Transactions on the last list before `start` that still run at `start`; None: the list was not found yet."""
        self._ended: set[int] = set()
        """The transactions that ended before `start`, in the segments read until that list is found."""

    async def read(self, source: Source, geometry: Geometry, first: int, end: int) -> None:
        """Read the records that begin between `first`, the start of a segment, and `end`."""
        reader = WalReader(geometry, first, find_first=True)
        # Ends of transactions matter until it is known which ones run at the start.
        irrelevant = _IRRELEVANT if self._alive is None else _IRRELEVANT_LATER
        reader.walk = skim = Skim(irrelevant)
        skim.stop = end
        lists: list[tuple[int, frozenset[int]]] = []
        ended: set[int] = set()
        feeding = source.feed(reader)
        try:
            while geometry.to_byte_position(reader.position) < geometry.to_byte_position(end):
                await anext(feeding)
                for data, offset, length, lsn, xid, info, rmgr in reader.records():
                    if lsn >= end:
                        break
                    if not irrelevant[rmgr << 4]:
                        record = parse_record(data, offset, length, lsn, lsn, xid, info, rmgr)
                        self._record(record, lists, ended)
        finally:
            await feeding.aclose()
            await source.close()
        if self._alive is None:
            self._ended |= ended
            before = [xids for lsn, xids in lists if lsn < self._start]
            if before:
                self._alive = before[-1] - self._ended
                self._ended.clear()
        self._lists = lists + self._lists

    def _record(self, record: Record, lists: list[tuple[int, frozenset[int]]], ended: set[int]) -> None:
        lsn = record.lsn
        kind = record.info & f.XLR_RMGR_INFO_MASK
        if record.rmgr == Rmgr.XLOG:
            if kind in {f.XLOG_CHECKPOINT_ONLINE, f.XLOG_CHECKPOINT_SHUTDOWN}:
                redo = int.from_bytes(record.main[:8], "little")
                if redo <= self._start:
                    self.redos.append(redo)
            if kind in {f.XLOG_CHECKPOINT_SHUTDOWN, f.XLOG_END_OF_RECOVERY}:
                lists.append((lsn, frozenset()))
        elif record.rmgr == Rmgr.STANDBY:
            running = parse_running_xacts(record)
            if running is not None:
                lists.append((lsn, frozenset(running.xids)))
                if lsn < self._start:
                    ended.clear()
        elif lsn < self._start and self._alive is None and record.info & f.XLOG_XACT_OPMASK in _ENDS:
            end = parse_end(record, self._format)
            ended.update((end.twophase_xid or record.xid, *end.subxids))

    def found(self, first: int) -> int | None:
        """Return the newest redo position from `first` on that serves, or None; all WAL from `first` on was read."""
        for redo in sorted({redo for redo in self.redos if redo >= first}, reverse=True):
            for lsn, xids in self._lists:
                if lsn >= redo:
                    # Nothing that ends before the first list is decoded, so one after the start comes too late.
                    if lsn <= self._start and not xids:
                        return redo
                    if lsn < self._start and self._alive is not None and not xids & self._alive:
                        return redo
                    break
        return None


_ENDS = frozenset({f.XLOG_XACT_COMMIT, f.XLOG_XACT_COMMIT_PREPARED, f.XLOG_XACT_ABORT, f.XLOG_XACT_ABORT_PREPARED})
