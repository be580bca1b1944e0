"""From copy-both frames to batches: worker.c's apply_dispatch, without I/O.

Per frame Python looks at the type byte and nothing more; rows are kept as bytes.  Begin and Commit, which come once a
transaction, are read with a struct here; everything rarer goes through the codec.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from apply.batch import Batch, OpenTransaction, Truncation
from pubsub.errors import ProtocolViolation
from pubsub.protocol import pgoutput
from pubsub.protocol.copyboth import XLOG_HEADER, Keepalive, read_server_message
from pubsub.protocol.lsn import Lsn

_KEEPALIVE: Final = ord("k")
_XLOG_DATA: Final = ord("w")
_ROWS: Final = frozenset(b"IUD")
_BEGIN: Final = ord("B")
_COMMIT: Final = ord("C")
# After the type byte: final LSN, commit time, xid; flags, commit LSN, end LSN, commit time (proto.c).
_BEGIN_BODY: Final = struct.Struct(">QqI")
_COMMIT_BODY: Final = struct.Struct(">BQQq")
_TYPE: Final = XLOG_HEADER
_BODY: Final = XLOG_HEADER + 1


class Dispatcher:
    """Assembles the frames of one stream; `batch` is the open batch, which the owner takes with `take`.

    `position` is the LSN up to which everything has been received: the end of the last transaction, or a keepalive's WAL
    end; `decided` the end of the last transaction.  Raises ProtocolViolation for what can not be in such a stream.
    """

    def __init__(self, start: Lsn) -> None:
        self.position = start
        self.decided = start
        self.last_frame_lsn = start
        self.reply_requested = False
        self._known: dict[int, pgoutput.Relation] = {}
        # What held before the open transaction: a batch that is started meanwhile begins with these.
        self._settled: dict[int, pgoutput.Relation] = {}
        self._open: OpenTransaction | None = None
        self.batch = Batch(self._settled)

    @property
    def idle(self) -> bool:
        """Nothing received is waiting: no transaction open, none in the open batch."""
        return self._open is None and not self.batch.transactions

    @property
    def pending_bytes(self) -> int:
        """Bytes of rows held, the transaction that is being received included."""
        return self.batch.nbytes + (self._open.nbytes if self._open is not None else 0)

    def take(self) -> Batch:
        """Close the open batch and start the next."""
        closed, self.batch = self.batch, Batch(self._settled)
        return closed

    def feed(
        self, frames: Sequence[bytes], now: float, *, stop_at: Lsn | None = None, pause_at: Lsn | None = None
    ) -> int:
        """Take `frames` in order; returns how many were taken: all, or up to the commit that reached a given LSN.

        Nothing that ends after `stop_at` joins a batch; a batch ends at `pause_at`.  `now` is the monotonic time in seconds.
        """
        opened = self._open
        rows = opened.rows.append if opened is not None else None
        taken = 0
        for frame in frames:
            taken += 1
            if len(frame) <= _TYPE or frame[0] != _XLOG_DATA:
                self._keepalive(frame)
                continue
            kind = frame[_TYPE]
            if kind in _ROWS:
                if rows is None:
                    raise ProtocolViolation("row change outside a transaction")
                rows(frame)
            elif kind == _BEGIN:
                opened = self._begin(frame)
                rows = opened.rows.append
            elif kind == _COMMIT:
                end = self._commit(frame, now, stop_at)
                opened = rows = None
                if (stop_at is not None and end >= stop_at) or (pause_at is not None and end >= pause_at):
                    break
            else:
                self._other(frame)
        if opened is not None:
            opened.count_bytes()
        return taken

    def _begin(self, frame: bytes) -> OpenTransaction:
        if self._open is not None:
            raise ProtocolViolation("BEGIN inside a transaction")
        if len(frame) != _BODY + _BEGIN_BODY.size:
            raise ProtocolViolation("malformed BEGIN message")
        final_lsn, commit_time, xid = _BEGIN_BODY.unpack_from(frame, _BODY)
        if final_lsn == 0:
            raise ProtocolViolation("final_lsn not set in begin message")
        self._open = OpenTransaction(xid, Lsn(final_lsn), commit_time)
        return self._open

    def _commit(self, frame: bytes, now: float, stop_at: Lsn | None) -> Lsn:
        opened = self._open
        if opened is None:
            raise ProtocolViolation("COMMIT outside a transaction")
        if len(frame) != _BODY + _COMMIT_BODY.size:
            raise ProtocolViolation("malformed COMMIT message")
        _, commit_lsn, end_lsn, commit_time = _COMMIT_BODY.unpack_from(frame, _BODY)
        if commit_lsn != opened.final_lsn:
            raise ProtocolViolation(
                f"incorrect commit LSN {Lsn(commit_lsn)} in commit message (expected {opened.final_lsn})"
            )
        if end_lsn <= commit_lsn or end_lsn < self.decided:
            raise ProtocolViolation(f"the stream went back: commit end {Lsn(end_lsn)} after {self.decided}")
        opened.commit_time = commit_time
        self._open = None
        end = Lsn(end_lsn)
        self._settled.update((relation.oid, relation) for _, relation in opened.relations)
        if (opened.rows or opened.truncations or opened.relations) and (stop_at is None or end <= stop_at):
            self.batch.add(opened, end, now)
        self.decided = end
        self.position = max(self.position, end)
        return end

    def _keepalive(self, frame: bytes) -> None:
        message = read_server_message(frame)
        if not isinstance(message, Keepalive):
            raise ProtocolViolation("no data left in message")
        self.reply_requested |= message.reply_requested
        self.last_frame_lsn = max(self.last_frame_lsn, message.wal_end)
        if self._open is None:
            self.position = max(self.position, message.wal_end)

    def _other(self, frame: bytes) -> None:
        message = pgoutput.read_message(frame, start=XLOG_HEADER)
        match message:
            case pgoutput.Relation():
                known = self._known.get(message.oid)
                if known == message:
                    return
                self._known[message.oid] = message
                if self._open is not None:
                    self._open.relations.append((len(self._open.rows), message))
                else:
                    self._settled[message.oid] = message
                    self.batch.relations.setdefault(message.oid, []).append((self.batch.rows, message))
            case pgoutput.Truncate():
                if self._open is None:
                    raise ProtocolViolation("TRUNCATE outside a transaction")
                self._open.truncations.append(Truncation(len(self._open.rows), tuple(message.relations)))
            case pgoutput.Type() | pgoutput.Origin() | pgoutput.LogicalMessage():
                return
            case _:
                raise ProtocolViolation(f"unexpected {type(message).__name__} message: it was not asked for")
