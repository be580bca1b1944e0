"""Keep a stream's Relation messages: which one holds for a relation's next rows, and which names may still be undone.

The publisher announces a relation before its first row, and again after whatever invalidates its own cache of it, be it an ALTER
that the message does not show (pgoutput.c: maybe_send_schema).  Between the two it does not repeat the message, whatever becomes
of the transaction that the message came in:

    transaction            its messages hold for                             from
    plain                  its rows, and those of later transactions         its commit on, also if it is skipped
    prepared               its rows, and those of later transactions         its PREPARE on, whatever its outcome; but the names are
                                                                             not followed before that, as it may have given them
    streamed               its rows; after its commit, those of later ones   its commit on, unless another message came meanwhile
    streamed and prepared  its rows alone: others have messages of their own

What a transaction itself has altered is announced again after it, before any row (reorderbuffer.c: ReorderBufferProcessTXN).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from pubsub.protocol.pgoutput import Relation


class Announced(NamedTuple):
    """A Relation message of a streamed transaction: its (sub)transaction, and its place among all Relation messages received."""

    xid: int
    relation: Relation
    arrival: int


class RelationCache:
    """The Relation messages of one stream.

    Call `received` for each message, and a method for each end of a transaction that had some.
    """

    def __init__(self) -> None:
        self._known: dict[int, Relation] = {}
        # The last messages outside streamed transactions, which the open transaction's are among.
        self._last: dict[int, Relation] = {}
        # When the last message outside streamed transactions, or of a committed one, has arrived.
        self._arrived: dict[int, int] = {}
        self._arrivals = 0
        # By relation, the prepared transaction that the message in `_known` came in.
        self._prepared: dict[int, int] = {}

    @property
    def known(self) -> Mapping[int, Relation]:
        """The messages that hold for rows of the next transaction; those of the open one are not among them yet."""
        return self._known

    @property
    def unnamed(self) -> Collection[int]:
        """The relations whose names in `known` may still be undone, with the prepared transactions that they came in."""
        return self._prepared.keys()

    def received(self, message: Relation) -> bool:
        """Note a message outside streamed transactions; return whether it says something new."""
        is_new = self._last.get(message.oid) != message
        self._last[message.oid] = message
        self._arrived[message.oid] = self.received_in_stream()
        return is_new

    def received_in_stream(self) -> int:
        """Note a message of a streamed transaction; return its place among all messages."""
        self._arrivals += 1
        return self._arrivals

    def committed(self, announced: Iterable[int]) -> None:
        """Note that a plain transaction has committed, or been skipped, in which these relations were announced."""
        for oid in announced:
            self._known[oid] = self._last[oid]
            self._prepared.pop(oid, None)

    def prepared(self, xid: int, announced: Iterable[int]) -> list[Relation]:
        """Note that a transaction has been prepared, not streamed; return those of its messages that say something new."""
        found = []
        for oid in announced:
            message = self._last[oid]
            if self._known.get(oid) != message:
                self._known[oid] = message
                self._prepared[oid] = xid
                found.append(message)
        return found

    def ended(self, xid: int) -> None:
        """Note that a prepared transaction has committed: the names that it has announced are not undone."""
        self._prepared = {oid: preparing for oid, preparing in self._prepared.items() if preparing != xid}

    def stream_committed(self, announced: Sequence[Announced]) -> set[int]:
        """Note that a streamed transaction has committed, or been skipped, that had these messages.

        Return the relations of which a later one has come since (ALTER PUBLICATION waits for no lock of the transaction's): that
        one holds for what comes now (pgoutput.c: set_schema_sent_in_streamed_txn).
        """
        overtaken: set[int] = set()
        for _, relation, arrival in announced:
            oid = relation.oid
            if arrival < self._arrived.get(oid, 0):
                overtaken.add(oid)
                continue
            self._known[oid] = self._last[oid] = relation
            self._arrived[oid] = arrival
            self._prepared.pop(oid, None)
        return overtaken

    def moves_keys(self, announced: Iterable[Relation]) -> bool:
        """Tell whether one of these messages, in order, changes the columns that identify a relation's rows."""
        return moves_keys(announced, self._known)


def moves_keys(announced: Iterable[Relation], known: Mapping[int, Relation]) -> bool:
    """Tell the same, of messages that come after those in `known`."""
    last = dict(known)
    for relation in announced:
        other = last.get(relation.oid)
        if other is not None and _identity(other) != _identity(relation):
            return True
        last[relation.oid] = relation
    return False


def _identity(relation: Relation) -> frozenset[str] | None:
    """Return the columns of the replica identity; None for all (REPLICA IDENTITY FULL)."""
    if relation.replica_identity == "f":
        return None
    return frozenset(column.name for column in relation.columns if column.in_replica_identity)
