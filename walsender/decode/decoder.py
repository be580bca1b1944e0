"""The main loop of logical decoding: WAL records in, transactions out (decode.c, snapbuild.c, reorderbuffer.c).

    decoder = Decoder(…)
    decoder.run(reader)       whenever the reader was fed more WAL

A record is parsed only as far as its kind requires.  Heap records of relations that are sent become frames, bytes cut
out of the record; heap records of catalogs go to the tracker, whole.  A change's relation is resolved when its record
is read.  Its values are decoded when its transaction is sent, at the commit.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from struct import Struct
from typing import Any, Final

from pubsub.errors import DataCorrupted, NotInPrerequisiteState
from pubsub.protocol.lsn import Lsn
from walsender.decode import changes as c
from walsender.decode.accounting import CHANGE, INVALIDATION, XID, MemoryAccounting, snapshot_bytes
from walsender.decode.assembly import HANDOVER_BYTES, Assembly, Txn
from walsender.decode.heap import HeapDecoder
from walsender.decode.relations import Registry
from walsender.decode.replay import Replay
from walsender.decode.snapbuild import SnapshotBuilder
from walsender.historic.tracker import CatalogTracker, ChangedKey
from walsender.hot.walk import Walk
from walsender.output.plugin import OutputPlugin, SentTransaction
from walsender.xlog import formats as f
from walsender.xlog.errors import WalCorrupted
from walsender.xlog.formats import Rmgr, WalFormat
from walsender.xlog.reader import WalReader
from walsender.xlog.record import Record, parse_record
from walsender.xlog.xact import XactEnd, parse_end, parse_prepare, parse_running_xacts

_HEAP: Final = int(Rmgr.HEAP)
_HEAP2: Final = int(Rmgr.HEAP2)
_XACT: Final = int(Rmgr.XACT)
_LOOKED_AT: Final = frozenset(
    {Rmgr.XLOG, Rmgr.XACT, Rmgr.SMGR, Rmgr.DBASE, Rmgr.RELMAP, Rmgr.STANDBY, Rmgr.LOGICALMSG, Rmgr.HEAP, Rmgr.HEAP2}
)
# Kinds among these that are skipped as well: the first three unless every change is counted (accounting.py).
_NOT_COUNTED: Final = frozenset(
    {(Rmgr.XACT, f.XLOG_XACT_INVALIDATIONS), (Rmgr.HEAP2, f.XLOG_HEAP2_NEW_CID), (Rmgr.HEAP, f.XLOG_HEAP_LOCK)}
)
_NEVER: Final = frozenset({(Rmgr.SMGR, f.XLOG_SMGR_CREATE), (Rmgr.STANDBY, f.XLOG_STANDBY_LOCK)})

_LISTS: Final = 1000
"""How many lists of running transactions are kept while the record of their checkpoint has not come."""
_MESSAGE: Final = Struct("<I?xxxQQ")


class Decoder:
    """One pass over the WAL for one output plugin.

    `database`: oid of the database to decode.  `on_consistent(lsn)` is called once, with the consistent point.
    `work_mem`: bytes.  `redo`: redo position of the checkpoint at which the reader starts.
    """

    def __init__(
        self,
        *,
        database: int,
        wal_format: WalFormat,
        tracker: CatalogTracker,
        registry: Registry[Any],
        assembly: Assembly,
        builder: SnapshotBuilder,
        plugin: OutputPlugin[Any],
        on_consistent: Callable[[int], None] = lambda _: None,
        work_mem: int = 64 << 20,
        redo: int = 0,
    ) -> None:
        self.builder = builder
        self.restart_point = redo
        """Where another process must start reading to continue from here: the redo position of a checkpoint."""
        self._restarts: list[tuple[int, frozenset[int]]] = []
        self._lists: list[tuple[int, frozenset[int]]] = []
        self.assembly = assembly
        self.tracker = tracker
        self.position = 0
        """LSN of the last record."""
        self._database = database
        self._format = wal_format
        self._registry = registry
        self._plugin = plugin
        self._on_consistent = on_consistent
        self._announced = False
        self._started = False
        self._reader: WalReader
        self._lsn = 0
        # Committed transactions that changed the catalog and are newer than the oldest running one: a server's
        # snapshots list them.
        self._committed: list[int] = []
        self._memory = (
            MemoryAccounting(
                work_mem,
                needs_streamable=wal_format.version >= 16,
                may_stream=lambda: not self.builder.needs_skip(self._lsn),
                stream=self._stream,
            )
            if plugin.streaming
            else None
        )

        self._heap = HeapDecoder(database, tracker, registry, assembly, plugin, self._memory)
        self._irrelevant = _irrelevant(counted=self._memory is not None)
        self._walk = Walk(
            database,
            self._irrelevant,
            assembly.by_xid,
            registry.by_file,
            registry.ignored_files,
            tracker.catalogs,
            assembly.begin,
            self._heap.sees_changes,
            assembly.hand_over,
            HANDOVER_BYTES,
            # When every change is counted, all rows take the general path.
            self._memory is None,
        )

    def run(self, reader: WalReader, end: int = 0) -> bool:
        """Decode the records that `reader` holds and that start before `end` (0: no end).

        Returns whether `end` was reached.  Raises WalCorrupted, CatalogDiverged, and what sending raises: all of these
        end the decoding.
        """
        by_xid = self.assembly.by_xid
        lsn = self.position
        self._reader = reader
        reader.walk = self._walk
        self._walk.stop = end
        stop = end or 1 << 64
        try:
            for data, offset, length, lsn, xid, info, rmgr in reader.records():
                if lsn >= stop:
                    return True
                if self._irrelevant[rmgr << 4 | info >> 4] and (not xid or xid in by_xid):
                    continue
                self._record(parse_record(data, offset, length, lsn, lsn, xid, info, rmgr))
        except struct.error as error:
            raise WalCorrupted("a record is too short", lsn) from error
        except UnicodeDecodeError as error:
            raise WalCorrupted(f"invalid byte sequence for encoding in a catalog: {error.reason}", lsn) from error
        except DataCorrupted as error:
            error.context = error.context or f"WAL position {Lsn(lsn)}"
            raise
        finally:
            self.position = lsn
            self.assembly.held += self._walk.held
            self._walk.held = 0
        self.assembly.relieve()
        return False

    # Rare records, and the first record of every transaction

    def _record(self, record: Record) -> None:
        lsn, xid, info, rmgr = record.lsn, record.xid, record.info, record.rmgr
        self._lsn = lsn
        txn = None
        if xid:
            txn = self.assembly.by_xid.get(xid)
            if txn is None:
                if record.top_xid:
                    txn = self.assembly.assign(record.top_xid, xid, lsn)
                elif rmgr != _XACT or info & f.XLOG_XACT_OPMASK not in {f.XLOG_XACT_COMMIT, f.XLOG_XACT_ABORT}:
                    txn = self.assembly.begin(xid, lsn)
        if rmgr == _HEAP:
            self._heap.heap(record, txn)
        elif rmgr == _HEAP2:
            self._heap.heap2(record, txn)
        elif rmgr == _XACT:
            record.end_lsn = self._reader.position
            self._xact(record)
        elif rmgr == Rmgr.STANDBY:
            self._standby(record)
        elif rmgr == Rmgr.XLOG:
            self._xlog(record)
        elif rmgr == Rmgr.SMGR:
            if info & 0xF0 == f.XLOG_SMGR_TRUNCATE:
                self.tracker.truncate(record)
        elif rmgr == Rmgr.RELMAP:
            self._changed(self.tracker.relmap_update(record), lsn)
        elif rmgr == Rmgr.LOGICALMSG:
            record.end_lsn = self._reader.position
            self._logical_message(record)

    def _xlog(self, record: Record) -> None:
        kind = record.info & 0xF0
        if kind == f.XLOG_CHECKPOINT_SHUTDOWN or kind == f.XLOG_END_OF_RECOVERY:
            self.builder.shutdown(record.lsn, [txn.xid for txn in self.assembly.transactions() if txn.prepared])
            self._announce()
        elif kind == f.XLOG_CHECKPOINT_ONLINE:
            redo = int.from_bytes(record.main[:8], "little")
            self._lists = [one for one in self._lists if one[0] >= redo]
            self._restarts += [(redo, xids) for _, xids in self._lists[:1]]
        elif kind == f.XLOG_PARAMETER_CHANGE:
            level = int.from_bytes(record.main[20:24], "little")
            if len(record.main) >= 24 and level < f.WAL_LEVEL_LOGICAL:
                raise NotInPrerequisiteState(
                    'logical decoding requires "wal_level" >= "logical" on the primary',
                    context=f"WAL position {Lsn(record.lsn)}",
                )
        elif kind in {f.XLOG_FPI, f.XLOG_FPI_FOR_HINT}:
            if any(self.tracker.is_file(block.locator) for block in record.blocks):
                self.tracker.apply(record)
        elif kind == f.XLOG_FPW_CHANGE and record.main[:1] == b"\0":
            raise NotInPrerequisiteState("full_page_writes was turned off", context=f"WAL position {Lsn(record.lsn)}")

    def _standby(self, record: Record) -> None:
        running = parse_running_xacts(record)
        if running is None:
            return
        self.builder.running(record.lsn, running)
        self._announce()
        self._remember(record.lsn, frozenset(running.xids))
        oldest = running.oldest_running
        self._committed = [xid for xid in self._committed if (xid - oldest) & 0xFFFFFFFF < 1 << 31]
        for txn in self.assembly.transactions():
            # Abort what a crash left behind (ReorderBufferAbortOld); prepared transactions count as running.
            if (txn.xid - oldest) & 0xFFFFFFFF >= 1 << 31:
                self._abort(txn, record.lsn, 0)
        self._registry.release(self.assembly.oldest_lsn() or record.lsn)

    def _remember(self, lsn: int, running: frozenset[int]) -> None:
        """Move `restart_point` to the newest checkpoint whose running transactions have all ended (startpoint.py)."""
        self._lists = [*self._lists[-_LISTS:], (lsn, running)]
        serve = [number for number, (_, xids) in enumerate(self._restarts) if not xids & running]
        if serve:
            self.restart_point = self._restarts[serve[-1]][0]
            del self._restarts[: serve[-1]]

    def _announce(self) -> None:
        if self.builder.consistent and not self._announced:
            self._announced = True
            if self.builder.start_decoding_at <= self.builder.consistent_point + 1:
                self._start()
            self._on_consistent(self.builder.consistent_point)

    def _start(self) -> None:
        """Refuse relations that cannot be sent before the first transaction, instead of at their first change."""
        if not self._started:
            self._started = True
            self._registry.refuse_unsupported(self._plugin.refusal)

    # Transactions

    def _xact(self, record: Record) -> None:
        operation = record.info & f.XLOG_XACT_OPMASK
        if operation in {f.XLOG_XACT_COMMIT, f.XLOG_XACT_COMMIT_PREPARED}:
            self._commit(record, parse_end(record, self._format))
        elif operation in {f.XLOG_XACT_ABORT, f.XLOG_XACT_ABORT_PREPARED}:
            self._rollback(record, parse_end(record, self._format))
        elif operation == f.XLOG_XACT_PREPARE:
            self._prepare(record)
        elif operation == f.XLOG_XACT_INVALIDATIONS and self._memory is not None and record.xid:
            count = int.from_bytes(record.main[:4], "little")
            size = CHANGE + INVALIDATION * count
            txn = self.assembly.by_xid[record.xid]
            txn.catalog_xids.add(record.xid)
            txn.invalidations += count
            self._memory.queue(txn, record.xid, record.lsn, size, streamable=False)

    def _commit(self, record: Record, end: XactEnd) -> None:
        xid = end.twophase_xid or record.xid
        txn = self.assembly.by_xid.get(xid)
        for subxid in end.subxids:
            if txn is not None and subxid not in txn.xids and subxid in self.assembly.by_xid:
                self.assembly.assign(xid, subxid, record.lsn)
        # Update the catalog first: from here on the commit's changes are visible to every transaction.
        changed = self.tracker.commit((xid, *end.subxids), record.lsn)
        if self._memory is not None and txn is not None and txn.catalog_xids:
            self._committed += [one for one in (xid, *end.subxids) if one in txn.catalog_xids or one == xid]
            snapshot = snapshot_bytes(self._format.version) + XID * len(self._committed)
            self._memory.distribute(txn, record.lsn, snapshot, INVALIDATION * txn.invalidations)
        skip = self._skips(record, end.database)
        two_phase = self._two_phase(end)
        if end.twophase_xid and not skip and (txn is None or (two_phase and not txn.two_phase)):
            raise NotInPrerequisiteState(
                f"transaction {xid} was prepared before the decoding began, and is committed now",
                hint="Begin further back, or after it.",
                context=f"WAL position {Lsn(record.lsn)}",
            )
        if not skip:
            self._start()
        elif self.builder.misses(record.lsn) and end.database == self._database:
            self._refuse_missed(xid, txn, record.lsn)
        try:
            if txn is not None and not skip:
                if two_phase:
                    if txn.has_base:
                        self._finish_prepared(txn, record, end, commit=True)
                elif txn.has_base or end.invalidations:
                    # A transaction that only invalidates caches has changed the catalogs, too (SnapBuildCommitTxn).
                    self._send(txn, self._sent(txn, record, end))
        finally:
            if txn is not None:
                self._end(txn, record.lsn)
        if changed:
            self._changed(changed, record.lsn)
        self.builder.ended(record.lsn, (xid, *end.subxids))
        self._announce()

    def _refuse_missed(self, xid: int, txn: Txn | None, lsn: int) -> None:
        """Raise NotInPrerequisiteState for a requested transaction that cannot be sent, instead of leaving it out.

        Do nothing if it has no changes and cannot have made any before decoding began.
        """
        if self.builder.is_waited_for(xid) or (txn is not None and (txn.frames or txn.handed_over)):
            raise NotInPrerequisiteState(
                f"there is no consistent point before transaction {xid}, which was to be decoded",
                detail="It, or one that ran beside it, had begun before the WAL that is there.",
                hint="Begin further back (--wal with an older archive), or behind the consistent point (without --start).",
                context=f"WAL position {Lsn(lsn)}",
            )

    def _skips(self, record: Record, database: int) -> bool:
        """Return whether a transaction is not sent at this record, its PREPARE or end (decode.c: DecodeTXNNeedSkip)."""
        return (
            self.builder.needs_skip(record.lsn)
            or (database != 0 and database != self._database)
            or self._plugin.skips_origin(record.origin)
        )

    def _two_phase(self, end: XactEnd) -> bool:
        """Return whether `end` ends a transaction that is sent at its PREPARE."""
        return end.twophase_xid != 0 and self._plugin.prepares(end.gid)

    def _sent(self, txn: Txn, record: Record, end: XactEnd) -> SentTransaction:
        sent: SentTransaction = txn.sent or SentTransaction(txn.xid, txn.first_lsn, 0, 0, 0)
        sent.final_lsn, sent.end_lsn = record.lsn, record.end_lsn
        sent.time = end.time
        if record.origin:
            sent.origin_id = record.origin
            sent.origin_lsn = end.origin_lsn
            sent.origin_name = self._origin_name(record.origin)
        if end.gid:
            sent.gid = end.gid
        return sent

    def _origin_name(self, origin: int) -> str | None:
        row = next(
            (r for r in self.tracker.all("pg_replication_origin", frozenset()) if r.number("roident") == origin), None
        )
        return row.text("roname") if row is not None else None

    def _send(self, txn: Txn, sent: SentTransaction) -> None:
        """Send a committed transaction: all of it, or the rest if it was streamed."""
        self._check(txn)
        if txn.streamed:
            self._stream_rest(txn)
            self._plugin.stream_commit(sent)
            return
        self._plugin.begin(sent)
        Replay(self._registry, self._plugin, sent).run(self.assembly.changes(txn))
        self._plugin.commit(sent)

    def _stream(self, txn: Txn) -> None:
        """Send what a transaction in progress has changed so far (ReorderBufferStreamTXN)."""
        assert self._memory is not None
        self._check(txn)
        account = self._memory.account(txn)
        sent: SentTransaction = txn.sent or SentTransaction(txn.xid, txn.first_lsn, 0, 0, 0)
        if not txn.streamed:
            sent.origin_id = account.first_origin
            sent.origin_name = self._origin_name(sent.origin_id) if sent.origin_id else None
            txn.sent = sent
            txn.replay = Replay(self._registry, self._plugin, sent)
        self._plugin.stream_start(sent, account.first_lsn, not txn.streamed)
        txn.streamed = True
        txn.replay.run(self.assembly.changes(txn))
        self._plugin.stream_stop(sent, account.last_lsn)

    def _stream_rest(self, txn: Txn) -> None:
        assert self._memory is not None
        if self._memory.account(txn).first_lsn:
            self._stream(txn)
            self._memory.sent(txn)

    def _check(self, txn: Txn) -> None:
        if txn.errors:
            lsn, error = min(txn.errors.values(), key=lambda one: one[0])
            error.context = error.context or f"change at WAL position {Lsn(lsn)} of transaction {txn.xid}"
            raise error

    def _prepare(self, record: Record) -> None:
        """Keep what a PREPARE records for the transaction's end; send the transaction now unless it is skipped.

        Follows decode.c: DecodePrepare.
        """
        prepared = parse_prepare(record)
        txn = self.assembly.by_xid.get(record.xid)
        if txn is None:
            return
        txn.prepared = True
        txn.two_phase = self._plugin.prepares(prepared.gid)
        if not txn.two_phase:
            return
        sent: SentTransaction = txn.sent or SentTransaction(txn.xid, txn.first_lsn, 0, 0, 0)
        txn.sent = sent
        sent.final_lsn, sent.end_lsn = record.lsn, record.end_lsn
        sent.time = prepared.origin_time or prepared.time
        sent.origin_id = record.origin
        sent.origin_name = self._origin_name(record.origin) if record.origin else None
        sent.origin_lsn, sent.gid = prepared.origin_lsn, prepared.gid
        sent.prepare_end_lsn, sent.prepare_time = record.end_lsn, sent.time
        for subxid in prepared.subxids:
            if subxid not in txn.xids and subxid in self.assembly.by_xid:
                self.assembly.assign(record.xid, subxid, record.lsn)
        if txn.has_base and not self._skips(record, prepared.database):
            self._send_prepared(txn, sent)

    def _send_prepared(self, txn: Txn, sent: SentTransaction) -> None:
        self._check(txn)
        if txn.streamed:
            self._stream_rest(txn)
            self._plugin.stream_prepare(sent)
        else:
            self._plugin.begin_prepare(sent)
            Replay(self._registry, self._plugin, sent).run(self.assembly.changes(txn))
            self._plugin.prepare(sent)
        if self._memory is not None:
            self._memory.prepared(txn)

    def _finish_prepared(self, txn: Txn, record: Record, end: XactEnd, *, commit: bool) -> None:
        """Send COMMIT PREPARED or ROLLBACK PREPARED of a transaction with changes (ReorderBufferFinishPrepared).

        A server sends it for transactions without changes, too, whose PREPARE it has not sent.
        """
        prepared: SentTransaction = txn.sent
        if commit and prepared.final_lsn < self.builder.start_decoding_at:
            # The PREPARE came before decoding started: send the prepared transaction now.
            self._send_prepared(txn, prepared)
        sent = self._sent(txn, record, end)
        if commit:
            self._plugin.commit_prepared(sent)
        else:
            self._plugin.rollback_prepared(sent)

    def _rollback(self, record: Record, end: XactEnd) -> None:
        xid = end.twophase_xid or record.xid
        txn = self.assembly.by_xid.get(xid)
        self.tracker.abort((xid, *end.subxids))
        if self._two_phase(end) and not self._skips(record, end.database):
            if txn is not None and txn.two_phase and txn.has_base:
                self._finish_prepared(txn, record, end, commit=False)
        elif self._memory is not None:
            # Look up each one: a subtransaction that wrote nothing is unknown, but those inside it may be known.
            for one in (*end.subxids, xid):
                its = self.assembly.by_xid.get(one)
                if its is not None and its.streamed and one in self._memory.account(its).streamed:
                    self._plugin.stream_abort(its.sent, one, record.end_lsn, end.time)
        if txn is not None and txn.xid == xid:
            self._end(txn, record.lsn)
        for subxid in (xid, *end.subxids):
            txn = self.assembly.by_xid.get(subxid)
            if txn is not None:
                self.assembly.abort_subtransaction(txn, subxid)
                if self._memory is not None:
                    self._memory.abort(txn, subxid)
                if txn.cache is not None:
                    self._registry.retire(txn.cache, record.lsn)
                    txn.cache = {}
        self.builder.ended(record.lsn, (xid, *end.subxids))
        self._announce()

    def _abort(self, txn: Txn, lsn: int, time: int) -> None:
        self.tracker.abort((txn.xid, *txn.subxids))
        if txn.streamed:
            self._plugin.stream_abort(txn.sent, txn.xid, lsn, time)
        self._end(txn, lsn)

    def _end(self, txn: Txn, lsn: int) -> None:
        self.assembly.forget(txn)
        if self._memory is not None:
            self._memory.forget(txn)
        if txn.cache is not None:
            self._registry.retire(txn.cache, lsn)
            txn.cache = None

    def _changed(self, changed: Iterable[ChangedKey], lsn: int) -> None:
        self._registry.forget(changed, lsn)
        for txn in {id(t): t for t in self.assembly.by_xid.values()}.values():
            if txn.cache:
                self._registry.retire(txn.cache, lsn)
                txn.cache = {}

    def _logical_message(self, record: Record) -> None:
        """Queue a transactional message, send another one at once (decode.c: logicalmsg_decode)."""
        database, transactional, prefix_size, size = _MESSAGE.unpack_from(record.main)
        if database != self._database or self._plugin.skips_origin(record.origin):
            return
        start = _MESSAGE.size
        prefix = record.main[start : start + max(prefix_size - 1, 0)]
        content = record.main[start + prefix_size : start + prefix_size + size]
        if len(content) != size:
            raise WalCorrupted("a logical message is too short", record.lsn)
        if transactional:
            txn = self.assembly.by_xid[record.xid]
            txn.has_base = txn.messages = True
            head = c.HEAD.pack(c.MESSAGE, record.xid, 0, record.end_lsn)
            self.assembly.append(txn, head + c.OLD_LENGTH.pack(len(prefix)) + prefix + content)
            if self._memory is not None:
                size = CHANGE + len(prefix) + 1 + len(content) + 16
                self._memory.queue(txn, record.xid, record.end_lsn, size)
        elif not self.builder.needs_skip(record.lsn):
            # A subtransaction's message names the subtransaction (reorderbuffer.c: ReorderBufferQueueMessage).
            known = self.assembly.by_xid.get(record.xid)
            sent = SentTransaction(record.xid, known.first_lsn, 0, 0, 0) if known is not None else None
            self._plugin.message(sent, record.end_lsn, record.xid, False, prefix, content)


def _irrelevant(*, counted: bool) -> bytes:
    """Build the table of record kinds to skip (walk.py).  `counted`: a server's memory is counted (accounting.py)."""
    kinds = bytearray(4096)
    for rmgr in range(256):
        for upper in range(16):
            kind = (rmgr, upper << 4)
            if rmgr not in _LOOKED_AT or kind in _NEVER or (kind in _NOT_COUNTED and not counted):
                kinds[rmgr << 4 | upper] = 1
    return bytes(kinds)
