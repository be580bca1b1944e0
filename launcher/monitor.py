"""A look at the publisher beside the stream: where its WAL ends, and how much of it the slot holds back."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

import structlog

from catalog.records import Subscription
from pubsub.errors import PubsubError
from pubsub.protocol.lsn import Lsn
from pubsub.publisher import definitions
from pubsub.publisher.connection import Connection

_INTERVAL: Final = 2.0

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Look:
    """`retained_bytes` is the WAL from the slot's restart_lsn on; None without a slot."""

    current_lsn: Lsn
    retained_bytes: int | None


class Monitor:
    """One connection to the publisher, kept; asked every other second at most.  It never fails: it is for people."""

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription
        self._connection: Connection | None = None
        self._last: Look | None = None
        self._asked_at = -1e9

    async def look(self) -> Look | None:
        """The latest look; None while the publisher can not be asked."""
        if time.monotonic() - self._asked_at >= _INTERVAL:
            self._asked_at = time.monotonic()
            try:
                self._last = await self._ask()
            except PubsubError as error:
                log.debug("publisher could not be asked", subscription=self._subscription.name, reason=error.message)
                await self.close()
                self._last = None
        return self._last

    async def close(self) -> None:
        """Let the connection go."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await connection.close()

    async def _ask(self) -> Look:
        if self._connection is None:
            self._connection = await Connection.connect(self._subscription.conninfo, application_name="pubsub monitor")
        current = await definitions.current_wal_lsn(self._connection)
        slot = None
        if self._subscription.slot_name is not None:
            slot = await definitions.slot_info(self._connection, self._subscription.slot_name)
        return Look(current, slot.retained_bytes if slot is not None else None)
