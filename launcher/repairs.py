"""Carry out the requests of `pubsub verify --repair`: copy the rows that differ anew, while apply goes on before and after.

    point     the apply worker stands at an LSN, P: the tables hold everything up to P and nothing else, and there is a
              snapshot of the publisher at P (apply.snapshot_point)
    read      the publisher's rows under the keys that differ, in that snapshot
    commit    in one commit the keys' rows leave, and these rows come; its position is P

After the commit these keys hold what the publisher has at P, as all others do, and the worker goes on with what ends after P.  The
commit is made to the version that the worker last committed or read, and its transaction version is P: if the daemon is
killed before it, nothing was done; if after it, the next worker finds the table at P and leaves out what ends up to there,
which the table has.  Nothing else can tell a repair from a batch.

A table without a key has no rows under a key.  There both sides count the rows with the hashes that differ, at P, and as many
copies as are missing or too many come or go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import psycopg
import pyarrow as pa
import structlog

from apply.schema_changes import attributes
from apply.schema_changes.column_choice import replicated
from apply.snapshot_point import SnapshotPoint
from apply.staging.destination import Destination
from apply.worker import ApplyWorker
from apply.worker_statistics import Figures
from catalog.records import Request, Subscription, SubscriptionRel
from catalog.store import Catalog
from launcher import streaming_worker
from launcher.failures import typed
from launcher.request_tasks import RequestTasks
from launcher.runner import Runner
from pubsub import faults
from pubsub.delta import table as delta
from pubsub.delta import versions
from pubsub.delta.spark.engine import Engine
from pubsub.delta.writers.changeset import COUNT_COLUMN, Folded
from pubsub.digest import sent_keys
from pubsub.digest.source import SESSION, SourceTable
from pubsub.digest.sums import Hashed, surplus
from pubsub.digest.target import DeltaVersion
from pubsub.errors import NotInPrerequisiteState, PubsubError, StartAgain
from pubsub.protocol.arrow_arrays import repeated
from pubsub.protocol.lsn import Lsn
from pubsub.publisher import copy_out, snapshots
from pubsub.publisher.connection import Connection
from pubsub.publisher.copy_out import Cut
from tablesync.history_copy import own_values
from tablesync.publisher_table import Described, PublisherTable
from tablesync.row_forms import published, row_form, source_table
from tablesync.window import rows_under, with_columns

_NAME: Final = "pubsub repair"
#: How often a repair is begun when the apply worker starts again meanwhile.
_ATTEMPTS: Final = 5

logger = structlog.get_logger()


class RepairRequests(RequestTasks):
    """The request "repair"; `tables` of its payload has, for each table, `relid` and the `keys` that differ (sent_keys).

    A table without a key has hashes instead, with their `seed` and `null`.
    """

    def __init__(self, catalog: Catalog, engine: Engine, runners: Mapping[int, Runner]) -> None:
        super().__init__({"repair"})
        self._catalog = catalog
        self._engine = engine
        self._runners = runners

    async def _carry_out(self, request: Request) -> None:
        try:
            result: dict[str, Any] | None = None
            error: PubsubError | None = None
            try:
                result = await self._repair(request.subid or 0, request.payload["tables"])
            except Exception as failure:
                error = typed(failure)
            await self._catalog.answer(request.id, error, result)
        except PubsubError as failure:
            logger.warning("a request could not be answered", request=request.kind, reason=failure.message)

    async def _repair(self, subid: int, tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Repair the tables; anew for those that are left if the apply worker starts again, as it does when others have written."""
        found: dict[str, Any] = {}
        worker: ApplyWorker | None = None
        for attempt in range(1, _ATTEMPTS + 1):
            runner, worker = await streaming_worker.streaming(self._runners, subid, other_than=worker)
            try:
                lsn = await self._repair_at_point(worker, runner.subscription, tables, found)
                return {"lsn": str(lsn), "tables": found}
            except StartAgain as again:
                if attempt == _ATTEMPTS:
                    raise
                logger.info("a repair begins again", reason=again.message)
        raise AssertionError

    async def _repair_at_point(
        self,
        worker: ApplyWorker,
        subscription: Subscription,
        tables: Sequence[Mapping[str, Any]],
        found: dict[str, Any],
    ) -> Lsn:
        """Repair the tables that are not in `found` yet, and put them there; return the point's LSN."""
        async with worker.snapshot_point(halts=True) as point:
            async with await Connection.connect(subscription.conninfo, application_name=_NAME) as connection:
                await snapshots.begin_under(connection, point.snapshot)
                for one in tables:
                    relation = await self._catalog.relation(subscription.oid, int(one["relid"]))
                    if relation is None or str(relation.relid) in found:
                        continue
                    repair = _Repair(subscription, relation, worker, self._engine, point)
                    found[str(relation.relid)] = await repair.run(connection, one)
            return point.lsn


