"""The one table that a sync worker's catch-up writes, for the pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from apply.batch import Batch
from apply.conflicts import Conflicts, count_conflicts, note_look_ups, record_other_commits
from apply.handover import Handover
from apply.promotion import Promotion
from apply.schema_changes.follow import Columns, Follower, UntilCommitted
from apply.staging.destination import Destination
from catalog.records import SubscriptionRel
from catalog.store import Catalog
from pubsub.delta.log.other_commits import OtherCommit
from pubsub.protocol.binary.single_values import BinaryTypes
from pubsub.protocol.lsn import Lsn
from tablesync.window import Window


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
        self._name = (relation.schema, relation.name)
        self._version = version

    async def adapt_tables(
        self, batch: Batch, until_committed: UntilCommitted | None
    ) -> Mapping[tuple[str, str], Destination]:
        columns = self._columns
        if self._follower is not None:
            if columns.relid in batch.relations:
                batch.rename(columns.relid, *self._name)
            for again in await self._follower.follow(batch, [(columns, self._after)], until_committed, self.version):
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
