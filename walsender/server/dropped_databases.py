"""Slots go with their database, whoever drops it, as a standby's do (dbcommands.c: dbase_redo, ReplicationSlotsDropDBSlots).

    feed ── the files of database 16400 are gone, by transaction 751 ──► DroppedDatabases
    upstream server ── does the snapshot see 751, and is there still a database 16400? ──► the slots go, or stay

The record alone does not tell: a database that moves to another tablespace leaves one behind, too, and so does DROP DATABASE
before it commits.  What happened while this program was away is asked when it starts.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import structlog

from pubsub.errors import ConnectionFailure, PubsubError
from pubsub.reorderbuffer.files import FileFailure
from walsender.feed.commits import VisibleSet

if TYPE_CHECKING:
    from walsender.feed.feed import Feed
    from walsender.server.decoders import Decoders
    from walsender.slots.slot import SlotStore

_PAUSE: Final = 1.0
"""Seconds before the upstream server is asked again."""
_STATE: Final = (
    "SELECT pg_catalog.pg_current_snapshot(),"
    " pg_catalog.array_to_string(ARRAY(SELECT oid FROM pg_catalog.pg_database), ' ')"
)

logger = structlog.get_logger()


class DroppedDatabases:
    """Drops the slots of databases that are gone.  `run` it; tell `seen` what the WAL says."""

    def __init__(self, conninfo: str, feed: Feed, slots: SlotStore, decoders: Decoders) -> None:
        self._conninfo = conninfo
        self._feed = feed
        self._slots = slots
        self._decoders = decoders
        self._soon = asyncio.Event()
        self._running: dict[int, int] = {}
        """The transactions that may drop databases, which the upstream server's snapshots may not see yet."""

    def seen(self, oid: int, xid: int) -> None:
        """Note that the files of a database are removed by a transaction."""
        if any(slot.database_oid == oid for slot in self._slots):
            self._running[oid] = xid
            self._soon.set()

    async def run(self) -> None:
        """Ask at the start, and whenever a database may be gone, until cancelled."""
        self._soon.set()
        while True:
            await self._soon.wait()
            self._soon.clear()
            try:
                if len(self._slots):
                    await self._look()
            except ConnectionFailure:
                self._soon.set()  # the feed says that the server cannot be reached
            except PubsubError as error:
                logger.warning(
                    "slots of databases that are gone cannot be dropped", reason=error.message, hint=error.hint
                )
                self._soon.set()
            if self._running:
                self._soon.set()
            if self._soon.is_set():
                await asyncio.sleep(_PAUSE)

    async def _look(self) -> None:
        """Drop the slots whose database is gone.  Raises ConnectionFailure, PublisherError, FileFailure."""
        # The answer says nothing of slots that are made meanwhile, perhaps in a new database.
        slots = list(self._slots)
        async with await self._feed.connect(self._conninfo) as connection:
            ((snapshot, found),) = await connection.query(_STATE)
        visible = VisibleSet.parse(str(snapshot))
        self._running = {oid: xid for oid, xid in self._running.items() if not visible.sees(xid)}
        there = {int(one) for one in str(found).split()}
        failure: FileFailure | None = None
        for slot in slots:
            if not slot.database_oid or slot.database_oid in there or self._slots.find(slot.name) is not slot:
                continue
            if slot.active_pid is not None:
                # Its session's backend was in the database, so it is ending; without its decoding process it could not
                # tell the client why.
                self._soon.set()
                continue
            logger.warning("slot is dropped with its database", slot=slot.name, database=slot.database)
            try:
                self._slots.drop(slot)
            except FileFailure as error:
                failure = error
        self._decoders.slots_changed()
        if failure is not None:
            raise failure
