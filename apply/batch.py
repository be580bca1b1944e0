"""Join committed transactions into the batch that becomes one Delta commit per table.

    frames ──► OpenTransaction ──(Commit)──► Batch ──(rows, bytes, age)──► staging
    frames ──► ReorderBuffer ──(Stream Commit, or Commit of a large one)──► Batch

A batch holds whole, committed transactions in commit order.  Small ones share frame logs; a large or streamed one is a part of
its own, in memory or on disk (reorderbuffer).  Frames are numbered through all parts; a frame's number is its `seq`.  A TRUNCATE
or a changed Relation is kept beside the rows, with the number of the row that follows it.  In a streamed transaction these
messages stand among the rows and have numbers too; `read_messages` looks them up once.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from apply.twophase import Kept
from pubsub.protocol import pgoutput
from pubsub.protocol.arrow_arrays import Indices
from pubsub.protocol.lsn import Lsn
from pubsub.protocol.rows import Block
from pubsub.reorderbuffer import transaction as reorderbuffer
from pubsub.reorderbuffer.log import FrameLog

# From 1970-01-01 to 2000-01-01, in microseconds.
_EPOCH: Final = 946_684_800_000_000


@dataclass(frozen=True, slots=True)
class Transaction:
    """A committed transaction of a batch; its rows have `first_seq` <= seq < `end_seq`.

    `final_lsn` is Begin's: where the commit record begins (of a prepared transaction, that of PREPARE TRANSACTION), which is also
    what SKIP takes.  `commit_lsn` is where the record of the commit begins, `end_lsn` one past it.  `commit_time` is in
    microseconds since 2000-01-01 UTC.
    """

    xid: int
    final_lsn: Lsn
    end_lsn: Lsn
    commit_time: int
    first_seq: int
    end_seq: int
    commit_lsn: Lsn

    @property
    def committed_at(self) -> int:
        """`commit_time` in microseconds since 1970-01-01 UTC."""
        return self.commit_time + _EPOCH


@dataclass(frozen=True, slots=True)
class Truncation:
    """A TRUNCATE before row `seq`, of `relations` (the publisher's oids), in the batch's `transaction`-th transaction."""

    seq: int
    relations: tuple[int, ...]
    transaction: int = 0


@dataclass(slots=True)
class OpenTransaction:
    """The transaction being received, outside a stream.

    `rows` are the frames still held here, `nbytes` bytes of them; `moved` counts the earlier ones, now in the reorder buffer.
    `relations`: the Relation messages that say something new, each with the number of the row that follows; `announced`: the
    oids of all.
    """

    xid: int
    final_lsn: Lsn
    commit_time: int
    rows: list[bytes] = field(default_factory=list)
    truncations: list[Truncation] = field(default_factory=list)
    relations: list[tuple[int, pgoutput.Relation]] = field(default_factory=list)
    announced: set[int] = field(default_factory=set)
    nbytes: int = 0
    moved: int = 0
    _counted: int = 0

    @property
    def count(self) -> int:
        """How many rows have been received."""
        return self.moved + len(self.rows)

    def count_bytes(self) -> None:
        """Add the bytes of the rows received since the last call to `nbytes`."""
        self.nbytes += sum(map(len, self.rows[self._counted :]))
        self._counted = len(self.rows)

    def clear_rows(self) -> None:
        """Forget the rows, which have been moved to the reorder buffer."""
        self.moved += len(self.rows)
        self.rows.clear()
        self.nbytes = self._counted = 0


class Batch:
    """Committed transactions that become one Delta commit per table.

    `opened_at`: monotonic seconds when the first of them joined.  `relations`: for each oid its Relation messages in order, each
    with the seq of the first row that it holds for.  `outcomes`: the xids of transactions that had been prepared, each with the
    end LSN of its COMMIT PREPARED.  `announced`: oids of relations whose Relation message came with these transactions, though it
    may say nothing new.  `unnamed`, set when the batch is closed: oids of relations whose last message is of a transaction that is
    still prepared: its definition holds, as the publisher sends no other before the next rows, but its name may be undone.
    `outdated`: oids of relations of which the stream had sent no message when a prepared transaction committed that was kept with
    one from an earlier stream; the table may have another name since.
    """

    def __init__(self, known: Mapping[int, pgoutput.Relation]) -> None:
        self.transactions: list[Transaction] = []
        self.truncations: list[Truncation] = []
        self.relations: dict[int, list[tuple[int, pgoutput.Relation]]] = {oid: [(0, r)] for oid, r in known.items()}
        self.rows = 0
        self.opened_at: float | None = None
        self.outcomes: list[tuple[int, Lsn]] = []
        self.announced: set[int] = set()
        self.unnamed: Collection[int] = ()
        self.outdated: set[int] = set()
        self._parts: list[FrameLog | reorderbuffer.Transaction] = []
        self._parts_bytes = 0
        # Streamed transactions, by position in `transactions`, whose Relation and Truncate messages are still to be looked up.
        self._unread: dict[int, Sequence[reorderbuffer.Transaction]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the frames, in memory and on disk."""
        return self._parts_bytes + self.memory

    @property
    def memory(self) -> int:
        """Bytes of the frames in logs, which the reorder buffer does not account for."""
        return sum(part.nbytes for part in self._parts if isinstance(part, FrameLog))

    @property
    def large(self) -> list[reorderbuffer.Transaction]:
        """The parts that belong to the reorder buffer; release them when the batch is no longer read."""
        return [part for part in self._parts if not isinstance(part, FrameLog)]

    @property
    def longest(self) -> int:
        """Bytes of the longest frame in the parts that were received into the reorder buffer."""
        return max((part.longest for part in self.large), default=0)

    @property
    def first_lsn(self) -> Lsn:
        """End LSN of the first transaction."""
        return self.transactions[0].end_lsn

    @property
    def last_lsn(self) -> Lsn:
        """End LSN of the last transaction: the version of its Delta commits."""
        return self.transactions[-1].end_lsn

    def add(
        self, opened: OpenTransaction, end_lsn: Lsn, now: float, moved: reorderbuffer.Transaction | None = None
    ) -> None:
        """Add a committed transaction.  `moved` has its rows if they went to the reorder buffer."""
        first = self.rows
        if moved is not None:
            self._append_part(moved)
        else:
            if not self._parts or not isinstance(self._parts[-1], FrameLog):
                self._parts.append(FrameLog())
            log = self._parts[-1]
            assert isinstance(log, FrameLog)
            log.append(opened.rows)
            self.rows += len(opened.rows)
        self.truncations += [Truncation(first + t.seq, t.relations, len(self.transactions)) for t in opened.truncations]
        for seq, relation in opened.relations:
            self.hold(relation, first + seq)
        self.announced |= opened.announced
        self._joined(opened.xid, opened.final_lsn, end_lsn, opened.commit_time, first, now)

    def add_streamed(
        self,
        streamed: Sequence[reorderbuffer.Transaction],
        final_lsn: Lsn,
        end_lsn: Lsn,
        commit_time: int,
        now: float,
    ) -> None:
        """Add a committed streamed transaction, in one part or several.

        Call `read_messages` before using `relations` or `truncations`.
        """
        first = self.rows
        self._unread[len(self.transactions)] = streamed
        for part in streamed:
            self._append_part(part)
        self._joined(streamed[0].xid, final_lsn, end_lsn, commit_time, first, now)

    def add_kept(
        self, kept: Kept, commit: pgoutput.CommitPrepared, now: float, relation_cache: Mapping[int, pgoutput.Relation]
    ) -> None:
        """Add a prepared transaction that has committed, under the definitions that it was prepared with.

        `relation_cache` holds after it.
        """
        first = self.rows
        if kept.streamed:
            self._unread[len(self.transactions)] = [kept.transaction]
        self.truncations += [Truncation(first + seq, oids, len(self.transactions)) for seq, oids in kept.truncations]
        own = {*(relation.oid for _, relation in kept.relations[kept.cached :]), *kept.announced}
        self.announced |= own
        self.outdated |= {relation.oid for _, relation in kept.relations} - relation_cache.keys()
        self.outdated -= own
        for seq, relation in kept.relations:
            self.hold(relation, first + seq)
        self._append_part(kept.transaction)
        for oid in own.union(relation.oid for _, relation in kept.relations):
            if oid in relation_cache:
                self.hold(relation_cache[oid])
        self.outcomes.append((kept.xid, commit.end_lsn))
        self._joined(kept.xid, kept.prepare_lsn, commit.end_lsn, commit.commit_time, first, now, commit.commit_lsn)

    def _append_part(self, part: reorderbuffer.Transaction) -> None:
        self._parts.append(part)
        self._parts_bytes += part.nbytes
        self.rows += part.count

    def _joined(
        self,
        xid: int,
        final_lsn: Lsn,
        end_lsn: Lsn,
        commit_time: int,
        first: int,
        now: float,
        commit_lsn: Lsn | None = None,
    ) -> None:
        self.transactions.append(
            Transaction(xid, final_lsn, end_lsn, commit_time, first, self.rows, commit_lsn or final_lsn)
        )
        if self.opened_at is None:
            self.opened_at = now

    def read_messages(self) -> None:
        """Look up the Relation and Truncate messages of streamed transactions.  Blocks: reads them whole.

        Raises ProtocolViolation, and the errors of reading from disk.
        """
        if not self._unread:
            return
        for index, streamed in self._unread.items():
            number = self.transactions[index].first_seq
            for part in streamed:
                with closing(part.blocks()) as blocks:
                    for block in blocks:
                        for place, data in block.others():
                            self._note(number + place, index, pgoutput.read_message(data))
                        number += block.count
        self._unread.clear()
        for messages in self.relations.values():
            messages.sort(key=_seq)
        self.truncations.sort(key=lambda truncation: truncation.seq)

    def _note(self, seq: int, transaction: int, message: pgoutput.Message) -> None:
        match message:
            case pgoutput.Relation():
                self.announced.add(message.oid)
                self.hold(replace(message, xid=None), seq)
            case pgoutput.Truncate():
                self.truncations.append(Truncation(seq, tuple(message.relations), transaction))
            case _:
                return  # Type and LogicalMessage: nothing here depends on them

    def hold(self, relation: pgoutput.Relation, seq: int | None = None) -> None:
        """Note that the message holds from row `seq` on (None: for what joins the batch from now on)."""
        self.relations.setdefault(relation.oid, []).append((self.rows if seq is None else seq, relation))

    def rename(self, oid: int, namespace: str, name: str) -> None:
        """Give the relation this name in the batch, whatever its messages say."""
        self.relations[oid] = [
            (seq, replace(message, namespace=namespace, name=name)) for seq, message in self.relations[oid]
        ]

    def chunks(self, max_bytes: int | None = None) -> Generator[tuple[int, list[Block]]]:
        """Yield all frames in order as (seq of the first frame, blocks), at most `max_bytes` of blocks at a time (None: all).

        A block of a single frame may be larger.  Those read from disk are freed when the caller clears the list.
        Close the generator if it is not read to its end.  Raises the errors of reading from disk.
        """
        first = count = size = 0
        pending: list[Block] = []
        for block in self._blocks():
            if max_bytes is not None and pending and size + len(block.data) > max_bytes:
                yield first, pending
                first += count
                pending, count, size = [], 0, 0
            pending.append(block)
            count += len(block.lengths)
            size += len(block.data)
            del block
            if max_bytes is not None and size >= max_bytes:
                yield first, pending
                first += count
                pending, count, size = [], 0, 0
        if pending:
            yield first, pending

    def _blocks(self) -> Iterator[Block]:
        for part in self._parts:
            if isinstance(part, FrameLog):
                yield from part.blocks()
            else:
                yield from part.blocks()

    def clear_logs(self) -> None:
        """Forget the frames in logs; `large` parts are released separately."""
        for part in self._parts:
            if isinstance(part, FrameLog):
                part.clear()

    def transaction_of(self, seq: int) -> Transaction:
        """Return the transaction that row `seq` belongs to."""
        return self.transactions[int(np.searchsorted(self._ends(), seq, side="right"))]

    def transactions_of(self, seqs: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Indices:
        """Return the places in `transactions` of those that these rows belong to."""
        return np.searchsorted(self._ends(), seqs, side="right")

    def kept_rows(
        self, after: Lsn, stops_before: Lsn | None = None
    ) -> np.ndarray[tuple[int], np.dtype[np.bool_]] | None:
        """Mark the rows for a table that holds everything up to `after` and stops before `stops_before` (None: does not stop).

        A transaction is dropped if and only if its end LSN <= `after`, or >= `stops_before`.  None means that every row is
        kept.
        """
        if after < self.first_lsn and (stops_before is None or stops_before > self.last_lsn):
            return None
        lsns = np.fromiter((t.end_lsn for t in self.transactions), np.uint64, len(self.transactions))
        kept = lsns > np.uint64(after)
        if stops_before is not None:
            kept &= lsns < np.uint64(stops_before)
        return np.repeat(kept, np.diff(self._ends(), prepend=0))

    def kept_truncations(
        self, oids: Collection[int], after: Lsn, stops_before: Lsn | None = None
    ) -> Sequence[Truncation]:
        """Return the TRUNCATEs, in order, that emptied one of the publisher's relations `oids`; bounds as in `kept_rows`."""
        kept = []
        for truncation in self.truncations:
            end_lsn = self.transactions[truncation.transaction].end_lsn
            emptied = not set(oids).isdisjoint(truncation.relations)
            if emptied and end_lsn > after and (stops_before is None or end_lsn < stops_before):
                kept.append(truncation)
        return kept

    def _ends(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.fromiter((t.end_seq for t in self.transactions), np.int64, len(self.transactions))


def _seq(entry: tuple[int, pgoutput.Relation]) -> int:
    return entry[0]


def lag_seconds(transactions: Sequence[Transaction], now: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the seconds from each transaction's commit at the publisher to `now` (microseconds since 2000-01-01 UTC)."""
    times = np.fromiter((t.commit_time for t in transactions), np.int64, len(transactions))
    return (now - times) / 1e6
