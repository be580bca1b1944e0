"""The path of a stream into Delta: receive ─► batch ─► stage ─► commit ─► feedback, as three concurrent tasks.

    receive   feeds frames to the open batch and the reorder buffer; stops reading while the batch is full
    stage     takes the open batch when it is due (trigger) and stages it (in a thread)
    commit    commits the staged tables; then everything up to the batch's end is durable, and is reported (feedback)

At most one batch is open, one staged or being staged, and one committing.

Data that is received but not yet staged takes at most `memory` bytes plus one read.  Frames of committed small
transactions take up to half of it in the open batch; the reorder buffer spills to disk whatever exceeds the rest.

Apply and the sync worker's catch-up both use this pipeline, over different `Tables`.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final, assert_never

import structlog

from apply.batch import Batch
from apply.isolation import Failure, failure, is_own, stage_isolating
from apply.pipeline.batch_trace import trace
from apply.pipeline.boundary import Boundary
from apply.pipeline.commit import commit_table, look_at_table
from apply.pipeline.dispatch import Dispatcher
from apply.pipeline.feedback import Feedback
from apply.pipeline.in_flight import InFlight
from apply.pipeline.interfaces import Course, Limits, Stream, SubscriptionTables, Tables, Timers
from apply.pipeline.receiver import Receiver
from apply.pipeline.trigger import Trigger
from apply.staging.destination import Destination, Destinations, RowInTheWay, WrittenByOthers
from apply.staging.stage_batch import stage_batch
from apply.staging.staged_table import StagedTable
from apply.staging.stream_ahead import Ahead
from apply.twophase import Preparation, TwoPhase
from apply.worker_statistics import Changes, Figures
from pubsub import allocators, faults, tracing
from pubsub.concurrency import in_thread
from pubsub.delta.spark.engine import Lane
from pubsub.delta.writers.arrow_writer import DirectStaged
from pubsub.delta.writers.changeset import NotAsExpected
from pubsub.delta.writers.choose_writer import TableWriters, discard
from pubsub.errors import ProtocolViolation, PubsubError, StartAgain
from pubsub.processor_time import spent_on
from pubsub.protocol.copyboth import pg_now, pg_time_to_datetime
from pubsub.protocol.lsn import Lsn
from pubsub.protocol.pgoutput import CommitPrepared, RollbackPrepared
from pubsub.reorderbuffer.buffer import ReorderBuffer
from pubsub.tracing import TableCommit

# After a batch of more rows than this, freed memory is returned to the system at once.
_LARGE: Final = 100_000
# Nothing is received while a frame of so many bytes is staged: either takes several times its size.
_LARGE_FRAME: Final = 16 << 20
_XLOG_POSITIONS: Final = struct.Struct(">xQQq")
# The reorder buffer gets at least this many bytes, as logical_decoding_work_mem is at least 64 kB.
_LEAST_MEMORY: Final = 64 << 10

logger = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _StagedBatch:
    """A batch whose tables are staged, and the tables that stop in it.  `closed_at`, `staged_at`: in monotonic seconds."""

    batch: Batch
    tables: list[StagedTable]
    failures: list[Failure]
    closed_at: float
    staged_at: float = 0.0


class Pipeline:
    """Run the tasks of one stream.

    `run` ends when everything up to the course's `stop_at` is durable; nothing after it is applied.  `whole`: `tables` again if
    they are a subscription's; None if they are one table, whose version is its position.  The caller closes `buffer`; without a
    buffer, everything stays in memory and the stream has no transactions in progress.  Without `two_phase` the stream has no
    prepared transactions.  Up to `ahead` transactions in progress are staged while they arrive (0: none).  `timers`: those of the
    connection, if they may change while it runs; else the limits'.
    """

    def __init__(
        self,
        stream: Stream,
        course: Course,
        tables: Tables,
        lane: Lane,
        writers: TableWriters,
        limits: Limits,
        figures: Figures,
        *,
        whole: SubscriptionTables | None = None,
        buffer: ReorderBuffer | None = None,
        parallel: bool = False,
        ahead: int = 0,
        two_phase: TwoPhase | None = None,
        timers: Timers | None = None,
    ) -> None:
        timers = timers or limits
        # The buffer is not thread-safe: nothing may be released while a thread spills it to disk.
        self._using_buffer = asyncio.Lock()
        self._whole = whole
        self._ahead = (
            Ahead(whole, writers, whole.origin, ahead, self._using_buffer) if ahead and whole is not None else None
        )
        self.dispatcher = Dispatcher(
            course.start, buffer, sent_from=course.sent_from, parallel=parallel, skip=course.skip, ahead=self._ahead
        )
        self.figures = figures
        figures.queue_limit = limits.memory
        self._stream = stream
        self._tables = tables
        self._lane = lane
        self._writers = writers
        self._limits = limits
        self._trigger = Trigger(limits, course.align_at)
        self._stop_at = course.stop_at
        self._buffer = buffer
        self._staging_memory = 0
        # While a batch with a large value is staged.
        self._staging_alone = False
        self._two_phase = two_phase
        # Set to wake the stage task, which looks again: at the open batch, the commit, draining, or requests to the tables.
        self._changed = asyncio.Event()
        # Set to wake the receive task: the open batch has been taken, one staged alone is staged, or draining begins.
        self._room = asyncio.Event()
        # From stage to commit.
        self._staged: asyncio.Queue[_StagedBatch | None] = asyncio.Queue(1)
        self._in_flight = InFlight()
        self._draining = False
        self._feedback = Feedback(
            stream,
            self.dispatcher,
            self._in_flight,
            tables,
            figures,
            course.start,
            whole=whole,
            timers=timers,
            stop_at=course.stop_at,
            two_phase=two_phase,
            on_caught_up=self._changed.set,
        )
        self._left: Sequence[bytes] = ()
        self._receiver = Receiver(stream, self.dispatcher, self._feedback, limits, timers, course.stop_at)
        self.boundary = Boundary(self.dispatcher, self._feedback, self._in_flight, self._receiver)
        self._sent_at = 0

    @property
    def flushed(self) -> Lsn:
        """The LSN up to which everything is durable in Delta; it only grows."""
        return self._feedback.flushed

    async def until_stored_to(self, lsn: Lsn) -> None:
        """Wait, while it runs, until everything up to `lsn` is durable, and the origin says so."""
        await self._feedback.until_stored_to(lsn)

    async def run(self) -> None:
        """Run until `stop_at` or `drain`; every transaction received whole is then durable and reported."""
        try:
            async with asyncio.TaskGroup() as group:
                status = group.create_task(self._feedback.send_status_regularly())
                staging = group.create_task(self._stage_batches())
                committing = group.create_task(self._commit_batches())
                ahead = group.create_task(self._ahead.run()) if self._ahead is not None else None
                await self._receive()
                self._draining = True
                self._changed.set()
                await staging
                await committing
                status.cancel()
                if ahead is not None:
                    ahead.cancel()
        finally:
            self.boundary.close()
            await self._feedback.close()
            if self._ahead is not None:
                await self._ahead.close()
            while not self._staged.empty():
                left = self._staged.get_nowait()
                for table in left.tables if left is not None else ():
                    discard(table.staged)
        await self._feedback.advance()
        await self._feedback.until_stored()
        await self._feedback.report()

    def drain(self) -> None:
        """Stop receiving; `run` commits what it has received and returns."""
        self._draining = True
        self._changed.set()
        self._room.set()
        self.boundary.drain()

    async def commit_between(self, table: StagedTable) -> None:
        """Commit what was staged for one table, within `boundary.standing_at`.  Raises as the commit of a batch does."""
        await self._tables.before_commit()
        try:
            await self._commit(table)
        finally:
            discard(table.staged)

    # receive

    async def _receive(self) -> None:
        while not self._ended():
            self.boundary.moved()
            if self._staging_alone or self._trigger.full(self.dispatcher.batch, closing=self.dispatcher.closing):
                self._room.clear()
                await self._room.wait()
                self._receiver.resume()
                continue
            if self.dispatcher.halted:
                await self.boundary.until_passed()
                self._receiver.resume()
                continue
            if self.dispatcher.waiting is not None:
                # The open batch had to be taken before this message could be handled.
                await self._handle_prepared()
                self._receiver.resume()
                continue
            frames = self._left or await self._receiver.frames()
            if self._ended():
                # Draining began during the wait: the last batch may be closed already.
                return
            silent = not frames
            # A read ends with a large frame.
            large = not silent and len(frames[-1]) >= _LARGE_FRAME
            if frames:
                self._take(frames)
            del frames  # a frame may take a gigabyte, and the reorder buffer has its own copy
            if not silent:
                await self._spill()
                if large and self._ahead is not None:
                    await self._ahead.settle()
                await self._handle_prepared()
                self._receiver.resume()
            if self.dispatcher.reply_requested:
                self.dispatcher.reply_requested = False
                await self._feedback.answer()
            elif silent or self._feedback.is_awaited:
                await self._feedback.advance()

    def _ended(self) -> bool:
        """Tell whether no more frames are taken: the stream is being drained, or has reached `stop_at`."""
        return self._draining or (self._stop_at is not None and self.dispatcher.position >= self._stop_at)

    async def _spill(self) -> None:
        """Move changes to disk if memory is used up."""
        buffer = self._buffer
        if buffer is None:
            return
        waiting = self.dispatcher.batch.memory + self._staging_memory
        buffer.work_mem = max(self._limits.memory - waiting, _LEAST_MEMORY)
        if buffer.exceeded:
            async with self._using_buffer:
                await in_thread(buffer.spill)
            spilled, figures = buffer.statistics, self.figures
            figures.spill_txns, figures.spill_count = spilled.spill_txns, spilled.spill_count
            figures.spill_bytes = spilled.spill_bytes

    async def _handle_prepared(self) -> None:
        """Store, load or remove the prepared transaction that the dispatcher waits for, before any later message."""
        dispatcher = self.dispatcher
        waiting = dispatcher.waiting
        if waiting is None:
            return
        if self._two_phase is None:
            raise ProtocolViolation("unexpected prepared transaction: two_phase was not asked for")
        match waiting:
            case Preparation():
                await faults.reached("prepare")
                await self._two_phase.keep(waiting)
                await faults.reached("prepared")
                async with self._using_buffer:
                    dispatcher.kept()
            case CommitPrepared():
                kept = await self._two_phase.load(waiting)
                if kept is None:
                    dispatcher.committed_nothing()
                    return
                if dispatcher.close_before(kept):
                    self._changed.set()
                    return
                if not dispatcher.committed(kept, time.monotonic(), self._stop_at):
                    await self._two_phase.durable([(kept.xid, waiting.end_lsn)])
                if dispatcher.batch.transactions:
                    self._changed.set()
            case RollbackPrepared():
                await self._two_phase.roll_back(waiting)
                dispatcher.rolled_back()
            case _:
                assert_never(waiting)

    @spent_on("receiving")
    def _take(self, frames: Sequence[bytes]) -> None:
        now = time.monotonic()
        dispatcher, figures = self.dispatcher, self.figures
        taken = dispatcher.feed(frames, now, stop_at=self._stop_at, pause_at=self._trigger.align_at)
        frames, self._left = frames[:taken], frames[taken:]
        if dispatcher.batch.transactions:
            self._changed.set()
        if not frames:
            return
        last = frames[-1]
        if last[0] == ord("w"):
            start, end, sent = _XLOG_POSITIONS.unpack_from(last)
            figures.publisher_lsn = max(figures.publisher_lsn, Lsn(max(start, end)))
            figures.received_lsn = max(figures.received_lsn, Lsn(start))
        else:
            end, sent = struct.unpack_from(">xQq", last)
            figures.publisher_lsn = max(figures.publisher_lsn, Lsn(end))
            figures.latest_end_lsn, figures.latest_end_time = Lsn(end), pg_time_to_datetime(sent)
        self._sent_at = sent
        figures.received_lsn = max(figures.received_lsn, dispatcher.position)
        figures.last_msg_send_time = pg_time_to_datetime(sent)
        figures.last_msg_receipt_time = datetime.now(UTC)
        figures.bytes_received += sum(map(len, frames))
        figures.queued_bytes = self._queued()
        figures.stream_txns = dispatcher.stream_txns
        figures.stream_count = dispatcher.stream_count
        figures.stream_bytes = dispatcher.stream_bytes
        self._feedback.note_progress(now)

    def _queued(self) -> int:
        """Return the bytes of data in memory that are received and not yet staged."""
        buffered = self._buffer.memory if self._buffer is not None else 0
        return self.dispatcher.batch.memory + self._staging_memory + buffered

    # stage

    async def _stage_batches(self) -> None:
        while True:
            await self._wait_until(lambda: not self._in_flight.staging)
            batch = await self._due_batch()
            if batch is None:
                await self._staged.put(None)
                return
            await self._staged.put(await self._stage_batch(batch))

    async def _due_batch(self) -> Batch | None:
        """Take the open batch as soon as it is due; return None when receiving has ended and nothing is left."""
        while True:
            self._changed.clear()
            batch = self.dispatcher.batch
            wait = None
            if batch.transactions:
                due_at = self._trigger.due_at(
                    batch,
                    closing=self._draining or self.dispatcher.closing,
                    committing=self._in_flight.committing,
                    sent_at=self._sent_at,
                    last_receive=self._stream.last_receive,
                )
                if due_at is not None:
                    wait = due_at - time.monotonic()
                    if wait <= 0:
                        return self._take_batch()
            elif self._draining:
                return None
            elif self._whole is not None and self._whole.refresh_pending and self._feedback.caught_up:
                await self._whole.refresh_columns(self.dispatcher.position)
            try:
                async with asyncio.timeout(wait):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _take_batch(self) -> Batch:
        batch = self.dispatcher.take()
        self._trigger.closed(batch, time.monotonic())
        self._in_flight.taken += 1
        self._staging_memory = batch.memory
        self._staging_alone = batch.longest >= _LARGE_FRAME
        if self._staging_alone:
            self._receiver.interrupt()
        self._room.set()
        return batch

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait, in the stage task, until `condition` holds; it is looked at again whenever `_changed` is set."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    async def _until_committed(self) -> None:
        """Wait until no batch is in flight except the one being staged."""
        await self._wait_until(lambda: self._in_flight.last_alone)

    async def _until_not_committing(self) -> None:
        """Wait until the commit task is idle: the previous batch is in its tables, and its origin is stored."""
        await self._wait_until(lambda: not self._in_flight.committing)

    async def _stage_batch(self, batch: Batch) -> _StagedBatch:
        """Stage the batch, then release its frames.  If it is cancelled, discard what it has staged."""
        staged = _StagedBatch(batch, [], [], time.monotonic())
        try:
            early = await self._ahead.finish(batch) if self._ahead is not None else None
            if early is not None:
                staged.tables.extend(early)
            else:
                await in_thread(batch.read_messages)
                await self._stage_tables(staged)
            batch.clear_logs()
            self._staging_memory = 0
            self._staging_alone = False
            self._room.set()
            self.figures.queued_bytes = self._queued()
            async with self._using_buffer:
                # On the event loop, not in a thread: frames fed meanwhile use the buffer too.
                for part in batch.large:
                    part.release()
        except BaseException:
            for table in staged.tables:
                discard(table.staged)
            raise
        return replace(staged, staged_at=time.monotonic())

    async def _stage_tables(self, staged: _StagedBatch) -> None:
        """Stage `staged.batch` in a thread; if others turn out to have written a table, record that and stage again."""
        batch, tables = staged.batch, self._tables
        while True:
            destinations = await self._destinations(staged)
            if any(destination.looks_up for some in destinations for destination in some.values()):
                # The table's rows are looked up, so the previous batch must be in it.
                await self._until_not_committing()

            def stage(destinations: Destinations = destinations) -> None:
                if self._isolates:
                    staged_tables, failures = stage_isolating(batch, destinations, self._writers, tables.origin)
                    staged.tables.extend(staged_tables)
                    staged.failures.extend(failures)
                else:
                    staged.tables.extend(stage_batch(batch, destinations, self._writers, tables.origin))

            try:
                await in_thread(stage)
            except WrittenByOthers as found:
                # The previous batch was not staged against these commits either: its own commit must find them first.
                await self._until_not_committing()
                await self._others_wrote(found)
                continue
            except RowInTheWay as found:
                self._tables.look_up(found.destination)
                continue
            self._failed(staged.failures)
            return

    @property
    def _isolates(self) -> bool:
        """Whether a failing table stops alone."""
        return self._whole is not None and self._whole.isolates

    def _failed(self, failures: Sequence[Failure]) -> None:
        if self._whole is not None:
            self._whole.failed(failures)

    async def _others_wrote(self, found: WrittenByOthers) -> None:
        await self._tables.others_wrote(found.destination, found.commits)
        self._writers.forget_others(found.destination.table.path, found.destination.app_id, found.commits[-1].version)

    async def _destinations(self, staged: _StagedBatch) -> Destinations:
        """Return where the batch goes.  With isolation, a table whose destination cannot be found fails alone."""
        while True:
            try:
                return await self._tables.adapt_tables(staged.batch, self._until_committed)
            except PubsubError as error:
                if not self._isolates or not is_own(error):
                    raise
                staged.failures.append(failure(error, staged.batch))
                self._failed(staged.failures)

    # commit

    async def _commit_batches(self) -> None:
        while True:
            item = await self._staged.get()
            if item is None:
                return
            self._in_flight.staged += 1
            self._changed.set()
            batch, tables, failures = item.batch, item.tables, list(item.failures)
            traced: list[TableCommit] | None = [] if tracing.is_on() else None
            try:
                await self._tables.before_commit()
                looked = await self._look(tables)
                # Wait for all, even if one fails: the others still read from their staged files.
                results = await asyncio.gather(
                    *(
                        self._commit(table, traced)
                        for table, error in zip(tables, looked, strict=True)
                        if error is None
                    ),
                    return_exceptions=True,
                )
            finally:
                for table in tables:
                    discard(table.staged)
            for error in (*looked, *results):
                if isinstance(error, PubsubError) and self._isolates and is_own(error):
                    failures.append(failure(error, batch))
                elif error is not None:
                    raise error
            await faults.reached("batch committed")
            if failures and self._whole is not None:
                self._failed(failures)
                await self._whole.stop(failures)
                await faults.reached("tables stopped")
            self._count(batch, tables)
            if traced is not None:
                trace(batch, item.closed_at, item.staged_at, traced, self.figures)
            if batch.rows > _LARGE or allocators.is_due():
                await asyncio.to_thread(allocators.give_back)
            if self._two_phase is not None:
                await self._two_phase.durable(batch.outcomes)
                await faults.reached("outcome durable")
            self._trigger.committed(time.monotonic() - item.closed_at)
            self._feedback.committed(batch.transactions[-1])
            self._changed.set()
            self.boundary.moved()
            await self._feedback.until_stored()
            await self._feedback.report()
            self._in_flight.stored += 1
            self._changed.set()

    async def _look(self, tables: Sequence[StagedTable]) -> Sequence[BaseException | None]:
        """Look whether the tables are as the batch expects; return for each table the error that it failed with, or None.

        Raises StartAgain if one is not, while nothing of the batch is committed: a transaction that a conflict stops is in none of
        its tables.
        """
        if len(tables) == 1 and isinstance(tables[0].staged, DirectStaged):
            return [None]  # its commit looks itself
        looked = await asyncio.gather(*map(self._look_at, tables), return_exceptions=True)
        for error in looked:
            if isinstance(error, StartAgain):
                raise error
        return looked

    async def _look_at(self, table: StagedTable) -> None:
        destination = table.destination
        if destination.window is not None or not await self._tables.may_write(destination):
            return
        async with self._starting_again(destination):
            await look_at_table(self._lane, self._writers, table, self._tables.version(destination.relid))

    @asynccontextmanager
    async def _starting_again(self, destination: Destination) -> AsyncIterator[None]:
        """Have the worker start again if a batch does not find its table as it was when it was staged, or as it expects it."""
        try:
            yield
        except WrittenByOthers as found:
            await self._others_wrote(found)
            raise StartAgain("a table was written by others: the worker starts again from its origin") from found
        except NotAsExpected as found:
            self._tables.look_up(destination)
            raise StartAgain("rows of a table must be looked up: the worker starts again from its origin") from found

    async def _commit(self, table: StagedTable, traced: list[TableCommit] | None = None) -> None:
        destination = table.destination
        if not await self._tables.may_write(destination):
            return
        if destination.window is not None:
            commit = await destination.window.complete(table.staged, table.commit)
            table = replace(table, commit=commit)
        await faults.reached(f"commit {destination.table.relation}")
        began = time.monotonic()
        async with self._starting_again(destination):
            rows = await commit_table(self._lane, table, self._tables.version(destination.relid))
        ended = time.monotonic()
        self.figures.commit_seconds.add(ended - began)
        if traced is not None:
            traced.append(TableCommit(destination.table.relation, began, ended))
        await faults.reached(f"committed {destination.table.relation}")
        self._tables.committed(destination, table.commit.last)
        if rows is not None:
            self.figures.rows[destination.relid] = (table.commit.app_id, rows, table.commit.last)
        if table.conflicts.counts:
            await self._tables.conflicts_found(destination.table.relation, table.conflicts)

    def _count(self, batch: Batch, tables: Sequence[StagedTable]) -> None:
        figures = self.figures
        if figures.behind_since is not None:
            figures.behind_since = time.monotonic()
        figures.batches += 1
        figures.commits += len(tables)
        figures.transactions += len(batch.transactions)
        figures.truncates += len(batch.truncations)
        figures.inserts += sum(table.inserts for table in tables)
        figures.updates += sum(table.updates for table in tables)
        figures.deletes += sum(table.deletes for table in tables)
        figures.batch_rows.add(batch.rows)
        now = pg_now()
        for table in tables:
            changes = figures.changes.setdefault(table.destination.relid, Changes())
            changes.inserts += table.inserts
            changes.updates += table.updates
            changes.deletes += table.deletes
            changes.commits += 1
            changes.last = now
        if tables:
            figures.lag.add(batch.transactions, now)
        logger.debug(
            "batch committed",
            lsn=str(batch.last_lsn),
            transactions=len(batch.transactions),
            rows=batch.rows,
            tables=len(tables),
        )
