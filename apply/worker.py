"""The apply worker of a subscription (worker.c: ApplyWorkerMain, LogicalRepApplyLoop).

It starts at the origin, drops the transactions that the tables already hold, and runs the pipeline until it is drained
or fails; the launcher starts it again.  Tables whose initial copy is under way belong to their sync workers
(handover.py).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from apply import publisher_identity
from apply.gap import fill
from apply.handover import Handover
from apply.last_commit import check_last_commit, streams_from
from apply.pipeline.interfaces import Course, Limits, Stream
from apply.pipeline.pipeline import Pipeline
from apply.promotion import Promotion
from apply.publisher_identity import PublisherLost, Standing
from apply.schema_changes.follow import Follower, Publisher
from apply.snapshot_point import SnapshotPoint, snapshot_point
from apply.staging.destination import Destination
from apply.staging.staged_table import StagedTable
from apply.tables import ApplyTables, OnUnknownTables
from apply.twophase import PreparedStore, TwoPhase
from apply.worker_statistics import Figures
from catalog.figures import Warned
from catalog.records import Subscription
from catalog.store import Catalog
from pubsub import faults
from pubsub.delta.log.transactions import Transactions
from pubsub.delta.spark.engine import Engine
from pubsub.delta.table import Commit
from pubsub.delta.writers.changeset import Folded
from pubsub.delta.writers.choose_writer import TableWriters
from pubsub.errors import NotInPrerequisiteState, PublisherError, StartAgain
from pubsub.protocol import commands
from pubsub.protocol.binary.single_values import BinaryTypes
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.publisher import definitions, replication, slots
from pubsub.publisher.connection import Connection
from pubsub.publisher.replication import SystemIdentity
from pubsub.publisher.slots import SlotInfo
from pubsub.reorderbuffer.buffer import ReorderBuffer
from pubsub.settings import Settings

logger = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Start:
    """Where a worker starts, and what it found: of the publisher, and of the subscription as the catalog has it."""

    subscription: Subscription
    origin: Lsn
    streams_from: Lsn
    """Where the stream is to begin: everything up to there is in Delta, and nothing else up to the origin was published."""
    identity: SystemIdentity
    began: Lsn | None
    slot: SlotInfo | None
    promotion: Promotion
    two_phase: TwoPhase
    begins: Lsn
    """Where the stream must begin at the latest; 0 if it may begin anywhere (Standing.begins)."""
    gap: fill.Gap | None
    """What the slot does not keep, if that can be decoded from an archive."""

    @property
    def sent_from(self) -> Lsn:
        """The stream has every commit from here on, and no earlier one."""
        if self.gap is not None:
            return self.gap.begins
        return INVALID_LSN if self.slot is None else self.slot.confirmed_flush_lsn or INVALID_LSN


class ApplyWorker:
    """One subscription's apply worker.  `figures` may be read at any time."""

    def __init__(
        self,
        subscription: Subscription,
        *,
        node_id: str,
        catalog: Catalog,
        engine: Engine,
        writers: TableWriters,
        handover: Handover,
        settings: Settings,
        on_unknown_tables: OnUnknownTables = lambda _: None,
    ) -> None:
        self.figures = Figures()
        self.streaming = False
        """Whether the publisher has started streaming."""
        self._subscription = subscription
        self._node_id = node_id
        self._catalog = catalog
        self._engine = engine
        self._writers = writers
        self._handover = handover
        self._settings = settings
        self._tables = ApplyTables(
            catalog,
            node_id,
            subscription,
            handover,
            follower(catalog, subscription, engine.transactions),
            on_unknown_tables,
        )
        self._tables_changed = asyncio.Event()
        self._broken = asyncio.Event()
        self._drain = asyncio.Event()
        # Set when the publisher warns that it skipped a publication.
        self._skipped = asyncio.Event()
        self._pipeline: Pipeline | None = None
        self._one_point_at_a_time = asyncio.Lock()
        # What the slot did not keep is applied, and it keeps what comes.
        self._filled = False
        # This worker has requested two-phase commit, which `_subscription`, read earlier, does not show yet.
        self._enabling = False
        self._origin = INVALID_LSN

    async def run(self) -> None:
        """Run until drained or at `stop_lsn`.  Raises PubsubError; StartAgain if only its decisions are stale.

        The steps' order is what makes them right: a killed daemon's JVM may still be committing, so it must be gone before
        versions are read; the publisher is compared with what the tables hold before anything is received from it.
        """
        slot_name = self._slot_name()
        with self.figures.waits_for("an earlier daemon's JVM to end"):
            await self._engine.fence()
        with self.figures.waits_for("a connection to the publisher"):
            connected = await Connection.connect(
                self._subscription.conninfo, replication=True, application_name=self._subscription.name
            )
        async with connected as connection:
            connection.on_warning = self._warned
            start = await self._look(connection, slot_name)
            filler = fill.Filler(start.subscription, slot_name, start.gap) if start.gap is not None else None
            if filler is not None and filler.reads_nothing:
                made = await filler.make_slot()
                raise StartAgain(
                    f"the slot is made anew, and begins at {made.consistent_point}; no table lacks what is before"
                )
            stream, options = await self._start(connection, slot_name, start, filler)
            if filler is None and start.slot is None:
                raise StartAgain(f'replication slot "{slot_name}" has been made: where it begins is looked at')
            try:
                buffer = await asyncio.to_thread(open_buffer, self._settings, str(start.subscription.oid))
                self._pipeline = pipeline = self._pipeline_of(stream, start, options, buffer)
                logger.info("apply worker has started", subscription=start.subscription.name, lsn=str(start.origin))
                if await self._follow(pipeline, buffer, start.promotion, filler):
                    await stream.close()
                    await self._disable_at_stop(pipeline.flushed)
                if self._filled:
                    raise StartAgain("the gap is filled: the apply worker starts again from its slot")
            finally:
                if filler is not None:
                    await stream.close()

    def _slot_name(self) -> str:
        if self._subscription.slot_name is None:
            raise NotInPrerequisiteState(
                f'subscription "{self._subscription.name}" has no replication slot',
                hint="Give it one with ALTER SUBSCRIPTION … SET (slot_name = …).",
            )
        return self._subscription.slot_name

    async def _look(self, connection: Connection, slot_name: str) -> _Start:
        """Read what the tables hold, and compare the publisher with it.  Raises what publisher_identity raises."""
        relations = self._tables.relations
        stored = await self._catalog.subscription(self._subscription.oid)
        subscription = publisher_identity.followed(self._subscription, stored)
        promotion = self._tables.promotion = Promotion(self._catalog, subscription, slot_name, subscription.name)
        await promotion.begin(connection)
        identity = await publisher_identity.check_system(connection, subscription)
        await relations.load()
        origin = await self._catalog.origin(subscription.oid)
        slot = await slots.slot_info(connection, slot_name)
        two_phase = TwoPhase(
            PreparedStore(prepared_directory(self._settings, subscription.oid)),
            self._catalog,
            subscription.oid,
            relations.hold,
        )
        held = max(origin, relations.held, await relations.held_by_copies())
        prepared = await two_phase.greatest()
        continues_at = subscription.options.continues_at
        standing = Standing(origin, held, relations.any_copied, prepared, relations.least_synchronized, continues_at)
        await publisher_identity.check_publications(connection, subscription)
        # A standby's WAL is not decoded here: its slots are made and lost as the primary's.
        gap = None if promotion.standby else fill.find(subscription, identity, slot, standing)
        try:
            began = await publisher_identity.check_position(
                connection, subscription, identity, slot if gap is None else None, standing, standby=promotion.standby
            )
            last = await self._catalog.last_commit(subscription.oid)
            await check_last_commit(connection, subscription, identity, last, origin)
        except PublisherLost as error:
            await self._catalog.set_publisher_lost(subscription.oid, error.lsn)
            raise
        begin = streams_from(subscription, identity, slot if gap is None else None, last, origin)
        return _Start(subscription, origin, begin, identity, began, slot, promotion, two_phase, standing.begins, gap)

    async def _start(
        self, connection: Connection, slot_name: str, start: _Start, filler: fill.Filler | None
    ) -> tuple[Stream, Mapping[str, str]]:
        """Start streaming, from the slot or what fills its gap; return the stream, and the options that it was asked for with."""
        subscription, relations = start.subscription, self._tables.relations
        # Requested only once, as the slot remembers it (worker.c: run_apply_worker).
        enable = filler is None and subscription.options.two_phase_state == "p" and relations.all_ready
        # A slot remembers that it was enabled, a decoder is told.
        told = enable or (filler is not None and subscription.options.two_phase_state == "e")
        options = stream_options(subscription, connection.server_version, two_phase=told)
        await start.two_phase.recover(start.origin, anew=not relations.any_copied)
        if not start.promotion.standby:
            await start.two_phase.compare(connection)
        self._tables.types = await binary_types(subscription, connection)
        stream: Stream
        if filler is not None:
            with self.figures.waits_for("the place in the WAL archive where its slot's gap begins to be found"):
                patience = limits(subscription, self._settings).receiver_timeout
                stream = await filler.start(options, self._settings, patience, self._warned)
        else:
            try:
                stream = await replication.start(connection, slot_name, start.streams_from, options)
            except PublisherError as error:
                standby = start.promotion.standby
                known = await publisher_identity.explained(connection, error, start.slot, standby=standby)
                if isinstance(known, publisher_identity.SlotLost):
                    known.copies = start.begins != INVALID_LSN
                raise known from error
        has_changed = await publisher_identity.remember(
            self._catalog, subscription, start.identity, start.began, start.sent_from
        )
        if has_changed:
            logger.info(
                "publisher has another identity",
                subscription=subscription.name,
                system_identifier=start.identity.system_identifier,
                timeline=start.identity.timeline,
            )
        self.streaming = True
        self._origin = start.origin
        if enable:
            self._enabling = True
            logger.info("two-phase commit is enabled", subscription=subscription.name)
            await self._catalog.alter_subscription(
                subscription.oid, options=lambda stored: replace(stored, two_phase_state="e")
            )
        return stream, options

    def _pipeline_of(
        self, stream: Stream, start: _Start, options: Mapping[str, str], buffer: ReorderBuffer
    ) -> Pipeline:
        subscription, greatest = start.subscription, self._tables.relations.greatest_version
        return Pipeline(
            stream,
            Course(
                start.streams_from,
                start.sent_from,
                align_at=greatest if greatest > start.streams_from else None,
                stop_at=subscription.options.stop_lsn,
                skip=subscription.skip_lsn,
            ),
            self._tables,
            self._engine.lane(),
            self._writers,
            limits(subscription, self._settings),
            self.figures,
            whole=self._tables,
            buffer=buffer,
            parallel=commands.streams_in_parallel(options),
            ahead=self._ahead(),
            two_phase=start.two_phase,
            timers=ReloadedTimers(subscription, self._settings),
        )

    async def _follow(
        self, pipeline: Pipeline, buffer: ReorderBuffer, promotion: Promotion, filler: fill.Filler | None
    ) -> bool:
        """Apply the stream, beside what watches tables, publications and this worker; return False if it was to end before.

        With `filler`, until the gap is filled.
        """
        self._tables.relations.keep_promises()
        self._handover.attach(self)
        try:
            if self._drain.is_set():
                return False
            async with asyncio.TaskGroup() as group:
                watching = [
                    group.create_task(self._follow_tables(may_enable=filler is None)),
                    group.create_task(self._fail_when_broken()),
                    group.create_task(self._watch_publications()),
                ]
                if filler is not None:
                    watching.append(group.create_task(self._fill(filler, pipeline)))
                await self._stream(pipeline, filler)
                for task in watching:
                    task.cancel()
            return True
        finally:
            self._handover.detach()
            await asyncio.to_thread(buffer.close)
            await promotion.close()

    async def _stream(self, pipeline: Pipeline, filler: fill.Filler | None) -> None:
        try:
            await pipeline.run()
        except* PublisherError as group:
            if len(group.exceptions) == 1 and isinstance(error := group.exceptions[0], PublisherError):
                if filler is not None:
                    raise await filler.explained(error) from error
                raise publisher_identity.explained_stream(error) from error
            raise

    async def _fill(self, filler: fill.Filler, pipeline: Pipeline) -> None:
        """Have the pipeline end once the slot keeps everything that it has not applied."""
        with self.figures.waits_for("its slot's gap to be filled from the WAL archive"):
            await filler.run(pipeline)
        self._filled = True
        pipeline.drain()

    async def _watch_publications(self) -> None:
        """After a warning that a publication was skipped, stop receiving (UndefinedObject) if it is still missing."""
        while True:
            await self._skipped.wait()
            self._skipped.clear()
            subscription = self._subscription
            async with await Connection.connect(subscription.conninfo, application_name=subscription.name) as other:
                await publisher_identity.check_publications(other, subscription)

    async def _disable_at_stop(self, flushed: Lsn) -> None:
        """If everything up to `stop_lsn` is durable, disable the subscription until it is enabled with another one."""
        stop = self._subscription.options.stop_lsn
        if stop is not None and flushed >= stop:
            stored = await self._catalog.subscription(self._subscription.oid)
            if stored.options.stop_lsn != stop:
                return  # it was changed while this worker ran to the old one
            logger.info(
                "subscription has reached stop_lsn, and is disabled",
                subscription=self._subscription.name,
                lsn=str(stop),
            )
            await self._catalog.set_enabled(self._subscription.oid, False)

    def _ahead(self) -> int:
        """Return how many streamed transactions to stage as they arrive: none with two-phase commit."""
        options = self._subscription.options
        if options.streaming != "parallel" or options.two_phase_state != "d" or self._enabling:
            return 0
        return self._settings.max_parallel_apply_workers_per_subscription

    def drain(self) -> None:
        """Stop receiving; `run` returns once everything received is committed and reported."""
        self._drain.set()
        self._tables.drain()
        if self._pipeline is not None:
            self._pipeline.drain()

    def wait(self, now: float) -> Warned | None:
        """Return what the worker waits for, if it has for long enough to be reported.  `now`: time.monotonic()."""
        return self.figures.wait(now) or self._tables.wait(now)

    # Between two batches

    @asynccontextmanager
    async def snapshot_point(self, *, at: Lsn | None = None, halts: bool = False) -> AsyncIterator[SnapshotPoint]:
        """Hold an LSN at which publisher and tables can both be read (apply.snapshot_point), while the body runs.

        With `halts` the body begins when the tables hold everything up to it, and they hold nothing else until it ends.
        Raises NotInPrerequisiteState if the worker does not stream, and as apply.snapshot_point does.
        """
        async with self._one_point_at_a_time:
            pipeline = self._pipeline
            if pipeline is None or not self.streaming:
                raise NotInPrerequisiteState(
                    f'the apply worker of subscription "{self._subscription.name}" does not stream yet',
                    hint="pubsub status says what it waits for.",
                )
            point = snapshot_point(pipeline.boundary, self._subscription, self._node_id, at=at, halts=halts)
            async with point as found:
                if not halts:
                    yield found
                    return
                async with pipeline.boundary.standing_at(found.lsn):
                    await faults.reached("standing at a point")
                    yield found

    async def destination(self, relid: int) -> Destination | None:
        """Return where a table's rows go; None for a table that is not ready, has stopped, or has left."""
        await self._tables.relations.load()
        return await self._tables.ready_destination(relid)

    async def replace_rows(self, destination: Destination, folded: Folded, at: Lsn) -> None:
        """Commit a change of the table's rows, which it has at `at`, where it is held by `snapshot_point`.

        The commit has the position `at`: whatever ends up to there is in the table, so nothing is lost and nothing comes twice
        if the worker is killed before or after it.  A failure leaves the table as it was, or makes the worker start again.
        """
        assert self._pipeline is not None
        if self._tables.version(destination.relid) >= at:
            raise NotInPrerequisiteState(f'table "{destination.table.relation}" is past {at}')
        staged = await asyncio.to_thread(self._writers.write, destination.table, folded, replace_all=False)
        record = Commit(destination.app_id, at, at, source=destination.table.whose)
        try:
            await self._pipeline.commit_between(StagedTable(destination, staged, record, 0, 0, 0))
        except BaseException:
            # Whether it was made is found out by reading the table's version again.
            self.start_again()
            raise

    def _warned(self, warning: PublisherError) -> None:
        logger.warning(
            "publisher warns", subscription=self._subscription.name, reason=warning.message, detail=warning.detail
        )
        skipped = publisher_identity.skipped_publication(warning)
        if skipped is not None:
            self.figures.warn(skipped, math.inf)
            self._skipped.set()
        else:
            self.figures.warn(Warned(warning.message, warning.detail, warning.hint), time.monotonic())

    # handover.Applying

    def answer(self, relid: int, at: Lsn) -> Lsn:
        """See handover.Applying."""
        assert self._pipeline is not None
        # The stream may begin before the origin, of which nothing is applied again (streams_from).
        return self._tables.relations.promise(relid, at, max(self._pipeline.dispatcher.decided, self._origin))

    def start_again(self) -> None:
        """See handover.Applying."""
        self._broken.set()

    def tables_changed(self) -> None:
        """Read the catalog again: its list of tables, or a table's state, has changed."""
        self._tables_changed.set()

    async def _follow_tables(self, *, may_enable: bool) -> None:
        """Read the tables whenever they may have changed.  `may_enable`: the next worker would enable two-phase commit."""
        relations = self._tables.relations
        pending = may_enable and self._subscription.options.two_phase_state == "p" and not self._enabling
        while True:
            await relations.load()
            await self._tables.store_ready()
            await self._tables.begin_refresh()
            if pending and relations.all_ready:
                raise StartAgain("all tables are ready: the apply worker starts again with two-phase commit")
            await self._tables_changed.wait()
            self._tables_changed.clear()

    async def _fail_when_broken(self) -> None:
        await self._broken.wait()
        raise StartAgain("a table is copied again: the apply worker starts again from its origin")


