"""Synchronize one table: its sync worker (tablesync.c: LogicalRepSyncTableStart, process_syncing_tables_for_sync).

    i ─► d   create a slot of its own, and copy its exported snapshot by a Spark job; finished chunks are kept
      ─► f   the copy is committed at the slot's consistent point; if it was resumed under another snapshot,
             follow the slot until the table is whole (window)
      ─► w   tell apply the position; apply answers with the LSN to reach
      ─► c   follow the slot exactly up to that LSN
      ─► s   store it; the slot is dropped, and apply takes over

After a crash in `f` the next worker continues from there; in `d` it keeps the finished chunks and copies the others
under a new snapshot.  If that is not possible, or the slot is gone, it starts over with a new slot, snapshot and
generation, and logs why.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import structlog

from apply.batch import Batch
from apply.conflicts import Conflicts
from apply.handover import Handover
from apply.isolation import Failure
from apply.metrics import Figures
from apply.pipeline.dispatch import PassedSkip
from apply.pipeline.pipeline import Pipeline
from apply.promotion import Promotion
from apply.publisher_identity import check_system, is_followed
from apply.schema_changes.diff import CopyAgain
from apply.schema_changes.follow import Columns, Follower, load
from apply.schema_changes.table_definition import described_json, target_table
from apply.staging.destination import Destination
from apply.tables import count_conflicts, note_others
from apply.worker import binary_types, follower, limits, open_buffer, stream_options
from catalog.records import CopyPlan, Subscription, SubscriptionRel
from catalog.states import RelState
from catalog.store import Catalog
from pubsub import faults
from pubsub.delta import table as delta
from pubsub.delta.choose_writer import Stage
from pubsub.delta.engine import Engine
from pubsub.delta.log import OtherCommit
from pubsub.delta.table import Commit, TargetTable
from pubsub.errors import NotInPrerequisiteState, UndefinedTable
from pubsub.protocol import commands
from pubsub.protocol.binary.values import BinaryTypes
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.protocol.pgoutput import Relation
from pubsub.publisher import definitions, publication, replication, slots, snapshots
from pubsub.publisher.connection import Connection
from pubsub.publisher.definitions import TableDefinition
from pubsub.publisher.publication import PublishedTable
from pubsub.settings import Settings
from pubsub.sql.identifiers import quote_literal
from pubsub.sql.typechoices import TypeChoices
from tablesync import copyjob
from tablesync.progress import follow_progress
from tablesync.resume import Conditions, conditions
from tablesync.window import Window

log = structlog.get_logger()


def sync_slot_name(subid: int, relid: int, node_id: str) -> str:
    """Return the name of a sync worker's slot (tablesync.c: ReplicationSlotNameForTablesync)."""
    return f"pg_{subid}_sync_{relid}_{node_id}"


@dataclass(frozen=True, slots=True)
class Described:
    """The publisher's table as one transaction sees it."""

    definition: TableDefinition
    target: TargetTable
    source: copyjob.CopySource
    conditions: Conditions


