"""Assemble copy-both frames into batches: worker.c's apply_dispatch, without I/O.

For most frames Python looks at the type byte alone; rows stay bytes.  Begin, Commit and keepalives, which come once per
transaction, are unpacked with a struct here; rarer messages go through the codec.

    B … C          rows collect in the OpenTransaction; past a bound they move to the reorder buffer
    S … E, c, A    a block's frames, tagged with their (sub)transactions, stay in the reorder buffer until c or A
    b … P, p, K, r feeding pauses until the owner has stored, loaded or removed the prepared transaction on disk
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final, assert_never

from apply.batch import Batch, OpenTransaction, Truncation
from apply.pipeline.relation_cache import Announced, RelationCache, moves_keys
from apply.pipeline.stream_states import Inside, after
from apply.pipeline.streamed_transaction import StreamedTransaction
from apply.staging.stream_ahead import PART_BYTES, Ahead
from apply.twophase import Kept, Preparation
from catalog.records import LastCommit
from pubsub.errors import ProtocolViolation
from pubsub.protocol import pgoutput
from pubsub.protocol.copyboth import XLOG_HEADER, read_server_message
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.reorderbuffer.buffer import ReorderBuffer

_KEEPALIVE: Final = ord("k")
_XLOG_DATA: Final = ord("w")
_ROWS: Final = frozenset(b"IUD")
_BEGIN: Final = ord("B")
_COMMIT: Final = ord("C")
_STREAM_COMMIT: Final = ord("c")
_ENDS: Final = frozenset((_COMMIT, _STREAM_COMMIT))
# The type byte, the WAL's end, the time of sending, whether a reply is requested.
_KEEPALIVE_FRAME: Final = struct.Struct(">BQqB")
# After the type byte: final LSN, commit time, xid; flags, commit LSN, end LSN, commit time (proto.c).
_BEGIN_BODY: Final = struct.Struct(">QqI")
_COMMIT_BODY: Final = struct.Struct(">BQQq")
_STREAM_COMMIT_XID: Final = struct.Struct(f">{XLOG_HEADER + 1}xI")
# Of a commit and a stream commit, the end LSN alone.
_COMMIT_END: Final = struct.Struct(f">{XLOG_HEADER + 1}x9xQ")
_STREAM_COMMIT_END: Final = struct.Struct(f">{XLOG_HEADER + 1}x13xQ")
_TYPE: Final = XLOG_HEADER
_BODY: Final = XLOG_HEADER + 1
# A transaction of more bytes is the reorder buffer's.
_SMALL: Final = 256 << 10


@dataclass(frozen=True, slots=True)
class PassedSkip:
    """The first transaction received since SKIP was set; whether it is the `wanted` one or another, it clears SKIP.

    `end`: the transaction's end LSN; SKIP is cleared when everything up to it is durable.
    """

    wanted: Lsn
    finish: Lsn
    end: Lsn


class Dispatcher:
    """Assembles the frames of one stream; `batch` is the open batch, which the owner takes with `take`.

    `position`: the LSN up to which everything has been received, which is the end of the last transaction or a keepalive's WAL
    end.  `decided`: the end of the last transaction; before the first one, where the stream's commits begin.  A streamed
    transaction in progress holds neither back: it ends past both, so after a reconnection the publisher sends it again whole.

    While `waiting` is not None, no more frames are taken: a transaction was prepared (call `kept`), or its outcome arrived (call
    `committed`, `committed_nothing` or `rolled_back`).  Until then `position` does not include it.

    `ahead` gets large streamed transactions, a part at a time; such a transaction is a batch of its own.  A transaction that
    changes a relation's replica identity begins a batch.  `closing`: take the open batch before feeding more frames.

    `boundary`: no batch has transactions from both sides of this LSN; None once one that ends after it has joined a batch.
    With `halts` none does, and nothing is fed from then on: `halted`.

    `stream_txns`, `stream_count` and `stream_bytes` count streamed transactions, their blocks, and the bytes of the blocks.

    `buffer` holds large and streamed transactions; after each `feed` the owner spills it if it is exceeded.  Without a buffer,
    transactions stay in memory and streams are refused.  `parallel`: streaming 'parallel' was requested.  `skip`: the finish LSN
    of a transaction to leave out; `passed_skip` is set by the first transaction that is fed, and `skipped` by the one left out.

    Raises ProtocolViolation for messages that such a stream cannot have.
    """

    def __init__(
        self,
        start: Lsn,
        buffer: ReorderBuffer | None = None,
        *,
        sent_from: Lsn = INVALID_LSN,
        parallel: bool = False,
        skip: Lsn = INVALID_LSN,
        ahead: Ahead | None = None,
    ) -> None:
        self.passed_skip: PassedSkip | None = None
        self.skipped: LastCommit | None = None
        self.closing = False
        self.boundary: Lsn | None = None
        self.halts = self.halted = False
        self._ahead = ahead
        self._skip = skip
        self._skip_is_new = skip != INVALID_LSN
        self.position = start
        self.decided = max(start, sent_from)
        self.last_frame_lsn = start
        self.reply_requested = False
        self._buffer = buffer
        self._parallel = parallel
        # A batch that begins while a transaction is open starts with what held before it.
        self._relations = RelationCache()
        self._inside = Inside.OUTSIDE
        self._open: OpenTransaction | None = None
        # How the open transaction began, if it will be prepared.
        self._preparing: pgoutput.BeginPrepare | None = None
        # The transaction of the stream block being received, and the block's frames since the last move.
        self._stream: StreamedTransaction | None = None
        self._block: list[bytes] = []
        self._streamed: dict[int, StreamedTransaction] = {}
        self.stream_txns = self.stream_count = self.stream_bytes = 0
        self.waiting: Preparation | pgoutput.CommitPrepared | pgoutput.RollbackPrepared | None = None
        self.batch = Batch(self._relations.known)

    @property
    def idle(self) -> bool:
        """Whether no transaction is open, waiting or in the open batch."""
        return self._open is None and self.waiting is None and not self.batch.transactions

    def take(self) -> Batch:
        """Close the open batch and start the next."""
        closed, self.batch = self.batch, Batch(self._relations.known)
        closed.unnamed = {*self._relations.unnamed, *(closed.outdated - self._relations.known.keys())}
        self.closing = False
        if self._ahead is not None and closed.transactions and self._ahead.parts(closed.transactions[0].xid):
            # It was staged before these were announced, and the publisher is looked at for its own tables alone.
            self.batch.announced |= closed.announced
        return closed

    def feed(
        self, frames: Sequence[bytes], now: float, *, stop_at: Lsn | None = None, pause_at: Lsn | None = None
    ) -> int:
        """Take `frames` in order, and return how many were taken.

        Fewer than all are taken when a commit reaches `stop_at` or `pause_at`, when `waiting` is set, or when the open batch must
        be taken first.  Transactions that end after `stop_at` join no batch; a batch ends at `pause_at`.  `now` is monotonic, in
        seconds.
        """
        rows = self._collector()
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
                continue
            end = None
            if kind == _BEGIN:
                self._begin(frame)
            elif kind in _ENDS and self._close_before(kind, frame):
                taken -= 1
                break
            elif kind == _COMMIT:
                end = self._commit(frame, now, stop_at)
            else:
                end = self._other(frame, now, stop_at)
            rows = self._collector()
            if self.waiting is not None or self.closing:
                break
            if end is not None and (
                (stop_at is not None and end >= stop_at) or (pause_at is not None and end >= pause_at)
            ):
                break
        self._move()
        return taken

    def _collector(self) -> Callable[[bytes], None] | None:
        """Return the function that takes a row; None outside a transaction."""
        if self._open is not None:
            return self._open.rows.append
        return self._block.append if self._stream is not None else None

    def _move(self) -> None:
        """Move to the reorder buffer the frames of the stream block, or of an open transaction that is no longer small."""
        if self._open is not None:
            self._open.count_bytes()
            if self._buffer is not None and (self._open.moved or self._open.nbytes > _SMALL):
                self._buffer.append(self._open.xid, self._open.rows)
                self._open.clear_rows()
        elif self._stream is not None and self._block:
            self._streams().append_tagged(self._stream.xid, self._block)
            nbytes = sum(map(len, self._block))
            self.stream_bytes += nbytes
            if self._ahead is not None:
                self._stream.since_part += nbytes
                self._take_part(self._stream, self._ahead)
            self._block.clear()

    def _take_part(self, stream: StreamedTransaction, ahead: Ahead) -> None:
        """Hand a part of a streamed transaction to `ahead`, if enough has been received for one."""
        if stream.since_part < PART_BYTES or not ahead.accepts(stream.xid):
            return
        ahead.add(stream.xid, self._streams().take(stream.xid), stream.known_before_part(self._relations.known))
        stream.begin_part()

    def _streams(self) -> ReorderBuffer:
        if self._buffer is None:
            raise ProtocolViolation("unexpected stream: it was not asked for")
        return self._buffer

    # Whole transactions

    def _begin(self, frame: bytes) -> None:
        inside = after(_BEGIN, self._inside)
        if len(frame) != _BODY + _BEGIN_BODY.size:
            raise ProtocolViolation("malformed BEGIN message")
        final_lsn, commit_time, xid = _BEGIN_BODY.unpack_from(frame, _BODY)
        if final_lsn == 0:
            raise ProtocolViolation("final_lsn not set in begin message")
        self._open = OpenTransaction(xid, Lsn(final_lsn), commit_time)
        self._inside = inside

    def _commit(self, frame: bytes, now: float, stop_at: Lsn | None) -> Lsn:
        inside, opened = after(_COMMIT, self._inside), self._open
        assert opened is not None
        if len(frame) != _BODY + _COMMIT_BODY.size:
            raise ProtocolViolation("malformed COMMIT message")
        _, commit_lsn, end_lsn, commit_time = _COMMIT_BODY.unpack_from(frame, _BODY)
        if commit_lsn != opened.final_lsn:
            raise ProtocolViolation(
                f"incorrect commit LSN {Lsn(commit_lsn)} in commit message (expected {opened.final_lsn})"
            )
        end = self._checked_end(Lsn(commit_lsn), Lsn(end_lsn))
        opened.commit_time = commit_time
        moved = None
        if opened.moved:
            self._move()
            moved = self._streams().commit(opened.xid)
        self._inside, self._open = inside, None
        self._relations.committed(opened.announced)
        commit = LastCommit(Lsn(commit_lsn), commit_time)
        skipped = self._skips(commit, commit.lsn, end, opened.announced)
        wanted = not skipped and (stop_at is None or end <= stop_at)
        if (opened.count or opened.truncations or opened.announced) and wanted:
            self.batch.add(opened, end, now, moved)
        elif moved is not None:
            moved.release()
        return self._decide(end)

    def _skips(self, commit: LastCommit, finish: Lsn, end: Lsn, announced: Collection[int] = ()) -> bool:
        """Tell whether the transaction that ends with `commit` is the one to skip.

        Follows worker.c: maybe_start_skipping_changes, clear_subscription_skip_lsn.  The publisher does not resend the
        Relation messages that a skipped transaction has `announced`, so the batch takes them from the relation cache.
        """
        if self._skip_is_new:
            self._skip_is_new = False
            self.passed_skip = PassedSkip(self._skip, finish, end)
        if self._skip == INVALID_LSN or finish != self._skip:
            return False
        self.skipped = commit
        for oid in announced:
            self.batch.hold(self._relations.known[oid])
        self.batch.announced.update(announced)
        return True

    def _checked_end(self, commit_lsn: Lsn, end_lsn: Lsn) -> Lsn:
        if end_lsn <= commit_lsn or end_lsn < self.decided:
            raise ProtocolViolation(f"the stream went back: commit end {end_lsn} after {self.decided}")
        return end_lsn

    def _decide(self, end: Lsn) -> Lsn:
        """Note that everything up to `end` has been received and decided; it may have been before."""
        self.decided = max(self.decided, end)
        self.position = max(self.position, end)
        return end

    # Streamed transactions

    def _stream_start(self, message: pgoutput.StreamStart) -> None:
        if message.first_segment == (message.xid in self._streamed):
            raise ProtocolViolation(f"transaction {message.xid} streams from its middle, or from its start again")
        self._streams().begin(message.xid)
        self.stream_txns += message.first_segment
        self.stream_count += 1
        self._stream = self._streamed.setdefault(message.xid, StreamedTransaction(message.xid))

    def _stream_stop(self) -> None:
        self._move()
        self._stream = None

    def _stream_abort(self, message: pgoutput.StreamAbort) -> None:
        # A subtransaction that streamed nothing may be aborted, too.
        self._streams().abort(message.subxid, top=message.xid)
        if message.subxid == message.xid:
            self._streamed.pop(message.xid, None)
            if self._ahead is not None:
                self._ahead.forget(message.xid)
        elif (stream := self._streamed.get(message.xid)) is not None:
            announced = stream.abort(message.subxid)
            if self._ahead is not None:
                self._ahead.abort(message.xid, message.subxid, announced=announced)

    def _close_before(self, kind: int, frame: bytes) -> bool:
        """Close the open batch if this committing transaction cannot share it; return whether it must wait.

        It cannot if it is staged ahead, and so is a batch of its own, changes a replica identity, or ends beyond the boundary.
        """
        if self.boundary is not None:
            layout = _COMMIT_END if kind == _COMMIT else _STREAM_COMMIT_END
            if len(frame) >= layout.size and self._waits_at_boundary(layout.unpack_from(frame)[0]):
                return True
        if not self.batch.transactions:
            return False
        if kind == _COMMIT:
            announced = self._open.relations if self._open is not None else ()
            self.closing = self._relations.moves_keys(relation for _, relation in announced)
        elif len(frame) >= _STREAM_COMMIT_XID.size:
            (xid,) = _STREAM_COMMIT_XID.unpack_from(frame)
            streamed = self._streamed[xid].relations if xid in self._streamed else ()
            ahead = self._ahead is not None and bool(self._ahead.parts(xid))
            self.closing = ahead or self._relations.moves_keys(one.relation for one in streamed)
        return self.closing

    def _waits_at_boundary(self, end: int) -> bool:
        """Tell whether a transaction that ends there must wait: for the open batch to be taken, or for the end of a halt."""
        if self.boundary is None or end <= self.boundary:
            return False
        if self.batch.transactions:
            self.closing = True
            return True
        if self.halts:
            self.halted = True
            return True
        self.boundary = None
        return False

    def close_before(self, kept: Kept) -> bool:
        """Do the same for a prepared transaction that has committed.  The messages of a streamed one are not known yet."""
        if isinstance(self.waiting, pgoutput.CommitPrepared) and self._waits_at_boundary(self.waiting.end_lsn):
            return True
        if self.batch.transactions:
            self.closing = kept.streamed or moves_keys((relation for _, relation in kept.relations), {})
        return self.closing

    def _close_after(self, announced: Sequence[pgoutput.Relation]) -> None:
        """Close the open batch if rows whose key is another one than with the last of these messages could follow in it."""
        last = {relation.oid: relation for relation in announced}
        if self.batch.transactions and self._relations.moves_keys(last.values()):
            self.closing = True

    def _stream_commit(self, message: pgoutput.StreamCommit, now: float, stop_at: Lsn | None) -> Lsn:
        stream = self._ended_stream(message.xid, "STREAM COMMIT")
        end = self._checked_end(message.commit_lsn, message.end_lsn)
        parts = list(self._ahead.parts(message.xid)) if self._ahead is not None else []
        rest = self._streams().commit(message.xid)
        known = stream.known_before_part(self._relations.known)
        overtaken = self._relations.stream_committed(stream.relations)
        commit = LastCommit(message.commit_lsn, message.commit_time)
        skipped = self._skips(commit, commit.lsn, end, {one.relation.oid for one in stream.relations})
        wanted = not skipped and (stop_at is None or end <= stop_at)
        if rest is not None and wanted and (parts or rest.count):
            if self._ahead is not None and parts:
                self._ahead.add(message.xid, rest, known)
                self.closing = True
            self.batch.add_streamed([*parts, rest], message.commit_lsn, end, message.commit_time, now)
            for oid in overtaken:
                self.batch.hold(self._relations.known[oid])
            self._close_after([one.relation for one in stream.relations])
        elif rest is not None:
            rest.release()
            if self._ahead is not None:
                self._ahead.forget(message.xid)
        return self._decide(end)

    def _ended_stream(self, xid: int, what: str) -> StreamedTransaction:
        """Take out a streamed transaction that has ended."""
        stream = self._streamed.pop(xid, None)
        if stream is None:
            raise ProtocolViolation(f"{what} of transaction {xid}, which was not streamed")
        return stream

    # Prepared transactions

    def _begin_prepare(self, message: pgoutput.BeginPrepare) -> None:
        self._open = OpenTransaction(message.xid, message.prepare_lsn, message.prepare_time)
        self._preparing = message

    def _prepare(self, message: pgoutput.Prepare) -> None:
        opened, begun = self._open, self._preparing
        if opened is None or begun is None:
            # Its transaction changed nothing, and nothing is to be kept of it.
            self._streams()
            self._decide(_prepare_end(message))
            return
        if (message.prepare_lsn, message.xid, message.gid) != (begun.prepare_lsn, begun.xid, begun.gid):
            raise ProtocolViolation(
                f"incorrect prepare LSN {message.prepare_lsn} in prepare message (expected {begun.prepare_lsn})"
            )
        relation_cache = dict(self._relations.known)
        buffer = self._streams()
        buffer.append(opened.xid, opened.rows)
        opened.clear_rows()
        self.waiting = Preparation(
            buffer.prepare(opened.xid, message.gid),
            message.gid,
            message.prepare_lsn,
            _prepare_end(message),
            message.prepare_time,
            streamed=False,
            relation_cache=relation_cache,
            relations=opened.relations,
            truncations=[(t.seq, t.relations) for t in opened.truncations],
        )
        # It joins no batch yet, but its messages hold for others' rows, too, also those that are resent unchanged.
        self.batch.announced |= opened.announced
        self._close_after([relation for _, relation in opened.relations])
        for relation in self._relations.prepared(opened.xid, opened.announced):
            self.batch.hold(relation)
        self._open = self._preparing = None

    def _stream_prepare(self, message: pgoutput.StreamPrepare) -> None:
        stream = self._ended_stream(message.xid, "STREAM PREPARE")
        self.waiting = Preparation(
            self._streams().prepare(message.xid, message.gid),
            message.gid,
            message.prepare_lsn,
            _prepare_end(message),
            message.prepare_time,
            streamed=True,
            relation_cache=dict(self._relations.known),
            announced=tuple({one.relation.oid: None for one in stream.relations}),
        )

    def _outcome(self, message: pgoutput.CommitPrepared | pgoutput.RollbackPrepared) -> None:
        self._streams()
        self.waiting = message

    def kept(self) -> None:
        """Note that the prepared transaction is durable on disk, and so received; release what the buffer holds of it."""
        preparation, self.waiting = self.waiting, None
        assert isinstance(preparation, Preparation)
        self._streams().rollback_prepared(preparation.gid)
        self._decide(preparation.end_lsn)

    def committed(self, kept: Kept, now: float, stop_at: Lsn | None) -> bool:
        """Add the committed prepared transaction to the batch; return False if it is the one to skip."""
        message, self.waiting = self.waiting, None
        assert isinstance(message, pgoutput.CommitPrepared)
        end = self._checked_end(message.commit_lsn, message.end_lsn)
        skipped = self._skips(LastCommit(message.commit_lsn, message.commit_time), kept.prepare_lsn, end)
        self._relations.ended(kept.xid)
        if not skipped and (stop_at is None or end <= stop_at):
            self.batch.add_kept(kept, message, now, self._relations.known)
            self._close_after([relation for _, relation in kept.relations])
        self._decide(end)
        return not skipped

    def committed_nothing(self) -> None:
        """Note that the committed prepared transaction changed nothing."""
        message, self.waiting = self.waiting, None
        assert isinstance(message, pgoutput.CommitPrepared)
        self._decide(self._checked_end(message.commit_lsn, message.end_lsn))

    def rolled_back(self) -> None:
        """Note that the prepared transaction was rolled back and its file removed."""
        message, self.waiting = self.waiting, None
        assert isinstance(message, pgoutput.RollbackPrepared)
        self._decide(self._checked_end(INVALID_LSN, message.rollback_end_lsn))

    # All else

    def _keepalive(self, frame: bytes) -> None:
        # A walsender that has sent everything sends one after each transaction.
        if len(frame) != _KEEPALIVE_FRAME.size or frame[0] != _KEEPALIVE or frame[-1] > 1:
            read_server_message(frame)
            raise ProtocolViolation("no data left in message")
        _, wal_end, _, reply_requested = _KEEPALIVE_FRAME.unpack(frame)
        self.reply_requested |= bool(reply_requested)
        if wal_end > self.last_frame_lsn:
            self.last_frame_lsn = Lsn(wal_end)
        if self._inside is Inside.OUTSIDE and wal_end > self.position:
            self.position = Lsn(wal_end)

    def _other(self, frame: bytes, now: float, stop_at: Lsn | None) -> Lsn | None:
        """Return the end LSN of a transaction that this frame commits, else None."""
        message = pgoutput.read_message(
            frame, streaming=self._stream is not None, parallel=self._parallel, start=XLOG_HEADER
        )
        inside = after(frame[_TYPE], self._inside)
        end = self._handle(message, frame, now, stop_at)
        self._inside = inside
        return end

    def _handle(self, message: pgoutput.Message, frame: bytes, now: float, stop_at: Lsn | None) -> Lsn | None:
        match message:
            case pgoutput.Relation() | pgoutput.Type() | pgoutput.Truncate() | pgoutput.LogicalMessage():
                if self._stream is not None:
                    self._block.append(frame)
                    if isinstance(message, pgoutput.Relation):
                        assert message.xid is not None
                        arrival = self._relations.received_in_stream()
                        self._stream.relations.append(Announced(message.xid, _untagged(message), arrival))
                elif isinstance(message, pgoutput.Relation):
                    self._relation(message)
                elif isinstance(message, pgoutput.Truncate):
                    assert self._open is not None
                    self._open.truncations.append(Truncation(self._open.count, tuple(message.relations)))
            case pgoutput.StreamStart():
                self._stream_start(message)
            case pgoutput.StreamStop():
                self._stream_stop()
            case pgoutput.StreamAbort():
                self._stream_abort(message)
            case pgoutput.StreamCommit():
                return self._stream_commit(message, now, stop_at)
            case pgoutput.Origin():
                return None
            case pgoutput.BeginPrepare():
                self._begin_prepare(message)
            case pgoutput.Prepare():
                self._prepare(message)
            case pgoutput.StreamPrepare():
                self._stream_prepare(message)
            case pgoutput.CommitPrepared() | pgoutput.RollbackPrepared():
                self._outcome(message)
            case pgoutput.Begin() | pgoutput.Commit() | pgoutput.Insert() | pgoutput.Update() | pgoutput.Delete():
                raise AssertionError(f"{message} is read elsewhere")
            case _:
                assert_never(message)
        return None

    def _relation(self, message: pgoutput.Relation) -> None:
        opened, is_new = self._open, self._relations.received(message)
        if opened is None:
            self._relations.committed([message.oid])
            self.batch.hold(message)
            self.batch.announced.add(message.oid)
            return
        # Resent unchanged: nothing has changed, or something that the message does not show.
        opened.announced.add(message.oid)
        if is_new or self._preparing is not None:
            opened.relations.append((opened.count, message))


def _prepare_end(message: pgoutput.Prepare | pgoutput.StreamPrepare) -> Lsn:
    """Return the end of the PREPARE, which the stream may have passed.

    A transaction that was prepared before the slot had two-phase commit is sent at its outcome, with the LSNs of its PREPARE
    (reorderbuffer.c: ReorderBufferFinishPrepared).
    """
    if message.end_lsn <= message.prepare_lsn:
        raise ProtocolViolation(f"the stream went back: prepare end {message.end_lsn} after {message.prepare_lsn}")
    return message.end_lsn


def _untagged(relation: pgoutput.Relation) -> pgoutput.Relation:
    """Return the message as it is outside a stream."""
    return pgoutput.Relation(
        relation.oid, relation.namespace, relation.name, relation.replica_identity, relation.columns
    )
