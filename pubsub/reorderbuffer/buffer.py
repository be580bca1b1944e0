"""The reorder buffer: transactions assembled from interleaved changes (reorderbuffer.c).

    append ─► one log for each top-level transaction ─► commit, prepare, take ─► Transaction: read in chunks, then released

`append` never blocks: it only uses memory.  When `exceeded`, the owner calls `spill`, which writes files and may run in
a thread, or streams the `largest` transaction with `take`.  Call one method at a time; other threads may meanwhile read
the Transactions that were returned.

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
    """Counters since the buffer was created, as in pg_stat_replication_slots.  Bytes are those of frames.

    spill_*    transactions moved to disk, number of moves, bytes
    stream_*   transactions taken while in progress, number of parts, bytes
    total_*    transactions returned (committed, prepared or taken) and their bytes; a streamed one counts once

    mem_exceeded_count  how often the changes in memory reached work_mem, as a walsender counts it

    A transaction counts once, with all its subtransactions.
    """

    spill_txns: int = 0
    spill_count: int = 0
    spill_bytes: int = 0
    stream_txns: int = 0
    stream_count: int = 0
    stream_bytes: int = 0
    total_txns: int = 0
    total_bytes: int = 0
    mem_exceeded_count: int = 0

    def add(self, counted: Sequence[int]) -> None:
        """Add what another has counted, in the order of the fields."""
        for name, number in zip(self.__slots__, counted, strict=True):
            setattr(self, name, getattr(self, name) + number)


class ReorderBuffer:
    """Transactions in progress, and those returned but not yet released.

    `directory` belongs to this buffer alone; the constructor removes spill files that an earlier process left there,
    and raises FileFailure.  `work_mem` is logical_decoding_work_mem in bytes; it may be changed at any time.  `header`:
    bytes before the message in frames that are not tagged.  `memory`: bytes that all changes hold in memory.
    """

    def __init__(self, directory: Path, work_mem: int, *, header: int = XLOG_HEADER) -> None:
        self.work_mem = work_mem
        self.memory = 0
        self.statistics = Statistics()
        self._directory = directory
        self._header = header
        self._by_xid: dict[int, Transaction] = {}
        self._prepared: dict[str, Transaction] = {}
        # All transactions not yet released, oldest first.
        self._held: dict[Transaction, None] = {}
        # Consecutive changes of one log share an arrival number; a change of another log ends the run.
        self._last: Transaction | None = None
        self._arrival = 0
        self._spilling = threading.Lock()
        self._numbers = itertools.count()
        files.remove_all(directory, SUFFIX)

    # Assembling.

    def begin(self, xid: int, lsn: Lsn = INVALID_LSN) -> Transaction:
        """Return the transaction that `xid` is or belongs to; if there is none, a new one that began at `lsn`."""
        transaction = self._by_xid.get(xid)
        if transaction is None:
            transaction = self._by_xid[xid] = Transaction(xid, self._header, self._account, self._drop)
            self._held[transaction] = None
        if not transaction.first_lsn:
            transaction.first_lsn = lsn
        return transaction

    def append(self, xid: int, frames: Sequence[bytes], *, top: int | None = None, lsn: Lsn = INVALID_LSN) -> None:
        """Append the changes of (sub)transaction `xid`, in order.

        `top` is its top-level transaction, needed where this buffer may not know it yet.  Raises ProgramLimitExceeded
        for a frame over 2 GB.
        """
        if top is not None and top != xid:
            known = self._by_xid.get(xid)
            if known is None or known.xid != top:
                self.assign(xid, top)
        self._append(self.begin(xid, lsn), frames, xid, tagged=False)

    def append_tagged(self, top: int, frames: Sequence[bytes], *, lsn: Lsn = INVALID_LSN) -> None:
        """Append messages R, Y, I, U, D, T and M as received between Stream Start and Stop.

        Each names its (sub)transaction.  The ids are read only when a block is sealed, at the latest in `spill` or
        `commit`: a frame without one raises ProtocolViolation there.  Raises ProgramLimitExceeded like `append`.
        """
        self._append(self.begin(top, lsn), frames, top, tagged=True)

    def assign(self, xid: int, parent: int) -> None:
        """Record `xid` as a subtransaction of `parent`, which may itself be a subtransaction.

        May be repeated, and may come after changes of `xid`.  Raises ValueError if it contradicts an earlier
        assignment.
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
            raise ValueError(f"{xid} is of {known!r} and cannot be a subtransaction of {parent}")
        self._by_xid[xid] = transaction

    def abort(self, xid: int, *, top: int | None = None) -> None:
        """Roll back the (sub)transaction `xid` with all the subtransactions in it.

        `top` is its top-level transaction, needed where this buffer may not know it yet.  Nothing happens if that
        transaction is unknown.  Raises FileFailure.
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
        """Roll back the transactions older than `xid`, the oldest one still running (ReorderBufferAbortOld).

        A crash ended them without an abort record.
        """
        for transaction in self.in_progress():
            if (transaction.xid - xid) & 0xFFFFFFFF >= 1 << 31:
                self.abort(transaction.xid)

    # Returning transactions.

    def commit(self, xid: int) -> Transaction | None:
        """Commit the transaction `xid` and return it; None if it is unknown.

        `spill` may still move its changes to disk, except while they are read.  Raises ValueError if `xid` is a
        subtransaction.
        """
        transaction = self._ended(xid)
        if transaction is not None:
            transaction.enter(State.COMMITTED)
            self._count(transaction)
        return transaction

    def prepare(self, xid: int, gid: str) -> Transaction:
        """Prepare the transaction `xid`, which may be without changes, as `gid` and return it.

        It can be read and released before its outcome.  Raises DuplicateObject if `gid` is in use, and ValueError if
        `xid` is a subtransaction.
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
        """Commit the transaction prepared as `gid` and return it; None if this buffer has none."""
        transaction = self._prepared.pop(gid, None)
        if transaction is not None:
            transaction.enter(State.COMMITTED)
        return transaction

    def rollback_prepared(self, gid: str) -> bool:
        """Roll back the transaction prepared as `gid`; return False if this buffer has none.  Raises FileFailure."""
        transaction = self._prepared.pop(gid, None)
        if transaction is not None:
            transaction.enter(State.ABORTED)
            transaction.release()
        return transaction is not None

    def take(self, xid: int) -> Transaction:
        """Return the changes of transaction `xid` so far; it continues without them (ReorderBufferStreamTXN).

        Subtransactions aborted so far are left out.  The caller must undo those aborted later: see `Transaction.xids`.
        Raises KeyError for an unknown transaction, ValueError if `xid` is a subtransaction.
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
        """Whether the changes in memory have reached `work_mem`."""
        return self.memory >= self.work_mem

    def largest(self, wanted: Callable[[Transaction], bool] = lambda _: True) -> Transaction | None:
        """Return the transaction in progress that holds the most memory, of those that `wanted` accepts."""
        candidates = (one for one in self.in_progress() if one.memory and wanted(one))
        return max(candidates, key=_memory, default=None)

    def spill(self) -> None:
        """If `work_mem` is reached, move the largest transactions to disk until an eighth of it is free.

        Transactions that are being read stay in memory.  PostgreSQL moves one at a time; with many small ones the
        search for the largest would cost more than the move.  Raises DiskFull and FileFailure; nothing is lost then,
        and it may be called again.
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
        """Move one transaction to disk and count it (ReorderBufferSerializeTXN)."""
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

    # Looking up.

    def in_progress(self) -> list[Transaction]:
        """Return the top-level transactions that have not ended, oldest first."""
        return [one for one in self._held if one.state is State.IN_PROGRESS]

    def get(self, xid: int) -> Transaction | None:
        """Return the transaction in progress that `xid` is or belongs to."""
        return self._by_xid.get(xid)

    def prepared(self) -> Iterator[tuple[str, Transaction]]:
        """Yield the prepared transactions without an outcome, each with its gid."""
        yield from self._prepared.items()

    def oldest_lsn(self) -> Lsn:
        """Return where the oldest transaction in progress began; 0 if there is none (ReorderBufferGetOldestTXN)."""
        return min((one.first_lsn for one in self.in_progress() if one.first_lsn), default=INVALID_LSN)

    def close(self) -> None:
        """Forget all transactions and remove the files.  Raises FileFailure.

        Waits for a `spill` in another thread to end: the task that awaited it may have been cancelled.
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
        """Stop tracking a transaction whose changes are released."""
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
        """Forget the transaction's xids, which may be used again."""
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
