"""Synchronize one table: its sync worker (tablesync.c: LogicalRepSyncTableStart, process_syncing_tables_for_sync).

    i ─► d   create a slot of its own, and copy its exported snapshot by a Spark job; finished chunks are kept
      ─► f   the copy is committed at the slot's consistent point; if it was resumed under another snapshot,
             follow the slot until the table is whole (window)
      ─► w   tell apply the position; apply answers with the LSN to reach
      ─► c   follow the slot exactly up to that LSN
      ─► s   store it; the slot is dropped, and apply takes over (catch_up has f to s)

After a crash in `f` the next worker continues from there; in `d` it keeps the finished chunks and copies the others
under a new snapshot.  If that is not possible, or the slot is gone, it starts over with a new slot, snapshot and
generation, and logs why.  Outside the window of copies it does not: the table goes back to i, without a slot and without
what apply was promised, and waits until the window opens.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace

import structlog

from apply.handover import Handover
from apply.publisher_identity import check_system, is_followed
from apply.schema_changes import attributes
from apply.schema_changes.diff import CopyAgain
from apply.schema_changes.table_definition import described, described_json
from apply.worker_statistics import Figures
from catalog.records import CopyPlan, Subscription, SubscriptionRel
from catalog.states import RelState
from catalog.store import Catalog
from pubsub import faults
from pubsub.delta import past
from pubsub.delta import table as delta
from pubsub.delta.spark.engine import Engine
from pubsub.delta.table import Commit, TargetTable
from pubsub.delta.writers.choose_writer import TableWriters
from pubsub.errors import NotInPrerequisiteState
from pubsub.protocol.lsn import Lsn
from pubsub.publisher import definitions, replication, slots, snapshots, sound_slots
from pubsub.publisher.connection import Connection
from pubsub.publisher.conninfo import without_secrets
from pubsub.publisher.copy_out import Cut
from pubsub.publisher.definitions import TableDefinition
from pubsub.settings import Settings
from tablesync import choose_copier, chunk_reader, copyjob, executor_check
from tablesync.catch_up import CatchUp
from tablesync.claim_target import claim_target, columns_of_earlier_copies, made_definition
from tablesync.progress import follow_progress
from tablesync.publisher_table import PublisherTable, Seen

logger = structlog.get_logger()


def sync_slot_name(subid: int, relid: int, node_id: str) -> str:
    """Return the name of a sync worker's slot (tablesync.c: ReplicationSlotNameForTablesync)."""
    return f"pg_{subid}_sync_{relid}_{node_id}"


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
        writers: TableWriters,
        handover: Handover,
        settings: Settings,
        may_begin: Callable[[], bool] = lambda: True,
    ) -> None:
        """`may_begin`: whether a copy may begin now."""
        self.figures = Figures()
        self.snapshot_lsn: Lsn | None = None
        """The LSN of the copy's snapshot, once known."""
        self._subscription = subscription
        self._node_id = node_id
        self._catalog = catalog
        self._engine = engine
        self._writers = writers
        self._handover = handover
        self._settings = settings
        self._may_begin = may_begin
        self._slot = sync_slot_name(subscription.oid, relation.relid, node_id)
        longest, max_rate = settings.max_message_size, settings.copies.max_rate
        self._table = PublisherTable(subscription, relation, self._slot, self.figures, longest, max_rate)
        self._catch_up = CatchUp(
            subscription,
            self._table,
            node_id=node_id,
            catalog=catalog,
            engine=engine,
            writers=writers,
            handover=handover,
            settings=settings,
            figures=self.figures,
        )

    @property
    def relation(self) -> SubscriptionRel:
        """The table as of the worker's last read of the catalog."""
        return self._table.relation

    @property
    def to_blame(self) -> bool:
        """Whether the failure is the table's own, and not one that other tables would have, too."""
        return self._table.to_blame

    async def run(self) -> None:
        """Run until the table is in s and its slot is dropped.  Raises PubsubError and Spark's errors."""
        with self.figures.waits_for("an earlier daemon's JVM to end"):
            await self._engine.fence()
        # The launcher may have read the catalog before the previous worker was done.
        relation = await self._catalog.relation(self._subscription.oid, self.relation.relid)
        if relation is None:
            return
        self._table.relation = relation
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
            if not await self._begin("its replication slot is gone"):
                return
        elif relation.state is RelState.DATASYNC and not await self._resume_copy():
            return
        try:
            if await self._catch_up.run():
                await self._drop_slot()
        except (CopyAgain, BaseExceptionGroup) as error:
            again = _copy_again(error)
            if again is None:
                raise
            await self._hand_back(again.reason)

    def drain(self) -> None:
        """End the catch-up soon; the next worker does the rest."""
        self._catch_up.drain()

    async def _make_target(self) -> None:
        """Create the Delta table of a table that joined without a copy, and store its definition.

        An earlier worker may have created it and failed before it could store the definition, and the publisher's table may have
        been altered since: then the definition is that of the Delta table, which is altered when its rows come.
        """
        app_id = self._app_id(self.relation.copy_generation)
        made = await asyncio.to_thread(made_definition, self.relation, app_id)
        if made is not None:
            await self._catalog.set_relation_definition(self._subscription.oid, self.relation.relid, made)
            return
        async with await self._table.connect(replication=False) as connection:
            seen = await self._look(connection)
            while True:
                # On the server's disk: after a crash, WAL up to there could be another one, with another ALTER.
                since = await snapshots.flushed_end_of_wal(connection)
                before, seen = seen, await self._look(connection)
                if _same_shape(before.definition, seen.definition):
                    # It includes all alterations up to `since`, and none that came later.
                    break
        # A transaction that ends exactly there is included, too.
        since = Lsn(since + 1)
        definition, target = seen.definition, seen.target
        known = described(target, definition, app_id, since, seen.choice).as_json()
        with self._table.blaming():
            await self._claim(target, {attributes.PROPERTY: known})
            await asyncio.to_thread(delta.check_columns, target)
        await faults.reached(f"target made {self.relation.qualified_name}")
        await self._catalog.set_relation_definition(
            self._subscription.oid,
            self.relation.relid,
            described_json(target, definition, since, seen.choice),
            definition.estimated_rows,
        )

    async def _look(self, connection: Connection) -> Seen:
        await connection.execute(snapshots.BEGIN)
        seen = await self._table.published(connection)
        await connection.execute("COMMIT")
        return seen

    async def _claim(self, target: TargetTable, properties: Mapping[str, str] | None = None) -> None:
        kept = self._settings.housekeeping
        await claim_target(
            target,
            self._subscription,
            self._node_id,
            self._engine,
            kept,
            self._start_spark,
            properties,
            self.relation,
        )

    async def _start_spark(self) -> None:
        with self.figures.waits_for("Spark to start"):
            await self._engine.start()

    async def _slot_is_there(self) -> bool | None:
        """Tell whether the sync slot exists and is valid; None if apply does not, or not yet, follow this publisher."""
        async with await self._table.connect(replication=True) as connection:
            subscription = await self._catalog.subscription(self._subscription.oid)
            identity = await check_system(connection, subscription)
            if not await is_followed(self._catalog, subscription, identity, self._settings.wal_retrieve_retry_interval):
                return None
            slot = await slots.slot_info(connection, self._slot)
        return slot is not None and not slot.lost

    async def _drop_slot(self) -> None:
        async with await self._table.connect(replication=True) as connection:
            await replication.drop_slot(connection, self._slot, missing_ok=True, wait=True)
        await self._catalog.set_sync_slot(self._subscription.oid, self.relation.relid, None)

    def _app_id(self, generation: int) -> str:
        return delta.application_id(self._node_id, self._subscription.oid, self.relation.relid, generation)

    # d

    async def _try_executors(self) -> None:
        """Raise, before a slot is made, if the copy takes executors that do not reach publisher and warehouse."""
        if self._settings.spark.is_local:
            return
        async with await self._table.connect(replication=False) as connection:
            seen = await self._look(connection)
        if choose_copier.takes_job(seen.definition.bytes):
            await self._start_spark()
            conninfo = self._conninfo_for_tasks()
            withheld = conninfo != self._subscription.conninfo
            await self._engine.run(executor_check.require_connections, conninfo, self._slot, withheld=withheld)
            await self._engine.run(executor_check.require_shared, self._settings.warehouse_uri)

    def _conninfo_for_tasks(self) -> str:
        """Return the connection string; without its passwords if others may read what Spark's programs say to each other."""
        conninfo = self._subscription.conninfo
        return conninfo if self._settings.spark.is_private else without_secrets(conninfo)

    async def _begin(self, reason: str) -> bool:
        """Copy from the beginning, and return True; outside the window of copies hand the table back, and return False.

        `reason`: why it is copied again, if an earlier copy has begun.
        """
        if not self._may_begin():
            await self._hand_back(reason)
            return False
        await self._try_executors()
        await self._copy()
        return True

    async def _hand_back(self, reason: str) -> None:
        """Have the table copied again when its turn comes, which may be hours later: until then it has no slot.

        What was promised to apply would keep the commits of all tables waiting.
        """
        relation = await self._catalog.relation(self._subscription.oid, self.relation.relid)
        if relation is None:
            return
        if relation.state is not RelState.INIT:
            await self._catalog.set_relation_state(self._subscription.oid, relation.relid, RelState.INIT)
            logger.info("table is copied again", relation=relation.qualified_name, reason=reason)
        self._handover.new_copy(relation.relid)
        await faults.reached(f"handed back {relation.qualified_name}")
        await self._drop_slot()

    async def _copy(self) -> None:
        """Copy from the beginning: create a new slot, and copy all chunks under its snapshot."""
        subscription, relation = self._subscription, self.relation
        earlier = await self._catalog.copy_plan(subscription.oid, relation.relid)
        # The connection that exported the snapshot stays open and idle until every range has imported it.
        async with await self._table.connect(replication=True) as exporter:
            await check_system(exporter, await self._catalog.subscription(subscription.oid))
            await replication.drop_slot(exporter, self._slot, missing_ok=True, wait=True)
            await faults.reached(f"init {relation.qualified_name}")
            last = await asyncio.to_thread(copyjob.last_generation, relation.path, self._app_id(0))
            generation = await self._catalog.begin_copy(
                subscription.oid, relation.relid, sync_slot=self._slot, after=last
            )
            self._handover.new_copy(relation.relid)
            self._writers.forget(relation.path, shared=relation.whose is not None)
            await faults.reached(f"datasync {relation.qualified_name}")
            # Be patient: if the monitor can ask the publisher, its report of what creation waits for is more exact.
            async with await self._table.connect(replication=False) as connection:
                with self.figures.waits_for("its replication slot to be created", patience=10):
                    created = await sound_slots.create_slot(
                        exporter,
                        self._slot,
                        snapshot="export",
                        watch=connection,
                        table=relation.oid,
                        failover=subscription.options.failover,
                    )
                assert created.snapshot_name is not None
                self.snapshot_lsn = created.consistent_point
                await faults.reached(f"slot created {relation.qualified_name}")
                with self.figures.waits_for("transactions of its snapshot to be marked as committed"):
                    visible = await snapshots.settle(connection, created.snapshot_name)
                await snapshots.begin_under(connection, created.snapshot_name)
                table = await self._table.describe(connection, created.snapshot_name, created.consistent_point)
                # A role that may read columns only may not ask for rows by their places: it reads the table in one piece.
                by_blocks = table.source.table.only and bool(
                    await definitions.readable_tables(connection, {relation.oid: ["ctid"]})
                )
            before = self._app_id(relation.copy_generation)
            left = await asyncio.to_thread(columns_of_earlier_copies, table.target, relation, before)
            with self._table.blaming():
                await self._claim(table.target)
            rows = table.definition.estimated_rows
            there = await asyncio.to_thread(past.with_kept_columns, table.target)
            known = described_json(there, table.definition, created.consistent_point, table.choice, left)
            await self._catalog.set_relation_definition(subscription.oid, relation.relid, known, rows)
            target = self._as_copied(table.target, known)
            version, writable = await asyncio.to_thread(
                copyjob.begin, target, earlier, self._app_id(earlier.generation if earlier else 0)
            )
            blocks = table.definition.pages if by_blocks else None
            small = not choose_copier.takes_job(table.source.bytes)
            if not small:
                await self._start_spark()
            plan = CopyPlan(
                generation=generation,
                start=created.consistent_point,
                until=created.consistent_point,
                version=version,
                edges=choose_copier.edges(
                    blocks, table.source.bytes, 1 if small else await self._engine.run(copyjob.parallelism)
                ),
                snapshot=visible,
                fingerprint=table.conditions.fingerprint if writable else None,
                attempts=(str(uuid.uuid4()),),
            )
            await self._catalog.put_copy_plan(subscription.oid, relation.relid, plan)
            await faults.reached(f"copy planned {relation.qualified_name}")
            logger.info("copy has started", relation=relation.qualified_name, lsn=str(plan.start))
            await self._copy_rows(plan, table.source, target, rows)

    def _as_copied(self, target: TargetTable, definition: str | None) -> TargetTable:
        """Return the table as its copy with this definition writes it: what earlier copies left goes, unless it is to stay.

        As when a column is dropped: it stays only if rows are not found by all of their values (schema_changes/diff.py).
        """
        known = attributes.stored(definition)
        if known is None or (self._subscription.options.dropped_columns == "keep" and target.key):
            return target
        return replace(target, outdated=frozenset(name for _, name in known.kept))

    async def _resume_copy(self) -> bool:
        """Resume an earlier worker's copy with its finished chunks, or start over (`_begin`); return whether it is committed."""
        subscription, relation = self._subscription, self.relation
        plan = await self._catalog.copy_plan(subscription.oid, relation.relid)
        if plan is None or plan.generation != relation.copy_generation:
            return await self._begin("its copy had not begun to read")
        await self._try_executors()
        held = await asyncio.to_thread(delta.committed_lsn, relation.path, self._app_id(plan.generation))
        if held is not None:
            if held != plan.start:
                raise NotInPrerequisiteState(
                    f'the Delta table of "{relation.qualified_name}" holds a copy that another process has made',
                    detail=f"That was taken at {held}, this node's at {plan.start}.",
                    hint="End the other process; ALTER SUBSCRIPTION … RESYNC TABLE then copies the table anew.",
                )
            await self._copied(plan)
            return True
        async with await self._table.connect(replication=False) as holder:
            await holder.execute(snapshots.BEGIN)
            snapshot = await snapshots.export(holder)
            until = await snapshots.flushed_end_of_wal(holder)
            table = await self._table.describe(holder, snapshot, until)
            kept = 0
            if plan.fingerprint is not None:
                kept = len(await asyncio.to_thread(copyjob.kept, table.target, plan, self._app_id(plan.generation)))
            obstacle = table.conditions.obstacle(plan, kept)
            if obstacle is None:
                if await snapshots.lacks(holder, plan.snapshot):
                    raise NotInPrerequisiteState(
                        f'the copy of table "{relation.qualified_name}" cannot go on yet',
                        detail="A transaction that it has seen is not visible to others: it waits for a synchronous standby.",
                    )
                plan = replace(
                    plan,
                    until=max(plan.until, until),
                    attempts=(*plan.attempts, str(uuid.uuid4())),
                )
                await self._catalog.put_copy_plan(subscription.oid, relation.relid, plan)
                logger.info(
                    "copy goes on",
                    relation=relation.qualified_name,
                    lsn=str(plan.start),
                    chunks=f"{kept} of {len(plan.edges)}",
                )
                await faults.reached(f"copy goes on {relation.qualified_name}")
                target = self._as_copied(table.target, relation.definition)
                await self._copy_rows(plan, table.source, target, table.definition.estimated_rows)
                return True
        logger.warning("copy starts over", relation=relation.qualified_name, reason=obstacle)
        return await self._begin(obstacle)

    async def _copy_rows(
        self, plan: CopyPlan, source: chunk_reader.CopySource, target: TargetTable, rows: int | None
    ) -> None:
        await self._catalog.prove()
        until = plan.until if plan.until > plan.start else None
        app_id = self._app_id(plan.generation)
        record = Commit(app_id, plan.start, plan.start, until, copied=True, source=target.whose)
        if await self._copy_in_thread(plan, source, target, record):
            return
        await self._start_spark()
        while not await self._copy_by_job(plan, source, target, record, rows):
            # Again under the same snapshot: finished chunks stay.
            plan = replace(plan, attempts=(*plan.attempts, str(uuid.uuid4())))
            await self._catalog.put_copy_plan(self._subscription.oid, self.relation.relid, plan)
        await faults.reached(f"copy committed {self.relation.qualified_name}")
        await self._copied(plan)

    async def _copy_by_job(
        self, plan: CopyPlan, source: chunk_reader.CopySource, target: TargetTable, record: Commit, rows: int | None
    ) -> bool:
        """Copy by a Spark job; return False if a task met a lock on the publisher.

        Wait first, outside Spark's places, for a lock that is already held.
        """
        async with await self._table.connect(replication=False) as connection:
            with self.figures.waits_for("a lock on the publisher"):
                await connection.execute(chunk_reader.wait_sql(source))
        if not self._settings.spark.is_private:
            source = replace(source, conninfo=self._conninfo_for_tasks(), mask_key=b"")
        try:
            async with follow_progress(
                self._catalog, self._subscription, self.relation, rows, self._slot, self._engine
            ) as done:
                with self._table.blaming():
                    await self._engine.run(copyjob.copy, self._engine.transactions, source, target, record, done, plan)
        except Exception as error:
            if not copyjob.was_locked(error):
                raise
            self._table.to_blame = False
            logger.info("copy met a lock on the publisher, and waits", relation=self.relation.qualified_name)
            return False
        return True

    async def _copy_in_thread(
        self, plan: CopyPlan, source: chunk_reader.CopySource, target: TargetTable, record: Commit
    ) -> bool:
        """Copy a small table without Spark; return False if it takes a Spark job."""
        cut = Cut()
        with self._table.blaming():
            rows = await self._engine.run_until_stopped(
                cut, copyjob.copy_in_thread, self._engine.transactions, source, target, record, plan, cut
            )
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
        logger.info("copy is done", relation=relation.qualified_name, lsn=str(plan.start))


def _same_shape(one: TableDefinition, other: TableDefinition) -> bool:
    first, second = (replace(each, estimated_rows=None, pages=0, bytes=0) for each in (one, other))
    return first == second


def _copy_again(error: BaseException) -> CopyAgain | None:
    """Return the CopyAgain that this is, or that is in this group."""
    if not isinstance(error, BaseExceptionGroup):
        return error if isinstance(error, CopyAgain) else None
    return next((again for one in error.exceptions if (again := _copy_again(one)) is not None), None)
