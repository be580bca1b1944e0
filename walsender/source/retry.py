"""What may be better soon: a server that restarts, a connection that broke."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from pubsub.errors import ConnectionFailure, PublisherError
from pubsub.publisher.connection import Connection

RETRY_SECONDS: Final = 60.0
"""How long a server that does not answer is tried again."""
RETRY_INTERVAL: Final = 0.5
_STARTING_OR_STOPPING: Final = frozenset({"57P01", "57P02", "57P03", "57P05"})
_OBJECT_IN_USE: Final = "55006"


class Retry:
    """The time that is left for it: RETRY_SECONDS since it was made, or since `connected`."""

    def __init__(self) -> None:
        self.connected()

    def connected(self) -> None:
        """All was well until now."""
        self._deadline = time.monotonic() + RETRY_SECONDS

    def judge(self, error: ConnectionFailure | PublisherError, *, slot: bool = False) -> None:
        """Raises `error` where it is final, or the time is over.  `slot`: a slot may be taken for a while by the connection
        that was lost."""
        passes = (
            isinstance(error, ConnectionFailure)
            or error.sqlstate in _STARTING_OR_STOPPING
            or (slot and error.sqlstate == _OBJECT_IN_USE)
        )
        if not passes or time.monotonic() > self._deadline:
            raise error

    async def connect(self, conninfo: str) -> Connection:
        """A connection for SQL, as soon as there is one.  Raises ConnectionFailure, PublisherError."""
        while True:
            await asyncio.sleep(RETRY_INTERVAL)
            try:
                return await Connection.connect(conninfo, application_name="walsender")
            except (ConnectionFailure, PublisherError) as error:
                self.judge(error)


async def is_lost(connection: Connection) -> bool:
    """Whether the server is gone, or has ended the session."""
    try:
        await connection.query("SELECT")
    except (ConnectionFailure, PublisherError):
        return True
    return False
