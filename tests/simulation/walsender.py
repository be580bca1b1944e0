"""A model of a logical walsender: WAL becomes pgoutput's messages (walsender.c, reorderbuffer.c, pgoutput.c).

It reads WAL from its beginning and sends what commits at or after its start: whole transactions, the blocks of those in progress,
prepared ones and their outcomes.  When there is nothing more to read it sends a keepalive.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pubsub.protocol.copyboth import XLogData, write_server_message
from pubsub.protocol.ids import Oid, Xid
from pubsub.protocol.lsn import Lsn
from pubsub.protocol.messages import (
    UNCHANGED,
    Begin,
    BeginPrepare,
    Commit,
    CommitPrepared,
    Delete,
    Insert,
    Message,
    Prepare,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Truncate,
    TupleData,
    Update,
)
from pubsub.protocol.pgoutput import write_message
from tests.simulation.publisher import Change, Record, Row, Server, Shape, Slot
from walsender.repl_gram import PgoutputParameters


@dataclass
class _Decoded:
    """A transaction that is being decoded.  `streamed`: some of it was sent."""

    changes: list[tuple[int, Change]] = field(default_factory=list)
    streamed: bool = False


class Decoder:
    """The messages of one stream, from `start`."""

    def __init__(self, server: Server, slot: Slot, start: Lsn, options: PgoutputParameters) -> None:
        self.server, self.slot, self.start, self.options = server, slot, start, options
        self.place = 0
        self.read_to = Lsn(0)
        self.frames: list[bytes] = []
        self._decoded: dict[int, _Decoded] = {}
        # The tables that were announced: to everybody, or within a streamed transaction.
        self._announced: set[int] = set()
        self._announced_in: dict[int, set[int]] = {}
        # Oids published by these publications.
        self._published: set[int] = set()

    def read(self) -> bool:
        """Decode the next WAL record; return whether there is one."""
        if self.place >= len(self.server.wal):
            return False
        self._published = set().union(*(self.server.publications.get(p, set()) for p in self.options.publications))
        record = self.server.wal[self.place]
        self.place += 1
        match record.kind:
            case "change":
                self._change(record)
            case "abort":
                self._abort(record)
            case "commit" | "commit prepared":
                self._commit(record)
            case "prepare":
                self._prepare(record)
            case "rollback prepared":
                self._rollback_prepared(record)
            case "other":
                pass
        self.read_to = record.end
        return True

    def _needs_skip(self, record: Record) -> bool:
        return record.start < self.start

    # What is sent

    def _send(self, message: Message, record: Record) -> None:
        data = XLogData(record.start, record.end, record.time, write_message(message))
        self.frames.append(write_server_message(data))

    def _forget_announced(self, oid: int) -> None:
        self._announced.discard(oid)
        for announced in self._announced_in.values():
            announced.discard(oid)

    def _send_changes(self, top: int, changes: list[tuple[int, Change]], record: Record, *, stream: bool) -> None:
        announced = self._announced_in.setdefault(top, set()) if stream else self._announced
        for sub, change in changes:
            xid = Xid(sub) if stream else None
            if change.kind == "A":
                self._forget_announced(change.oid)
                continue
            if change.kind == "T":
                emptied = [(oid, shape) for oid, shape in change.emptied if oid in self._published]
                for oid, shape in emptied:
                    self._announce(oid, shape, announced, xid, record)
                if emptied:
                    self._send(Truncate(tuple(Oid(oid) for oid, _ in emptied), False, False, xid), record)
                continue
            if change.oid not in self._published:
                continue
            assert change.shape is not None
            self._announce(change.oid, change.shape, announced, xid, record)
            self._send(_row_message(change, change.shape, xid), record)

    def _announce(self, oid: int, shape: Shape, announced: set[int], xid: Xid | None, record: Record) -> None:
        if oid not in announced:
            announced.add(oid)
            relation = shape.message()
            self._send(relation if xid is None else replace(relation, xid=xid), record)

    def _change(self, record: Record) -> None:
        assert record.change is not None
        decoded = self._decoded.setdefault(record.top, _Decoded())
        decoded.changes.append((record.xid, record.change))
        chance = self.server.chance.random
        streams = self.options.streaming != "off" and not self._needs_skip(record)
        if streams and len(decoded.changes) >= 2 and chance.random() < 0.4:
            self._stream(record.top, decoded, record)

    def _stream(self, top: int, decoded: _Decoded, record: Record) -> None:
        """Send a block of a transaction in progress."""
        self._send(StreamStart(Xid(top), not decoded.streamed), record)
        self._send_changes(top, decoded.changes, record, stream=True)
        self._send(StreamStop(), record)
        decoded.streamed = True
        decoded.changes = []

    def _abort(self, record: Record) -> None:
        decoded = self._decoded.get(record.top)
        if decoded is None:
            return
        if decoded.streamed:
            parallel = self.options.streaming == "parallel"
            lsn, time = (record.start, record.time) if parallel else (None, None)
            self._send(StreamAbort(Xid(record.top), Xid(record.xid), lsn, time), record)
        if record.xid == record.top:
            self._decoded.pop(record.top)
            self._announced_in.pop(record.top, None)
        else:
            decoded.changes = [(sub, change) for sub, change in decoded.changes if sub != record.xid]

    def _commit(self, record: Record) -> None:
        decoded = self._decoded.pop(record.top, _Decoded())
        oids = {change.oid for _, change in decoded.changes if change.kind == "A"}
        prepared = record.prepared
        if self._needs_skip(record):
            self._announced_in.pop(record.top, None)
        elif prepared is not None and self.options.two_phase:
            if prepared.start < self.slot.two_phase_at:
                self._send_prepared(prepared, decoded)
            commit = CommitPrepared(0, record.start, record.end, record.time, Xid(record.top), record.gid)
            self._send(commit, record)
        elif decoded.streamed:
            if decoded.changes:
                self._stream(record.top, decoded, record)
            self._send(StreamCommit(Xid(record.top), 0, record.start, record.end, record.time), record)
            self._announced |= self._announced_in.pop(record.top, set())
        elif any(self._is_sent(change) for _, change in decoded.changes):
            self._send(Begin(record.start, record.time, Xid(record.top)), record)
            self._send_changes(record.top, decoded.changes, record, stream=False)
            self._send(Commit(0, record.start, record.end, record.time), record)
        for oid in oids:
            self._forget_announced(oid)

    def _is_sent(self, change: Change) -> bool:
        oids = [oid for oid, _ in change.emptied] if change.kind == "T" else [change.oid]
        return change.kind != "A" and any(oid in self._published for oid in oids)

    def _prepare(self, record: Record) -> None:
        if not self.options.two_phase or self._needs_skip(record):
            return
        decoded = self._decoded.get(record.top, _Decoded())
        if decoded.streamed:
            if decoded.changes:
                self._stream(record.top, decoded, record)
            self._send(StreamPrepare(0, record.start, record.end, record.time, Xid(record.top), record.gid), record)
            self._announced |= self._announced_in.pop(record.top, set())
        else:
            self._send_prepared(record, decoded)
        oids = {change.oid for _, change in decoded.changes if change.kind == "A"}
        for oid in oids:
            self._forget_announced(oid)

    def _send_prepared(self, record: Record, decoded: _Decoded) -> None:
        fields = (record.start, record.end, record.time, Xid(record.top), record.gid)
        self._send(BeginPrepare(*fields), record)
        self._send_changes(record.top, decoded.changes, record, stream=False)
        self._send(Prepare(0, *fields), record)

    def _rollback_prepared(self, record: Record) -> None:
        decoded = self._decoded.pop(record.top, _Decoded())
        prepared = record.prepared
        assert prepared is not None
        if self.options.two_phase and not self._needs_skip(record):
            # A prepare that was not sent is not sent for a rollback either (ReorderBufferFinishPrepared).
            self._send(
                RollbackPrepared(0, prepared.end, record.end, prepared.time, record.time, Xid(record.top), record.gid),
                record,
            )
        elif decoded.streamed and not self._needs_skip(record):
            parallel = self.options.streaming == "parallel"
            lsn, time = (record.start, record.time) if parallel else (None, None)
            self._send(StreamAbort(Xid(record.top), Xid(record.top), lsn, time), record)
        self._announced_in.pop(record.top, None)


def _row_message(change: Change, shape: Shape, xid: Xid | None) -> Message:
    oid, full = Oid(change.oid), shape.identity == "f"
    kind = "O" if full else "K"
    if change.kind == "I":
        assert change.new is not None
        return Insert(oid, _tuple(shape, change.new), xid)
    assert change.old is not None
    old = _tuple(shape, change.old) if full else _key_tuple(shape, change.old)
    if change.kind == "D":
        return Delete(oid, kind, old, xid)
    assert change.new is not None
    new = _tuple(shape, change.new, change.unchanged)
    moved = shape.key_of(change.old) != shape.key_of(change.new)
    return Update(oid, kind, old, new, xid) if full or moved else Update(oid, None, None, new, xid)


def _tuple(shape: Shape, row: Row, unchanged: frozenset[int] = frozenset()) -> TupleData:
    return tuple(
        UNCHANGED if column.number in unchanged else _bytes(row.get(column.number, column.missing))
        for column in shape.columns
    )


def _key_tuple(shape: Shape, row: Row) -> TupleData:
    return tuple(_bytes(row.get(c.number)) if c.number in shape.key else None for c in shape.columns)


def _bytes(value: str | None) -> bytes | None:
    return None if value is None else value.encode()
