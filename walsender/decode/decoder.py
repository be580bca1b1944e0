"""The main loop of logical decoding: WAL records in, transactions out (decode.c, snapbuild.c, reorderbuffer.c).

    decoder = Decoder(…)
    decoder.add(output)
    decoder.run(reader)       whenever the reader was fed more WAL
    output.proceed()          what could not be done at once

A record is parsed only as far as its kind requires.  Heap records of relations that are sent become frames, bytes cut
out of the record; heap records of catalogs go to the tracker, whole.  A change's relation is resolved when its record
is read.  Its values are decoded when its transaction is sent, at the commit.

One pass serves any number of outputs (output.py).  Those with the same rules share the transactions' changes
(assembly.py); all share the WAL, the catalogs and the transactions.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from pubsub.errors import DataCorrupted, NotInPrerequisiteState
from pubsub.protocol.lsn import Lsn
from pubsub.reorderbuffer.buffer import ReorderBuffer
from walsender.decode import changes as c
from walsender.decode.accounting import CHANGE, INVALIDATION, XID, MemoryAccounting, snapshot_bytes
from walsender.decode.assembly import HANDOVER_BYTES, Assembly, Rules
from walsender.decode.heap import HeapDecoder
from walsender.decode.output import Ending, Origin, Output
from walsender.decode.record_kinds import irrelevant
from walsender.decode.relations import Registry
from walsender.decode.restart_points import RestartPoints
from walsender.decode.sender import Sender, prepared_before
from walsender.decode.sharing import Sharing
from walsender.decode.snapbuild import SnapshotBuilder
from walsender.decode.transactions import Part, Transactions, Txn
from walsender.historic.tracker import CatalogTracker, ChangedKey
from walsender.hot.walk import Walk
from walsender.plugins.failure import failure_of
from walsender.plugins.plugin import SentTransaction
from walsender.xlog import formats as f
from walsender.xlog.errors import WalCorrupted
from walsender.xlog.formats import Rmgr, WalFormat
from walsender.xlog.message import parse_message
from walsender.xlog.reader import WalReader
from walsender.xlog.record import Record, parse_record
from walsender.xlog.xact import XactEnd, parse_end, parse_prepare, parse_running_xacts, precedes

_HEAP: Final = int(Rmgr.HEAP)
_HEAP2: Final = int(Rmgr.HEAP2)
_XACT: Final = int(Rmgr.XACT)


class Decoder:
    """One pass over the WAL.

    `database`: oid of the database to decode.  `make_buffer` makes a reorder buffer.  `on_consistent(lsn)` is called once, with
    the consistent point.  `work_mem`: bytes.  `redo`: redo position of the checkpoint at which the reader starts.
    """

    def __init__(
        self,
        *,
        database: int,
        wal_format: WalFormat,
        make_tracker: Callable[[Callable[[int], bool]], CatalogTracker],
        encoding: str,
        make_buffer: Callable[[int], ReorderBuffer],
        on_consistent: Callable[[int], None] = lambda _: None,
        work_mem: int = 64 << 20,
        redo: int = 0,
    ) -> None:
        self.builder = SnapshotBuilder()
        self.restarts = RestartPoints(redo)
        self.on_list: Callable[[int], None] = lambda _: None
        """Called with the LSN of a list of running transactions, before it is read."""
        self._shutdown_at = 0  # LSN of the last checkpoint at which the server ended
        self.ended_at = 0
        """LSN of the last record with which anything was, or could have been, sent."""
        self.ahead: RolledBack | None = None
        """Knows how transactions in progress end, where the WAL of their ends is there already."""
        self.transactions = Transactions(self._parts, lambda part, other: part.assembly.join(part, other))
        self.tracker = tracker = make_tracker(self.transactions.by_xid.__contains__)
        self.registry = registry = Registry(tracker, encoding)
        self._sender = Sender(self._start, self._origin)
        self.sharing = Sharing(registry, self.transactions, self._make_assembly, self._adopt, self._here)
        self.outputs = self.sharing.outputs
        self.position = 0
        """LSN of the last record."""
        self._database = database
        self._format = wal_format
        self._make_buffer = make_buffer
        self._work_mem = work_mem
        self._on_consistent = on_consistent
        self._announced = False
        self._reader: WalReader | None = None
        self._lsn = 0
        # Committed transactions that changed the catalog and are newer than the oldest running one: a server's
        # snapshots list them.
        self._committed: list[int] = []
        self._heap = HeapDecoder(database, tracker, registry, wal_format)
        self._irrelevant = irrelevant(counted=False)
        self._walk = Walk(
            database,
            self._irrelevant,
            self.transactions.by_xid,
            registry.by_file,
            registry.ignored_files,
            tracker.catalogs,
            self.transactions.begin,
            self._heap.sees_changes,
            HANDOVER_BYTES,
            True,
        )

    # Outputs

    def add(self, output: Output) -> None:
        """Feed an output from here on: transactions that have not begun yet."""
        self.sharing.add(output)
        self._count()
        if self.builder.consistent:
            self._begin(output)

    def remove(self, output: Output) -> None:
        """Stop feeding an output, and leave its work undone."""
        self.sharing.remove(output)
        self._count()

    def absorb(self, other: Decoder) -> None:
        """Take over the outputs of another decoder, which has read as far as this one, to the byte (Sharing.absorb)."""
        self.sharing.absorb(other.sharing)
        self._count()

    def _parts(self, txn: Txn) -> list[Part]:
        return self.sharing.parts(txn)

    def _here(self) -> int:
        """Return an LSN from which on transactions have not begun."""
        return self._reader.position if self._reader is not None else 0

    def _make_assembly(self, rules: Rules) -> Assembly:
        small = self._work_mem // 4
        assembly = Assembly(rules, self._make_buffer(self._work_mem - small), small)
        if rules.streaming:
            assembly.memory = MemoryAccounting(
                self._work_mem,
                needs_streamable=self._format.version >= 16,
                may_stream=self._may_stream(assembly),
                goes_on=self._goes_on,
                stream=self._sender.stream,
            )
            assembly.memory.on_exceeded = assembly.count_exceeded
        return assembly

    def _adopt(self, assembly: Assembly) -> None:
        if assembly.memory is not None:
            assembly.memory.move(self._may_stream(assembly), self._goes_on, self._sender.stream)

    def _may_stream(self, assembly: Assembly) -> Callable[[], bool]:
        return lambda: not any(self._needs_skip(one, self._lsn) for one in assembly.outputs)

    def _goes_on(self, part: Part) -> bool:
        """Return whether a part of the transaction can be sent: nothing it did with a catalog that is rolled back later.

        Where that is not known yet, its changes wait.
        """
        txn = part.txn
        if self.ahead is None or not txn.catalog_xids:
            return True
        return self.ahead.rolled_back(txn.catalog_xids & txn.xids, self._here()) is False

    def _count(self) -> None:
        """Have the walk leave what must be counted, if anything is."""
        counted = any(assembly.memory is not None for assembly in self.sharing.assemblies)
        self._irrelevant = self._walk.irrelevant = irrelevant(counted=counted)
        # When every change is counted, all rows take the general path.
        self._walk.rows = not counted

    def run(self, reader: WalReader, end: int = 0) -> bool:
        """Decode the records that `reader` holds and that start before `end` (0: no end).

        Returns whether `end` was reached.  Raises WalCorrupted, CatalogDiverged, and what sending raises: all of these
        end the decoding.
        """
        by_xid = self.transactions.by_xid
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
            for assembly in self.sharing.assemblies:
                assembly.held += self._walk.held
            self._walk.held = 0
        for assembly in self.sharing.assemblies:
            assembly.relieve()
        return False

    # Rare records, and the first record of every transaction

    def _record(self, record: Record) -> None:
        lsn, xid, info, rmgr = record.lsn, record.xid, record.info, record.rmgr
        self._lsn = lsn
        txn = None
        if xid:
            txn = self.transactions.by_xid.get(xid)
            if txn is None:
                if record.top_xid:
                    txn = self.transactions.assign(record.top_xid, xid, lsn)
                elif rmgr != _XACT or info & f.XLOG_XACT_OPMASK not in {f.XLOG_XACT_COMMIT, f.XLOG_XACT_ABORT}:
                    txn = self.transactions.begin(xid, lsn)
        if rmgr == _HEAP:
            self._heap.heap(record, txn)
        elif rmgr == _HEAP2:
            self._heap.heap2(record, txn)
        elif rmgr == _XACT:
            record.end_lsn = self._here()
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
            record.end_lsn = self._here()
            self._logical_message(record)

    def _xlog(self, record: Record) -> None:
        kind = record.info & 0xF0
        if kind == f.XLOG_CHECKPOINT_SHUTDOWN or kind == f.XLOG_END_OF_RECOVERY:
            self.tracker.server_ended()
            self._shutdown_at = record.lsn
            self.builder.shutdown(record.lsn, self.tracker.prepared)
            self._announce()
        elif kind == f.XLOG_CHECKPOINT_ONLINE:
            self.restarts.checkpoint(int.from_bytes(record.main[:8], "little"))
        elif kind == f.XLOG_PARAMETER_CHANGE:
            level = int.from_bytes(record.main[20:24], "little")
            if len(record.main) >= 24 and level < f.WAL_LEVEL_LOGICAL:
                raise NotInPrerequisiteState(
                    'logical decoding requires "wal_level" >= "logical" on the primary',
                    context=f"WAL position {Lsn(record.lsn)}",
                )
        elif kind == f.XLOG_LOGICAL_DECODING_STATUS_CHANGE:
            self._logical_decoding(record, enabled=record.main[:1] != b"\0")
        elif kind in {f.XLOG_FPI, f.XLOG_FPI_FOR_HINT}:
            if any(self.tracker.is_file(block.locator) for block in record.blocks):
                self.tracker.apply(record)
        elif kind == f.XLOG_FPW_CHANGE and record.main[:1] == b"\0":
            raise NotInPrerequisiteState("full_page_writes was turned off", context=f"WAL position {Lsn(record.lsn)}")

    def _logical_decoding(self, record: Record, *, enabled: bool) -> None:
        """Take note that the server begins, or ends, to write what decoding needs (logicalctl.c).

        With wal_level = replica it does so while it has a logical slot.  A transaction that had an xid before the beginning
        goes on without.  Raises NotInPrerequisiteState if that cannot serve.
        """
        if not enabled:
            raise NotInPrerequisiteState(
                'logical decoding requires "wal_level" >= "logical" on the primary',
                detail="Its last logical slot is gone, and without one it writes no old keys from here on.",
                hint="Set wal_level = logical there: it does not depend on slots.",
                context=f"WAL position {Lsn(record.lsn)}",
            )
        restarted = self._shutdown_at > max(self.ended_at, self.restarts.last_list)
        if restarted and not self.transactions.by_xid:
            # No transaction can have begun before.
            return
        if self.builder.consistent:
            raise NotInPrerequisiteState(
                'logical decoding requires "wal_level" >= "logical" on the primary',
                detail="A logical slot has raised it here, while transactions were running that go on without old keys.",
                hint=f"Begin behind the first checkpoint that comes after {Lsn(record.lsn)}.",
                context=f"WAL position {Lsn(record.lsn)}",
            )
        self.builder.begin_again()

    def _standby(self, record: Record) -> None:
        running = parse_running_xacts(record)
        if running is None:
            return
        self.on_list(record.lsn)
        self.tracker.running(running)
        self.builder.running(record.lsn, running)
        self._announce()
        self.restarts.listed(record.lsn, frozenset(running.xids))
        oldest = running.oldest_running
        self._committed = [xid for xid in self._committed if not precedes(xid, oldest)]
        for txn in self.transactions.all():
            # Abort what a crash left behind (ReorderBufferAbortOld); prepared transactions count as running.
            if precedes(txn.xid, oldest):
                self._abort(txn, record.lsn)
        if not any(output.waits for output in self.outputs):
            self.registry.release(self.transactions.oldest_lsn() or record.lsn)

    def _announce(self) -> None:
        if self.builder.consistent and not self._announced:
            self._announced = True
            for output in list(self.outputs):
                self._begin(output)
            self._on_consistent(self.builder.consistent_point)

    def _begin(self, output: Output) -> None:
        """Have an output begin at the consistent point, if it was to begin before."""
        point = self.builder.consistent_point
        if output.start <= point + 1:
            output.start = max(output.start, point + 1)
            self._start(output)

    def _start(self, output: Output) -> None:
        """Refuse relations that cannot be sent before the first transaction, instead of at their first change."""
        if not output.started:
            output.started = True
            try:
                self.registry.refuse_unsupported(output)
            except Exception as error:
                output.fail(failure_of(output.plugin, error))

    def _needs_skip(self, output: Output, lsn: int) -> bool:
        """Return whether a transaction that ends with the record at `lsn` is not sent (SnapBuildXactNeedsSkip)."""
        return not self.builder.consistent or lsn < output.start

    # Transactions

    def _xact(self, record: Record) -> None:
        operation = record.info & f.XLOG_XACT_OPMASK
        if operation not in {f.XLOG_XACT_INVALIDATIONS, f.XLOG_XACT_ASSIGNMENT}:
            self.ended_at = record.lsn
        if operation in {f.XLOG_XACT_COMMIT, f.XLOG_XACT_COMMIT_PREPARED}:
            self._commit(record, parse_end(record, self._format))
        elif operation in {f.XLOG_XACT_ABORT, f.XLOG_XACT_ABORT_PREPARED}:
            self._rollback(record, parse_end(record, self._format))
        elif operation == f.XLOG_XACT_PREPARE:
            self._prepare(record)
        elif operation == f.XLOG_XACT_INVALIDATIONS and record.xid:
            count = int.from_bytes(record.main[:4], "little")
            txn = self.transactions.by_xid[record.xid]
            txn.catalog_xids.add(record.xid)
            txn.invalidations += count
            for part in txn.parts:
                if part.assembly.memory is not None:
                    size = CHANGE + INVALIDATION * count
                    part.assembly.memory.queue(part, record.xid, record.lsn, size, streamable=False)

    def _commit(self, record: Record, end: XactEnd) -> None:
        xid, lsn = end.twophase_xid or record.xid, record.lsn
        self.tracker.finish_prepared(xid)
        txn = self.transactions.by_xid.get(xid)
        for subxid in end.subxids:
            if txn is not None and subxid not in txn.xids and subxid in self.transactions.by_xid:
                self.transactions.assign(xid, subxid, lsn)
        # Update the catalog first: from here on the commit's changes are visible to every transaction.
        changed = self.tracker.commit((xid, *end.subxids), lsn)
        if txn is not None and txn.catalog_xids:
            self._distribute(txn, xid, end, lsn)
        other = end.database != 0 and end.database != self._database
        ending: Ending | None = None
        for part in txn.parts if txn is not None else ():
            assembly = part.assembly
            if other or assembly.rules.skips_origin(record.origin):
                continue
            to = []
            for output in assembly.outputs_of(txn):
                if not self._needs_skip(output, lsn):
                    to.append(output)
                elif lsn >= output.wanted and end.database == self._database:
                    self._refuse_missed(output, xid, part, lsn)
            if to:
                if ending is None:
                    ending = self._ending(record, end)
                self._sender.commit(part, to, ending, end)
        if txn is None and not other:
            self._commit_unknown(xid, end, record)
        if txn is not None:
            self._end(txn, lsn)
        if changed:
            self._changed(changed, lsn)
        self.builder.ended(lsn, (xid, *end.subxids))
        self._announce()

    def _commit_unknown(self, xid: int, end: XactEnd, record: Record) -> None:
        """Refuse the commit of a transaction that had begun before the WAL that was read, if it was to be sent."""
        for output in list(self.outputs):
            if output.rules.skips_origin(record.origin):
                continue
            if not self._needs_skip(output, record.lsn):
                self._start(output)
                if end.twophase_xid:
                    output.fail(prepared_before(xid, record.lsn))
            elif record.lsn >= output.wanted and end.database == self._database:
                self._refuse_missed(output, xid, None, record.lsn)

    def _refuse_missed(self, output: Output, xid: int, part: Part | None, lsn: int) -> None:
        """End an output that cannot be sent a requested transaction, instead of leaving it out.

        Do nothing if it has no changes and cannot have made any before decoding began.
        """
        if self.builder.may_have_begun_before(xid) or (part is not None and (part.frames or part.handed_over)):
            output.fail(
                NotInPrerequisiteState(
                    f"there is no consistent point before transaction {xid}, which was to be decoded",
                    detail="It, or one that ran beside it, had begun before the WAL that is there.",
                    hint="Begin further back (--wal with an older archive), or behind the consistent point (without --start).",
                    context=f"WAL position {Lsn(lsn)}",
                )
            )

    def _distribute(self, txn: Txn, xid: int, end: XactEnd, lsn: int) -> None:
        """Count what a commit that changed the catalog adds to all transactions."""
        assemblies = [one for one in self.sharing.assemblies if one.memory is not None]
        if not assemblies:
            return
        self._committed += [one for one in (xid, *end.subxids) if one in txn.catalog_xids or one == xid]
        snapshot = snapshot_bytes(self._format.version) + XID * len(self._committed)
        for assembly in assemblies:
            assembly.memory.distribute(_part_of(txn, assembly), lsn, snapshot, INVALIDATION * txn.invalidations)

    def _ending(self, record: Record, end: XactEnd) -> Ending:
        return Ending(record.lsn, record.end_lsn, end.time, self._origin(record.origin, end.origin_lsn), end.gid)

    def _origin(self, number: int, lsn: int = 0) -> Origin:
        if not number:
            return Origin()
        rows = self.tracker.all("pg_replication_origin", frozenset())
        row = next((r for r in rows if r.number("roident") == number), None)
        return Origin(number, row.text("roname") if row is not None else None, lsn)

    def _prepare(self, record: Record) -> None:
        """Keep what a PREPARE records for the transaction's end; send the transaction now unless it is skipped.

        Follows decode.c: DecodePrepare.
        """
        prepared = parse_prepare(record)
        self.tracker.prepare(record.xid, prepared.subxids)
        txn = self.transactions.by_xid.get(record.xid)
        if txn is None:
            return
        parts = [part for part in txn.parts if part.assembly.rules.prepares(prepared.gid)]
        if not parts:
            return
        for subxid in prepared.subxids:
            if subxid not in txn.xids and subxid in self.transactions.by_xid:
                self.transactions.assign(record.xid, subxid, record.lsn)
        time = prepared.origin_time or prepared.time
        origin = self._origin(record.origin, prepared.origin_lsn)
        ending = Ending(record.lsn, record.end_lsn, time, origin, prepared.gid)
        # What was done with a catalog that is known to be rolled back is not sent, as in ReorderBufferProcessTXN.
        gone = (
            self.ahead is not None
            and bool(txn.catalog_xids)
            and self.ahead.rolled_back({txn.xid}, self._here()) is True
        )
        for part in parts:
            part.two_phase = True
            part.prepared_at = record.lsn
            assembly = part.assembly
            outputs = assembly.outputs_of(txn)
            to = [output for output in outputs if not self._needs_skip(output, record.lsn)]
            if (
                not to
                or not txn.has_base
                or (prepared.database != 0 and prepared.database != self._database)
                or assembly.rules.skips_origin(record.origin)
            ):
                for output in outputs:
                    output.prepare(part, ending, None)
            else:
                self._sender.prepare(part, to, ending, gone=gone)
            if gone:
                assembly.take(part, set())
            if assembly.memory is not None:
                # It is sent, or was before, or will be at its end: its changes must not be streamed meanwhile.
                assembly.memory.prepared(part)

    def _rollback(self, record: Record, end: XactEnd) -> None:
        xid, lsn = end.twophase_xid or record.xid, record.lsn
        self.tracker.finish_prepared(xid)
        txn = self.transactions.by_xid.get(xid)
        self.tracker.abort((xid, *end.subxids))
        other = end.database != 0 and end.database != self._database
        for assembly in self.sharing.assemblies:
            rules = assembly.rules
            if end.twophase_xid and rules.prepares(end.gid) and not other and not rules.skips_origin(record.origin):
                part = _part_of(txn, assembly)
                if txn is not None and part is not None and part.two_phase and txn.has_base:
                    to = [output for output in assembly.outputs_of(txn) if not self._needs_skip(output, lsn)]
                    self._sender.finish_prepared(part, to, self._ending(record, end), commit=False)
            elif assembly.memory is not None:
                # Look up each one: a subtransaction that wrote nothing is unknown, but those inside it may be known.
                for one in (*end.subxids, xid):
                    part = _part_of(self.transactions.by_xid.get(one), assembly)
                    if part is not None and part.streamed and one in assembly.memory.account(part).streamed:
                        for output in assembly.outputs_of(part.txn):
                            output.stream_abort(part, one, record.end_lsn, end.time)
        if txn is not None and txn.xid == xid:
            self._end(txn, lsn)
        for subxid in (xid, *end.subxids):
            txn = self.transactions.forget_one(subxid)
            if txn is not None:
                txn.xids.discard(subxid)
                txn.aborted.add(subxid)
                for part in txn.parts:
                    part.assembly.abort_subtransaction(part, subxid)
                    if part.assembly.memory is not None:
                        part.assembly.memory.abort(part, subxid)
                if txn.cache is not None:
                    self.registry.retire(txn.cache, lsn)
                    txn.cache = {}
        self.builder.ended(lsn, (xid, *end.subxids))
        self._announce()

    def _abort(self, txn: Txn, lsn: int) -> None:
        """Forget a transaction whose end has no record, so that its Stream Abort has neither LSN nor time."""
        self.tracker.abort((txn.xid, *txn.subxids))
        for part in txn.parts:
            if part.streamed:
                for output in part.assembly.outputs_of(txn):
                    output.stream_abort(part, txn.xid, 0, 0)
        self._end(txn, lsn)

    def _end(self, txn: Txn, lsn: int) -> None:
        self.transactions.forget(txn)
        for part in txn.parts:
            part.assembly.forget(part)
            if part.assembly.memory is not None:
                part.assembly.memory.forget(part)
            if part.assembly.closed and not part.assembly.parts:
                self.sharing.drop(part.assembly)
                self._count()
        if txn.cache is not None:
            self.registry.retire(txn.cache, lsn)
            txn.cache = None

    def _changed(self, changed: Iterable[ChangedKey], lsn: int) -> None:
        self.registry.forget(changed, lsn)
        for txn in self.transactions.all():
            if txn.cache:
                self.registry.retire(txn.cache, lsn)
                txn.cache = {}

    def _logical_message(self, record: Record) -> None:
        """Queue a transactional message, send another one at once (decode.c: logicalmsg_decode)."""
        message = parse_message(record)
        if message.database != self._database:
            return
        prefix, content = message.prefix, message.content
        txn = self.transactions.by_xid.get(record.xid)
        if message.transactional:
            if txn is None:
                raise WalCorrupted("a transactional message belongs to no transaction", record.lsn)
            parts = [part for part in txn.parts if not part.assembly.rules.skips_origin(record.origin)]
            if not parts and txn.parts:
                return
            txn.has_base = txn.messages = True
            head = c.HEAD.pack(c.MESSAGE, record.xid, 0, record.end_lsn)
            frame = head + c.OLD_LENGTH.pack(len(prefix)) + prefix + content
            for part in parts:
                part.assembly.append(part, frame)
                if part.assembly.memory is not None:
                    size = CHANGE + len(prefix) + 1 + len(content) + 16
                    part.assembly.memory.queue(part, record.xid, record.end_lsn, size)
            return
        self.ended_at = record.lsn
        for output in list(self.outputs):
            if not self._needs_skip(output, record.lsn) and not output.rules.skips_origin(record.origin):
                # A subtransaction's message names the subtransaction (reorderbuffer.c: ReorderBufferQueueMessage).
                sent = SentTransaction(record.xid, txn.first_lsn, 0, 0, 0) if txn is not None else None
                output.message(sent, record.lsn, record.end_lsn, record.xid, prefix, content)


class RolledBack(Protocol):
    """See ahead.Ahead."""

    def rolled_back(self, xids: Iterable[int], position: int) -> bool | None: ...


def _part_of(txn: Txn | None, assembly: Assembly) -> Part | None:
    return None if txn is None else next((part for part in txn.parts if part.assembly is assembly), None)
