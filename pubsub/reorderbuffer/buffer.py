"""The reorder buffer: transactions assembled from interleaved changes (reorderbuffer.c).

    append ─► one log for each top-level transaction ─► commit, prepare, take ─► Transaction: read in chunks, then released

Nothing here waits: `append` only ever uses memory.  When `exceeded`, the owner calls `spill`, which writes files and may run in a
thread, or streams the `largest` out with `take`.  One method at a time; what a Transaction that was given out is read for
may go on in other threads meanwhile.

    buffer.append_tagged(700, frames)            # between Stream Start and Stop, as they came
    if buffer.exceeded:
        await asyncio.to_thread(buffer.spill)
    buffer.abort(702, top=700)
    with buffer.commit(700) as transaction:
        for chunk in transaction.chunks(32 << 20):
            relations = rows.split_by_relation(chunk.blocks, chunk.first)
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pubsub.errors import DuplicateObject
from pubsub.protocol.copyboth import XLOG_HEADER
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.reorderbuffer import files
from pubsub.reorderbuffer.segments import SegmentFile
from pubsub.reorderbuffer.transaction import State, Transaction

SUFFIX: Final = ".spill.arrows"


@dataclass(slots=True)
class Statistics:
    """Counters since the buffer was made, as pg_stat_replication_slots has them.  Bytes are those of frames.

    spill_*    transactions that were moved to disk, how often, and how much
    stream_*   transactions that were taken while in progress, in how many pieces, and how much
    total_*    transactions given out (committed, prepared or taken), and how much; a streamed one once

    A transaction counts as one, whatever the number of its subtransactions.
    """

    spill_txns: int = 0
    spill_count: int = 0
    spill_bytes: int = 0
    stream_txns: int = 0
    stream_count: int = 0
    stream_bytes: int = 0
    total_txns: int = 0
    total_bytes: int = 0


class ReorderBuffer:
    """Transactions in progress, and those given out that are not released yet.

    `directory` is this buffer's own: spilled changes that an earlier process left there are removed now.  `work_mem` is
    logical_decoding_work_mem in bytes; it may be changed.  `header`: bytes before the message in frames that are not tagged.
    `memory` is the bytes that all changes hold.  Raises FileFailure.
    """

    def __init__(self, directory: Path, work_mem: int, *, header: int = XLOG_HEADER) -> None:
        self.work_mem = work_mem
        self.memory = 0
        self.statistics = Statistics()
        self._directory = directory
        self._header = header
        self._by_xid: dict[int, Transaction] = {}
        self._prepared: dict[str, Transaction] = {}
        # Everything that holds changes, oldest first.
        self._held: dict[Transaction, None] = {}
        # A log's changes that arrived with none of another log between them share an arrival.
        self._last: Transaction | None = None
        self._arrival = 0
        self._spilling = threading.Lock()
        self._numbers = itertools.count()
        files.remove_all(directory, SUFFIX)

    # Assembling.

    def begin(self, xid: int, lsn: Lsn = INVALID_LSN) -> Transaction:
        """The transaction that `xid` is or belongs to; a new one, which began at `lsn`, where there is none."""
        transaction = self._by_xid.get(xid)
        if transaction is None:
            transaction = self._by_xid[xid] = Transaction(xid, self._header, self._account, self._drop)
            self._held[transaction] = None
        if not transaction.first_lsn:
            transaction.first_lsn = lsn
        return transaction

    def append(self, xid: int, frames: Sequence[bytes], *, top: int | None = None, lsn: Lsn = INVALID_LSN) -> None:
        """Changes that (sub)transaction `xid` made, in order; `top` is the transaction it is in where that may be new.

        Raises ProgramLimitExceeded for a frame past 2 GB.
        """
        if top is not None and top != xid:
            known = self._by_xid.get(xid)
            if known is None or known.xid != top:
                self.assign(xid, top)
        self._append(self.begin(xid, lsn), frames, xid, tagged=False)

    def append_tagged(self, top: int, frames: Sequence[bytes], *, lsn: Lsn = INVALID_LSN) -> None:
        """Messages R, Y, I, U, D, T and M as they came between Stream Start and Stop: each names its (sub)transaction.

        That is read only later: then, at the latest in `spill` or `commit`, ProtocolViolation is raised for a frame that does
        not.  Raises ProgramLimitExceeded as `append`.
        """
        self._append(self.begin(top, lsn), frames, top, tagged=True)

    def assign(self, xid: int, parent: int) -> None:
        """`xid` is a subtransaction of `parent`, which may be one itself.  It may be said again, and late.

        Raises ValueError if it contradicts what was said before.
        """
        transaction = self.begin(parent)
        known = self._by_xid.get(xid)
        if known is None or known is transaction:
            transaction.assign(xid, parent)
        elif known.xid == xid and not known.streamed:
            transaction.absorb(known, parent)
            del self._held[known]
            for sub in (xid, *known.parents):
                self._by_xid[sub] = transaction
        else:
            raise ValueError(f"{xid} is of {known!r} and can not be a subtransaction of {parent}")
        self._by_xid[xid] = transaction

    def abort(self, xid: int, *, top: int | None = None) -> None:
        """`xid` is rolled back with all that is in it: a subtransaction, or the whole.  Nothing happens for an unknown one.

        `top` is its top-level transaction where that may be new.  Raises FileFailure.
        """
        transaction = self._by_xid.get(xid if top is None else top)
        if transaction is None:
            return
        if xid == transaction.xid:
            self._forget(transaction)
            transaction.enter(State.ABORTED)
            transaction.release()
        else:
            transaction.abort(xid)

    def abort_older(self, xid: int) -> None:
        """Transactions that began before `xid`, the oldest that still runs, are rolled back: a crash left no record of them
        (ReorderBufferAbortOld)."""
        for transaction in self.in_progress():
            if (transaction.xid - xid) & 0xFFFFFFFF >= 1 << 31:
                self.abort(transaction.xid)

    # Giving out.

    def commit(self, xid: int) -> Transaction | None:
        """The transaction `xid` has committed: what it changed; None if nothing is known of it.

        Until it is released, or read, it may still move to disk.  Raises ValueError if `xid` is a subtransaction.
        """
        transaction = self._ended(xid)
        if transaction is not None:
            transaction.enter(State.COMMITTED)
            self._count(transaction)
        return transaction

    def prepare(self, xid: int, gid: str) -> Transaction:
        """The transaction `xid`, which may have no changes, is prepared as `gid`.

        It may be read, and released, before its outcome.  Raises DuplicateObject, and ValueError if `xid` is a subtransaction.
        """
        if gid in self._prepared:
            raise DuplicateObject(f'transaction identifier "{gid}" is already in use')
        self.begin(xid)
        transaction = self._ended(xid)
        assert transaction is not None
        transaction.enter(State.PREPARED)
        self._prepared[gid] = transaction
        self._count(transaction)
        return transaction

    def commit_prepared(self, gid: str) -> Transaction | None:
        """The transaction that was prepared as `gid`, committed; None if this buffer knows of none."""
        transaction = self._prepared.pop(gid, None)
        if transaction is not None:
            transaction.enter(State.COMMITTED)
        return transaction

    def rollback_prepared(self, gid: str) -> bool:
        """Forget the transaction that was prepared as `gid`; False if this buffer knows of none.  Raises FileFailure."""
        transaction = self._prepared.pop(gid, None)
        if transaction is not None:
            transaction.enter(State.ABORTED)
            transaction.release()
        return transaction is not None

    def take(self, xid: int) -> Transaction:
        """What the transaction `xid` has changed so far; it goes on without that (ReorderBufferStreamTXN).

        Subtransactions aborted so far are left out; those aborted later are the owner's to take back: see `Transaction.xids`.
        Raises KeyError if nothing is known of it, ValueError if `xid` is a subtransaction.
        """
        transaction = self._top(xid)
        if transaction is None:
            raise KeyError(xid)
        part = transaction.split(self._drop)
        transaction.streamed = True
        self._held[part] = None
        self._count(part, taken=True)
        return part

    # Memory.

    @property
    def exceeded(self) -> bool:
        """The changes in memory have reached `work_mem`."""
        return self.memory >= self.work_mem

    def largest(self, wanted: Callable[[Transaction], bool] = lambda _: True) -> Transaction | None:
        """The transaction in progress, among those `wanted`, that holds the most memory."""
        candidates = (one for one in self.in_progress() if one.memory and wanted(one))
        return max(candidates, key=_memory, default=None)

    def spill(self) -> None:
        """If `work_mem` is reached, move the largest transactions to disk until an eighth of it is free.

        What is being read stays.  (PostgreSQL moves one; with many small ones the search for it would cost more than the move.)
        Raises DiskFull and FileFailure; nothing is lost then, and it may be called again.
        """
        if not self.exceeded:
            return
        enough = self.work_mem - self.work_mem // 8
        with self._spilling:
            for transaction in sorted(self._held, key=_memory, reverse=True):
                if transaction.memory:
                    self._spill(transaction)
                    if self.memory < enough:
                        return

    def _spill(self, transaction: Transaction) -> None:
        """ReorderBufferSerializeTXN."""
        written = _written(transaction)
        try:
            transaction.spill(self._new_file)
        finally:
            size = _written(transaction) - written
            if size:
                self.statistics.spill_txns += not transaction.spilled
                self.statistics.spill_count += 1
                self.statistics.spill_bytes += size
                transaction.spilled = True

    # What there is.

    def in_progress(self) -> list[Transaction]:
        """Top-level transactions that have not ended, oldest first."""
        return [one for one in self._held if one.state is State.IN_PROGRESS]

    def get(self, xid: int) -> Transaction | None:
        """The transaction in progress that `xid` is or belongs to."""
        return self._by_xid.get(xid)

    def prepared(self) -> Iterator[tuple[str, Transaction]]:
        """Prepared transactions without an outcome, by gid."""
        yield from self._prepared.items()

    def oldest_lsn(self) -> Lsn:
        """Where the oldest transaction in progress began; 0 if there is none (ReorderBufferGetOldestTXN)."""
        return min((one.first_lsn for one in self.in_progress() if one.first_lsn), default=INVALID_LSN)

    def close(self) -> None:
        """Forget everything and remove the files.  Raises FileFailure.

        Waits until a `spill` in another thread has ended: whoever waited for that one may have been cancelled.
        """
        with self._spilling:
            self._by_xid.clear()
            self._prepared.clear()
            self._last = None
            for transaction in list(self._held):
                transaction.release()

    def _append(self, transaction: Transaction, frames: Sequence[bytes], xid: int, *, tagged: bool) -> None:
        if not frames:
            return
        if transaction is not self._last:
            self._last = transaction
            self._arrival += 1
        transaction.own_log().append(frames, xid, self._arrival, tagged=tagged)

    def _account(self, change: int) -> None:
        self.memory += change

    def _drop(self, transaction: Transaction) -> None:
        """Its changes are given back."""
        del self._held[transaction]

    def _top(self, xid: int) -> Transaction | None:
        transaction = self._by_xid.get(xid)
        if transaction is not None and transaction.xid != xid:
            raise ValueError(f"{xid} is a subtransaction of {transaction!r}")
        return transaction

    def _ended(self, xid: int) -> Transaction | None:
        transaction = self._top(xid)
        if transaction is not None:
            transaction.seal()
            self._forget(transaction)
        return transaction

    def _forget(self, transaction: Transaction) -> None:
        """Its xids may come again."""
        for xid in (transaction.xid, *transaction.parents):
            self._by_xid.pop(xid, None)

    def _count(self, transaction: Transaction, *, taken: bool = False) -> None:
        size = transaction.nbytes
        if taken or transaction.streamed:
            self.statistics.stream_txns += not transaction.streamed
            self.statistics.stream_count += 1
            self.statistics.stream_bytes += size
        self.statistics.total_txns += not transaction.streamed
        self.statistics.total_bytes += size

    def _new_file(self, header: int) -> SegmentFile:
        files.make_directory(self._directory)
        return SegmentFile(self._directory / f"{next(self._numbers)}{SUFFIX}", header)


def _memory(transaction: Transaction) -> int:
    return transaction.memory


def _written(transaction: Transaction) -> int:
    return sum(file.nbytes for file in transaction.files)