class SyncWorker:
    """Takes one table from i to s.  `figures` may be read at any time."""

    def __init__(
        self,
        subscription: Subscription,
        relation: SubscriptionRel,
        *,
        node_id: str,
        catalog: Catalog,
        engine: Engine,
        stage: Stage,
        handover: Handover,
        settings: Settings,
    ) -> None:
        self.relation = relation
        """The table as of the worker's last read of the catalog."""
        self.figures = Figures()
        self.to_blame = False
        """Whether the failure is the table's own, and not one that other tables would have, too."""
        self.snapshot_lsn: Lsn | None = None
        """The LSN of the copy's snapshot, once known."""
        self._subscription = subscription
        self._node_id = node_id
        self._catalog = catalog
        self._engine = engine
        self._stage = stage
        self._handover = handover
        self._settings = settings
        self._slot = sync_slot_name(subscription.oid, relation.relid, node_id)
        self._pipeline: Pipeline | None = None

    async def run(self) -> None:
        """Run until the table is in s and its slot is dropped.  Raises PubsubError and Spark's errors."""
        with self.figures.waits_for("an earlier daemon's JVM to end"):
            await self._engine.fence()
        # The launcher may have read the catalog before the previous worker was done.
        relation = await self._catalog.relation(self._subscription.oid, self.relation.relid)
        if relation is None:
            return
        self.relation = relation
        self.snapshot_lsn = relation.lsn
        if relation.stopped:
            # The table stopped alone; its slot must not hold back the publisher's WAL.
            if relation.sync_slot is not None:
                await self._drop_slot()
            return
        if relation.state in (RelState.SYNCDONE, RelState.READY):
            if relation.definition is None:
                await self._make_target()
            # The worker that stored s may have failed before it could tell apply.
            self._handover.synced(relation.relid)
            if relation.sync_slot is not None:
                await self._drop_slot()
            return
        there = await self._slot_is_there()
        if there is None:
            return
        if relation.state is RelState.INIT or not there:
            await self._copy()
        elif relation.state is RelState.DATASYNC:
            await self._go_on()
        try:
            if await self._catch_up():
                await self._drop_slot()
        except BaseExceptionGroup as errors:
            again = errors.subgroup(CopyAgain)
            if again is None:
                raise
            await self._catalog.set_relation_state(self._subscription.oid, relation.relid, RelState.INIT)
            log.info("table is copied again", relation=relation.qualified_name, reason=_reason(again))

    def drain(self) -> None:
        """End the catch-up soon; the next worker does the rest."""
        if self._pipeline is not None:
            self._pipeline.drain()

    async def _make_target(self) -> None:
        """Create the Delta table of a table that joined without a copy, and store its definition."""
        async with await self._connect(replication=False) as connection:
            # The definition includes all alterations up to here.
            since = await slots.current_wal_lsn(connection)
            await connection.execute(snapshots.BEGIN)
            _, definition, target = await self._described(connection)
            await connection.execute("COMMIT")
        with self._blaming():
            await self._prepare_target(target)
            await asyncio.to_thread(delta.check_columns, target)
        await self._catalog.set_relation_definition(
            self._subscription.oid,
            self.relation.relid,
            described_json(target, definition, since),
            definition.estimated_rows,
        )

    async def _connect(self, *, replication: bool) -> Connection:
        with self.figures.waits_for("a connection to the publisher"):
            return await Connection.connect(
                self._subscription.conninfo, replication=replication, application_name=self._slot
            )

    async def _start_spark(self) -> None:
        with self.figures.waits_for("Spark to start"):
            await self._engine.start()

    async def _slot_is_there(self) -> bool | None:
        """Tell whether the sync slot exists and is valid; None if apply does not, or not yet, follow this publisher."""
        async with await self._connect(replication=True) as connection:
            subscription = await self._catalog.subscription(self._subscription.oid)
            identity = await check_system(connection, subscription)
            if not await is_followed(self._catalog, subscription, identity, self._settings.wal_retrieve_retry_interval):
                return None
            slot = await slots.slot_info(connection, self._slot)
        return slot is not None and slot.wal_status != "lost" and slot.invalidation_reason is None

    async def _drop_slot(self) -> None:
        async with await self._connect(replication=True) as connection:
            await replication.drop_slot(connection, self._slot, missing_ok=True, wait=True)
        await self._catalog.set_sync_slot(self._subscription.oid, self.relation.relid, None)

    def _app_id(self, generation: int) -> str:
        return delta.application_id(self._node_id, self._subscription.oid, self.relation.relid, generation)

    # d

    async def _copy(self) -> None:
        """Copy from the beginning: create a new slot, and copy all chunks under its snapshot."""
        subscription, relation = self._subscription, self.relation
        earlier = await self._catalog.copy_plan(subscription.oid, relation.relid)
        # The connection that exported the snapshot stays open and idle until every range has imported it.
        async with await self._connect(replication=True) as exporter:
            await check_system(exporter, await self._catalog.subscription(subscription.oid))
            await replication.drop_slot(exporter, self._slot, missing_ok=True, wait=True)
            await faults.reached(f"init {relation.qualified_name}")
            generation = await self._catalog.begin_copy(subscription.oid, relation.relid, sync_slot=self._slot)
            self._handover.new_copy(relation.relid)
            self._stage.forget(relation.path)
            await faults.reached(f"datasync {relation.qualified_name}")
            # Be patient: if the monitor can ask the publisher, its report of what creation waits for is more exact.
            with self.figures.waits_for("its replication slot to be created", patience=10):
                created = await replication.create_slot(
                    exporter, self._slot, snapshot="export", failover=subscription.options.failover
                )
            assert created.snapshot_name is not None
            self.snapshot_lsn = created.consistent_point
            await faults.reached(f"slot created {relation.qualified_name}")
            async with await self._connect(replication=False) as connection:
                await connection.execute(snapshots.BEGIN)
                await connection.execute(f"SET TRANSACTION SNAPSHOT {quote_literal(created.snapshot_name)}")
                table = await self._seen(connection, created.snapshot_name, created.consistent_point)
                visible = await snapshots.visible(connection)
            with self._blaming():
                await self._prepare_target(table.target)
            rows = table.definition.estimated_rows
            described = described_json(table.target, table.definition, created.consistent_point)
            await self._catalog.set_relation_definition(subscription.oid, relation.relid, described, rows)
            version, writable = await asyncio.to_thread(
                copyjob.begin, table.target, earlier, self._app_id(earlier.generation if earlier else 0)
            )
            blocks = table.definition.pages if table.source.only else None
            small = table.source.bytes < copyjob.LEAST_JOB_BYTES
            if not small:
                await self._start_spark()
            plan = CopyPlan(
                generation=generation,
                start=created.consistent_point,
                until=created.consistent_point,
                version=version,
                edges=copyjob.edges(blocks, 1 if small else await self._engine.run(copyjob.parallelism)),
                snapshot=visible,
                fingerprint=table.conditions.fingerprint if writable else None,
                attempts=(str(uuid.uuid4()),),
            )
            await self._catalog.put_copy_plan(subscription.oid, relation.relid, plan)
            await faults.reached(f"copy planned {relation.qualified_name}")
            log.info("copy has started", relation=relation.qualified_name, lsn=str(plan.start))
            await self._copy_rows(plan, table.source, table.target, rows)

    async def _go_on(self) -> None:
        """Resume an earlier worker's copy with its finished chunks; start over if that is not possible."""
        subscription, relation = self._subscription, self.relation
        plan = await self._catalog.copy_plan(subscription.oid, relation.relid)
        if plan is None or plan.generation != relation.copy_generation:
            await self._copy()
            return
        held = await asyncio.to_thread(delta.committed_lsn, relation.path, self._app_id(plan.generation))
        if held is not None:
            if held != plan.start:
                raise NotInPrerequisiteState(
                    f'the Delta table of "{relation.qualified_name}" holds a copy that another process has made',
                    detail=f"That was taken at {held}, this node's at {plan.start}.",
                    hint="End the other process; ALTER SUBSCRIPTION … RESYNC TABLE then copies the table anew.",
                )
            await self._copied(plan)
            return
        async with await self._connect(replication=False) as holder:
            await holder.execute(snapshots.BEGIN)
            snapshot = await snapshots.export(holder)
            until = await snapshots.end_of_wal(holder)
            table = await self._seen(holder, snapshot, until)
            kept = 0
            if plan.fingerprint is not None:
                kept = len(await asyncio.to_thread(copyjob.kept, table.target, plan, self._app_id(plan.generation)))
            obstacle = table.conditions.obstacle(plan, kept)
            if obstacle is None:
                if await snapshots.lacks(holder, plan.snapshot):
                    raise NotInPrerequisiteState(
                        f'the copy of table "{relation.qualified_name}" can not go on yet',
                        detail="A transaction that it has seen is not visible to others: it waits for a synchronous standby.",
                    )
                plan = replace(
                    plan,
                    until=max(plan.until, until),
                    attempts=(*plan.attempts, str(uuid.uuid4())),
                )
                await self._catalog.put_copy_plan(subscription.oid, relation.relid, plan)
                log.info(
                    "copy goes on",
                    relation=relation.qualified_name,
                    lsn=str(plan.start),
                    chunks=f"{kept} of {len(plan.edges)}",
                )
                await faults.reached(f"copy goes on {relation.qualified_name}")
                await self._copy_rows(plan, table.source, table.target, table.definition.estimated_rows)
                return
        log.warning("copy starts over", relation=relation.qualified_name, reason=obstacle)
        await self._copy()

    async def _copy_rows(
        self, plan: CopyPlan, source: copyjob.CopySource, target: TargetTable, rows: int | None
    ) -> None:
        await self._catalog.prove()
        until = plan.until if plan.until > plan.start else None
        record = Commit(self._app_id(plan.generation), plan.start, plan.start, until)
        if await self._copy_here(plan, source, target, record):
            return
        await self._start_spark()
        while not await self._copy_by_job(plan, source, target, record, rows):
            # Again under the same snapshot: finished chunks stay.
            plan = replace(plan, attempts=(*plan.attempts, str(uuid.uuid4())))
            await self._catalog.put_copy_plan(self._subscription.oid, self.relation.relid, plan)
        await faults.reached(f"copy committed {self.relation.qualified_name}")
        await self._copied(plan)

    async def _copy_by_job(
        self, plan: CopyPlan, source: copyjob.CopySource, target: TargetTable, record: Commit, rows: int | None
    ) -> bool:
        """Copy by a Spark job; return False if a task met a lock on the publisher.

        Wait first, outside Spark's places, for a lock that is already held.
        """
        async with await self._connect(replication=False) as connection:
            with self.figures.waits_for("a lock on the publisher"):
                await connection.execute(copyjob.wait_sql(source))
        try:
            async with follow_progress(
                self._catalog, self._subscription, self.relation, rows, self._slot, self._engine
            ) as done:
                with self._blaming():
                    await self._engine.run(copyjob.copy, source, target, record, done, plan)
        except Exception as error:
            if not copyjob.was_locked(error):
                raise
            self.to_blame = False
            log.info("copy met a lock on the publisher, and waits", relation=self.relation.qualified_name)
            return False
        return True

    async def _copy_here(self, plan: CopyPlan, source: copyjob.CopySource, target: TargetTable, record: Commit) -> bool:
        """Copy a small table without Spark; return False if it takes a Spark job."""
        cut = copyjob.Cut()
        with self._blaming():
            rows = await self._engine.run_until_told(cut, copyjob.copy_here, source, target, record, plan, cut)
        if rows is None:
            return False
        await self._catalog.put_copy_progress(self._subscription.oid, self.relation.relid, rows, rows, finished=True)
        await faults.reached(f"copy committed {self.relation.qualified_name}")
        await self._copied(plan)
        return True

    async def _copied(self, plan: CopyPlan) -> None:
        relation = self.relation
        await self._catalog.set_relation_state(
            self._subscription.oid, relation.relid, RelState.FINISHEDCOPY, plan.start
        )
        await faults.reached(f"copy finished {relation.qualified_name}")
        log.info("copy is done", relation=relation.qualified_name, lsn=str(plan.start))

    async def _seen(self, connection: Connection, snapshot: str, lsn: Lsn) -> Described:
        """Return the table as the connection's transaction sees it, and what to copy under its `snapshot`.

        Takes no lasting lock: an ALTER TABLE would wait for it, and the copy's tasks for the ALTER TABLE.
        """
        subscription, relation = self._subscription, self.relation
        found, definition, target = await self._described(connection)
        file = await snapshots.file_seen(connection, relation.relid)
        publishing = await snapshots.publishing(connection, subscription.publications, relation.relid)
        plain = definition.kind == "r"
        source = copyjob.CopySource(
            conninfo=subscription.conninfo,
            application_name=self._slot,
            schema=definition.schema,
            name=definition.name,
            columns=tuple(field.name for field in target.schema),
            snapshot=snapshot,
            row_filter=found.row_filter,
            only=plain,
            lsn=str(lsn),
            oid=relation.relid,
            file=file,
            bytes=definition.bytes,
        )
        return Described(
            definition, target, source, conditions(subscription, found, definition, target, publishing, file)
        )

    async def _described(self, connection: Connection) -> tuple[PublishedTable, TableDefinition, TargetTable]:
        """Return the table's publication, definition and target as the connection's transaction sees them."""
        relation = self.relation
        published = await publication.published_tables(connection, self._subscription.publications, relation.relid)
        found = published[0] if published else None
        with self._blaming():
            if found is None:
                raise UndefinedTable(
                    f'table "{relation.qualified_name}" not found on publisher',
                    hint="ALTER SUBSCRIPTION … REFRESH PUBLICATION takes it out of the subscription.",
                )
            definition = await definitions.table_definition(connection, relation.relid)
            choices = TypeChoices.parse(self._subscription.options.types)
            return found, definition, target_table(definition, found.attnames, relation.path, choices)

    @contextmanager
    def _blaming(self) -> Iterator[None]:
        """Attribute a failure inside to this table."""
        self.to_blame = True
        yield
        self.to_blame = False

    async def _prepare_target(self, target: TargetTable) -> None:
        """Create the Delta table if it is missing, or require that its rows may be replaced: none, or our own."""
        subscription = self._subscription
        identity = {
            "pubsub.node": self._node_id,
            "pubsub.subscription": str(subscription.oid),
            "pubsub.publisher": f"{subscription.publisher_system_identifier}/{subscription.publisher_database}",
        }
        if await asyncio.to_thread(delta.exists, target.path):
            have = await asyncio.to_thread(delta.properties, target.path)
            # The publisher may differ: a RESYNC may have changed it.
            ours = all(have.get(name) == identity[name] for name in ("pubsub.node", "pubsub.subscription"))
            if ours:
                return  # the copy's commit adds missing columns
            if await asyncio.to_thread(delta.row_count, target.path) > 0:
                raise NotInPrerequisiteState(
                    f'the Delta table for "{target.relation}" holds rows already',
                    detail=f'It lies at "{target.path}".',
                    hint="Move it away, use WITH (copy_data = false), or choose another target.",
                )
        elif not subscription.options.create_tables:
            raise UndefinedTable(
                f'Delta table for "{target.relation}" does not exist',
                detail=f'It should lie at "{target.path}".',
                hint="Create it, or use WITH (create_tables = true).",
            )
        if not await self._engine.run_without_spark(delta.create_directly, target, identity):
            await self._start_spark()
            await self._engine.run(delta.create, target, identity)

    # w, c, s

    async def _catch_up(self) -> bool:
        """Follow the slot from the copy to where apply takes over.  False if told to end before that."""
        subscription = self._subscription
        at = await self._made_whole()
        relation = await self._catalog.relation(subscription.oid, self.relation.relid)
        if relation is None or at is None:
            return False
        app_id = self._app_id(relation.copy_generation)
        with self.figures.waits_for("the apply worker"):
            catchup = await self._handover.catchup_lsn(relation.relid, at)
        await faults.reached(f"catchup {relation.qualified_name}")
        if catchup > at and not await self._follow(relation, app_id, at, catchup):
            return False
        await faults.reached(f"caught up {relation.qualified_name}")
        await self._catalog.set_relation_state(subscription.oid, relation.relid, RelState.SYNCDONE, catchup)
        await faults.reached(f"sync done {relation.qualified_name}")
        self._handover.synced(relation.relid)
        log.info("table is synchronized", relation=relation.qualified_name, lsn=str(catchup))
        return True

    async def _made_whole(self) -> Lsn | None:
        """Return the table's LSN once it holds the rows of one moment; None if told to end first, or if it has left."""
        relation = await self._catalog.relation(self._subscription.oid, self.relation.relid)
        if relation is None:
            return None
        assert relation.lsn is not None
        app_id = self._app_id(relation.copy_generation)
        held = await asyncio.to_thread(delta.committed_lsn, relation.path, app_id) or INVALID_LSN
        at = max(held, relation.lsn)
        plan = await self._catalog.copy_plan(self._subscription.oid, relation.relid)
        if plan is None or plan.generation != relation.copy_generation or plan.until <= at:
            return at
        return await self._pass_window(relation, app_id, at, plan.until)

    async def _pass_window(self, relation: SubscriptionRel, app_id: str, at: Lsn, until: Lsn) -> Lsn | None:
        """Follow the slot until the table is whole (window); return its LSN, or None if told to end before that."""
        async with await self._connect(replication=False) as connection:
            await connection.execute(snapshots.BEGIN)
            table = await self._seen(connection, "", INVALID_LSN)
            await connection.execute("COMMIT")
        target = await asyncio.to_thread(delta.load, relation.path, relation.qualified_name, relation.definition)
        same = target.key == table.target.key and all(field in target.schema for field in table.target.schema)
        window = Window(
            relation,
            until,
            target.schema,
            table.source if same else None,
            {column.name: column.type_name for column in table.definition.columns},
            catalog=self._catalog,
            engine=self._engine,
        )
        log.info("copy is followed until it is whole", relation=relation.qualified_name, lsn=str(at), until=str(until))
        await faults.reached(f"window {relation.qualified_name}")
        while at < window.until:
            stop = window.until
            if not await self._follow(relation, app_id, at, stop, window):
                return None
            at = stop
        # The window is complete; later workers can skip it.
        await self._catalog.set_relation_state(self._subscription.oid, relation.relid, RelState.FINISHEDCOPY, at)
        await faults.reached(f"whole {relation.qualified_name}")
        return at

    async def _follow(
        self, relation: SubscriptionRel, app_id: str, at: Lsn, catchup: Lsn, window: Window | None = None
    ) -> bool:
        columns = await load(relation.relid, app_id, relation.path, relation.qualified_name, relation.definition)
        following = follower(self._catalog, self._subscription)
        held = await asyncio.to_thread(delta.committed_lsn, relation.path, app_id) or INVALID_LSN
        async with await self._connect(replication=True) as connection:
            promotion = Promotion(self._catalog, self._subscription, self._slot, self._slot)
            await promotion.begin(connection)
            types = await binary_types(self._subscription, connection)
            tables = _OneTable(
                f"{self._slot}", columns, at, types, following, relation, held, self._catalog, window, promotion
            )
            options = stream_options(self._subscription, connection.server_version)
            stream = await replication.start(connection, self._slot, at, options)
            buffer = await asyncio.to_thread(open_buffer, self._settings, f"{self._subscription.oid}-{relation.relid}")
            pipeline = self._pipeline = Pipeline(
                stream,
                at,
                tables,
                self._engine.lane(),
                self._stage,
                limits(self._subscription, self._settings),
                self.figures,
                buffer=buffer,
                parallel=commands.streams_in_parallel(options),
                stop_at=catchup,
                skip=self._subscription.skip_lsn,
            )
            try:
                await pipeline.run()
            finally:
                await asyncio.to_thread(buffer.close)
                await promotion.close()
            await stream.close()
        return pipeline.flushed >= catchup


