"""Follow the sync slot of a copied table to the LSN where apply takes over.

      f    if the copy was resumed under another snapshot, follow the slot until the table is whole (window)
      ─► w   tell apply the position; apply answers with the LSN to reach
      ─► c   follow the slot exactly up to that LSN
      ─► s   store it; apply takes over

The pipeline is apply's, with one table (CatchUpTable).
"""

from __future__ import annotations

import asyncio

import structlog

from apply.handover import Handover
from apply.pipeline.interfaces import Course
from apply.pipeline.pipeline import Pipeline
from apply.promotion import Promotion
from apply.schema_changes import attributes
from apply.schema_changes.diff import CopyAgain
from apply.schema_changes.follow import load
from apply.worker import ReloadedTimers, binary_types, follower, limits, open_buffer, stream_options
from apply.worker_statistics import Figures
from catalog.records import CopyPlan, Subscription, SubscriptionRel
from catalog.states import RelState
from catalog.store import Catalog
from pubsub import faults
from pubsub.delta import table as delta
from pubsub.delta.spark.engine import Engine
from pubsub.delta.writers.choose_writer import TableWriters
from pubsub.masks import NO_MASKS
from pubsub.protocol import commands
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.publisher import replication, snapshots
from pubsub.settings import Settings
from tablesync.catch_up_table import CatchUpTable
from tablesync.publisher_table import PublisherTable
from tablesync.window import Window

logger = structlog.get_logger()


class CatchUp:
    """Takes one table from f to s.  The copy of `table.relation` is committed when `run` is called."""

    def __init__(
        self,
        subscription: Subscription,
        table: PublisherTable,
        *,
        node_id: str,
        catalog: Catalog,
        engine: Engine,
        writers: TableWriters,
        handover: Handover,
        settings: Settings,
        figures: Figures,
    ) -> None:
        self._subscription = subscription
        self._table = table
        self._node_id = node_id
        self._catalog = catalog
        self._engine = engine
        self._writers = writers
        self._handover = handover
        self._settings = settings
        self._figures = figures
        self._pipeline: Pipeline | None = None

    def drain(self) -> None:
        """End soon; the next worker does the rest."""
        if self._pipeline is not None:
            self._pipeline.drain()

    async def run(self) -> bool:
        """Follow the slot from the copy to where apply takes over.  False if told to end before that.

        Raises CopyAgain, alone or in an exception group, if the table must be copied again.
        """
        subscription = self._subscription
        at = await self._made_whole()
        relation = await self._catalog.relation(subscription.oid, self._table.relation.relid)
        if relation is None or at is None:
            return False
        app_id = self._app_id(relation)
        with self._figures.waits_for("the apply worker"):
            catchup = await self._handover.catchup_lsn(relation.relid, at)
        await faults.reached(f"catchup {relation.qualified_name}")
        if catchup > at and not await self._follow(relation, app_id, at, catchup):
            return False
        await faults.reached(f"caught up {relation.qualified_name}")
        await self._catalog.set_relation_state(subscription.oid, relation.relid, RelState.SYNCDONE, catchup)
        await faults.reached(f"sync done {relation.qualified_name}")
        self._handover.synced(relation.relid)
        logger.info("table is synchronized", relation=relation.qualified_name, lsn=str(catchup))
        return True

    async def _made_whole(self) -> Lsn | None:
        """Return the table's LSN once it holds the rows of one moment; None if told to end first, or if it has left."""
        relation = await self._catalog.relation(self._subscription.oid, self._table.relation.relid)
        if relation is None:
            return None
        assert relation.lsn is not None
        app_id = self._app_id(relation)
        held = await asyncio.to_thread(delta.committed_lsn, relation.path, app_id) or INVALID_LSN
        at = max(held, relation.lsn)
        plan = await self._catalog.copy_plan(self._subscription.oid, relation.relid)
        if plan is None or plan.generation != relation.copy_generation or plan.until <= at:
            return at
        return await self._pass_window(relation, app_id, at, plan)

    async def _pass_window(self, relation: SubscriptionRel, app_id: str, at: Lsn, plan: CopyPlan) -> Lsn | None:
        """Follow the slot until the table is whole (window); return its LSN, or None if told to end before that.

        Raises CopyAgain if the stream lacks a change that the table needs.
        """
        until = plan.until
        async with await self._table.connect(replication=False) as connection:
            await connection.execute(snapshots.BEGIN)
            table = await self._table.describe(connection, "", INVALID_LSN)
            await connection.execute("COMMIT")
        missing = table.conditions.missing(plan)
        # Of a transaction that is skipped here some chunks would have the rows, and others not.
        if missing is None and at <= self._subscription.skip_lsn < until:
            missing = "a transaction is to be skipped that some of its chunks have"
        if missing is not None:
            raise CopyAgain(relation.relid, relation.qualified_name, missing)
        target = await asyncio.to_thread(delta.load, relation.path, relation.qualified_name, relation.definition)
        known = attributes.stored(relation.definition)
        # By another text of the option mask rows would be masked otherwise than the others; of where, other rows would be read.
        as_masked = table.target.masks == (NO_MASKS if known is None else known.masked)
        as_filtered = table.target.where == (None if known is None else known.row_filter)
        same_key = target.key == table.target.key
        same = same_key and as_masked and as_filtered and all(field in target.schema for field in table.target.schema)
        window = Window(
            relation,
            until,
            target.schema,
            table.source if same else None,
            {column.name: column.type_name for column in table.definition.columns},
            catalog=self._catalog,
            engine=self._engine,
        )
        logger.info(
            "copy is followed until it is whole", relation=relation.qualified_name, lsn=str(at), until=str(until)
        )
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
        following = follower(self._catalog, self._subscription, self._engine.transactions)
        held = await asyncio.to_thread(delta.committed_lsn, relation.path, app_id) or INVALID_LSN
        async with await self._table.connect(replication=True) as connection:
            promotion = Promotion(self._catalog, self._subscription, self._table.slot, self._table.slot)
            await promotion.begin(connection)
            types = await binary_types(self._subscription, connection)
            tables = CatchUpTable(
                self._table.slot,
                columns,
                at,
                types,
                following,
                relation,
                held,
                self._catalog,
                window,
                promotion,
                self._handover,
            )
            options = stream_options(self._subscription, connection.server_version)
            stream = await replication.start(connection, self._table.slot, at, options)
            buffer = await asyncio.to_thread(open_buffer, self._settings, f"{self._subscription.oid}-{relation.relid}")
            pipeline = self._pipeline = Pipeline(
                stream,
                Course(at, stop_at=catchup, skip=self._subscription.skip_lsn if window is None else INVALID_LSN),
                tables,
                self._engine.lane(),
                self._writers,
                limits(self._subscription, self._settings),
                self._figures,
                buffer=buffer,
                parallel=commands.streams_in_parallel(options),
                timers=ReloadedTimers(self._subscription, self._settings),
            )
            try:
                await pipeline.run()
            finally:
                await asyncio.to_thread(buffer.close)
                await promotion.close()
            await stream.close()
        return pipeline.flushed >= catchup

    def _app_id(self, relation: SubscriptionRel) -> str:
        return delta.application_id(self._node_id, self._subscription.oid, relation.relid, relation.copy_generation)
