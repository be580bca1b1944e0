"""What the WAL says about transactions, followed without decoding it: where a slot can begin, and with which snapshot.

A slot can begin at an LSN if there is a list of running transactions before it from which every transaction that ends after
the LSN is seen whole: one that names none that was still running at the LSN.  Before the list there must be a checkpoint's
redo position, from which the catalogs can be read if they are not known (bootstrap.py).

A snapshot fits an LSN if it sees exactly the commits before it.  Commits become visible in another order than they are in
the WAL, so for many snapshots there is no such LSN; the next one may fit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Self

from walsender.xlog import formats as f
from walsender.xlog.formats import Rmgr, WalFormat
from walsender.xlog.record import Record
from walsender.xlog.xact import parse_end, parse_running_xacts, precedes

IRRELEVANT: Final = bytes(kind >> 4 not in {Rmgr.XLOG, Rmgr.XACT, Rmgr.STANDBY} for kind in range(4096))
"""Kinds of records that say nothing about this, as Walk has them."""
_LISTS: Final = 1000
_VERSION: Final = 2
"""Of what is on disk.  Before there was a number, `recent` lacked what lies behind a commit that waits."""
_ENDS: Final = frozenset(
    {f.XLOG_XACT_COMMIT, f.XLOG_XACT_COMMIT_PREPARED, f.XLOG_XACT_ABORT, f.XLOG_XACT_ABORT_PREPARED}
)
_COMMITS: Final = frozenset({f.XLOG_XACT_COMMIT, f.XLOG_XACT_COMMIT_PREPARED})


@dataclass(frozen=True, slots=True)
class VisibleSet:
    """pg_current_snapshot(): transactions below `xmin` are visible, and those below `xmax` that are not in `running`."""

    xmin: int
    xmax: int
    running: frozenset[int]

    @classmethod
    def parse(cls, text: str) -> VisibleSet:
        """Parse xmin:xmax:xip_list, whose transaction ids have 64 bits."""
        xmin, xmax, running = text.split(":")
        return cls(int(xmin), int(xmax), frozenset(int(xid) & 0xFFFFFFFF for xid in running.split(",") if xid))

    def sees(self, xid: int) -> bool:
        """Return whether the transaction with these 32 bits, which has committed lately, is visible."""
        return precedes(xid, self.xmax) and xid not in self.running


def fitting(commits: Iterable[tuple[int, int]], snapshot: VisibleSet, end: int) -> int | None:
    """Return the LSN that has every visible commit before it and every other one after it; None if there is none.

    `commits`: (LSN of the commit record, transaction) in the WAL's order; `end`: where the known WAL ends.
    """
    found = None
    for lsn, xid in commits:
        if not snapshot.sees(xid):
            found = lsn if found is None else found
        elif found is not None:
            return None
    return end if found is None else found


@dataclass(eq=False, slots=True)
class _List:
    """A list of running transactions: those of them that still run, and since when none does (0: some do)."""

    lsn: int
    alive: set[int]
    clear_at: int


class Commits:
    """Follows the records of transactions, checkpoints and lists of running transactions, in order.

    `prepared`: the transactions that are prepared where it begins, as far as the WAL from there on may not tell.
    """

    def __init__(self, wal_format: WalFormat, prepared: Iterable[int] = ()) -> None:
        self._format = wal_format
        self.recent: deque[tuple[int, int]] = deque()
        """(LSN, transaction) of the commits that a new snapshot may not see yet, and of some behind them that it sees."""
        self.last_list = 0
        """LSN of the last list of running transactions that a server has written."""
        self._keeping = 0
        self._prepared = set(prepared)
        self._lists: deque[_List] = deque()
        self._waiting: dict[int, list[_List]] = {}
        self._redos: list[int] = []
        """Redo positions of checkpoints."""

    def add(self, record: Record) -> None:
        """Take the next record.  Raises WalCorrupted."""
        kind = record.info & f.XLR_RMGR_INFO_MASK
        if record.rmgr == Rmgr.XACT:
            operation = record.info & f.XLOG_XACT_OPMASK
            if operation in _ENDS:
                end = parse_end(record, self._format)
                xid = end.twophase_xid or record.xid
                if operation in _COMMITS and xid:
                    self.recent.append((record.lsn, xid))
                if end.twophase_xid:
                    if xid not in self._prepared and xid not in self._waiting:
                        self._prepared_before(record.lsn)
                    self._prepared.discard(xid)
                if self._waiting:
                    self._ended((xid, *end.subxids), record.lsn)
            elif operation == f.XLOG_XACT_PREPARE:
                self._prepared.add(record.xid)
        elif record.rmgr == Rmgr.STANDBY:
            running = parse_running_xacts(record)
            if running is not None:
                xids = set(running.xids)
                if not self._keeping:
                    self._forget_seen(xids)
                # Transactions that are no longer on the list have ended, perhaps in a crash.
                self._ended(self._waiting.keys() - xids, record.lsn)
                self._list(record.lsn, xids)
                self.last_list = record.lsn
        elif record.rmgr == Rmgr.XLOG:
            if kind in {f.XLOG_CHECKPOINT_SHUTDOWN, f.XLOG_END_OF_RECOVERY}:
                # Only prepared transactions survive it.  Any of those that ran may be prepared: the next list tells.
                self._list(record.lsn, self._prepared | self._waiting.keys())
            if kind in {f.XLOG_CHECKPOINT_ONLINE, f.XLOG_CHECKPOINT_SHUTDOWN}:
                self._redos.append(int.from_bytes(record.main[:8], "little"))

    def _forget_seen(self, xids: set[int]) -> None:
        """Forget the commits that a list of running transactions, `xids`, says all snapshots from then on see.

        One that is on it may wait for a synchronous standby.  As long as it does, no LSN fits a snapshot if a commit that
        lies behind it is seen: one of these is kept.
        """
        kept: deque[tuple[int, int]] = deque()
        for one in self.recent:
            if one[1] in xids or (kept and kept[-1][1] in xids):
                kept.append(one)
        self.recent = kept

    def _prepared_before(self, lsn: int) -> None:
        """Note that a transaction has ended at `lsn` that was prepared before the WAL that was read, and so at each shutdown."""
        for one in self._lists:
            if one.clear_at:
                one.clear_at = lsn

    @contextmanager
    def all_kept(self) -> Iterator[Self]:
        """Keep all of `recent` meanwhile: a snapshot from before a list of running transactions is still to be compared.

        Entered before the snapshot is taken.
        """
        self._keeping += 1
        try:
            yield self
        finally:
            self._keeping -= 1

    def _list(self, lsn: int, xids: Iterable[int]) -> None:
        alive = set(xids)
        made = _List(lsn, alive, 0 if alive else lsn)
        if len(self._lists) >= _LISTS:
            self._forget_one()
        self._lists.append(made)
        for xid in alive:
            self._waiting.setdefault(xid, []).append(made)

    def _forget_one(self) -> None:
        """Forget the oldest list, but not the newest one at which a slot can begin."""
        kept = self._newest()
        first = self._lists.popleft()
        if first is kept:
            self._lists.popleft()
            self._lists.appendleft(first)

    def _ended(self, xids: Iterable[int], lsn: int) -> None:
        for xid in list(xids):
            for one in self._waiting.pop(xid, ()):
                one.alive.discard(xid)
                if not one.alive:
                    one.clear_at = lsn

    def restart_for(self, lsn: int, oldest: int) -> int | None:
        """Return the newest list, from `oldest` on, from which everything that ends from `lsn` on is seen whole."""
        first = next((redo for redo in self._redos if redo >= oldest), None)
        if first is None:
            return None
        return next(
            (one.lsn for one in reversed(self._lists) if first <= one.lsn <= lsn and 0 < one.clear_at < lsn), None
        )

    def newest_restart(self) -> int | None:
        """Return the newest list at which a slot could begin now."""
        newest = self._newest()
        return None if newest is None else newest.lsn

    def redo_before(self, lsn: int) -> int | None:
        """Return the newest redo position of a checkpoint up to `lsn`."""
        return max((redo for redo in self._redos if redo <= lsn), default=None)

    def _newest(self) -> _List | None:
        return next((one for one in reversed(self._lists) if one.clear_at), None)

    def forget_before(self, lsn: int, restarts: Iterable[int]) -> None:
        """Forget where slots could begin before `lsn`, whose WAL is no longer kept here.

        `restarts`: where slots begin.  An archive may have that WAL: the checkpoint before each is remembered.
        """
        needed = {self.redo_before(restart) for restart in restarts}
        self._redos = [redo for redo in self._redos if redo >= lsn or redo in needed]
        while self._lists and self._lists[0].lsn < lsn:
            gone = self._lists.popleft()
            for xid in gone.alive:
                self._waiting[xid].remove(gone)

    # On disk

    def state(self) -> dict[str, Any]:
        """Return all that it knows, for JSON."""
        return {
            "version": _VERSION,
            "recent": list(self.recent),
            "last_list": self.last_list,
            "prepared": sorted(self._prepared),
            "lists": [[one.lsn, sorted(one.alive), one.clear_at] for one in self._lists],
            "redos": self._redos,
        }

    @classmethod
    def restored(cls, wal_format: WalFormat, state: dict[str, Any]) -> Self:
        """Return what `state` was taken of.  Raises KeyError, TypeError, ValueError if it was not."""
        if state.get("version") != _VERSION:
            raise ValueError(f"its version is {state.get('version')}, not {_VERSION}")
        made = cls(wal_format, [int(xid) for xid in state["prepared"]])
        made.recent = deque((int(lsn), int(xid)) for lsn, xid in state["recent"])
        made.last_list = int(state["last_list"])
        made._redos = [int(redo) for redo in state["redos"]]
        for lsn, alive, clear_at in state["lists"]:
            one = _List(int(lsn), set(alive), int(clear_at))
            made._lists.append(one)
            for xid in one.alive:
                made._waiting.setdefault(xid, []).append(one)
        return made