class _Repair:
    """The repair of one table at a point."""

    def __init__(
        self,
        subscription: Subscription,
        relation: SubscriptionRel,
        worker: ApplyWorker,
        engine: Engine,
        point: SnapshotPoint,
    ) -> None:
        self._subscription = subscription
        self._relation = relation
        self._worker = worker
        self._engine = engine
        self._point = point

    async def run(self, connection: Connection, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Repair the table; return how many rows came and how many keys, or copies, went, or a reason why nothing was done."""
        relation = self._relation
        try:
            destination = await self._worker.destination(relation.relid)
            if destination is None:
                raise NotInPrerequisiteState("the table is not ready any more")
            table = PublisherTable(self._subscription, relation, _NAME, Figures())
            described = await table.describe(connection, self._point.snapshot, self._point.lsn)
            properties = await asyncio.to_thread(delta.properties, relation.path)
            _require_same_columns(described, destination, relation, properties)
            if described.target.masks and not destination.table.key:
                raise NotInPrerequisiteState("it has no key, and columns that are masked: RESYNC TABLE copies it anew")
            keys = await asyncio.to_thread(sent_keys.read, wanted["keys"])
            if destination.table.key:
                folded = await self._under_keys(described, destination, keys)
            else:
                drawn = int(wanted["seed"]), str(wanted["null"])
                folded = await self._copies(connection, destination, keys.column("h").to_pylist(), drawn)
        except (PubsubError, psycopg.Error) as error:
            return {"inserted": 0, "removed": 0, "reason": typed(error).message}
        if not (folded.images.num_rows or folded.deleted_keys.num_rows or folded.removed.num_rows):
            return {"inserted": 0, "removed": 0, "reason": None}
        await faults.reached(f"repair {relation.qualified_name}")
        await self._worker.replace_rows(destination, folded, self._point.lsn)
        await faults.reached(f"repaired {relation.qualified_name}")
        inserted, removed = folded.images.num_rows, folded.deleted_keys.num_rows + folded.removed.num_rows
        logger.info(
            "rows were copied anew",
            subscription=self._subscription.name,
            relation=relation.qualified_name,
            lsn=str(self._point.lsn),
            rows=inserted,
        )
        return {"inserted": inserted, "removed": removed, "reason": None}

    async def _under_keys(self, described: Described, destination: Destination, keys: pa.Table) -> Folded:
        """Return the change that gives these keys the publisher's rows."""
        types = {column.name: column.type_name for column in described.definition.columns}
        table, lsn, cut = destination.table, self._point.lsn, Cut()

        def read() -> pa.Table:
            with copy_out.session(described.source.conninfo, _NAME, cut) as session, cut.watching(session):
                snapshots.begin_session_under(session, self._point.snapshot)
                return rows_under(session, described.source, table, keys, types)

        rows = await self._engine.run_until_stopped(cut, read)
        for name, value in own_values(table, lsn).items():
            same = repeated(pa.scalar(value, table.schema.field(name).type), rows.num_rows)
            rows = rows.set_column(rows.schema.get_field_index(name), name, same)
        names = list(table.key)
        schema = pa.schema([pa.field(name, table.schema.field(name).type) for name in names])
        # PostgreSQL takes some different texts for one key: the row that it has found may have another one.
        leaving = pa.concat_tables([keys.select(names).cast(schema), rows.select(names).cast(schema)])
        leaving = leaving.group_by(names).aggregate([]).select(names)
        for name, end in versions.ended(lsn).items() if table.versions else ():
            leaving = leaving.append_column(name, repeated(end, leaving.num_rows))
        return _change(rows, deleted_keys=leaving)

    async def _copies(
        self, connection: Connection, destination: Destination, hashes: Sequence[int], drawn: tuple[int, str]
    ) -> Folded:
        """Return the change that gives the rows with these hashes as many copies as the publisher has."""
        found = await published(connection, self._subscription.publications)
        relation, table, cut = self._relation, destination.table, Cut()

        def read() -> Folded:
            version = int(delta.opened(relation.path).version())
            target = DeltaVersion(relation.path, version, relation.qualified_name, relation.source)
            with copy_out.session(self._subscription.conninfo, _NAME, cut) as session, cut.watching(session):
                session.execute(SESSION.encode())
                snapshots.begin_session_under(session, self._point.snapshot)
                form = row_form(relation, found, target, destination.app_id, drawn)
                source = source_table(session, relation, found, form, target, destination.app_id)
                theirs = Hashed.joined([source.rows_like(session, one, hashes) for one in source.stretches()])
                ours = target.rows_like(source.form, hashes)
                places = surplus(theirs, ours)
                images = _rows_at(session, source, theirs.at.take(pa.array(places[0])).to_pylist(), destination)
            found_here = target.rows_of(source.form, ours.take(places[1]), table.schema.names)
            return _change(images, removed=_counted(list(found_here), table.schema))

        return await self._engine.run_until_stopped(cut, read)


def _change(images: pa.Table, *, deleted_keys: pa.Table | None = None, removed: pa.Table | None = None) -> Folded:
    nothing = pa.table({})
    return Folded(
        images=images,
        masked=images.slice(0, 0),
        deleted_keys=nothing if deleted_keys is None else deleted_keys,
        removed=nothing if removed is None else removed,
        insert_only=False,
        truncated=False,
        inserts=images.num_rows,
        updates=0,
        deletes=0,
    )


def _counted(found: Sequence[tuple[Hashed, pa.RecordBatch]], schema: pa.Schema) -> pa.Table:
    """Return distinct rows with the number of each (changeset.Folded.removed); rows are the same if their hashes are."""
    rows = pa.Table.from_batches([batch.select(schema.names).cast(schema) for _, batch in found], schema)
    hashes = np.concatenate([np.empty(0, np.uint64), *(hashed.rows for hashed, _ in found)])
    _, first, counts = np.unique(hashes, return_index=True, return_counts=True)
    return rows.take(pa.array(first)).append_column(COUNT_COLUMN, pa.array(counts))


def _rows_at(
    session: psycopg.Connection, source: SourceTable, places: Sequence[str], destination: Destination
) -> pa.Table:
    schema = pa.schema([destination.table.schema.field(name) for name in source.form.columns])
    return with_columns(pa.Table.from_batches(source.copy_at(session, places, schema), schema), destination.table)


def _require_same_columns(
    described: Described, destination: Destination, relation: SubscriptionRel, properties: Mapping[str, str]
) -> None:
    """Raise unless the Delta table has the publisher's columns: an ALTER TABLE that was not followed yet is followed first.

    The stream knows columns by their numbers.  It would drop or rename what was written under a name that another column has now.
    """
    known = attributes.current(relation.definition, properties, destination.app_id)
    for name in described.target.replicated:
        if name not in destination.table.schema.names:
            raise NotInPrerequisiteState(f'column "{name}" was added at the publisher, and not here yet')
    for name in attributes.named_otherwise(known, described.choice.columns):
        raise NotInPrerequisiteState(f'column "{name}" is another one at the publisher, which is not followed yet')
    now = replicated(known, described.definition.columns)
    closed = known is not None and known.left_out is not None
    if described.target.closed != destination.table.closed or (
        closed and not described.choice.names.issuperset(column.name for column in now)
    ):
        raise NotInPrerequisiteState(
            "its options columns, exclude and rename were changed: RESYNC TABLE makes them hold"
        )
    masks, wanted = destination.table.masks, described.target.masks
    there = {name: rule for name, rule in masks.rules.items() if name in described.target.schema.names}
    if there != wanted.rules or (wanted.are_keyed and masks.fingerprint != wanted.fingerprint):
        raise NotInPrerequisiteState("its option mask was changed: RESYNC TABLE makes it hold")
    if described.target.where != destination.table.where:
        raise NotInPrerequisiteState("its option where was changed: RESYNC TABLE makes it hold")
    if described.target.key != destination.table.key:
        raise NotInPrerequisiteState("the table's key was altered at the publisher, and not here yet")
