"""Errors that may pass soon: a server that restarts, a connection that broke."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from pubsub.errors import ConnectionFailure, PublisherError
from pubsub.publisher.connection import Connection

RETRY_SECONDS: Final = 60.0
"""How long to retry a server that does not answer."""
RETRY_INTERVAL: Final = 0.5
_STARTING_OR_STOPPING: Final = frozenset({"57P01", "57P02", "57P03", "57P05"})
_OBJECT_IN_USE: Final = "55006"


class Retry:
    """The time left for trying again: RETRY_SECONDS since this was made, or since `connected`."""

    def __init__(self) -> None:
        self.connected()

    def connected(self) -> None:
        """Start the time anew, since the connection worked until now."""
        self._deadline = time.monotonic() + RETRY_SECONDS

    def judge(self, error: ConnectionFailure | PublisherError, *, slot: bool = False) -> None:
        """Raise `error` if it is final or the time is over.

        `slot`: an error that the slot is in use may pass, since the lost connection can hold it for a while.
        """
        passes = (
            isinstance(error, ConnectionFailure)
            or error.sqlstate in _STARTING_OR_STOPPING
            or (slot and error.sqlstate == _OBJECT_IN_USE)
        )
        if not passes or time.monotonic() > self._deadline:
            raise error

    async def judge_session(self, error: ConnectionFailure | PublisherError, connection: Connection) -> None:
        """Judge an error of a session that worked until now: it is final unless that is gone, and then the time begins anew."""
        if not await _is_lost(connection):
            raise error
        self.connected()
        self.judge(error)

    async def connect(self, conninfo: str) -> Connection:
        """Connect for SQL, trying again as long as `judge` allows.  Raises ConnectionFailure, PublisherError."""
        while True:
            await asyncio.sleep(RETRY_INTERVAL)
            try:
                return await Connection.connect(conninfo, application_name="walsender")
            except (ConnectionFailure, PublisherError) as error:
                self.judge(error)


async def _is_lost(connection: Connection) -> bool:
    """Return whether the server is gone or has ended the session."""
    try:
        await connection.query("SELECT")
    except (ConnectionFailure, PublisherError):
        return True
    return False
