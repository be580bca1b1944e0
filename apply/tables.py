"""Write a subscription's tables: adapt them to each batch, wait for their sync workers, and store what becomes of them.

Which tables there are, and which transactions each gets, is in relation_map.py; how they follow the publisher's tables, in
schema_changes/.  A table that its sync worker has finished becomes ready (ready.py), one that fails stops alone or ends the worker
(isolation.py), and one that others write may conflict (conflicts.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import structlog

from apply.batch import Batch
from apply.conflicts import Conflicts, count_conflict_of, count_conflicts, note_look_ups, record_other_commits
from apply.handover import Handover
from apply.identity_missing import explain
from apply.isolation import Failure, hint_to_resync, is_own
from apply.pipeline.dispatch import PassedSkip
from apply.promotion import Promotion
from apply.ready import ReadyTables, is_ready
from apply.relation_entry import RelationEntry
from apply.relation_map import RelationMap
from apply.schema_changes.diff import CopyAgain
from apply.schema_changes.follow import Follower, UntilCommitted
from apply.schema_changes.refresh import ColumnRefresh
from apply.schema_changes.table_renames import Renames, refuse_renamed, use_our_names, use_our_names_of_unnamed
from apply.staging.destination import Destination, Destinations
from apply.worker_statistics import PATIENCE
from catalog.figures import Warned
from catalog.records import LastCommit, Subscription
from catalog.states import RelState
from catalog.store import Catalog
from pubsub.delta.log.other_commits import OtherCommit
from pubsub.errors import NotInPrerequisiteState, PubsubError, StartAgain, UndefinedObject
from pubsub.protocol.binary.single_values import BinaryTypes
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.protocol.pgoutput import Relation
from pubsub.publisher import definitions
from pubsub.publisher.connection import Connection
from pubsub.sql.layout_rules import Mode

logger = structlog.get_logger()

#: Called with the schemas and names of tables that the stream has and the subscription has not.
OnUnknownTables = Callable[[Collection[tuple[str, str]]], None]


def _names(batch: Batch) -> set[tuple[str, str]]:
    """Return the schemas and names under which the batch's relations are announced."""
    return {(r.namespace, r.name) for messages in batch.relations.values() for _, r in messages}


class _Synchronized(Exception):
    """Tables are apply's now that were their sync workers' when a batch's destinations were looked for."""


