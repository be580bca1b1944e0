"""A client's session: what its commands work with, and their waits for the daemon's workers.

The catalog is what commands and the daemon share: a command changes it, and if it must wait for workers to end, it
inserts a request there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from catalog.records import Subscription
from catalog.store import Catalog
from launcher.notices import Notice
from pubsub.errors import ConnectionFailure
from pubsub.settings import Settings

if TYPE_CHECKING:
    from pubsub.publisher.connection import Connection

#: How often a waiting command checks that the daemon is still running, in seconds.
_LOOK: Final = 0.2
#: The time that a daemon needs besides draining, to notice the request and to end what did not drain, in seconds.
_PATIENCE: Final = 60.0


class Session:
    """What a command works with.  `notify` is called with each Notice at once; `wake` wakes this process's workers."""

    def __init__(
        self,
        settings: Settings,
        catalog: Catalog,
        notify: Callable[[Notice], None],
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.settings = settings
        self.catalog = catalog
        self.wake = wake
        self._notify = notify

    def notice(
        self, message: str, severity: str = "NOTICE", *, detail: str | None = None, hint: str | None = None
    ) -> None:
        """Send the client a notice."""
        self._notify(Notice(message, severity, detail, hint))

    async def connect(self, subscription: str, conninfo: str) -> Connection:
        """Open a replication connection, which accepts SQL too, for a command on `subscription`.

        Raises ConnectionFailure in the words of subscriptioncmds.c; PubsubError for an invalid connection string.
        """
        from pubsub.publisher.connection import Connection  # most ALTER SUBSCRIPTIONs need no publisher, nor psycopg

        try:
            return await Connection.connect(conninfo, replication=True, application_name=subscription)
        except ConnectionFailure as error:
            raise ConnectionFailure(
                f'subscription "{subscription}" {error.message}', detail=error.detail, hint=error.hint
            ) from error

    async def workers_ended(self, subscription: Subscription) -> None:
        """Wait until no worker works for `subscription`, whose workers the catalog already asks to end.

        Returns at once when no daemon runs.  Raises the error that the daemon answers, and RequestTimeoutError.
        """
        await self.ask_daemon("stop", subscription.oid, timeout=self.settings.drain_timeout + _PATIENCE)

    async def ask_daemon(
        self, kind: str, subid: int | None = None, payload: dict[str, Any] | None = None, *, timeout: float
    ) -> dict[str, Any] | None:
        """Let the catalog's daemon carry out a request, and wait for its answer; return what it found, None if no daemon runs.

        Raises the error that the daemon answered, and RequestTimeoutError after `timeout` seconds.
        """
        request = asyncio.create_task(self.catalog.request(kind, subid, payload, timeout=timeout))
        try:
            while await self.catalog.has_daemon():
                self.wake()
                done, _ = await asyncio.wait({request}, timeout=_LOOK)
                if done:
                    return request.result()
            return None
        finally:
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)


@asynccontextmanager
async def paused(session: Session, subscription: Subscription, command: str) -> AsyncIterator[None]:
    """Run the body of `command` while the subscription has no workers; wait for another command that does so.

    A daemon ends the pause of a command that was killed.  Raises UndefinedObject if the subscription is dropped meanwhile, and
    what keeps the workers from ending.
    """
    try:
        async with session.catalog.pause(subscription.oid, command):
            await session.workers_ended(subscription)
            yield
    finally:
        session.wake()
