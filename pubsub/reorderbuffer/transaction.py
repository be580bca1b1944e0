"""A top-level transaction: its log, its subtransactions, and which of them were aborted.

    IN_PROGRESS ─┬────────────────► COMMITTED       commit; take gives the part so far as a committed one, the rest goes on
                 ├──► PREPARED ──┬► COMMITTED       commit_prepared
                 │               └► ABORTED         rollback_prepared
                 └────────────────► ABORTED         abort

While it is IN_PROGRESS a transaction belongs to the ReorderBuffer.  From then on its changes are read with `chunks`, as often
as wanted, and given back with `release` by whoever got it; those of a PREPARED one also before its outcome.
"""

from __future__ import annotations

import heapq
import threading
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator
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
    """Neighbouring changes of a transaction: the first is number `first`, counted from 0 without aborted subtransactions."""

    first: int
    blocks: tuple[ChangeBlock, ...]

    @property
    def count(self) -> int:
        return sum(block.count for block in self.blocks)

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)


class Transaction:
    """The changes of a top-level transaction, `xid`, its subtransactions' included.

    `first_lsn` is where the first was made, if that is known.  `streamed`: changes were taken before these; `spilled`: some
    were on disk.  `header` and `account` as in ChangeLog; `released` is called once, when the changes are given back.
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
        self.parents: dict[int, int] = {}
        self._header = header
        self._account = account
        self._released: Callable[[Transaction], None] | None = released
        self._aborted: set[int] = set()
        self._gone: frozenset[int] | None = frozenset()
        # By (sub)transaction: changes, and their bytes.
        self._counts: defaultdict[int, int] = defaultdict(int)
        self._bytes: defaultdict[int, int] = defaultdict(int)
        self._logs = [ChangeLog(header, account, self._count, file)]
        # Between readers and a move to disk, which may be in different threads.
        self._lock = threading.Lock()
        self._readers = 0

    def __repr__(self) -> str:
        return f"<Transaction {self.xid} {self.state.value}>"

    # What it is.

    @property
    def memory(self) -> int:
        """Bytes that the buffers of its changes hold, what they keep for growing included."""
        return sum(log.memory for log in self._logs)

    @property
    def being_read(self) -> bool:
        return self._readers > 0

    @property
    def count(self) -> int:
        """Changes, without those of aborted subtransactions."""
        return sum(self._counts[xid] for xid in self.xids)

    @property
    def nbytes(self) -> int:
        """Bytes of the frames of those changes."""
        return sum(self._bytes[xid] for xid in self.xids)

    @property
    def xids(self) -> frozenset[int]:
        """The (sub)transactions, not aborted, that made changes."""
        self.seal()
        return frozenset(self._counts) - self.aborted

    def size_of(self, xid: int) -> tuple[int, int]:
        """The changes that (sub)transaction `xid` made itself, and the bytes of their frames."""
        self.seal()
        return self._counts.get(xid, 0), self._bytes.get(xid, 0)

    @property
    def aborted(self) -> frozenset[int]:
        """The subtransactions that were aborted, themselves or with one that they are in."""
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
        """What is on disk; the changes of `aborted` may be among it."""
        return [log.file for log in self._logs if log.file is not None and log.file.segments]

    @property
    def paths(self) -> list[Path]:
        """The Arrow streams of `files`, for engines that read them themselves."""
        return [file.path for file in self.files]

    # How it is read.

    def blocks(self, bound: int = BLOCK_BYTES) -> Generator[ChangeBlock]:
        """The changes in order of arrival, without those of aborted subtransactions, in blocks of at most `bound` bytes.

        A block has more bytes only if it is one frame.  Of what is on disk a few blocks are in memory at a time.  May run in
        another thread than the buffer.  Raises FileFailure, and DataCorrupted where a file is not what was written.
        """
        with self._lock:
            if self._released is None or self.state not in (State.COMMITTED, State.PREPARED):
                raise ValueError(f"{self!r} can not be read")
            self._readers += 1
        try:
            yield from reblocked(self._kept(), bound)
        finally:
            with self._lock:
                self._readers -= 1

    def chunks(self, max_bytes: int) -> Generator[Chunk]:
        """What `blocks` gives, as many together as have at most `max_bytes`."""
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
        """Give the changes back: free their memory, remove their files.  May be called again.  Raises FileFailure."""
        with self._lock:
            if self._readers:
                raise ValueError(f"{self!r} is being read")
            released, self._released = self._released, None
        if released is not None:
            released(self)
            for log in self._logs:
                log.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    # For the buffer.

    def enter(self, state: State) -> None:
        """Take a step; raises ValueError for one that there is not."""
        if state not in STEPS[self.state]:
            raise ValueError(f"{self!r} can not become {state.value}")
        self.state = state

    def own_log(self) -> ChangeLog:
        """Where new changes go."""
        return self._logs[0]

    def seal(self) -> None:
        for log in self._logs:
            log.seal()

    def assign(self, xid: int, parent: int) -> None:
        """`xid` is a subtransaction of `parent`, which is this transaction or one in it.

        Said again the nearer parent holds: one that `xid` is in already is no news.  Raises ValueError for a circle.
        """
        if xid == self.xid or xid in self._above(parent):
            raise ValueError(f"{xid} can not be a subtransaction of {parent}")
        if xid in self.parents and parent in self._above(self.parents[xid]):
            return
        self.parents[xid] = parent
        self._gone = None

    def _above(self, xid: int) -> list[int]:
        """`xid`, its parent, and so on."""
        path = [xid]
        while path[-1] in self.parents:
            path.append(self.parents[path[-1]])
        return path

    def abort(self, xid: int) -> None:
        """The subtransaction `xid`, and what is in it, is no more."""
        self._aborted.add(xid)
        self._gone = None

    def absorb(self, other: Transaction, parent: int) -> None:
        """`other`, thought to be top-level so far, is a subtransaction of `parent`, in this one."""
        other.seal()
        theirs, own = other.own_log(), self.own_log()
        if theirs.tagged or (own.tagged and not theirs.empty):
            raise ValueError(f"{other!r} has tagged changes, or {self!r}: they can not be merged")
        self.assign(other.xid, parent)
        self.parents |= other.parents
        self._logs += other._logs
        for sizes, more in ((self._counts, other._counts), (self._bytes, other._bytes)):
            for xid, value in more.items():
                sizes[xid] += value
        self._aborted |= other._aborted
        self.spilled |= other.spilled
        if other.first_lsn:
            self.first_lsn = Lsn(min(self.first_lsn or other.first_lsn, other.first_lsn))

    def set_sizes(self, sizes: Iterable[tuple[int, int, int]]) -> None:
        """What `size_of` says, xids first: for a transaction whose changes came as a file."""
        for xid, count, nbytes in sizes:
            self._counts[xid], self._bytes[xid] = count, nbytes

    def split(self, released: Callable[[Transaction], None]) -> Transaction:
        """A committed transaction with the changes so far; this one goes on without them."""
        self.seal()
        part = Transaction(self.xid, self._header, self._account, released, state=State.COMMITTED)
        part.first_lsn, part.streamed, part.spilled = self.first_lsn, self.streamed, self.spilled
        part.parents, part._aborted, part._gone = dict(self.parents), set(self._aborted), self._gone
        part._counts.update(self._counts)
        part._bytes.update(self._bytes)
        part._logs, self._logs = self._logs, [ChangeLog(self._header, self._account, self._count)]
        self._counts.clear()
        self._bytes.clear()
        return part

    def spill(self, new_file: Callable[[int], SegmentFile]) -> None:
        """Move what is in memory to disk; nothing while it is read.  Raises FileFailure: nothing is lost then."""
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

    def _kept(self) -> Iterator[ChangeBlock]:
        aborted = _array(self.aborted)
        blocks = self._logs[0].read() if len(self._logs) == 1 else self._merged()
        for block in blocks:
            yield block.without(aborted) if len(aborted) else block

    def _merged(self) -> Iterator[ChangeBlock]:
        """The runs of all logs in order of arrival: only where a subtransaction was known too late."""
        logs = [(run for block in log.read() for run in block.runs()) for log in self._logs]
        for _, block in heapq.merge(*logs, key=itemgetter(0)):
            yield block


def _array(xids: frozenset[int]) -> Xids:
    return np.fromiter(xids, np.uint32, len(xids))
