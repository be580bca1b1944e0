"""A top-level transaction: its log, its subtransactions, and which of them were aborted.

    IN_PROGRESS ─┬────────────────► COMMITTED       commit; take returns the changes so far as a COMMITTED transaction,
                 │                                  and this one continues without them
                 ├──► PREPARED ──┬► COMMITTED       commit_prepared
                 │               └► ABORTED         rollback_prepared
                 └────────────────► ABORTED         abort

The ReorderBuffer owns a transaction that is IN_PROGRESS.  After that the receiver owns it: it may read the changes with
`chunks` any number of times, and must `release` them.  A PREPARED transaction can be read and released before its
outcome.
"""

from __future__ import annotations

import heapq
import threading
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from operator import itemgetter
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import numpy as np

from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.reorderbuffer.block import ChangeBlock, Xids, reblocked
from pubsub.reorderbuffer.changes import Account, ChangeLog
from pubsub.reorderbuffer.log import BLOCK_BYTES
from pubsub.reorderbuffer.segments import SegmentFile


class State(Enum):
    IN_PROGRESS = "in progress"
    PREPARED = "prepared"
    COMMITTED = "committed"
    ABORTED = "aborted"


STEPS: Final = {
    State.IN_PROGRESS: frozenset({State.PREPARED, State.COMMITTED, State.ABORTED}),
    State.PREPARED: frozenset({State.COMMITTED, State.ABORTED}),
    State.COMMITTED: frozenset[State](),
    State.ABORTED: frozenset[State](),
}


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive changes of a transaction.

    The first has the number `first`; numbers start at 0 and leave out aborted subtransactions.
    """

    first: int
    blocks: tuple[ChangeBlock, ...]

    @property
    def count(self) -> int:
        return sum(block.count for block in self.blocks)

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)


class Transaction:
    """The changes of the top-level transaction `xid` and of its subtransactions.

    `first_lsn` is where the transaction began, 0 if that is unknown.  `streamed`: earlier changes were taken already;
    `spilled`: some changes have been on disk; `longest`: the bytes of the longest frame, as far as blocks are sealed.
    `header` and `account` are those of ChangeLog.  `released` is called once, by the first `release`.
    """

    def __init__(
        self,
        xid: int,
        header: int,
        account: Account,
        released: Callable[[Transaction], None],
        *,
        state: State = State.IN_PROGRESS,
        file: SegmentFile | None = None,
    ) -> None:
        self.xid = xid
        self.first_lsn = INVALID_LSN
        self.state = state
        self.streamed = False
        self.spilled = False
        self.longest = 0
        self.parents: dict[int, int] = {}
        self._header = header
        self._account = account
        self._released: Callable[[Transaction], None] | None = released
        self._aborted: set[int] = set()
        self._gone: frozenset[int] | None = frozenset()
        # Number of changes and bytes of their frames, by (sub)transaction.
        self._counts: defaultdict[int, int] = defaultdict(int)
        self._bytes: defaultdict[int, int] = defaultdict(int)
        self._logs = [ChangeLog(header, account, self._count, file)]
        # Keeps a reader and a move to disk apart: they may run in different threads.
        self._lock = threading.Lock()
        self._readers = 0

    def __repr__(self) -> str:
        return f"<Transaction {self.xid} {self.state.value}>"

    # Properties.

    @property
    def memory(self) -> int:
        """Bytes allocated for its changes, the buffers' spare capacity included."""
        return sum(log.memory for log in self._logs)

    @property
    def count(self) -> int:
        """The number of changes, without those of aborted subtransactions."""
        return sum(self._counts[xid] for xid in self.xids)

    @property
    def nbytes(self) -> int:
        """Bytes of the frames of the changes in `count`."""
        return sum(self._bytes[xid] for xid in self.xids)

    @property
    def xids(self) -> frozenset[int]:
        """The (sub)transactions that made changes and were not aborted."""
        self.seal()
        return frozenset(self._counts) - self.aborted

    def size_of(self, xid: int) -> tuple[int, int]:
        """Return how many changes (sub)transaction `xid` made itself, and the bytes of their frames."""
        self.seal()
        return self._counts.get(xid, 0), self._bytes.get(xid, 0)

    @property
    def aborted(self) -> frozenset[int]:
        """The subtransactions that were aborted, directly or with one that contains them."""
        if self._gone is None:
            gone: dict[int, bool] = {}
            for xid in self.parents:
                path = []
                while xid not in gone and xid not in self._aborted and xid in self.parents:
                    path.append(xid)
                    xid = self.parents[xid]
                end = gone.get(xid, xid in self._aborted)
                gone.update((passed, end) for passed in path)
            self._gone = frozenset(xid for xid, end in gone.items() if end) | self._aborted
        return self._gone

    @property
    def files(self) -> list[SegmentFile]:
        """The files that hold changes on disk; changes of `aborted` may be among them."""
        return [log.file for log in self._logs if log.file is not None and log.file.segments]

    @property
    def paths(self) -> list[Path]:
        """The paths of `files`, for engines that read Arrow streams themselves."""
        return [file.path for file in self.files]

    # Reading.

    def blocks(self, bound: int = BLOCK_BYTES) -> Generator[ChangeBlock]:
        """Yield the changes in order of arrival in blocks of at most `bound` bytes, without aborted subtransactions.

        Only a block of a single frame may be larger.  A few blocks from disk are in memory at a time.  May run in
        another thread than the buffer.  Raises ValueError in a state that cannot be read or after `release`,
        FileFailure, and DataCorrupted if a file is not as it was written.
        """
        with self._lock:
            if self._released is None or self.state not in (State.COMMITTED, State.PREPARED):
                raise ValueError(f"{self!r} cannot be read")
            self._readers += 1
        try:
            yield from reblocked(self._kept(), bound)
        finally:
            with self._lock:
                self._readers -= 1

    def chunks(self, max_bytes: int) -> Generator[Chunk]:
        """Yield the blocks of `blocks` in chunks of at most `max_bytes`; only a chunk of one frame may be larger."""
        first = size = 0
        pending: list[ChangeBlock] = []
        for block in self.blocks(min(max_bytes, BLOCK_BYTES)):
            if pending and size + block.nbytes > max_bytes:
                chunk = Chunk(first, tuple(pending))
                yield chunk
                first += chunk.count
                pending, size = [], 0
            pending.append(block)
            size += block.nbytes
        if pending:
            yield Chunk(first, tuple(pending))

    def release(self) -> None:
        """Free the changes' memory and remove their files.  May be called again.

        Raises FileFailure, and ValueError while the changes are being read.
        """
        with self._lock:
            if self._readers:
                raise ValueError(f"{self!r} is being read")
            released, self._released = self._released, None
        if released is not None:
            released(self)
            with ExitStack() as clearing:  # each log, even if another's file cannot be removed
                for log in self._logs:
                    clearing.callback(log.clear)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    # For the buffer.

    def enter(self, state: State) -> None:
        """Change to `state`.  Raises ValueError for a step that STEPS lacks."""
        if state not in STEPS[self.state]:
            raise ValueError(f"{self!r} cannot become {state.value}")
        self.state = state

    def own_log(self) -> ChangeLog:
        """Return the log that new changes are appended to."""
        return self._logs[0]

    def seal(self) -> None:
        for log in self._logs:
            log.seal()

    def assign(self, xid: int, parent: int) -> None:
        """Record `xid` as a subtransaction of `parent`, which is this transaction or one of its subtransactions.

        Of several parents recorded for `xid` the innermost counts: one that already contains `xid` is ignored.  Raises
        ValueError for a cycle.
        """
        if xid == self.xid or xid in self._above(parent):
            raise ValueError(f"{xid} cannot be a subtransaction of {parent}")
        if xid in self.parents and parent in self._above(self.parents[xid]):
            return
        self.parents[xid] = parent
        self._gone = None

    def _above(self, xid: int) -> list[int]:
        """Return `xid`, its parent, and so on up to the top."""
        path = [xid]
        while path[-1] in self.parents:
            path.append(self.parents[path[-1]])
        return path

    def abort(self, xid: int) -> None:
        """Record that the subtransaction `xid` was aborted, with all the subtransactions in it."""
        self._aborted.add(xid)
        self._gone = None

    def absorb(self, other: Transaction, parent: int) -> None:
        """Merge `other`, so far taken for top-level, into this transaction as a subtransaction of `parent`.

        Raises ValueError if `other` is tagged, or if this one is and `other` has changes.
        """
        other.seal()
        theirs, own = other.own_log(), self.own_log()
        if theirs.tagged or (own.tagged and not theirs.empty):
            raise ValueError(f"{other!r} has tagged changes, or {self!r}: they cannot be merged")
        self.assign(other.xid, parent)
        self.parents |= other.parents
        self._logs += other._logs
        for sizes, more in ((self._counts, other._counts), (self._bytes, other._bytes)):
            for xid, value in more.items():
                sizes[xid] += value
        self._aborted |= other._aborted
        self.spilled |= other.spilled
        self.longest = max(self.longest, other.longest)
        if other.first_lsn:
            self.first_lsn = Lsn(min(self.first_lsn or other.first_lsn, other.first_lsn))

    def set_sizes(self, sizes: Iterable[tuple[int, int, int]]) -> None:
        """Set the results of `size_of` from (xid, count, bytes), for a transaction whose changes came as a file."""
        for xid, count, nbytes in sizes:
            self._counts[xid], self._bytes[xid] = count, nbytes

    def split(self, released: Callable[[Transaction], None]) -> Transaction:
        """Move the changes so far into a new COMMITTED transaction and return it; this one continues without them."""
        self.seal()
        part = Transaction(self.xid, self._header, self._account, released, state=State.COMMITTED)
        part.first_lsn, part.streamed, part.spilled = self.first_lsn, self.streamed, self.spilled
        part.longest = self.longest
        part.parents, part._aborted, part._gone = dict(self.parents), set(self._aborted), self._gone
        part._counts.update(self._counts)
        part._bytes.update(self._bytes)
        part._logs, self._logs = self._logs, [ChangeLog(self._header, self._account, self._count)]
        self._counts.clear()
        self._bytes.clear()
        return part

    def spill(self, new_file: Callable[[int], SegmentFile]) -> None:
        """Move the changes in memory to disk; do nothing while they are read.  Raises FileFailure and loses nothing."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if not self._readers:
                aborted = _array(self.aborted)
                for log in self._logs:
                    log.spill(new_file, aborted)
        finally:
            self._lock.release()

    def _count(self, block: ChangeBlock) -> None:
        for xid, count, nbytes in block.by_xid():
            self._counts[xid] += count
            self._bytes[xid] += nbytes
        self.longest = max(self.longest, int(block.lengths.max(initial=0)))

    def _kept(self) -> Iterator[ChangeBlock]:
        aborted = _array(self.aborted)
        blocks = self._logs[0].read() if len(self._logs) == 1 else self._merged()
        if not len(aborted):
            yield from blocks  # not in a loop, whose variable would keep a block while the next one is read
            return
        for block in blocks:
            yield block.without(aborted)
            del block

    def _merged(self) -> Iterator[ChangeBlock]:
        """Yield the runs of all logs in order of arrival: needed if a subtransaction was first taken for top-level."""
        logs = [(run for block in log.read() for run in block.runs()) for log in self._logs]
        for _, block in heapq.merge(*logs, key=itemgetter(0)):
            yield block


def _array(xids: frozenset[int]) -> Xids:
    return np.fromiter(xids, np.uint32, len(xids))