class ApplyTables:
    """Implements interfaces.Tables for a whole subscription, and stores `r` and the origin.

    `follower` alters tables as the publisher's are altered; without it, rows that do not fit are refused.
    """

    def __init__(
        self,
        catalog: Catalog,
        node_id: str,
        subscription: Subscription,
        handover: Handover,
        follower: Follower | None = None,
        on_unknown_tables: OnUnknownTables = lambda _: None,
    ) -> None:
        self.origin = f"pg_{subscription.oid}"
        self._catalog = catalog
        self.isolates = subscription.options.on_table_error == "isolate"
        self._subid = subscription.oid
        self._name = subscription.name
        self._handover = handover
        self._follower = follower
        self._on_unknown_tables = on_unknown_tables
        self._renames = Renames(follower) if follower is not None else None
        self._refresh = ColumnRefresh(catalog, subscription.oid, follower) if follower is not None else None
        self._ready = ReadyTables(catalog, subscription.oid, handover)
        self.relations = RelationMap(catalog, node_id, subscription.oid, handover, self._ready, self._stop_alone)
        # Names that the catalog did not have at this value of its counter: partitions that are announced beside their root.
        self._absent: set[tuple[str, str]] = set()
        self._looked_at: int | None = None
        self._draining = asyncio.Event()
        # Tables whose sync workers are awaited, with the times when that began.
        self._awaited: list[tuple[str, float]] = []
        self._subscription = subscription
        self.types = BinaryTypes()
        self.promotion: Promotion | None = None

    # interfaces.Tables

    async def adapt_tables(self, batch: Batch, until_committed: UntilCommitted | None) -> Destinations:
        """See interfaces.Tables.  Leaves out tables whose copy is under way, and those not in the subscription.

        A table may leave while any of the steps waits.  The last one does not wait, so what it returns is still there.
        """
        if until_committed is not None:
            await self._refresh_before(batch, until_committed)
        await self._learn_types(batch)
        await self._know_relations(batch)
        await self._follow_renames(batch, until_committed)
        while True:
            entries = await self._entries_with_columns(batch)
            try:
                await self._follow_schema_changes(batch, entries, until_committed)
            except _Synchronized:
                await self.relations.load()
                continue
            return self._destinations(entries)

    async def _refresh_before(self, batch: Batch, until_committed: UntilCommitted) -> None:
        """Take over the columns that REFRESH asks about, if the batch begins past the first look at them."""
        if self._refresh is None or not self._refresh.pending:
            return
        at = Lsn(batch.first_lsn - 1)
        if self._refresh.is_due(at):
            await until_committed()
            await self.refresh_columns(at)

    async def _learn_types(self, batch: Batch) -> None:
        """For binary transfer, ask the publisher about types created since the worker started."""
        options = self._subscription.options
        oids = {column.type_oid for messages in batch.relations.values() for _, r in messages for column in r.columns}
        if not options.binary or all(self.types.knows(oid) for oid in oids):
            return
        async with await Connection.connect(
            self._subscription.conninfo, replication=False, application_name=self._subscription.name
        ) as connection:
            self.types = await definitions.binary_types(connection)

    async def _know_relations(self, batch: Batch) -> None:
        """Read the catalog again if it may know more about the batch's relations than we do."""
        # An unknown table may have joined just now, without a copy; its rows must not be dropped.
        unknown_names = _names(batch) - self.relations.by_name.keys()
        if self.relations.unread or unknown_names:
            counter = await self._catalog.change_counter()
            if self.relations.unread or counter != self._looked_at or not unknown_names <= self._absent:
                await self.relations.load()
                self._looked_at, self._absent = counter, _names(batch) - self.relations.by_name.keys()
            named = {r.oid: (r.namespace, r.name) for messages in batch.relations.values() for _, r in messages}
            here = self.relations
            if unknown := {at for oid, at in named.items() if oid not in here.by_oid and at not in here.by_name}:
                self._on_unknown_tables(unknown)

    async def _follow_renames(self, batch: Batch, until_committed: UntilCommitted | None) -> None:
        """Rename tables that the publisher renamed, and use our names in the batch; or refuse the batch."""
        if self._renames is None:
            refuse_renamed(batch, self.relations.by_oid, self.relations.by_name.keys())
            use_our_names_of_unnamed(batch, self.relations.by_oid)
            return
        if await self._renames.follow(batch, self.relations, until_committed):
            await self.relations.load()
        use_our_names(batch, self.relations.by_oid)

    async def _entries_with_columns(self, batch: Batch) -> list[RelationEntry]:
        """Return the tables that get changes of the batch, with their columns; wait for sync workers where necessary."""
        here = self.relations
        return [
            entry
            for name in _names(batch)
            for entry in here.named.get(name, ())  # as it is by then
            if await self._with_columns(entry)
        ]

    async def _with_columns(self, entry: RelationEntry) -> bool:
        """Return whether a table gets changes, and has its columns by now."""
        if entry.after is None or not self.relations.is_here(entry):
            return False
        must_be_known = not entry.synced and (entry.contested or entry.relation.kept_rows is not None)
        if entry.relation.definition is None or must_be_known:
            # Its Delta table is still to be created, or its rows must be known.
            await self._until_synced(entry)
            await self.relations.load()
            if not self.relations.is_here(entry) or entry.stopped:
                return False
        if entry.columns is None:
            columns = await self.relations.columns_of(entry)
            if columns.app_id != entry.app_id:
                return False  # a new copy has begun meanwhile
            entry.columns = columns
        return True

    async def _follow_schema_changes(
        self, batch: Batch, entries: Sequence[RelationEntry], until_committed: UntilCommitted | None
    ) -> None:
        """Alter the tables as the batch's rows require; hand back those that must be copied again (StartAgain).

        Raises _Synchronized once their sync workers are done, if some had to be waited for: they alter tables, too.
        """
        if self._follower is None:
            return
        tables = [(e.columns, e.after) for e in entries if e.columns is not None and e.after is not None]
        under_way = [entry for entry in entries if not entry.synced]

        async def until_settled() -> None:
            assert until_committed is not None
            await until_committed()
            for entry in under_way:
                await self._until_synced(entry)
            if under_way:
                raise _Synchronized

        settled = None if until_committed is None else until_settled
        again = await self._follower.follow(batch, tables, settled, self.version)
        if {one.relid for one in again} & {entry.relation.relid for entry in under_way}:
            # A sync worker that goes on fails when it stores s for a table in state i.
            await until_settled()
        await self._copy_again(again)

    def _destinations(self, entries: Sequence[RelationEntry]) -> Destinations:
        """Return where rows of these tables go, without those that have left or get nothing any more."""
        found: dict[Mode | None, dict[tuple[str, str], Destination]] = {None: {}}
        for entry in entries:
            destination = entry.destination(self.types) if self.relations.is_here(entry) else None
            if destination is not None:
                found.setdefault(entry.relation.beside, {})[entry.name] = destination
        return [*found.values()]

    async def begin_refresh(self) -> None:
        """Take the first look at the publisher's columns of the tables that REFRESH asks about, unless it was taken."""
        if self._refresh is not None:
            await self._refresh.take_first_look(self.relations.entries)

    @property
    def refresh_pending(self) -> bool:
        """See interfaces.Tables."""
        return self._refresh is not None and self._refresh.pending

    async def refresh_columns(self, at: Lsn) -> None:
        """See interfaces.Tables, and schema_changes/refresh.py."""
        if self._refresh is not None:
            await self._copy_again(await self._refresh.take_over(at, self.relations.entries, self._stop_alone))

    async def _stop_alone(self, relid: int, error: PubsubError, at: Lsn) -> None:
        """Stop the table alone at `at` if isolation allows it; otherwise raise `error`."""
        error.relid = relid
        if not self.isolates or not is_own(error):
            raise error
        failures = [Failure(relid, error, at)]
        self.failed(failures)
        await self.stop(failures)

    async def unchanged(self, batch: Batch, announced: Mapping[int, Relation]) -> bool:
        """See interfaces.Tables."""
        if self._follower is None:
            return True
        entries = [entry for entry in self.relations.entries.values() if entry.relation.oid in announced]
        known = [entry.columns for entry in entries if entry.columns is not None]
        return await self._follower.unchanged(batch, known, announced)

    async def _copy_again(self, tables: Sequence[CopyAgain]) -> None:
        """Return the tables to their sync workers, as RESYNC TABLE does, and raise StartAgain.

        Raises the CopyAgain of a table that was never copied.
        """
        for again in tables:
            assert again.relid is not None
            entry = self.relations.entries.get(again.relid)
            if entry is not None and not entry.relation.copied:
                raise again
        for again in tables:
            assert again.relid is not None
            try:
                await self._catalog.set_relation_state(self._subid, again.relid, RelState.INIT)
            except UndefinedObject:
                continue  # it has left meanwhile
            # Else the next apply worker would keep to what was promised to the old copy, and end here again.
            self._handover.new_copy(again.relid)
            logger.info("table is copied again", relation=again.relation, reason=again.reason)
        if tables:
            raise StartAgain(tables[0].message)

    async def before_commit(self) -> None:
        """See interfaces.Tables."""
        await self._catalog.prove()
        if self.promotion is not None:
            await self.promotion.noticed()

    async def may_write(self, destination: Destination) -> bool:
        """See interfaces.Tables.  True only once the sync worker has stored s and the table's version has been read."""
        if destination.relid in self.relations.unread:
            await self.relations.load()
        entry = self.relations.entries.get(destination.relid)
        if entry is not None and not entry.synced:
            await self._until_synced(entry)
            await self.relations.load()
        if entry is None or not self.relations.is_here(entry):
            return False
        return entry.is_copy_of(destination) and not entry.stopped

    def failed(self, failures: Sequence[Failure]) -> None:
        """See interfaces.Tables."""
        for one in failures:
            entry = self.relations.entries.get(one.relid)
            if entry is not None:
                entry.fail()

    async def stop(self, failures: Sequence[Failure]) -> None:
        """See interfaces.Tables."""
        for one in failures:
            entry = self.relations.entries.get(one.relid)
            if entry is None:
                continue
            entry.stopped = True
            relation, error = entry.relation, one.error
            await explain(error, self._subscription)
            logger.error(
                "table has stopped",
                subscription=self._name,
                relation=relation.qualified_name,
                lsn=str(one.lsn),
                reason=error.message,
                detail=error.detail,
                context=error.context,
            )
            hint = hint_to_resync(error, self._name, relation)
            await self._catalog.stop_relation(self._subid, one.relid, error.message, hint, one.lsn, count="apply")
            await count_conflict_of(self._catalog, self._subid, error)

    async def others_wrote(self, destination: Destination, commits: Sequence[OtherCommit]) -> None:
        """See interfaces.Tables."""
        await record_other_commits(self._catalog, self._subid, destination.relid, destination.table.relation, commits)
        entry = self.relations.entries.get(destination.relid)
        if entry is not None:
            entry.contested = True

    def look_up(self, destination: Destination) -> None:
        """See interfaces.Tables."""
        note_look_ups(destination.table.relation)
        self._handover.look_up(destination.app_id)
        entry = self.relations.entries.get(destination.relid)
        if entry is not None and entry.is_copy_of(destination):
            entry.contested = True

    async def conflicts_found(self, relation: str, conflicts: Conflicts) -> None:
        """See interfaces.Tables."""
        await count_conflicts(self._catalog, self._subid, relation, conflicts)

    async def ready_destination(self, relid: int) -> Destination | None:
        """Return where the rows of a table in state r go; None for any other."""
        entry = self.relations.entries.get(relid)
        if (
            entry is None
            or entry.relation.state is not RelState.READY
            or not entry.synced
            or entry.stopped
            or entry.failed
        ):
            return None
        if entry.columns is None:
            entry.columns = await self.relations.columns_of(entry)
        return entry.destination(self.types) if self.relations.is_here(entry) else None

    def drain(self) -> None:
        """End the waits for sync workers: the worker ends, and they end too."""
        self._draining.set()

    async def _until_synced(self, entry: RelationEntry) -> None:
        """Wait until the table's sync worker has stored s; not for a table that apply writes by now, has stopped, or has left.

        Raises NotInPrerequisiteState if told to drain first; the uncommitted changes are then received again.
        """
        if entry.synced or entry.stopped or not self.relations.is_here(entry):
            return  # its hand-over is forgotten, maybe while other things were awaited: nothing would end the wait
        name = entry.relation.qualified_name
        awaited = (name, time.monotonic())
        self._awaited.append(awaited)
        waits = {
            asyncio.create_task(self._handover.wait_synced(entry.relation.relid)),
            asyncio.create_task(self._draining.wait()),
        }
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._awaited.remove(awaited)
            for wait in waits:
                wait.cancel()
        if self._draining.is_set():
            raise NotInPrerequisiteState(
                f'table "{name}" is not synchronized',
                detail="The worker was told to end before the table's sync worker was done.",
            )

    def wait(self, now: float) -> Warned | None:
        """Return for which tables' sync workers commits have waited long enough to be reported.  `now`: time.monotonic()."""
        names = sorted({name for name, since in self._awaited if now - since >= PATIENCE})
        if not names:
            return None
        tables = f"table {names[0]}" if len(names) == 1 else f"tables {', '.join(names)}"
        return Warned(
            f"waits for {tables} to be synchronized",
            "Changes of all tables of the subscription are committed after those that the sync worker still has to apply.",
        )

    def version(self, relid: int) -> Lsn:
        """See interfaces.Tables."""
        entry = self.relations.entries.get(relid)
        return INVALID_LSN if entry is None else entry.version

    def committed(self, destination: Destination, lsn: Lsn) -> None:
        """See interfaces.Tables."""
        entry = self.relations.entries.get(destination.relid)
        if entry is not None and entry.is_copy_of(destination):
            entry.version = lsn
            if not entry.failed:
                entry.after = max(lsn, entry.after or INVALID_LSN)

    async def durable(self, lsn: Lsn, last: LastCommit | None) -> None:
        """See interfaces.Tables.  Also stores `r` where the origin allows it."""
        self._ready.origin_is(await self._catalog.advance_origin(self._subid, lsn, last=last))
        await self.store_ready()

    async def skip_passed(self, passed: PassedSkip) -> None:
        """See interfaces.Tables (worker.c: clear_subscription_skip_lsn)."""
        await self._catalog.clear_skip_lsn(self._subid, passed.wanted)
        if passed.finish == passed.wanted:
            logger.info(
                "logical replication completed skipping transaction", origin=self.origin, finish_lsn=str(passed.finish)
            )
        else:
            logger.warning(
                "skip-LSN of the subscription is cleared: the first transaction was another",
                origin=self.origin,
                skip_lsn=str(passed.wanted),
                finish_lsn=str(passed.finish),
            )

    def waits_for(self, position: Lsn) -> bool:
        """See interfaces.Tables."""
        return any(is_ready(entry.sync_lsn, position) for entry in self.relations.entries.values())

    async def store_ready(self) -> None:
        """Store `r` for the tables in s whose LSN the stored origin has reached."""
        await self._ready.store(self.relations.entries)
