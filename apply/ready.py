"""Take tables from state s to r (tablesync.c: process_syncing_tables_for_apply).

The sync worker stored s with the LSN that it has applied the stream up to.  The apply worker stores r once its stored origin has
reached that LSN:

    s at 0/180    stored origin 0/150    stays in s: a restart receives transactions that the table holds already
                  stored origin 0/180    r: whatever is received from now on ends after 0/180

A publisher that sends nothing moves no origin, so the origin is also compared when the catalog is read.
"""

from __future__ import annotations

from collections.abc import Mapping

import structlog

from apply.handover import Handover
from apply.relation_entry import RelationEntry
from catalog.states import RelState
from catalog.store import Catalog
from pubsub import faults
from pubsub.errors import NotInPrerequisiteState, UndefinedObject
from pubsub.protocol.lsn import INVALID_LSN, Lsn

logger = structlog.get_logger()


def is_ready(sync_lsn: Lsn | None, origin: Lsn) -> bool:
    """Tell whether a table in s at `sync_lsn` (None: it is not in s, or has stopped) is ready with this stored origin."""
    return sync_lsn is not None and origin >= sync_lsn


class ReadyTables:
    """Stores `r` for a subscription's tables.  `origin`: the greatest stored origin known; it never goes back."""

    def __init__(self, catalog: Catalog, subid: int, handover: Handover) -> None:
        self.origin = INVALID_LSN
        self._catalog = catalog
        self._subid = subid
        self._handover = handover

    def origin_is(self, origin: Lsn) -> None:
        """Note a stored origin.  Notes may come out of order: the catalog answers several tasks."""
        self.origin = max(self.origin, origin)

    async def store(self, entries: Mapping[int, RelationEntry]) -> None:
        """Store `r` for the tables that are ready, each once, even if two tasks run this."""
        for relid, entry in list(entries.items()):
            lsn = entry.sync_lsn
            if lsn is None or not is_ready(lsn, self.origin):
                continue
            entry.sync_lsn = None  # the other task passes over it
            await faults.reached(f"synced {entry.relation.qualified_name}")
            try:
                await self._catalog.set_relation_state(self._subid, relid, RelState.READY, lsn)
            except (UndefinedObject, NotInPrerequisiteState):
                continue  # it has left, or left and joined again, since the catalog was read; `load` finds out
            await faults.reached(f"ready {entry.relation.qualified_name}")
            logger.info("table is ready", relation=entry.relation.qualified_name, lsn=str(lsn))
            self._handover.forget(relid)
