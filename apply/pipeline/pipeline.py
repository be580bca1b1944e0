"""The path of a stream into Delta: receive ─► batch ─► stage ─► commit ─► feedback, as three concurrent tasks.

    receive   feeds frames to the open batch and the reorder buffer; stops reading while the batch is full
    stage     takes the open batch when it is due and stages it (in a thread)
    commit    commits the staged tables; then everything up to the batch's end is durable

A batch is due when it reaches `rows` or `nbytes`, or when it is `age` seconds old and no commit is running.  While a
commit runs, the open batch grows, so a backlog makes batches larger, not more numerous.  A stream whose transactions
were sent long after their commit is a backlog from the start; there, age counts only once the stream runs dry.  A large
batch is staged while the one before it commits.  At most one batch is open, one staged or being staged, and one
committing.

Data that is received but not yet staged takes at most `memory` bytes plus one read.  Frames of committed small
transactions take up to half of it in the open batch; the reorder buffer spills to disk whatever exceeds the rest.

Apply and the sync worker's catch-up both use this pipeline, over different `Tables`.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final, assert_never

import structlog

from apply.batch import Batch
from apply.isolation import Failure, failure, is_own, stage_isolating
from apply.metrics import Figures
from apply.pipeline.commit import commit_table
from apply.pipeline.dispatch import Dispatcher
from apply.pipeline.interfaces import Limits, Tables
from apply.staging.destination import Destination, WrittenByOthers
from apply.staging.stage_batch import stage_batch
from apply.staging.staged_table import StagedTable
from apply.staging.stream_ahead import Ahead
from apply.twophase import Preparation, TwoPhase
from pubsub import allocators, faults
from pubsub.concurrency import in_thread
from pubsub.delta.choose_writer import Stage, discard
from pubsub.delta.lanes import Lane
from pubsub.errors import ConnectionFailure, ProgramLimitExceeded, ProtocolViolation, PubsubError, StartAgain
from pubsub.protocol.copyboth import pg_now, pg_time_to_datetime
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.protocol.pgoutput import CommitPrepared, RollbackPrepared
from pubsub.publisher.replication import ReplicationStream
from pubsub.reorderbuffer.buffer import ReorderBuffer

# A batch of this many rows is staged while another commits; a smaller one waits and grows.
_WORTH_STAGING_AHEAD: Final = 50_000
# After a batch of more rows than this, freed memory is returned to the system.
_LARGE: Final = 100_000
# A transaction sent more than this after its commit, in microseconds, belongs to a backlog.
_BACKLOG: Final = 2_000_000
# A backlog's stream has run dry after this long without a frame, in seconds.
_STALLED: Final = 0.25
# How long storing the origin may delay a reply to the publisher, and further reading, in seconds.
_PATIENCE: Final = 1.0
_XLOG_POSITIONS: Final = struct.Struct(">xQQq")

# The reorder buffer gets at least this many bytes, as logical_decoding_work_mem is at least 64 kB.
_LEAST_MEMORY: Final = 64 << 10


log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Ready:
    """A staged batch, and the tables that stop in it."""

    batch: Batch
    prepared: list[StagedTable]
    failures: list[Failure]


class Pipeline:
    """One stream and its tasks.  `flushed` is the LSN up to which everything is durable; it only grows.

    `align_at`: the first batch closes at this LSN if the stream reaches it, so that tables line up again after a crash
    between the commits of one batch.  `stop_at`: `run` ends when everything up to it is durable; nothing after it is
    applied.  The caller closes `buffer`; without a buffer, everything stays in memory and the stream has no
    transactions in progress.  Without `two_phase` the stream has no prepared transactions.  Up to `ahead` transactions
    in progress are staged while they arrive (0: none).
    """

    def __init__(
        self,
        stream: ReplicationStream,
        start: Lsn,
        tables: Tables,
        engine: Lane,
        stage: Stage,
        limits: Limits,
        figures: Figures,
        *,
        buffer: ReorderBuffer | None = None,
        parallel: bool = False,
        ahead: int = 0,
        two_phase: TwoPhase | None = None,
        align_at: Lsn | None = None,
        stop_at: Lsn | None = None,
        skip: Lsn = INVALID_LSN,
    ) -> None:
        # The buffer is not thread-safe: nothing may be released while a thread spills it to disk.
        self._using_buffer = asyncio.Lock()
        self._ahead = Ahead(tables, stage, tables.origin, ahead, self._using_buffer) if ahead else None
        self.dispatcher = Dispatcher(start, buffer, parallel=parallel, skip=skip, ahead=self._ahead)
        self.flushed = start
        self.figures = figures
        self._stream = stream
        self._tables = tables
        self._engine = engine
        self._stage = stage
        self._limits = limits
        self._align_at = align_at
        self._stop_at = stop_at
        self._buffer = buffer
        self._staging_memory = 0
        self._two_phase = two_phase
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._staged: asyncio.Queue[_Ready | None] = asyncio.Queue(1)
        self._staging = asyncio.Semaphore(1)
        self._committing = False
        self._not_committing = asyncio.Event()
        self._not_committing.set()
        self._in_flight = 0
        self._draining = False
        self._stored = start
        self._storing: asyncio.Task[None] | None = None
        self._storing_since = 0.0
        self._left: Sequence[bytes] = ()
        self._sent_at = 0
        # When reading began, or resumed after a wait for room: silence before that is not the publisher's.
        self._reading_since = time.monotonic()
        # Since when the worker has not been reading; None while it waits on the socket.
        self._away_since: float | None = None

    async def run(self) -> None:
        """Run until `stop_at` or `drain`; every transaction received whole is then durable and reported."""
        try:
            async with asyncio.TaskGroup() as group:
                status = group.create_task(self._send_status_regularly())
                preparing = group.create_task(self._prepare_batches())
                committing = group.create_task(self._commit_batches())
                ahead = group.create_task(self._ahead.run()) if self._ahead is not None else None
                await self._receive()
                self._draining = True
                self._changed.set()
                await preparing
                await committing
                status.cancel()
                if ahead is not None:
                    ahead.cancel()
        finally:
            if self._storing is not None:
                self._storing.cancel()
                await asyncio.gather(self._storing, return_exceptions=True)
            if self._ahead is not None:
                await self._ahead.close()
            while not self._staged.empty():
                left = self._staged.get_nowait()
                for prepared in left.prepared if left is not None else ():
                    discard(prepared.staged)
        await self._advance(idle=True)
        await self._until_stored()
        await self._report()

    def drain(self) -> None:
        """Stop receiving; `run` commits what it has received and returns."""
        self._draining = True
        self._changed.set()
        self._room.set()

    # receive

    async def _receive(self) -> None:
        while not self._draining:
            if self._reached_stop():
                return
            if self._full():
                self._room.clear()
                await self._room.wait()
                self._reading_since = time.monotonic()
                continue
            if self.dispatcher.waiting is not None:
                # The open batch had to be taken before this message could be handled.
                await self._settle_prepared()
                continue
            frames = self._left or await self._next_frames()
            if self._drained():
                # Draining began during the wait: the last batch may be closed already.
                return
            if frames:
                self._take(frames)
                await self._spill()
                await self._settle_prepared()
            if self.dispatcher.reply_requested:
                self.dispatcher.reply_requested = False
                await self._advance()
                await self._store_for(_PATIENCE)
                await self._send_status()
            elif not frames:
                await self._advance()

    async def _next_frames(self) -> Sequence[bytes]:
        """Return the next frames, or none after a second of silence (worker.c: LogicalRepApplyLoop).

        Raises ConnectionFailure if the publisher is silent for wal_receiver_timeout.
        """
        self._away_since = None
        try:
            async with asyncio.timeout(1.0):
                return await self._stream.receive()
        except TimeoutError:
            silence = time.monotonic() - max(self._stream.last_receive, self._reading_since)
            limit = self._limits.receiver_timeout
            if limit and silence > limit:
                raise ConnectionFailure(
                    "terminating logical replication worker due to timeout",
                    hint="The publisher sent nothing for wal_receiver_timeout.",
                ) from None
            asks = self._stop_at is not None and self._limits.status_interval
            if (limit and silence > limit / 2) or asks:
                await self._send_status(reply=True)
            return ()
        finally:
            self._away_since = time.monotonic()

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

    async def _settle_prepared(self) -> None:
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
                if dispatcher.must_close_before(kept):
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

    def _take(self, frames: Sequence[bytes]) -> None:
        self._check_sizes(frames)
        now = time.monotonic()
        dispatcher, figures = self.dispatcher, self.figures
        taken = dispatcher.feed(frames, now, stop_at=self._stop_at, pause_at=self._align_at)
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
        figures.stream_txns = dispatcher.stream_txns
        figures.stream_count = dispatcher.stream_count
        figures.stream_bytes = dispatcher.stream_bytes
        self._note_progress(now)

    def _check_sizes(self, frames: Sequence[bytes]) -> None:
        limit = self._limits.message
        if sum(map(len, frames)) > limit and (longest := max(map(len, frames))) > limit:
            raise ProgramLimitExceeded(
                f"the publisher sent a message of {longest} bytes",
                detail=f"The limit is {limit} bytes.",
                hint='Raise "max_message_size" in pubsub.toml, or take the column out of the publication.',
            )

    def _drained(self) -> bool:
        return self._draining

    def _reached_stop(self) -> bool:
        return self._stop_at is not None and self.dispatcher.position >= self._stop_at

    def _full(self) -> bool:
        batch = self.dispatcher.batch
        if not batch.transactions:
            return False
        if self.dispatcher.closing or (self._align_at is not None and batch.last_lsn >= self._align_at):
            return True
        if batch.memory >= self._limits.memory // 2:
            return True
        return batch.rows >= self._limits.rows or batch.nbytes >= self._limits.nbytes

    # stage

    async def _prepare_batches(self) -> None:
        while True:
            await self._staging.acquire()
            batch = await self._due_batch()
            if batch is None:
                await self._staged.put(None)
                return
            await self._staged.put(await self._prepare(batch))

    async def _until_committed(self) -> None:
        """Wait until no batch is in flight except the one being staged."""
        while self._in_flight > 1:
            self._changed.clear()
            await self._changed.wait()

    async def _prepare(self, batch: Batch) -> _Ready:
        """Stage the batch, then release its frames.  If it is cancelled, discard what it has staged."""
        ready = _Ready(batch, [], [])
        try:
            early = await self._ahead.finish(batch) if self._ahead is not None else None
            if early is not None:
                ready.prepared.extend(early)
            else:
                await in_thread(batch.read_messages)
                await self._stage_for(ready)
            batch.clear_logs()
            self._staging_memory = 0
            async with self._using_buffer:
                # On the event loop, not in a thread: frames fed meanwhile use the buffer too.
                for part in batch.large:
                    part.release()
        except BaseException:
            for one in ready.prepared:
                discard(one.staged)
            raise
        return ready

    async def _stage_for(self, ready: _Ready) -> None:
        """Stage `ready.batch` in a thread; if others turn out to have written a table, record that and stage again."""
        batch, tables = ready.batch, self._tables
        while True:
            destinations = await self._destinations(ready)
            if any(destination.contested for destination in destinations.values()):
                # The table's rows are looked up, so the previous batch must be in it.
                await self._not_committing.wait()

            def stage(destinations: Mapping[tuple[str, str], Destination] = destinations) -> None:
                if tables.isolates:
                    prepared, failures = stage_isolating(batch, destinations, self._stage, tables.origin)
                    ready.prepared.extend(prepared)
                    ready.failures.extend(failures)
                else:
                    ready.prepared.extend(stage_batch(batch, destinations, self._stage, tables.origin))

            try:
                await in_thread(stage)
            except WrittenByOthers as found:
                # The previous batch was not staged against these commits either: its own commit must find them first.
                await self._not_committing.wait()
                await self._others_wrote(found)
                continue
            tables.failed(ready.failures)
            return

    async def _others_wrote(self, found: WrittenByOthers) -> None:
        await self._tables.others_wrote(found.destination, found.commits)
        self._stage.forget_others(found.destination.table.path)

    async def _destinations(self, ready: _Ready) -> Mapping[tuple[str, str], Destination]:
        """Return where the batch goes.  With isolation, a table whose destination cannot be found fails alone."""
        while True:
            try:
                return await self._tables.destinations(ready.batch, self._until_committed)
            except PubsubError as error:
                if not self._tables.isolates or not is_own(error):
                    raise
                ready.failures.append(failure(error, ready.batch))
                self._tables.failed(ready.failures)

    async def _due_batch(self) -> Batch | None:
        """Return the open batch as soon as it is due; None when receiving has ended and nothing is left."""
        while True:
            self._changed.clear()
            batch = self.dispatcher.batch
            if not batch.transactions:
                if self._draining:
                    return None
                if self._tables.asked and self._caught_up():
                    await self._tables.settle_columns(self.dispatcher.position)
                await self._changed.wait()
                continue
            wait = None
            if self._draining or self._full():
                wait = 0.0
            elif not self._committing or batch.rows >= _WORTH_STAGING_AHEAD:
                assert batch.opened_at is not None
                due = batch.opened_at + self._limits.age
                if self._behind(batch):
                    # A backlog: the batch grows to its bounds while frames keep coming.
                    due = max(due, self._stream.last_receive + _STALLED)
                wait = due - time.monotonic()
            if wait is not None and wait <= 0:
                if self._align_at is not None and batch.last_lsn >= self._align_at:
                    self._align_at = None
                self._in_flight += 1
                self._room.set()
                self._staging_memory = batch.memory
                return self.dispatcher.take()
            try:
                async with asyncio.timeout(wait):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _behind(self, batch: Batch) -> bool:
        """Tell whether the stream was committed long before it was sent, both by the publisher's clock."""
        return self._sent_at - batch.transactions[-1].commit_time > _BACKLOG

    # commit

    async def _commit_batches(self) -> None:
        while True:
            item = await self._staged.get()
            if item is None:
                return
            self._committing = True
            self._not_committing.clear()
            self._staging.release()
            batch, prepared, failures = item.batch, item.prepared, list(item.failures)
            try:
                await self._tables.before_commit()
                # Wait for all, even if one fails: the others still read from their staged files.
                results = await asyncio.gather(*map(self._commit, prepared), return_exceptions=True)
            finally:
                for table in prepared:
                    discard(table.staged)
            for error in results:
                if isinstance(error, PubsubError) and self._tables.isolates and is_own(error):
                    failures.append(failure(error, batch))
                elif error is not None:
                    raise error
            await faults.reached("batch committed")
            if failures:
                self._tables.failed(failures)
                await self._tables.stop(failures)
                await faults.reached("tables stopped")
            self._count(batch, prepared)
            if batch.rows > _LARGE:
                await asyncio.to_thread(allocators.give_back)
            if self._two_phase is not None:
                await self._two_phase.durable(batch.outcomes)
                await faults.reached("outcome durable")
            self._in_flight -= 1
            self._changed.set()
            self.flushed = max(self.flushed, batch.last_lsn)
            await self._until_stored()
            await self._report()
            self._committing = False
            self._not_committing.set()
            self._changed.set()

    async def _commit(self, prepared: StagedTable) -> None:
        destination = prepared.destination
        if not await self._tables.may_write(destination):
            return
        if destination.window is not None:
            commit = await destination.window.complete(prepared.staged, prepared.commit)
            prepared = replace(prepared, commit=commit)
        await faults.reached(f"commit {destination.table.relation}")
        try:
            rows = await commit_table(self._engine, prepared, self._tables.version(destination.relid))
        except WrittenByOthers as found:
            await self._others_wrote(found)
            raise StartAgain("a table was written by others: the worker starts again from its origin") from found
        await faults.reached(f"committed {destination.table.relation}")
        self._tables.committed(destination, prepared.commit.last)
        if rows is not None:
            self.figures.rows[destination.relid] = (prepared.commit.app_id, rows, prepared.commit.last)
        if prepared.conflicts.counts:
            await self._tables.met(destination.table.relation, prepared.conflicts)

    def _count(self, batch: Batch, prepared: Sequence[StagedTable]) -> None:
        figures = self.figures
        if figures.behind_since is not None:
            figures.behind_since = time.monotonic()
        figures.batches += 1
        figures.commits += len(prepared)
        figures.transactions += len(batch.transactions)
        figures.truncates += len(batch.truncations)
        figures.inserts += sum(p.inserts for p in prepared)
        figures.updates += sum(p.updates for p in prepared)
        figures.deletes += sum(p.deletes for p in prepared)
        if prepared:
            figures.lag.add(batch.transactions, pg_now())
        log.debug(
            "batch committed",
            lsn=str(batch.last_lsn),
            transactions=len(batch.transactions),
            rows=batch.rows,
            tables=len(prepared),
        )

    # feedback

    async def _advance(self, *, idle: bool = False) -> None:
        """If nothing is pending, advance `flushed` to the received position: quiet tables must not hold back WAL."""
        self._note_progress(time.monotonic())
        if self.figures.caught_up and (idle or not self._draining):
            if self._tables.asked:
                self._changed.set()
            position = self.dispatcher.position
            self.flushed = max(self.flushed, position if self._stop_at is None else min(position, self._stop_at))
        await self._store_for(0.0)

    def _note_progress(self, now: float) -> None:
        pending = self._in_flight > 0 or bool(self.dispatcher.batch.transactions)
        self.figures.received(now, caught_up=self._caught_up(), pending=pending)

    def _caught_up(self) -> bool:
        return self.dispatcher.idle and self._in_flight == 0

    async def _until_stored(self) -> None:
        """Wait until the stored origin has reached `flushed`."""
        wanted = self.flushed
        while self._stored < wanted:
            await self._store_for(None)
        await self._after_storing()

    async def _store_for(self, seconds: float | None) -> None:
        """Store the origin; return at most `seconds` after that began (None: when it has ended).  Raises its errors.

        Storing runs as its own task: while the catalog does not answer, replies go on with the origin stored before.
        """
        task = self._storing
        if task is None:
            if self.flushed <= self._stored:
                return
            self._storing_since = time.monotonic()
            task = self._storing = asyncio.create_task(self._store(), name="store origin")
        left = None if seconds is None else max(0.0, self._storing_since + seconds - time.monotonic())
        await asyncio.wait({task}, timeout=left)
        if task.done():
            if self._storing is task:
                self._storing = None
            task.result()

    async def _store(self) -> None:
        # `flushed` may move meanwhile; only what was stored may be reported.
        flushed = self.flushed
        await self._tables.before_commit()
        await self._tables.durable(flushed)
        self._stored = max(self._stored, flushed)
        if self._two_phase is not None:
            await self._two_phase.origin_stored(flushed)
        await self._after_storing()

    async def _after_storing(self) -> None:
        self.figures.flush_lsn = self._stored
        passed = self.dispatcher.passed_skip
        if passed is not None and self._stored >= passed.end:
            self.dispatcher.passed_skip = None
            await self._tables.skip_passed(passed)

    async def _report(self) -> None:
        """Send an unrequested status, except with wal_receiver_status_interval = 0 (worker.c: send_feedback)."""
        if self._limits.status_interval:
            await self._send_status()

    async def _send_status(self, *, reply: bool = False) -> None:
        received = max(self.dispatcher.position, self._stored)
        await self._stream.send_status(received, self._stored, self._stored, reply=reply)

    async def _send_status_regularly(self) -> None:
        """Send status at every interval, and every second while nothing is read.

        The publisher's request for a reply may then lie unread in the socket, and it must not take the worker for dead.
        Without a status interval, status is sent only in that case.
        """
        interval = self._limits.status_interval
        sent = time.monotonic()
        while True:
            await asyncio.sleep(min(interval, 1.0) or 1.0)
            now = time.monotonic()
            away = self._away_since is not None and now - self._away_since >= 1.0
            if away or (interval and now - sent >= interval):
                sent = now
                await self._advance()
                await self._send_status()
