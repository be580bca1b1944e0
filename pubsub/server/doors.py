"""Where a node's clients come in: a Unix socket in its directory, a port, and which backend serves which database.

dbname=pubsub             the node itself, in a daemon
any other database        the publisher's server, if there is an upstream server (walsender/server)
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Self

from pubsub.backend.listener import Backend, Client, Listener
from pubsub.backend.tls import Tls
from pubsub.errors import PubsubError
from pubsub.protocol.lsn import Lsn
from pubsub.settings import Settings

if TYPE_CHECKING:
    from pubsub.server.backend import NodeBackend
    from walsender.server.service import Service

NODE: Final = "pubsub"
"""The database that is the node itself."""


class Doors:
    """The open doors of a node, made by `open`."""

    def __init__(self, settings: Settings, node: NodeBackend | None) -> None:
        ours = settings.walsender
        home = settings.home
        self._settings = settings
        self._node = node
        self.publisher: Service | None = None
        """The server for subscribers of the upstream server, if there is one."""
        tls = None
        if ours.ssl_cert_file is not None:
            tls = Tls.load(home / ours.ssl_cert_file, home / ours.ssl_key_file if ours.ssl_key_file else None)
        elif ours.require_tls and ours.listen is not None:
            raise PubsubError(
                "TLS cannot be required of clients without a certificate",
                sqlstate="F0000",
                hint="Name one: ssl_cert_file and ssl_key_file in [walsender], --cert and --key of pubsub publish.",
            )
        self._listener = Listener(
            self._choose,
            self._backends,
            tls=tls,
            require_tls=ours.require_tls,
            timeout=ours.authentication_timeout,
            max_connections=ours.max_connections,
        )
        self.place: str | None = None
        """HOST:PORT where TCP connections are accepted; None: nowhere."""

    @classmethod
    async def open(cls, settings: Settings, node: NodeBackend | None = None) -> Self:
        """Start the publisher's server, if an upstream server is named, and accept connections.

        `node`: serves the node itself, by a Unix socket, too.  Raises PubsubError.
        """
        doors = cls(settings, node)
        try:
            if settings.walsender.upstream is not None:
                from walsender.server.service import ServerOptions, Service

                doors.publisher = await Service.start(ServerOptions.of(settings))
            await doors._listen()
        except BaseException:
            await doors.close()
            raise
        return doors

    async def _listen(self) -> None:
        ours = self._settings.walsender
        place = ours.place()
        if place is not None:
            host, port = place
            bound = await self._listener.listen(host, port)
            self.place = f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"
        if self._node is not None and ours.unix_socket:
            await self._listener.listen_locally(self._settings.home)

    async def failed(self) -> None:
        """Wait until the publisher's server can no longer go on, and raise why; for ever without one."""
        if self.publisher is None:
            await asyncio.Event().wait()
        else:
            await self.publisher.failed()

    async def begin_slot(self, name: str, plugin: str, start: Lsn) -> None:
        """Make a slot of the publisher's server that begins in the past, if it is not there.  Raises PubsubError."""
        from walsender.server import past_slots

        assert self.publisher is not None
        work = {
            asyncio.create_task(past_slots.make(self.publisher, name, plugin, start)),
            asyncio.create_task(self.publisher.failed()),
        }
        try:
            done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in work:
                one.cancel()
            await asyncio.gather(*work, return_exceptions=True)
        for one in done:
            one.result()

    async def close(self) -> None:
        """End all sessions, and the publisher's server."""
        await self._listener.stop()
        if self._node is not None:
            await self._node.close()
        if self.publisher is not None:
            await self.publisher.stop()

    def _backends(self) -> list[Backend]:
        return [one for one in (self._node, self.publisher) if one is not None]

    def _choose(self, client: Client) -> Backend:
        # Without a node a database of its name is the upstream server's.
        found = self._node if client.database == NODE and self._node is not None else self.publisher
        if found is None:
            raise PubsubError(f'database "{client.database}" does not exist', sqlstate="3D000")
        return found
