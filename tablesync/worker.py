"""The sync worker of one table (tablesync.c: LogicalRepSyncTableStart, process_syncing_tables_for_sync).

    i ─► d   its own slot, whose exported snapshot is copied by a Spark job in one commit
      ─► f   the copy is committed, at the slot's consistent point
      ─► w   tells apply where it is; apply answers with the LSN to reach
      ─► c   follows the slot exactly up to there
      ─► s   stored with that LSN; the slot is dropped, and apply goes on

Found in `f` after a crash, it goes on from there; in `d`, it starts over with a new slot, snapshot and generation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import structlog

from apply.batch import Batch
from apply.changes import CopyAgain
from apply.conflicts import Conflicts
from apply.delta import table as delta
from apply.delta.engine import Engine
from apply.delta.log import OtherCommit
from apply.delta.stage import Stage
from apply.delta.table import Commit, TargetTable
from apply.dispatch import PassedSkip
from apply.figures import Figures
from apply.follow import Columns, Follower, load
from apply.handover import Handover
from apply.isolation import Failure
from apply.pipeline import Pipeline
from apply.prepare import Destination
from apply.publisher import check_system
from apply.tables import count_conflicts, note_others
from apply.target import described_json, target_table
from apply.worker import binary_types, follower, limits, open_buffer, stream_options
from catalog.records import Subscription, SubscriptionRel
from catalog.states import RelState
from catalog.store import Catalog
from pubsub import faults
from pubsub.errors import NotInPrerequisiteState, UndefinedTable
from pubsub.protocol import commands
from pubsub.protocol.binary.values import BinaryTypes
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.publisher import definitions, replication
from pubsub.publisher.connection import Connection
from pubsub.publisher.definitions import PublishedTable, TableDefinition
from pubsub.settings import Settings
from pubsub.sql.identifiers import quote_literal
from pubsub.sql.typechoices import TypeChoices
from tablesync import copyjob
from tablesync.progress import follow_progress

log = structlog.get_logger()


def sync_slot_name(subid: int, relid: int, node_id: str) -> str:
    """tablesync.c: ReplicationSlotNameForTablesync."""
    return f"pg_{subid}_sync_{relid}_{node_id}"


class SyncWorker:
    """One table's way from i to s.  `figures` may be read at any time."""

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
        self.figures = Figures()
        self.to_blame = False
        """Whether what failed is the table's own: nothing that other tables would fail of too."""
        self.snapshot_lsn: Lsn | None = None
        """Where the copy is taken, once that is known."""
        self._subscription = subscription
        self._relation = relation
        self._node_id = node_id
        self._catalog = catalog
        self._engine = engine
        self._stage = stage
        self._handover = handover
        self._settings = settings
        self._slot = sync_slot_name(subscription.oid, relation.relid, node_id)
        self._pipeline: Pipeline | None = None

    async def run(self) -> None:
        """Until the table is in s and its slot is gone.  Raises PubsubError and what Spark raises."""
        await self._engine.fence()
        # Who started this worker may have read the catalog before the one before it was done.
        relation = await self._catalog.relation(self._subscription.oid, self._relation.relid)
        if relation is None:
            return
        self._relation = relation
        self.snapshot_lsn = relation.lsn
        if relation.stopped:
            # It stopped alone: nothing of it may hold the publisher's WAL back.
            if relation.sync_slot is not None:
                await self._drop_slot()
            return
        if relation.state in (RelState.SYNCDONE, RelState.READY):
            if relation.definition is None:
                await self._make_target()
            # The worker that stored s may have failed before it could say so.
            self._handover.synced(relation.relid)
            if relation.sync_slot is not None:
                await self._drop_slot()
            return
        if relation.state is not RelState.FINISHEDCOPY or not await self._slot_is_there():
            await self._copy()
        try:
            if await self._catch_up():
                await self._drop_slot()
        except BaseExceptionGroup as errors:
            if errors.subgroup(CopyAgain) is None:
                raise
            await self._catalog.set_relation_state(self._subscription.oid, relation.relid, RelState.INIT)
            log.info("table was altered while it was copied, and is copied again", relation=relation.qualified_name)

    def drain(self) -> None:
        """End soon; what is not done is done by the next worker."""
        if self._pipeline is not None:
            self._pipeline.drain()

    async def _make_target(self) -> None:
        """The Delta table of a table that joined without a copy."""
        async with await self._connect(replication=False) as connection:
            await connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            _, definition, target = await self._described(connection)
            await connection.execute("COMMIT")
        with self._blaming():
            await self._prepare_target(target)
            await asyncio.to_thread(delta.check_columns, target)
        await self._catalog.set_relation_definition(
            self._subscription.oid,
            self._relation.relid,
            described_json(target, definition),
            definition.estimated_rows,
        )

    async def _connect(self, *, replication: bool) -> Connection:
        return await Connection.connect(
            self._subscription.conninfo, replication=replication, application_name=self._slot
        )

    async def _slot_is_there(self) -> bool:
        async with await self._connect(replication=False) as connection:
            return await definitions.slot_info(connection, self._slot) is not None

    async def _drop_slot(self) -> None:
        async with await self._connect(replication=True) as connection:
            await replication.drop_slot(connection, self._slot, missing_ok=True, wait=True)
        await self._catalog.set_sync_slot(self._subscription.oid, self._relation.relid, None)

    # d

    async def _copy(self) -> None:
        subscription, relation = self._subscription, self._relation
        # The connection that exported the snapshot stays open and idle until every range has imported it.
        async with await self._connect(replication=True) as exporter:
            await check_system(exporter, await self._catalog.subscription(subscription.oid))
            await replication.drop_slot(exporter, self._slot, missing_ok=True, wait=True)
            await faults.reached(f"init {relation.qualified_name}")
            generation = await self._catalog.begin_copy(subscription.oid, relation.relid, sync_slot=self._slot)
            self._handover.new_copy(relation.relid)
            self._stage.forget(relation.path)
            await faults.reached(f"datasync {relation.qualified_name}")
            created = await replication.create_slot(
                exporter, self._slot, snapshot="export", failover=subscription.options.failover
            )
            assert created.snapshot_name is not None
            self.snapshot_lsn = created.consistent_point
            await faults.reached(f"slot created {relation.qualified_name}")
            source, target, definition = await self._source(created.snapshot_name, created.consistent_point)
            rows = definition.estimated_rows
            with self._blaming():
                await self._prepare_target(target)
            await self._catalog.set_relation_definition(
                subscription.oid, relation.relid, described_json(target, definition, created.consistent_point), rows
            )
            app_id = delta.application_id(self._node_id, subscription.oid, relation.relid, generation)
            record = Commit(app_id, created.consistent_point, created.consistent_point)
            log.info("copy has started", relation=relation.qualified_name, lsn=str(created.consistent_point))
            async with follow_progress(self._catalog, subscription, relation, rows, self._slot, self._engine) as done:
                with self._blaming():
                    await self._engine.run(copyjob.copy, source, target, record, done)
        await faults.reached(f"copy committed {relation.qualified_name}")
        await self._catalog.set_relation_state(
            subscription.oid, relation.relid, RelState.FINISHEDCOPY, created.consistent_point
        )
        await faults.reached(f"copy finished {relation.qualified_name}")
        log.info("copy is done", relation=relation.qualified_name, lsn=str(created.consistent_point))

    async def _source(self, snapshot: str, lsn: Lsn) -> tuple[copyjob.CopySource, TargetTable, TableDefinition]:
        """What to copy and into what, as the snapshot sees the table."""
        subscription = self._subscription
        async with await self._connect(replication=False) as connection:
            await connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            await connection.execute(f"SET TRANSACTION SNAPSHOT {quote_literal(snapshot)}")
            found, definition, target = await self._described(connection)
            await connection.execute("COMMIT")
        plain = definition.kind == "r"
        source = copyjob.CopySource(
            conninfo=subscription.conninfo,
            application_name=self._slot,
            schema=definition.schema,
            name=definition.name,
            columns=tuple(field.name for field in target.schema),
            snapshot=snapshot,
            row_filter=found.row_filter,
            blocks=definition.pages if plain else None,
            only=plain,
            lsn=str(lsn),
        )
        return source, target, definition

    async def _described(self, connection: Connection) -> tuple[PublishedTable, TableDefinition, TargetTable]:
        """The table as the connection's transaction sees it published."""
        relation = self._relation
        published = await definitions.published_tables(connection, self._subscription.publications)
        found = next((table for table in published if table.oid == relation.relid), None)
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
        """What fails inside fails because of this table."""
        self.to_blame = True
        yield
        self.to_blame = False

    async def _prepare_target(self, target: TargetTable) -> None:
        """The Delta table is there, and what it holds may be replaced: nothing, or an unfinished copy of our own."""
        subscription = self._subscription
        identity = {
            "pubsub.node": self._node_id,
            "pubsub.subscription": str(subscription.oid),
            "pubsub.publisher": f"{subscription.publisher_system_identifier}/{subscription.publisher_database}",
        }
        if await asyncio.to_thread(delta.exists, target.path):
            have = await asyncio.to_thread(delta.properties, target.path)
            # Of whichever publisher: after a RESYNC it may be another.
            ours = all(have.get(name) == identity[name] for name in ("pubsub.node", "pubsub.subscription"))
            if ours:
                return  # the copy's commit brings the columns that it lacks
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
            await self._engine.run(delta.create, target, identity)

    # w, c, s

    async def _catch_up(self) -> bool:
        """From the copy to where apply takes over.  False when told to end before that."""
        subscription = self._subscription
        relation = await self._catalog.relation(subscription.oid, self._relation.relid)
        if relation is None:
            return False
        assert relation.lsn is not None
        app_id = delta.application_id(self._node_id, subscription.oid, relation.relid, relation.copy_generation)
        held = await asyncio.to_thread(delta.committed_lsn, relation.path, app_id) or INVALID_LSN
        at = max(held, relation.lsn)
        catchup = await self._handover.catchup_lsn(relation.relid, at)
        await faults.reached(f"catchup {relation.qualified_name}")
        if catchup > at and not await self._follow(relation, app_id, at, held, catchup):
            return False
        await faults.reached(f"caught up {relation.qualified_name}")
        await self._catalog.set_relation_state(subscription.oid, relation.relid, RelState.SYNCDONE, catchup)
        await faults.reached(f"sync done {relation.qualified_name}")
        self._handover.synced(relation.relid)
        log.info("table is synchronized", relation=relation.qualified_name, lsn=str(catchup))
        return True

    async def _follow(self, relation: SubscriptionRel, app_id: str, at: Lsn, held: Lsn, catchup: Lsn) -> bool:
        columns = await load(relation.relid, app_id, relation.path, relation.qualified_name, relation.definition)
        following = follower(self._catalog, self._subscription)
        async with await self._connect(replication=True) as connection:
            types = await binary_types(self._subscription, connection)
            tables = _OneTable(f"{self._slot}", columns, at, types, following, relation, held, self._catalog)
            options = stream_options(self._subscription, connection.server_version)
            stream = await replication.start(connection, self._slot, at, options)
            buffer = await asyncio.to_thread(open_buffer, self._settings, f"{self._subscription.oid}-{relation.relid}")
            pipeline = self._pipeline = Pipeline(
                stream,
                at,
                tables,
                self._engine,
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
            await stream.close()
        return pipeline.flushed >= catchup


class _OneTable:
    """pipeline.Tables for the catch-up: one table, whose own version is all that need be stored.

    Its failure is the worker's.
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
    ) -> None:
        self.origin = origin
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
            for again in await self._follower.follow(batch, [(columns, self._after)], quiet):
                raise again
        return {
            self._name: Destination(
                columns.relid,
                columns.target,
                columns.app_id,
                self._after,
                self._types,
                contested=self._contested,
                readings=columns.readings,
            )
        }

    async def may_write(self, relid: int) -> bool:
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

    def committed(self, relid: int, lsn: Lsn) -> None:
        self._version = lsn

    async def durable(self, lsn: Lsn) -> None:
        return

    async def skip_passed(self, passed: PassedSkip) -> None:
        """The apply worker takes it back: it has the same transaction."""
