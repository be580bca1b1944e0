"""When to stream a transaction in progress: PostgreSQL's memory arithmetic, so that streams break where a server's do.

Counts what a 64-bit server would hold (reorderbuffer.c: ReorderBufferChangeSize, ReorderBufferChangeMemoryUpdate,
ReorderBufferCheckMemoryLimit), not what this process holds: changes of unpublished relations, command ids and
invalidations count, too.  Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from typing import Final

from walsender.decode.transactions import Part

CHANGE: Final = 80
"""sizeof(ReorderBufferChange)."""
ROW: Final = 24 + 18
"""sizeof(HeapTupleData), and the bytes of a tuple that a row lacks (layout.py)."""
INVALIDATION: Final = 16
XID: Final = 4
_STALE: Final = 10_000


def snapshot_bytes(version: int) -> int:
    """Return sizeof(SnapshotData); 17 removed two fields."""
    return 104 if version >= 17 else 120


class Account:
    """Sizes of one transaction's changes since it was last sent or spilled, by (sub)transaction."""

    __slots__ = ("partial", "serialized", "sizes", "spans", "streamable", "streamed")

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.spans: dict[int, tuple[int, int, int]] = {}
        """LSNs of each (sub)transaction's first and last unsent change, and the first one's origin."""
        self.partial = False
        """The last changes cannot be sent without the next ones: TOAST chunks, an unconfirmed speculative insertion."""
        self.serialized: set[int] = set()
        self.streamable = False
        self.streamed: set[int] = set()
        """The (sub)transactions of which changes were sent."""

    @property
    def total(self) -> int:
        return sum(self.sizes.values())

    @property
    def first_lsn(self) -> int:
        """LSN of the first unsent change; 0: there is none."""
        return min((first for first, _, _ in self.spans.values()), default=0)

    @property
    def first_origin(self) -> int:
        """Origin of the first unsent change; 0: local."""
        return min(self.spans.values(), default=(0, 0, 0))[2]

    @property
    def last_lsn(self) -> int:
        return max((last for _, last, _ in self.spans.values()), default=0)


class MemoryAccounting:
    """The memory of all transactions.

    `may_stream()`: whether streaming may begin at this point of the WAL; `goes_on(part)`: whether this transaction may be
    streamed at it; `stream` sends a transaction.
    """

    def __init__(
        self,
        work_mem: int,
        *,
        needs_streamable: bool,
        may_stream: Callable[[], bool],
        goes_on: Callable[[Part], bool],
        stream: Callable[[Part], None],
    ) -> None:
        self._limit = work_mem
        self._needs_streamable = needs_streamable
        self._may_stream = may_stream
        self._goes_on = goes_on
        self._stream = stream
        self.on_exceeded: Callable[[], None] = lambda: None
        """Called whenever the limit is reached (memExceededCount)."""
        self._size = 0
        self._accounts: dict[Part, Account] = {}
        # Made at the first spill: a heap of (sub)transactions, the largest first (reorderbuffer.c: txn_heap).  An entry
        # whose size has changed since stays in it and is skipped.
        self._largest: list[tuple[int, int, Account, int]] | None = None
        self._pushed = 0
        self._bound = 0

    def move(
        self, may_stream: Callable[[], bool], goes_on: Callable[[Part], bool], stream: Callable[[Part], None]
    ) -> None:
        """Go on with another decoder."""
        self._may_stream, self._goes_on, self._stream = may_stream, goes_on, stream

    def account(self, part: Part) -> Account:
        found = self._accounts.get(part)
        if found is None:
            found = self._accounts[part] = Account()
        return found

    def queue(
        self,
        part: Part,
        xid: int,
        lsn: int,
        size: int,
        *,
        origin: int = 0,
        streamable: bool = True,
        begins_partial: bool = False,
        ends_partial: bool = False,
    ) -> None:
        """Count one more change (ReorderBufferQueueChange); this may stream transactions."""
        account = self.account(part)
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
        if not account.partial and xid in account.serialized and self._sendable(part, account) and self._may_stream():
            self._send(part, account)
        self._check()

    def sent(self, part: Part) -> None:
        """Note that all changes of the transaction so far were sent."""
        account = self.account(part)
        account.streamed.add(part.txn.xid)
        account.streamed.update(account.sizes)
        self._clear(account)

    def prepared(self, part: Part) -> None:
        """Note that the transaction was sent at its PREPARE: only its end is to come (ReorderBufferTruncateTXN)."""
        self._clear(self.account(part))

    def abort(self, part: Part, xid: int) -> None:
        """Stop counting a subtransaction that was rolled back."""
        account = self._accounts.get(part)
        if account is not None:
            self._size -= account.sizes.pop(xid, 0)
            account.spans.pop(xid, None)

    def forget(self, part: Part) -> None:
        account = self._accounts.pop(part, None)
        if account is not None:
            self._clear(account)

    def distribute(self, committed: Part | None, lsn: int, snapshot: int, invalidations: int) -> None:
        """Count what a commit that changed the catalog adds to all transactions (SnapBuildDistributeSnapshotAndInval).

        Each one, `committed` included, gets the new snapshot; all others get its invalidations.  Sizes in bytes.
        """
        for part in list(self._accounts):
            if not part.txn.has_base or part.two_phase:
                continue
            self.queue(part, part.txn.xid, lsn, CHANGE + snapshot, streamable=False)
            if part is not committed and invalidations:
                self.queue(part, part.txn.xid, lsn, CHANGE + invalidations, streamable=False)

    def _clear(self, account: Account) -> None:
        self._size -= account.total
        account.sizes.clear()
        account.serialized.clear()
        account.spans.clear()

    def _sendable(self, part: Part, account: Account) -> bool:
        return (account.streamable or not self._needs_streamable) and self._goes_on(part)

    def _check(self) -> None:
        if self._size >= self._limit:
            self.on_exceeded()
        while self._size >= self._limit:
            candidates: Iterable[tuple[Part, Account]] = (
                (part, account)
                for part, account in self._accounts.items()
                if account.total > 0 and not account.partial and part.txn.has_base and self._sendable(part, account)
            )
            largest = max(candidates, key=lambda item: item[1].total, default=None) if self._may_stream() else None
            if largest is not None:
                self._send(*largest)
                continue
            # A server would write it to disk, so it no longer counts.
            if not self._write_largest():
                return

    def _write_largest(self) -> bool:
        """Stop counting the largest (sub)transaction; return False if there is none."""
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
        # The number sorts it after older entries of its size; it is unique, so accounts are never compared.
        heappush(self._largest, (-account.sizes[xid], self._bound + self._pushed, account, xid))
        if len(self._largest) > self._bound:
            # Most entries may be stale: the next spill builds the heap anew.
            self._largest = None

    def _send(self, part: Part, account: Account) -> None:
        self._stream(part)
        self.sent(part)
