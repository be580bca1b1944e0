"""A subscription's tables as apply sees them: their states, how much of the stream each holds, and which apply writes.

Whether a transaction is applied to a table is decided by LSNs alone: a table gets the transactions that end after its
`after`.  While the sync worker has the table, `after` is None, and apply passes over the table.  The hand-over (state
c) sets it to C, which is at or past every transaction decided before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import structlog

from apply.batch import Batch
from apply.conflicts import Conflicts, UniqueViolation
from apply.handover import Handover
from apply.isolation import Failure, is_own
from apply.pipeline.dispatch import PassedSkip
from apply.promotion import Promotion
from apply.schema_changes.diff import CopyAgain
from apply.schema_changes.follow import Columns, Follower, Looked, load
from apply.staging.destination import Destination
from catalog.records import Counters, ForeignCommit, Subscription, SubscriptionRel
from catalog.states import RelState
from catalog.store import Catalog
from pubsub import faults
from pubsub.delta import table as delta
from pubsub.delta.log import OtherCommit
from pubsub.errors import NotInPrerequisiteState, PubsubError, StartAgain, UndefinedObject, UndefinedTable
from pubsub.protocol.binary.values import BinaryTypes
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.protocol.pgoutput import Relation
from pubsub.publisher import definitions
from pubsub.publisher.connection import Connection
from pubsub.sql.identifiers import quote_identifier, quote_qualified

log = structlog.get_logger()


@dataclass(slots=True)
class _Entry:
    relation: SubscriptionRel
    app_id: str
    after: Lsn | None = None
    """None: the table is the sync worker's, or has stopped; apply leaves out every transaction."""
    version: Lsn = INVALID_LSN
    sync_lsn: Lsn | None = None
    """The LSN of state s, until r is stored."""
    columns: Columns | None = None
    own: bool = False
    """The sync worker is done with the table (s or r); apply may write it."""
    contested: bool = False
    """The table may hold rows of other writers, so changes may conflict."""
    failed: bool = False
    """The table is about to stop; only what is staged for it is still committed."""
    stopped: bool = False
    """The table has stopped alone and gets nothing more."""
    asked: int = 0
    """How many REFRESHes have asked to compare its columns with the publisher's, even if no rows come."""
    named: tuple[str, str] | None = None
    """Schema and name in its last Relation message."""

    @property
    def name(self) -> tuple[str, str]:
        """Schema and name in the catalog."""
        return self.relation.schema, self.relation.name


def _goes_on(known: SubscriptionRel, now: SubscriptionRel) -> bool:
    """Tell whether a table that apply writes is still the same copy, and past its hand-over."""
    return now.copy_generation == known.copy_generation and now.state in (RelState.SYNCDONE, RelState.READY)


def _is_for(destination: Destination, entry: _Entry) -> bool:
    """Tell whether `destination` is the table's present copy, not an earlier one."""
    return destination.app_id == entry.app_id


def bring_back(error: PubsubError, subscription: str, relation: SubscriptionRel) -> str:
    """Return the hint for a table that stopped alone: the error's own, and how to bring the table back."""
    name = quote_qualified(relation.schema, relation.name)
    resync = f"ALTER SUBSCRIPTION {quote_identifier(subscription)} RESYNC TABLE {name} copies the table anew."
    return resync if error.hint is None or "RESYNC TABLE" in error.hint else f"{error.hint} {resync}"


async def note_others(catalog: Catalog, subid: int, destination: Destination, commits: Sequence[OtherCommit]) -> None:
    """Log other writers' commits to a table, and store the last one for the table's status."""
    for commit in commits:
        log.warning(
            "the Delta table was written by others",
            relation=destination.table.relation,
            version=commit.version,
            operation=commit.operation,
            engine=commit.engine,
        )
    last = commits[-1]
    await catalog.set_foreign_commit(subid, destination.relid, ForeignCommit(last.version, last.operation, last.engine))


async def count_conflicts(catalog: Catalog, subid: int, relation: str, conflicts: Conflicts) -> None:
    """Log and store conflicts at once: a worker that ends before the next statistics report must not lose them."""
    conflicts.report(relation)
    counts = {f"confl_{conflict.value}": count for conflict, count in conflicts.counts.items()}
    await catalog.add_counters(subid, **cast(Counters, counts))


