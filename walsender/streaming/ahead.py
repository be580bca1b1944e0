"""Which transactions are rolled back further on in the WAL that is here.

A server that reads late finds in pg_xact that a transaction in progress, or a part of it, is gone already, and does not send
what it did with a catalog that nobody has (reorderbuffer.c: SetupCheckXidLive).  The WAL up to its end tells the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from walsender.feed.commits import IRRELEVANT
from walsender.feed.spool import Spool
from walsender.hot.walk import Skim
from walsender.streaming.spool_reader import SpoolReader
from walsender.xlog import formats as f
from walsender.xlog.formats import Rmgr
from walsender.xlog.geometry import Geometry
from walsender.xlog.reader import WalReader
from walsender.xlog.record import parse_record
from walsender.xlog.xact import parse_end

_NEAR: Final = 32 << 20
"""Bytes of WAL that are looked through for a transaction."""
_ABORTS: Final = frozenset({f.XLOG_XACT_ABORT, f.XLOG_XACT_ABORT_PREPARED})


class Ahead:
    """The ends of transactions in a spool's WAL, which ends at `tip()`.  Each byte of it is read once at most."""

    def __init__(self, spool: Spool, geometry: Geometry, tip: Callable[[], int]) -> None:
        self._tip = tip
        self._spool = SpoolReader(spool)
        self._reader = WalReader(geometry, 0)
        self._rolled_back: dict[int, int] = {}
        """The (sub)transactions, each with the LSN of the record that says so."""

    def rolled_back(self, xids: Iterable[int], position: int) -> bool | None:
        """Return whether one of them is rolled back after `position`, where a record begins.

        None: there is much WAL to be read, or a segment to be fetched from the archive, before this is known.
        """
        if self._tip() - position > _NEAR:
            return None
        self._rolled_back = {xid: lsn for xid, lsn in self._rolled_back.items() if lsn >= position}
        if self._reader.position < position:
            self._reader = WalReader(self._reader.geometry, position)
            self._reader.walk = Skim(IRRELEVANT)
        is_known = self._look()
        return any(xid in self._rolled_back for xid in xids) or (False if is_known else None)

    def close(self) -> None:
        self._spool.close()

    def _look(self) -> bool:
        """Read on; return whether the tip was reached."""
        reader, tip = self._reader, self._tip()
        if reader.received < reader.position:
            # A segment ended early (XLOG_SWITCH).
            reader.restart_at(reader.position)
        for start, piece in self._spool.read(reader.received, tip):
            reader.feed(start, piece)
            for data, offset, length, lsn, xid, info, rmgr in reader.records():
                if rmgr == Rmgr.XACT and info & f.XLOG_XACT_OPMASK in _ABORTS:
                    assert reader.format is not None
                    end = parse_end(parse_record(data, offset, length, lsn, lsn, xid, info, rmgr), reader.format)
                    for one in (end.twophase_xid or xid, *end.subxids):
                        self._rolled_back[one] = lsn
        return reader.received >= tip
