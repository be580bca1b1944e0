"""The subscription's tables by oid and by name, as the catalog last had them (relation.c: LogicalRepRelMap).

Whether a transaction is applied to a table is decided by LSNs alone: a table gets the transactions that end after its `after`.

    i d f    after = None    the sync worker's table: apply passes over it
    c        after = C       at or past every transaction decided before; the sync worker still writes the table
    s r      after = the LSN of s, or what the table itself holds if that is more; apply writes the table

Commands of other processes may take tables out, and in again, at any moment.  A table that joined again has a new entry, so an
entry is compared with the map's after each wait (`is_here`).
"""

from __future__ import annotations

import asyncio

from apply.handover import Handover
from apply.isolation import StopAlone
from apply.ready import ReadyTables
from apply.relation_entry import RelationEntry
from apply.schema_changes import follow
from apply.schema_changes.follow import Columns
from catalog.records import SubscriptionRel
from catalog.states import RelState
from catalog.store import Catalog
from pubsub.delta import table as delta
from pubsub.errors import PubsubError, UndefinedTable
from pubsub.protocol.lsn import INVALID_LSN, Lsn


class RelationMap:
    """The tables of one subscription.  `entries` by relid; they may change at any wait.

    `named`: all of a published table, by its schema and name: the mirror, and what stands beside it (catalog.beside).  `by_oid`,
    `by_name`: one of these, by which its name is followed: the mirror, if changes are applied to it.

    `unread`: the tables answered with C since the catalog was read: their copy, generation and definition are newer than ours.
    `stop_alone` is called for a table that cannot be taken over from its sync worker.
    """

    def __init__(
        self, catalog: Catalog, node_id: str, subid: int, handover: Handover, ready: ReadyTables, stop_alone: StopAlone
    ) -> None:
        self.entries: dict[int, RelationEntry] = {}
        self.named: dict[tuple[str, str], list[RelationEntry]] = {}
        self.by_oid: dict[int, RelationEntry] = {}
        self.by_name: dict[tuple[str, str], RelationEntry] = {}
        self.unread: set[int] = set()
        self._catalog = catalog
        self._node_id = node_id
        self._subid = subid
        self._handover = handover
        self._ready = ready
        self._stop_alone = stop_alone
        self._loading = asyncio.Lock()

    async def load(self) -> None:
        """Read the catalog again: new tables are the sync worker's, and removed tables are forgotten."""
        async with self._loading:
            await self._load()

    async def _load(self) -> None:
        answered = set(self.unread)
        self._ready.origin_is(await self._catalog.origin(self._subid))
        relations = {r.relid: r for r in await self._catalog.relations(self._subid)}
        for relid in self.entries.keys() - relations.keys():
            self._handover.forget(relid)
            del self.entries[relid]
        for relation in relations.values():
            entry = self._entry_of(relation, answered)
            await self._update(entry, relation)
        self.named = {}
        for entry in self.entries.values():
            self.named.setdefault(entry.name, []).append(entry)
        # The last one counts.
        followed = sorted(self.entries.values(), key=lambda entry: (entry.after is not None, -entry.relation.relid))
        self.by_oid = {entry.relation.oid: entry for entry in followed}
        self.by_name = {entry.name: entry for entry in followed}
        self.unread -= answered

    def _entry_of(self, relation: SubscriptionRel, answered: set[int]) -> RelationEntry:
        """Return the table's entry: a new one if it has joined, or has left and joined again, since the last reading.

        `answered`: the tables that had been answered with C when the reading began.
        """
        relid = relation.relid
        entry = self.entries.get(relid)
        if entry is not None and entry.synced and not entry.continues_as(relation):
            if relation.state is RelState.INIT and relid not in self.unread - answered:
                self._handover.forget(relid)  # that promise was not made to the new copy
            entry = None
        if entry is None:
            entry = self.entries[relid] = RelationEntry(relation, self._app_id(relation))
            entry.after = self._handover.promised.get(relid)
        return entry

    async def _update(self, entry: RelationEntry, relation: SubscriptionRel) -> None:
        """Bring the entry to what the catalog has of its table; take the table over if its sync worker is done."""
        app_id = self._app_id(relation)
        if entry.app_id != app_id:
            entry.columns = None
        entry.relation, entry.app_id = relation, app_id
        entry.refresh_requests = relation.look_again
        # A table that joined without a copy may lack rows that the publisher has, and have others.
        entry.contested = relation.foreign is not None or not relation.copied or self._handover.looks_up(app_id)
        if relation.stopped:
            # Release the tasks that wait for its sync worker.
            entry.stopped, entry.after, entry.sync_lsn = True, None, None
            self._handover.forget(relation.relid)
        elif relation.state in (RelState.SYNCDONE, RelState.READY) and not entry.synced:
            if relation.definition is not None:
                await self._try_to_take_over(entry)
            else:
                # The table joined without a copy, and its Delta table is still to be created.
                entry.after = relation.lsn or INVALID_LSN
        if entry.failed:
            entry.after = entry.sync_lsn = None

    def _app_id(self, relation: SubscriptionRel) -> str:
        return delta.application_id(self._node_id, self._subid, relation.relid, relation.copy_generation)

    async def _try_to_take_over(self, entry: RelationEntry) -> None:
        try:
            await self._take_over(entry)
        except PubsubError as error:
            await self._stop_alone(entry.relation.relid, error, self._ready.origin)

    async def _take_over(self, entry: RelationEntry) -> None:
        """Take over a table in s or r; how much it holds is read from the table itself."""
        relation = entry.relation
        held = await asyncio.to_thread(delta.committed_lsn, relation.path, entry.app_id)
        if held is None and relation.copied:
            await asyncio.to_thread(delta.check_exists, relation.path, relation.qualified_name)
            raise UndefinedTable(
                f'the Delta table of "{relation.qualified_name}" does not hold its copy any more',
                detail=f'"{relation.path}" holds another table now.',
                hint=f"ALTER SUBSCRIPTION … RESYNC TABLE {relation.qualified_name} copies it anew.",
            )
        held = held or INVALID_LSN
        entry.version = max(entry.version, held)
        entry.after = max(held, relation.lsn or INVALID_LSN)
        entry.columns = await self.columns_of(entry)
        entry.synced = True
        if relation.state is RelState.SYNCDONE:
            entry.sync_lsn = relation.lsn

    async def columns_of(self, entry: RelationEntry) -> Columns:
        """Return the columns of the table's present copy, from its Delta table.  Raises UndefinedTable."""
        relation = entry.relation
        return await follow.load(
            relation.relid, entry.app_id, relation.path, relation.qualified_name, relation.definition
        )

    def is_here(self, entry: RelationEntry) -> bool:
        """Tell whether the entry is still the subscription's.  Ask again after every await."""
        return self.entries.get(entry.relation.relid) is entry

    @property
    def greatest_version(self) -> Lsn:
        """The greatest version of any table (0: none).  If a crash cut a batch short, that batch ends here."""
        return max((entry.version for entry in self.entries.values()), default=INVALID_LSN)

    @property
    def held(self) -> Lsn:
        """The LSN past which no table holds anything (0: nothing is held), but see `held_by_copies`."""
        return max(
            (Lsn(max(entry.version, entry.relation.lsn or INVALID_LSN)) for entry in self.entries.values()),
            default=INVALID_LSN,
        )

    @property
    def least_synchronized(self) -> Lsn:
        """The least LSN from which on a table needs the stream; 0: no table does, or one that does not know.

        A table in s or r has everything up to there; one in c gets it from its sync worker.
        """
        found = []
        for relid, entry in self.entries.items():
            if entry.stopped:
                continue
            if entry.relation.state in (RelState.SYNCDONE, RelState.READY):
                found.append(Lsn(max(entry.version, entry.relation.lsn or INVALID_LSN)))
            elif relid in self._handover.promised:
                found.append(self._handover.promised[relid])
        return min(found, default=INVALID_LSN)

    def hold(self, lsn: Lsn) -> bool:
        """Tell whether every table has what a transaction changed that ends at `lsn`, or gets it by a copy."""
        return all(entry.stopped or entry.after is None or entry.after >= lsn for entry in self.entries.values())

    async def held_by_copies(self) -> Lsn:
        """Return the greatest LSN held by tables still being copied: by their snapshots, or by a catch-up's commits."""
        held = INVALID_LSN
        for relid, entry in self.entries.items():
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
        return any(e.relation.state not in (RelState.INIT, RelState.DATASYNC) for e in self.entries.values())

    @property
    def all_ready(self) -> bool:
        """Whether there are tables, and all are in state r (tablesync.c: AllTablesyncsReady)."""
        going = [entry for entry in self.entries.values() if not entry.stopped]
        return bool(going) and all(entry.relation.state is RelState.READY for entry in going)

    def keep_promises(self) -> None:
        """Read the promises again before attaching: until then a new copy breaks a promise unnoticed."""
        for relid, entry in self.entries.items():
            if not entry.synced and not entry.failed and not entry.stopped and entry.relation.definition is not None:
                entry.after = self._handover.promised.get(relid)

    def promise(self, relid: int, at: Lsn, decided: Lsn) -> Lsn:
        """Answer a sync worker in state w at `at` with C = max(`at`, `decided`); see handover.py."""
        catchup = max(at, decided)
        self.unread.add(relid)
        entry = self.entries.get(relid)
        if entry is not None and not entry.failed and not entry.stopped:
            entry.after = catchup
        return catchup
