"""The one table that a sync worker's catch-up writes, for the pipeline.

The rows of a relation go where its name says, and the table has been copied by its oid.  While it is copied it may be renamed, and
another table take its name: what its own relation sends is the table's under any name, and what the other one sends is not, unless
the table is gone.  As in schema_changes/table_renames.py, the publisher tells which it is, and under schema_changes = refuse a
renamed table is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from apply.batch import Batch
from apply.conflicts import Conflicts, count_conflicts, note_look_ups, record_other_commits
from apply.handover import Handover
from apply.promotion import Promotion
from apply.schema_changes.follow import Columns, Follower, UntilCommitted
from apply.schema_changes.table_renames import announced_names, renamed_otherwise
from apply.staging.destination import Destination, Destinations
from catalog.records import SubscriptionRel
from catalog.store import Catalog
from pubsub.delta.log.other_commits import OtherCommit
from pubsub.protocol.binary.single_values import BinaryTypes
from pubsub.protocol.lsn import Lsn
from pubsub.protocol.pgoutput import Relation
from tablesync.window import Window

# A name that no table has.
_NOBODY: Final = ("", "")


class CatchUpTable:
    """Implements apply.pipeline.interfaces.Tables for the catch-up of one table, whose position is its own version.

    A failure of the table ends the worker.  The apply worker receives the same transactions, and clears SKIP.
    """

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
        handover: Handover,
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
        self._handover = handover
        self._contested = relation.foreign is not None or handover.looks_up(columns.app_id)
        self._relation = relation
        self._name = (relation.schema, relation.published_name)
        self._version = version
        # Relations that have the table's name in the stream: those of other tables, and those of this one, made anew.
        self._others: set[int] = set()
        self._made_anew: set[int] = set()

    async def adapt_tables(self, batch: Batch, until_committed: UntilCommitted | None) -> Destinations:
        columns = self._columns
        if self._follower is None:
            await self._refuse_renamed(batch)
        else:
            await self._tell_apart(batch, self._follower)
            for again in await self._follower.follow(batch, [(columns, self._after)], until_committed, self.version):
                raise again
        to = {
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
        return [to]

    async def _tell_apart(self, batch: Batch, follower: Follower) -> None:
        """Give the table's relation its name in the batch, and no other table's."""
        own = self._columns.oid
        named = {oid for oid, messages in batch.relations.items() if _name_in(messages) == self._name} - {own}
        if unknown := named - self._others - self._made_anew:
            there = own in (await follower.renamed(batch, [own]))[0]
            (self._others if there else self._made_anew).update(unknown)
        for oid in named & self._others:
            batch.rename(oid, *_NOBODY)
        if own in batch.relations:
            batch.rename(own, *self._name)

    async def _refuse_renamed(self, batch: Batch) -> None:
        """Refuse the batch if the table was renamed, as the apply worker would: its rows would be no table's."""
        own = self._columns.oid
        announced = announced_names(batch).get(own, self._name)
        if announced != self._name:
            relations = await self._catalog.relations(self._subid)
            if announced not in {(one.schema, one.published_name) for one in relations}:
                raise renamed_otherwise(self._relation, *announced)
        if own in batch.unnamed:
            batch.rename(own, *self._name)

    async def before_commit(self) -> None:
        await self._catalog.prove()
        await self._promotion.noticed()

    async def may_write(self, destination: Destination) -> bool:
        return True

    async def others_wrote(self, destination: Destination, commits: Sequence[OtherCommit]) -> None:
        await record_other_commits(self._catalog, self._subid, destination.relid, destination.table.relation, commits)
        self._contested = True

    def look_up(self, destination: Destination) -> None:
        note_look_ups(destination.table.relation)
        self._handover.look_up(destination.app_id)
        self._contested = True

    async def conflicts_found(self, relation: str, conflicts: Conflicts) -> None:
        await count_conflicts(self._catalog, self._subid, relation, conflicts)

    def version(self, relid: int) -> Lsn:
        return self._version

    def committed(self, destination: Destination, lsn: Lsn) -> None:
        self._version = lsn


def _name_in(messages: Sequence[tuple[int, Relation]]) -> tuple[str, str]:
    """Return the name by which a batch's rows of a relation find their table: that of its last message."""
    last = messages[-1][1]
    return last.namespace, last.name
