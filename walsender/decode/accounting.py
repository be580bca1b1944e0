"""When a transaction in progress is sent: PostgreSQL's own arithmetic of memory, so that streams break where its do.

What is counted is what a server would hold (reorderbuffer.c: ReorderBufferChangeSize, ReorderBufferChangeMemoryUpdate,
ReorderBufferCheckMemoryLimit), on 64 bits, not what is held here: changes of relations that are not published count, and so
do command ids and invalidations.  Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from typing import Final

from walsender.decode.assembly import Txn

CHANGE: Final = 80
"""sizeof(ReorderBufferChange)."""
ROW: Final = 24 + 18
"""HeapTupleData, and what a tuple's length has that a row's has not."""
INVALIDATION: Final = 16
XID: Final = 4
_STALE: Final = 10_000


def snapshot_bytes(version: int) -> int:
    """sizeof(SnapshotData): 17 took two fields out."""
    return 104 if version >= 17 else 120


class Account:
    """Sizes of one transaction's changes, since it was last sent or spilled."""

    __slots__ = ("partial", "serialized", "sizes", "spans", "streamable", "streamed")

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.spans: dict[int, tuple[int, int, int]] = {}
        """LSNs of each (sub)transaction's first and last change that was not sent yet, and the origin of the first."""
        self.partial = False
        """The last changes can not be sent without the next: TOAST chunks, an insertion that is not confirmed."""
        self.serialized: set[int] = set()
        self.streamable = False
        self.streamed: set[int] = set()
        """The (sub)transactions with changes that were sent."""

    @property
    def total(self) -> int:
        return sum(self.sizes.values())

    @property
    def first_lsn(self) -> int:
        """Of the first change that was not sent yet; 0: there is none."""
        return min((first for first, _, _ in self.spans.values()), default=0)

    @property
    def first_origin(self) -> int:
        """Where the first change that was not sent yet came from; 0: from here."""
        return min(self.spans.values(), default=(0, 0, 0))[2]

    @property
    def last_lsn(self) -> int:
        return max((last for _, last, _ in self.spans.values()), default=0)


class MemoryAccounting:
    """All transactions.  `may_stream` says whether sending may begin at this point of the WAL, `stream` sends one."""

    def __init__(
        self, work_mem: int, *, needs_streamable: bool, may_stream: Callable[[], bool], stream: Callable[[Txn], None]
    ) -> None:
        self._limit = work_mem
        self._needs_streamable = needs_streamable
        self._may_stream = may_stream
        self._stream = stream
        self._size = 0
        self._accounts: dict[Txn, Account] = {}
        # Once something had to be written to disk: (sub)transactions by size, the largest first; what has changed since is left
        # in it, and passed over (reorderbuffer.c: txn_heap).
        self._largest: list[tuple[int, int, Account, int]] | None = None
        self._pushed = 0
        self._bound = 0

    def account(self, txn: Txn) -> Account:
        found = self._accounts.get(txn)
        if found is None:
            found = self._accounts[txn] = Account()
        return found

    def queue(
        self,
        txn: Txn,
        xid: int,
        lsn: int,
        size: int,
        *,
        origin: int = 0,
        streamable: bool = True,
        begins_partial: bool = False,
        ends_partial: bool = False,
    ) -> None:
        """A change more (ReorderBufferQueueChange); it may cause transactions to be sent."""
        account = self.account(txn)
        account.sizes[xid] = account.sizes.get(xid, 0) + size
        self._size += size
        if self._largest is not None:
            self._push(account, xid)
        span = account.spans.get(xid)
        account.spans[xid] = (lsn, lsn, origin) if span is None else (span[0], lsn, span[2])
        account.streamable |= streamable
        if begins_partial:
            account.partial = True
        elif ends_partial:
            account.partial = False
        if not account.partial and xid in account.serialized and self._sendable(account) and self._may_stream():
            self._send(txn, account)
        self._check()

    def sent(self, txn: Txn) -> None:
        """All of its changes so far were sent."""
        account = self.account(txn)
        account.streamed.add(txn.xid)
        account.streamed.update(account.sizes)
        self._clear(account)

    def prepared(self, txn: Txn) -> None:
        """The same, at its PREPARE: nothing more comes than its end (ReorderBufferTruncateTXN)."""
        self._clear(self.account(txn))

    def abort(self, txn: Txn, xid: int) -> None:
        """A subtransaction was rolled back."""
        account = self._accounts.get(txn)
        if account is not None:
            self._size -= account.sizes.pop(xid, 0)
            account.spans.pop(xid, None)

    def forget(self, txn: Txn) -> None:
        account = self._accounts.pop(txn, None)
        if account is not None:
            self._clear(account)

    def distribute(self, committed: Txn, lsn: int, snapshot: int, invalidations: int) -> None:
        """A transaction that changed the catalog commits: all are given the new snapshot, itself too, and all others its
        invalidations; sizes in bytes (SnapBuildDistributeSnapshotAndInval)."""
        for txn in list(self._accounts):
            if not txn.has_base or txn.two_phase:
                continue
            self.queue(txn, txn.xid, lsn, CHANGE + snapshot, streamable=False)
            if txn is not committed and invalidations:
                self.queue(txn, txn.xid, lsn, CHANGE + invalidations, streamable=False)

    def _clear(self, account: Account) -> None:
        self._size -= account.total
        account.sizes.clear()
        account.serialized.clear()
        account.spans.clear()

    def _sendable(self, account: Account) -> bool:
        return account.streamable or not self._needs_streamable

    def _check(self) -> None:
        while self._size >= self._limit:
            candidates: Iterable[tuple[Txn, Account]] = (
                (txn, account)
                for txn, account in self._accounts.items()
                if account.total > 0 and not account.partial and self._sendable(account) and txn.has_base
            )
            largest = max(candidates, key=lambda item: item[1].total, default=None) if self._may_stream() else None
            if largest is not None:
                self._send(*largest)
                continue
            # It would be written to disk: it counts no longer.
            if not self._write_largest():
                return

    def _write_largest(self) -> bool:
        """Count the largest (sub)transaction no longer; False: there is none."""
        if self._largest is None:
            every = ((account, xid, size) for account in self._accounts.values() for xid, size in account.sizes.items())
            self._largest = [(-size, place, account, xid) for place, (account, xid, size) in enumerate(every)]
            self._pushed = len(self._largest)
            self._bound = 2 * self._pushed + _STALE
            heapify(self._largest)
        while self._largest:
            negative, _, account, xid = heappop(self._largest)
            size = -negative
            if size > 0 and account.sizes.get(xid) == size:
                account.sizes[xid] = 0
                account.serialized.add(xid)
                self._size -= size
                return True
        self._largest = None
        return False

    def _push(self, account: Account, xid: int) -> None:
        assert self._largest is not None
        self._pushed += 1
        # Behind those that were there: a number comes only once, so that nothing else is compared.
        heappush(self._largest, (-account.sizes[xid], self._bound + self._pushed, account, xid))
        if len(self._largest) > self._bound:
            # Most of it may be what has changed since: it is made anew when it is needed.
            self._largest = None

    def _send(self, txn: Txn, account: Account) -> None:
        self._stream(txn)
        self.sent(txn)