def follower(catalog: Catalog, subscription: Subscription, transactions: Transactions) -> Follower | None:
    """Return the Follower that alters tables as the publisher's are altered; None under schema_changes = refuse."""
    if subscription.options.schema_changes == "refuse":
        return None
    return Follower(catalog, subscription, Publisher(subscription), transactions)


def stream_options(subscription: Subscription, server_version: int, *, two_phase: bool = False) -> dict[str, str]:
    """Return pgoutput's options; with `two_phase`, the slot enables two-phase commit."""
    return commands.pgoutput_options(
        server_version,
        subscription.publications,
        streaming=subscription.options.streaming,
        binary=subscription.options.binary,
        origin="none" if subscription.options.origin == "none" else "any",
        two_phase=two_phase,
    )


async def binary_types(subscription: Subscription, connection: Connection) -> BinaryTypes:
    """Return the decoders for binary transfer.  If the subscription uses it, ask about user-defined types, too."""
    return await definitions.binary_types(connection) if subscription.options.binary else BinaryTypes()


def prepared_directory(settings: Settings, subid: int) -> Path:
    """Return the directory where a subscription's prepared transactions wait for their outcome."""
    return settings.home / "prepared" / str(subid)


def open_buffer(settings: Settings, worker: str) -> ReorderBuffer:
    """Open the reorder buffer of the worker of this name, which must be unique.  Blocks.  Raises FileFailure."""
    return ReorderBuffer(settings.spill_directory / worker, settings.logical_decoding_work_mem)


@dataclass(frozen=True, slots=True)
class ReloadedTimers:
    """A connection's timers as the subscription and the node's settings say now: a reload changes these in place."""

    subscription: Subscription
    settings: Settings

    @property
    def status_interval(self) -> float:
        """The seconds between reports; 0: none unless asked for."""
        return self.settings.wal_receiver_status_interval

    @property
    def receiver_timeout(self) -> float:
        """The seconds of silence after which a publisher is given up; 0: never."""
        own = self.subscription.options.wal_receiver_timeout
        return self.settings.wal_receiver_timeout if own is None else own


def limits(subscription: Subscription, settings: Settings) -> Limits:
    """Return a pipeline's limits from the subscription's options and the node's settings."""
    options, timers = subscription.options, ReloadedTimers(subscription, settings)
    return Limits(
        rows=options.batch_rows,
        nbytes=options.batch_bytes,
        age=options.batch_age,
        status_interval=timers.status_interval,
        receiver_timeout=timers.receiver_timeout,
        memory=settings.logical_decoding_work_mem,
        message=settings.max_message_size,
    )