def _reason(errors: BaseExceptionGroup[CopyAgain]) -> str:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error.reason if isinstance(error, CopyAgain) else str(error)


class _OneTable:
    """Implements interfaces.Tables for the catch-up of one table, whose position is its own version.

    A failure of the table ends the worker.
    """

    isolates = False

    def __init__(
        self,
        origin: str,
        columns: Columns,
        after: Lsn,
        types: BinaryTypes,
        following: Follower | None,
        relation: SubscriptionRel,
        version: Lsn,
        catalog: Catalog,
        window: Window | None,
        promotion: Promotion,
    ) -> None:
        self.origin = origin
        self._promotion = promotion
        self._window = window
        self._catalog = catalog
        self._subid = relation.subid
        self._columns = columns
        self._after = after
        self._types = types
        self._follower = following
        self._contested = relation.foreign is not None
        self._name = (relation.schema, relation.name)
        self._version = version

    async def destinations(
        self, batch: Batch, quiet: Callable[[], Awaitable[None]] | None
    ) -> Mapping[tuple[str, str], Destination]:
        columns = self._columns
        if self._follower is not None:
            if columns.relid in batch.relations:
                batch.rename(columns.relid, *self._name)
            for again in await self._follower.follow(batch, [(columns, self._after)], quiet, self.version):
                raise again
        return {
            self._name: Destination(
                columns.relid,
                columns.target,
                columns.app_id,
                self._after,
                self._types,
                contested=self._contested and self._window is None,
                readings=columns.readings,
                window=self._window,
            )
        }

    asked = False

    async def settle_columns(self, at: Lsn) -> None:
        raise AssertionError("nobody asks a sync worker")

    async def unchanged(self, told: Mapping[int, Relation]) -> bool:
        raise AssertionError("nothing is prepared ahead here")

    async def before_commit(self) -> None:
        await self._catalog.prove()
        await self._promotion.noticed()

    async def may_write(self, destination: Destination) -> bool:
        return True

    def failed(self, failures: Sequence[Failure]) -> None:
        assert not failures

    async def stop(self, failures: Sequence[Failure]) -> None:
        assert not failures

    async def others_wrote(self, destination: Destination, commits: Sequence[OtherCommit]) -> None:
        await note_others(self._catalog, self._subid, destination, commits)
        self._contested = True

    async def met(self, relation: str, conflicts: Conflicts) -> None:
        await count_conflicts(self._catalog, self._subid, relation, conflicts)

    def version(self, relid: int) -> Lsn:
        return self._version

    def committed(self, destination: Destination, lsn: Lsn) -> None:
        self._version = lsn

    async def durable(self, lsn: Lsn) -> None:
        return

    async def skip_passed(self, passed: PassedSkip) -> None:
        """Do nothing: the apply worker receives the same transaction, and clears SKIP."""
