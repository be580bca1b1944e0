"""Notice when a publishing standby is promoted while it streams.

The stream continues in the WAL of the new timeline, past the point where that timeline began.  A worker that starts
later could not tell this from a standby that took over without all the received changes
(publisher_identity.check_position).  So the new timeline is stored before anything of it is committed:

    received up to 0/180 ─► asked: still in recovery          ─► committed: it is all of timeline 1
    promoted at 0/190
    received up to 0/1C0 ─► asked: timeline 2, the same server ─► 2 is stored ─► committed

The promoted server has everything that it has sent, so nothing received before is lost.
"""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

from catalog.records import Subscription
from catalog.store import Catalog
from pubsub.errors import ConnectionFailure
from pubsub.publisher.connection import Connection

logger = structlog.get_logger()

_TIMELINE: Final = """
SELECT CASE WHEN NOT pg_catalog.pg_is_in_recovery()
            THEN pg_catalog.substr(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_lsn()), 1, 8) END,
       (SELECT active_pid FROM pg_catalog.pg_replication_slots WHERE slot_name = $1)
"""


class Promotion:
    """Watches one stream's server: call `begin` before the stream, `noticed` before each commit, `close` at the end."""

    def __init__(self, catalog: Catalog, subscription: Subscription, slot: str, application_name: str) -> None:
        self._catalog = catalog
        self._subscription = subscription
        self._slot = slot
        self._application_name = application_name
        self.standby = False
        """Whether the server was in recovery when it was last asked."""
        self._pid = 0
        self._asking = asyncio.Lock()
        self._connection: Connection | None = None

    async def begin(self, stream: Connection) -> None:
        """Find out whether the server that `stream` is connected to is a standby.

        Call this before asking for the timeline: a server promoted in between would seem a primary of the old one.
        """
        ((standby,),) = await stream.query("SELECT pg_catalog.pg_is_in_recovery()")
        self.standby = standby == "t"
        self._pid = stream.backend_pid

    async def noticed(self) -> None:
        """Store the new timeline if the server was promoted.  A primary is not asked.

        Raises ConnectionFailure if the server asked is not the one that streams, and the errors of asking.
        """
        async with self._asking:
            if not self.standby:
                return
            if self._connection is None:
                self._connection = await Connection.connect(
                    self._subscription.conninfo, application_name=self._application_name
                )
            ((timeline, pid),) = await self._connection.query(_TIMELINE, [self._slot])
            if pid is None or int(pid) != self._pid:
                raise ConnectionFailure(
                    "the publisher that was a standby could not be asked whether it was promoted",
                    detail=f'Replication slot "{self._slot}" is not read by process {self._pid} there.',
                )
            if timeline is None:
                return
            system = (await self._catalog.subscription(self._subscription.oid)).publisher_system_identifier
            if system is not None:
                await self._catalog.set_publisher(self._subscription.oid, system, int(timeline, 16))
            self.standby = False
            logger.info("publisher was promoted", subscription=self._subscription.name, timeline=int(timeline, 16))

    async def close(self) -> None:
        """Close the connection that asks the server."""
        if self._connection is not None:
            await self._connection.close()
