"""What the apply worker knows of one table: its state, how much of the stream it holds, and its columns.

PostgreSQL's apply worker keeps the same in LogicalRepRelMapEntry (relation.c).
"""

from __future__ import annotations

from dataclasses import dataclass

from apply.schema_changes.follow import Columns
from apply.staging.destination import Destination
from catalog.records import SubscriptionRel
from catalog.states import RelState
from pubsub.protocol.binary.single_values import BinaryTypes
from pubsub.protocol.lsn import INVALID_LSN, Lsn


@dataclass(slots=True)
class RelationEntry:
    """One table of the subscription.  `app_id` is that of its present copy."""

    relation: SubscriptionRel
    """The table as the catalog had it when it was last read."""
    app_id: str
    after: Lsn | None = None
    """The table gets the transactions that end after this LSN.  None: the table is the sync worker's, or has stopped; apply
    leaves out every transaction."""
    version: Lsn = INVALID_LSN
    """The end LSN of the last transaction in the table."""
    sync_lsn: Lsn | None = None
    """The LSN of state s, until r is stored."""
    columns: Columns | None = None
    synced: bool = False
    """The sync worker is done with the table (s or r); apply may write it."""
    contested: bool = False
    """The table may hold other rows than the changes expect, so they are looked up to find conflicts."""
    failed: bool = False
    """The table is about to stop; only what is staged for it is still committed."""
    stopped: bool = False
    """The table has stopped alone and gets nothing more."""
    refresh_requests: int = 0
    """How many REFRESHes have asked to compare its columns with the publisher's, even if no rows come."""
    announced_name: tuple[str, str] | None = None
    """Schema and name in its last Relation message."""

    @property
    def name(self) -> tuple[str, str]:
        """Schema and name of the published table, as the catalog has them."""
        return self.relation.schema, self.relation.published_name

    def continues_as(self, now: SubscriptionRel) -> bool:
        """Tell whether a table that apply writes is, as the catalog now has it, the same copy and past its hand-over."""
        same_copy = now.copy_generation == self.relation.copy_generation
        return same_copy and now.state in (RelState.SYNCDONE, RelState.READY)

    def is_copy_of(self, destination: Destination) -> bool:
        """Tell whether `destination` is the table's present copy, not an earlier one."""
        return destination.app_id == self.app_id

    def fail(self) -> None:
        """Give the table no later changes."""
        self.failed, self.after, self.sync_lsn = True, None, None

    def destination(self, types: BinaryTypes) -> Destination | None:
        """Return where the table's rows go; None if it gets nothing, or its columns are not known yet."""
        if self.columns is None or self.after is None:
            return None
        return Destination(
            self.relation.relid,
            self.columns.target,
            self.app_id,
            self.after,
            types,
            contested=self.contested,
            readings=self.columns.readings,
        )
