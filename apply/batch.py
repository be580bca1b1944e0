"""Transactions joined into the batch that Delta commits.

    frames ──► OpenTransaction ──(Commit)──► Batch ──(rows, bytes, age)──► prepare

Only committed transactions are in a batch, whole, in commit order.  Row frames lie in one log in order of arrival; a row's
number in it is its `seq`.  What happens between rows (a TRUNCATE, a changed Relation) is kept beside it with the number of
the row that follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pubsub.protocol import pgoutput
from pubsub.protocol.lsn import Lsn
from pubsub.reorderbuffer.log import FrameLog


@dataclass(frozen=True, slots=True)
class Transaction:
    """A committed transaction of a batch; its rows are those with `first_seq` <= seq < `end_seq`.

    `final_lsn` is Begin's (where the commit record begins: what SKIP takes), `end_lsn` one past the commit record.
    `commit_time` is in microseconds since 2000-01-01 UTC.
    """

    xid: int
    final_lsn: Lsn
    end_lsn: Lsn
    commit_time: int
    first_seq: int
    end_seq: int


@dataclass(frozen=True, slots=True)
class Truncation:
    """A TRUNCATE before row `seq`, of `relations` (the publisher's oids), in the batch's `transaction`-th transaction."""

    seq: int
    relations: tuple[int, ...]
    transaction: int = 0


@dataclass(slots=True)
class OpenTransaction:
    """The transaction that is being received."""

    xid: int
    final_lsn: Lsn
    commit_time: int
    rows: list[bytes] = field(default_factory=list)
    truncations: list[Truncation] = field(default_factory=list)
    relations: list[tuple[int, pgoutput.Relation]] = field(default_factory=list)
    nbytes: int = 0
    _counted: int = 0

    def count_bytes(self) -> None:
        """Add the rows that came since the last call to `nbytes`."""
        self.nbytes += sum(map(len, self.rows[self._counted :]))
        self._counted = len(self.rows)


class Batch:
    """Committed transactions that become one Delta commit per table.

    `opened_at` is the monotonic time, in seconds, at which the first of them joined.
    """

    def __init__(self, known: dict[int, pgoutput.Relation]) -> None:
        self.log = FrameLog()
        self.transactions: list[Transaction] = []
        self.truncations: list[Truncation] = []
        self.relations: dict[int, list[tuple[int, pgoutput.Relation]]] = {oid: [(0, r)] for oid, r in known.items()}
        self.rows = 0
        self.opened_at: float | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the row frames held."""
        return self.log.nbytes

    @property
    def first_lsn(self) -> Lsn:
        """End LSN of the first transaction."""
        return self.transactions[0].end_lsn

    @property
    def last_lsn(self) -> Lsn:
        """End LSN of the last transaction: the version of its Delta commits."""
        return self.transactions[-1].end_lsn

    def add(self, opened: OpenTransaction, end_lsn: Lsn, now: float) -> None:
        """The transaction has committed: it joins the batch."""
        first = self.rows
        self.log.append(opened.rows)
        self.rows += len(opened.rows)
        self.truncations += [Truncation(first + t.seq, t.relations, len(self.transactions)) for t in opened.truncations]
        for seq, relation in opened.relations:
            self.relations.setdefault(relation.oid, []).append((first + seq, relation))
        self.transactions.append(
            Transaction(opened.xid, opened.final_lsn, end_lsn, opened.commit_time, first, self.rows)
        )
        if self.opened_at is None:
            self.opened_at = now

    def transaction_of(self, seq: int) -> Transaction:
        """The transaction that row `seq` belongs to."""
        return self.transactions[int(np.searchsorted(self._ends(), seq, side="right"))]

    def kept_rows(self, after: Lsn) -> np.ndarray[tuple[int], np.dtype[np.bool_]] | None:
        """Per row: whether a table that holds everything up to `after` gets it.

        A transaction is dropped if and only if its end LSN <= `after`.  None when every row is kept.
        """
        if after < self.first_lsn:
            return None
        lsns = np.fromiter((t.end_lsn for t in self.transactions), np.uint64, len(self.transactions))
        return np.repeat(lsns > np.uint64(after), np.diff(self._ends(), prepend=0))

    def kept_truncation(self, oid: int, after: Lsn) -> int | None:
        """The greatest seq before which TRUNCATE emptied the publisher's relation `oid`; None when it did not."""
        kept = [
            truncation.seq
            for truncation in self.truncations
            if oid in truncation.relations and self.transactions[truncation.transaction].end_lsn > after
        ]
        return max(kept, default=None)

    def _ends(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.fromiter((t.end_seq for t in self.transactions), np.int64, len(self.transactions))


def lag_seconds(transactions: Sequence[Transaction], now: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Seconds from each transaction's commit at the publisher to `now` (microseconds since 2000-01-01 UTC)."""
    times = np.fromiter((t.commit_time for t in transactions), np.int64, len(transactions))
    return (now - times) / 1e6