async def count_conflict_of(catalog: Catalog, subid: int, error: PubsubError) -> None:
    """Count the conflict that ended a worker or stopped a table, if `error` is one."""
    if isinstance(error, UniqueViolation):
        await catalog.add_counters(subid, **cast(Counters, {f"confl_{error.conflict.value}": 1}))


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
    ) -> None:
        self.origin = f"pg_{subscription.oid}"
        self._catalog = catalog
        self._node_id = node_id
        self.isolates = subscription.options.on_table_error == "isolate"
        self._subid = subscription.oid
        self._name = subscription.name
        self._handover = handover
        self._follower = follower
        self._entries: dict[int, _Entry] = {}
        self._by_name: dict[tuple[str, str], _Entry] = {}
        self._loading = asyncio.Lock()
        # Tables answered with C since the catalog was read: their copy, generation and definition are newer than ours.
        self._unread: set[int] = set()
        self._durable = INVALID_LSN
        self._draining = asyncio.Event()
        # Tables that the publisher has not renamed although another table uses their name: they were dropped.
        self._told_apart: set[int] = set()
        # The publisher's catalog at the first look at the tables that REFRESH asks about.
        self._looked: Looked | None = None
        self._subscription = subscription
        self.types = BinaryTypes()
        self.promotion: Promotion | None = None

    async def load(self) -> None:
        """Read the catalog again: new tables are the sync worker's, and removed tables are forgotten."""
        async with self._loading:
            await self._load()

    async def _load(self) -> None:
        answered = set(self._unread)
        origin = await self._catalog.origin(self._subid)
        self._durable = max(self._durable, origin)
        relations = {r.relid: r for r in await self._catalog.relations(self._subid)}
        for relid in self._entries.keys() - relations.keys():
            self._handover.forget(relid)
            del self._entries[relid]
        for relid, relation in relations.items():
            entry = self._entries.get(relid)
            app_id = delta.application_id(self._node_id, self._subid, relid, relation.copy_generation)
            if entry is not None and entry.own and not _goes_on(entry.relation, relation):
                # The table has left and joined again since the catalog was last read.
                if relation.state is RelState.INIT and relid not in self._unread - answered:
                    self._handover.forget(relid)  # that promise was not made to the new copy
                entry = None
            if entry is None:
                entry = self._entries[relid] = _Entry(relation, app_id)
                entry.after = self._handover.promised.get(relid)
            if entry.app_id != app_id:
                entry.columns = None
            entry.relation, entry.app_id = relation, app_id
            entry.asked = relation.look_again
            # A table that joined without a copy may lack rows that the publisher has, and have others.
            entry.contested = relation.foreign is not None or relation.copy_generation == 0
            if relation.stopped:
                # Release the tasks that wait for its sync worker.
                entry.stopped, entry.after, entry.sync_lsn = True, None, None
                self._handover.forget(relid)
            elif relation.state in (RelState.SYNCDONE, RelState.READY) and not entry.own:
                if relation.definition is not None:
                    await self._try_to_take_over(entry)
                else:
                    # The table joined without a copy, and its Delta table is still to be created.
                    entry.after = relation.lsn or INVALID_LSN
            if entry.failed:
                entry.after = entry.sync_lsn = None
        self._by_name = {(e.relation.schema, e.relation.name): e for e in self._entries.values()}
        self._unread -= answered

    async def _try_to_take_over(self, entry: _Entry) -> None:
        try:
            await self._take_over(entry)
        except PubsubError as error:
            await self._stop_alone(entry, error, self._durable)

    async def _take_over(self, entry: _Entry) -> None:
        """Take over a table in s or r; how much it holds is read from the table itself."""
        relation = entry.relation
        held = await asyncio.to_thread(delta.committed_lsn, relation.path, entry.app_id)
        if held is None and relation.copy_generation:
            raise UndefinedTable(
                f'the Delta table of "{relation.qualified_name}" does not hold its copy any more',
                detail=f'"{relation.path}" was deleted, or replaced by another table.',
                hint=f"ALTER SUBSCRIPTION … RESYNC TABLE {relation.qualified_name} copies it anew.",
            )
        held = held or INVALID_LSN
        entry.version = max(entry.version, held)
        entry.after = max(held, relation.lsn or INVALID_LSN)
        if relation.state is RelState.SYNCDONE:
            entry.sync_lsn = relation.lsn
        entry.columns = await self._columns(entry)
        entry.own = True

    async def _columns(self, entry: _Entry) -> Columns:
        relation = entry.relation
        return await load(relation.relid, entry.app_id, relation.path, relation.qualified_name, relation.definition)

    @property
    def greatest_version(self) -> Lsn:
        """The greatest version of any table (0: none).  If a crash cut a batch short, that batch ends here."""
        return max((entry.version for entry in self._entries.values()), default=INVALID_LSN)

    @property
    def held(self) -> Lsn:
        """The LSN past which no table holds anything (0: nothing is held), but see `held_by_copies`."""
        return max(
            (Lsn(max(entry.version, entry.relation.lsn or INVALID_LSN)) for entry in self._entries.values()),
            default=INVALID_LSN,
        )

    async def held_by_copies(self) -> Lsn:
        """Return the greatest LSN held by tables still being copied: by their snapshots, or by a catch-up's commits."""
        held = INVALID_LSN
        for relid, entry in self._entries.items():
            relation = entry.relation
            if relation.state not in (RelState.DATASYNC, RelState.FINISHEDCOPY):
                continue
            plan = await self._catalog.copy_plan(self._subid, relid)
            if plan is not None and plan.generation == relation.copy_generation:
                held = max(held, plan.start, plan.until)
            if relation.state is RelState.FINISHEDCOPY:
                committed = await asyncio.to_thread(delta.committed_lsn, relation.path, entry.app_id)
                held = max(held, committed or INVALID_LSN)
        return held

    @property
    def any_copied(self) -> bool:
        """Whether any table's copy is finished, or was never needed."""
        return any(e.relation.state not in (RelState.INIT, RelState.DATASYNC) for e in self._entries.values())

    @property
    def all_ready(self) -> bool:
        """Whether there are tables, and all are in state r (tablesync.c: AllTablesyncsReady)."""
        going = [entry for entry in self._entries.values() if not entry.stopped]
        return bool(going) and all(entry.relation.state is RelState.READY for entry in going)

    def keep_promises(self) -> None:
        """Read the promises again before attaching: until then a new copy breaks a promise unnoticed."""
        for relid, entry in self._entries.items():
            if not entry.own and not entry.failed and not entry.stopped and entry.relation.definition is not None:
                entry.after = self._handover.promised.get(relid)

    def promise(self, relid: int, at: Lsn, decided: Lsn) -> Lsn:
        """Answer a sync worker in state w at `at` with C = max(`at`, `decided`); see handover.py."""
        catchup = max(at, decided)
        self._unread.add(relid)
        entry = self._entries.get(relid)
        if entry is not None and not entry.failed and not entry.stopped:
            entry.after = catchup
        return catchup

    # interfaces.Tables

    async def destinations(
        self, batch: Batch, quiet: Callable[[], Awaitable[None]] | None
    ) -> Mapping[tuple[str, str], Destination]:
        """See interfaces.Tables.  Leaves out tables whose copy is under way, and those not in the subscription."""
        if quiet is not None and self._looked is not None and self._looked.lsn < batch.first_lsn:
            await quiet()
            await self.settle_columns(Lsn(batch.first_lsn - 1))
        found: dict[tuple[str, str], _Entry] = {}
        await self._learn_types(batch)
        names = {(r.namespace, r.name) for messages in batch.relations.values() for _, r in messages}
        # An unknown table may have joined just now, without a copy; its rows must not be dropped.
        if self._unread or not names <= self._by_name.keys():
            await self.load()
        if self._follower is None:
            self._refuse_renamed(batch)
        else:
            await self._follow_names(self._follower, batch, quiet)
            names = {(r.namespace, r.name) for messages in batch.relations.values() for _, r in messages}
        for name in names:
            entry = self._by_name.get(name)
            if entry is None or entry.after is None:
                continue
            if entry.relation.definition is None or (entry.contested and not entry.own):
                # Its Delta table is still to be created, or its rows must be known.
                await self._until_synced(entry)
                await self.load()
                if self._by_name.get(name) is not entry or entry.stopped:
                    continue
            if entry.columns is None:
                columns = await self._columns(entry)
                if columns.app_id != entry.app_id:
                    continue  # a new copy has begun meanwhile
                entry.columns = columns
            found[name] = entry
        if self._follower is not None:
            tables = [(e.columns, e.after) for e in found.values() if e.columns is not None and e.after is not None]
            await self._copy_again(await self._follower.follow(batch, tables, quiet, self.version))
        return {
            name: Destination(
                e.relation.relid,
                e.columns.target,
                e.app_id,
                e.after,
                self.types,
                contested=e.contested,
                readings=e.columns.readings,
            )
            for name, e in found.items()
            if self._is_here(e) and e.columns is not None and e.after is not None
        }

    def _is_here(self, entry: _Entry) -> bool:
        """Tell whether the entry is still the subscription's.  Ask again after every await."""
        return self._entries.get(entry.relation.relid) is entry

    async def look(self) -> None:
        """Take the first look at the publisher's columns of the tables that REFRESH asks about, unless it was taken."""
        asked = self._asked_for()
        if asked and self._follower is not None and self._looked is None:
            self._looked = await self._follower.look([columns for _, columns, _ in asked])

    def _asked_for(self) -> list[tuple[_Entry, Columns, int]]:
        """Return the tables whose columns are asked for, with their known columns and the number of requests."""
        return [
            (entry, entry.columns, entry.asked)
            for entry in self._entries.values()
            if entry.asked and entry.own and entry.after is not None and entry.columns is not None
        ]

    @property
    def asked(self) -> bool:
        """See interfaces.Tables."""
        return self._looked is not None

    async def settle_columns(self, at: Lsn) -> None:
        """See interfaces.Tables.

        The publisher's catalog is ahead of the stream, so one look is not enough.  A table with the same columns in two
        looks had them all the time between.  Once the stream is past the end of WAL of the first look, it is between
        the two, so its rows have the columns that both looks saw.
        """
        first = self._looked
        if first is None or self._follower is None or at < first.lsn:
            return
        asked = self._asked_for()
        now = await self._follower.look([columns for _, columns, _ in asked])
        known: dict[int, int] = {}
        again: list[CopyAgain] = []
        for entry, table, count in asked:
            if not self._is_here(entry) or entry.columns is not table:
                continue  # removed or copied anew since the publisher was asked
            described = now.tables.get(table.relid)
            before = first.tables.get(table.relid)
            if described is not None and (before is None or not before.same_columns(described)):
                continue  # altered since the first look
            if described is not None and entry.after is not None:
                try:
                    since = max(first.lsn, entry.after)
                    await self._follower.take_over(table, described, since, entry.version)
                except CopyAgain as error:
                    again.append(error)
                except PubsubError as error:
                    await self._stop_alone(entry, error, at)
            known[table.relid] = count
            if entry.asked == count:  # a REFRESH that came meanwhile needs another look
                entry.asked = 0
        await self._catalog.columns_are_known(self._subid, known)
        self._looked = now if self._asked_for() else None
        await self._copy_again(again)

    async def _stop_alone(self, entry: _Entry, error: PubsubError, at: Lsn) -> None:
        """Stop the table alone at `at` if isolation allows it; otherwise raise `error`."""
        error.relid = entry.relation.relid
        if not self.isolates or not is_own(error):
            raise error
        failures = [Failure(entry.relation.relid, error, at)]
        self.failed(failures)
        await self.stop(failures)

    async def unchanged(self, told: Mapping[int, Relation]) -> bool:
        """See interfaces.Tables."""
        if self._follower is None:
            return True
        entries = [self._entries[oid] for oid in told if oid in self._entries]
        return await self._follower.unchanged([e.columns for e in entries if e.columns is not None], told)

    async def _follow_names(
        self, follower: Follower, batch: Batch, quiet: Callable[[], Awaitable[None]] | None
    ) -> None:
        """Rename tables that the publisher renamed, known by their oids, and use our names in the batch."""
        renamed: dict[int, tuple[str, str]] = {}
        doubtful: set[int] = set()
        for oid, messages in batch.relations.items():
            last = messages[-1][1]
            entry = self._entries.get(oid)
            if entry is None:
                other = self._by_name.get((last.namespace, last.name))
                if other is not None and other.after is not None:
                    # Either our table was dropped and created again, or it was renamed, and this one is not ours.
                    doubtful.add(other.relation.relid)
            elif entry.after is not None and entry.named != (last.namespace, last.name):
                renamed[oid] = (last.namespace, last.name)
        renamed = {oid: name for oid, name in renamed.items() if name != self._entries[oid].name}
        doubtful |= {
            other.relation.relid for name in renamed.values() if (other := self._by_name.get(name)) is not None
        }
        doubtful -= renamed.keys() | self._told_apart
        if doubtful:
            now = await follower.renamed([*doubtful])
            here = {oid: name for oid, name in now.items() if oid in self._entries}
            renamed |= {oid: name for oid, name in here.items() if name != self._entries[oid].name}
            self._told_apart |= doubtful - renamed.keys()
        # Skip a name that another table still has; that table's own rename comes later in the stream.
        taken = {entry.name for oid, entry in self._entries.items() if oid not in renamed}
        renamed = {oid: name for oid, name in renamed.items() if name not in taken}
        if renamed:
            if quiet is None:
                raise NotInPrerequisiteState("a table is renamed in a transaction in progress")
            await quiet()
            for oid, (schema, name) in renamed.items():
                entry = self._entries.get(oid)
                if entry is None:
                    continue  # removed meanwhile
                log.info("table was renamed as the publisher's was", relation=entry.relation.qualified_name, name=name)
                await follower.rename(oid, entry.columns, schema, name)
            await self.load()
        for oid, messages in batch.relations.items():
            entry = self._entries.get(oid)
            if entry is not None:
                last = messages[-1][1]
                entry.named = (last.namespace, last.name)
                batch.rename(oid, *entry.name)

    async def _copy_again(self, tables: Sequence[CopyAgain]) -> None:
        """Return the tables to their sync workers, as RESYNC TABLE does, and raise StartAgain.

        Raises the CopyAgain of a table that was never copied.
        """
        for again in tables:
            assert again.relid is not None
            entry = self._entries.get(again.relid)
            if entry is not None and not entry.relation.copy_generation:
                raise again
        for again in tables:
            assert again.relid is not None
            try:
                await self._catalog.set_relation_state(self._subid, again.relid, RelState.INIT)
            except UndefinedObject:
                continue  # it has left meanwhile
            log.info("table is copied again", relation=again.relation, reason=again.reason)
        if tables:
            raise StartAgain(tables[0].message)

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

    def _refuse_renamed(self, batch: Batch) -> None:
        """Raise NotInPrerequisiteState for a renamed table, whose changes would find no destination and be lost."""
        for oid, messages in batch.relations.items():
            entry = self._entries.get(oid)
            namespace, name = messages[-1][1].namespace, messages[-1][1].name
            if entry is not None and entry.after is not None and (namespace, name) not in self._by_name:
                error = NotInPrerequisiteState(
                    f'logical replication target relation "{namespace}.{name}" does not exist',
                    detail=f'The publisher has renamed "{entry.relation.qualified_name}".',
                    hint="Rename it back; a rename is not followed.",
                )
                error.relid = oid
                raise error

    async def before_commit(self) -> None:
        """See interfaces.Tables."""
        await self._catalog.prove()
        if self.promotion is not None:
            await self.promotion.noticed()

    async def may_write(self, destination: Destination) -> bool:
        """See interfaces.Tables.  True only once the sync worker has stored s and the table's version has been read."""
        if destination.relid in self._unread:
            await self.load()
        entry = self._entries.get(destination.relid)
        if entry is not None and not entry.own:
            await self._until_synced(entry)
            await self.load()
        return entry is not None and self._is_here(entry) and _is_for(destination, entry) and not entry.stopped

    def failed(self, failures: Sequence[Failure]) -> None:
        """See interfaces.Tables."""
        for one in failures:
            entry = self._entries.get(one.relid)
            if entry is not None:
                entry.failed, entry.after, entry.sync_lsn = True, None, None

    async def stop(self, failures: Sequence[Failure]) -> None:
        """See interfaces.Tables."""
        for one in failures:
            entry = self._entries.get(one.relid)
            if entry is None:
                continue
            entry.stopped = True
            relation, error = entry.relation, one.error
            log.error(
                "table has stopped",
                subscription=self._name,
                relation=relation.qualified_name,
                lsn=str(one.lsn),
                reason=error.message,
                detail=error.detail,
                context=error.context,
            )
            hint = bring_back(error, self._name, relation)
            await self._catalog.stop_relation(self._subid, one.relid, error.message, hint, one.lsn, count="apply")
            await count_conflict_of(self._catalog, self._subid, error)

    async def others_wrote(self, destination: Destination, commits: Sequence[OtherCommit]) -> None:
        """See interfaces.Tables."""
        await note_others(self._catalog, self._subid, destination, commits)
        entry = self._entries.get(destination.relid)
        if entry is not None:
            entry.contested = True

    async def met(self, relation: str, conflicts: Conflicts) -> None:
        """See interfaces.Tables."""
        await count_conflicts(self._catalog, self._subid, relation, conflicts)

    def drain(self) -> None:
        """End the waits for sync workers: the worker ends, and they end too."""
        self._draining.set()

    async def _until_synced(self, entry: _Entry) -> None:
        """Wait until the table's sync worker has stored s.

        Raises NotInPrerequisiteState if told to drain first; the uncommitted changes are then received again.
        """
        waits = {
            asyncio.create_task(self._handover.wait_synced(entry.relation.relid)),
            asyncio.create_task(self._draining.wait()),
        }
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self._draining.is_set():
            raise NotInPrerequisiteState(
                f'table "{entry.relation.qualified_name}" is not synchronized',
                detail="The worker was told to end before the table's sync worker was done.",
            )

    def version(self, relid: int) -> Lsn:
        """See interfaces.Tables."""
        entry = self._entries.get(relid)
        return INVALID_LSN if entry is None else entry.version

    def committed(self, destination: Destination, lsn: Lsn) -> None:
        """See interfaces.Tables."""
        entry = self._entries.get(destination.relid)
        if entry is not None and _is_for(destination, entry):
            entry.version = lsn
            if not entry.failed:
                entry.after = max(lsn, entry.after or INVALID_LSN)

    async def durable(self, lsn: Lsn) -> None:
        """See interfaces.Tables.  Also stores `r` where the origin allows it."""
        origin = await self._catalog.advance_origin(self._subid, lsn)
        self._durable = max(self._durable, origin)
        await self.settle()

    async def skip_passed(self, passed: PassedSkip) -> None:
        """See interfaces.Tables (worker.c: clear_subscription_skip_lsn)."""
        await self._catalog.clear_skip_lsn(self._subid, passed.wanted)
        if passed.finish == passed.wanted:
            log.info(
                "logical replication completed skipping transaction", origin=self.origin, finish_lsn=str(passed.finish)
            )
        else:
            log.warning(
                "skip-LSN of the subscription is cleared: the first transaction was another",
                origin=self.origin,
                skip_lsn=str(passed.wanted),
                finish_lsn=str(passed.finish),
            )

    async def settle(self) -> None:
        """Store `r` for the tables in s whose LSN the stored origin has reached."""
        for relid, entry in list(self._entries.items()):
            # None for a stopped table.
            lsn = entry.sync_lsn
            if lsn is not None and self._durable >= lsn:
                entry.sync_lsn = None  # two tasks run this
                await faults.reached(f"synced {entry.relation.qualified_name}")
                try:
                    await self._catalog.set_relation_state(self._subid, relid, RelState.READY, lsn)
                except (UndefinedObject, NotInPrerequisiteState):
                    continue  # it has left, or left and joined again, since the catalog was read; `load` finds out
                await faults.reached(f"ready {entry.relation.qualified_name}")
                log.info("table is ready", relation=entry.relation.qualified_name, lsn=str(lsn))
                self._handover.forget(relid)
