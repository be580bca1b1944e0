"""The node's own backend: it serves dbname=pubsub, as `pubsub sql` does, to psql, drivers and tools.

On the Unix socket, which only this program's own user can open, everybody is let in as superuser; by TCP those whom
walsender.auth_file names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from catalog.records import State
from pubsub import __version__
from pubsub.backend import authentication, users
from pubsub.backend.cancel_keys import CancelKeys
from pubsub.backend.listener import Client
from pubsub.errors import FeatureNotSupported, InsufficientPrivilege, PubsubError
from pubsub.node.node import Node
from pubsub.server.publishing.publisher import Publisher
from pubsub.server.queries import Environment
from pubsub.server.query_process import QueryProcesses
from pubsub.server.session import Session
from pubsub.server.session_parameters import SERVER_VERSION, SessionParameters
from pubsub.server.system_catalogs import contents
from pubsub.server.system_catalogs.contents import Contents
from pubsub.server.system_catalogs.database import Caller, SystemCatalogs
from pubsub.settings import Settings

_OFF: Final = frozenset({"false", "off", "no", "0", "f", "n"})


class NodeBackend:
    """Serves the node of `settings`; `node` is open, and carries statements out."""

    def __init__(self, settings: Settings, node: Node) -> None:
        self.settings = settings
        self.node = node
        self.keys = CancelKeys()
        self.version = __version__
        self._catalogs = SystemCatalogs()
        self._processes = QueryProcesses(settings.spark.session_conf())
        self.publisher = Publisher(settings, node.pin_paths)
        self.snapshots: dict[str, Mapping[str, int]] = {}
        """Exported snapshots: versions of tables, by path."""

    async def close(self) -> None:
        """End what is kept for further queries."""
        await self._processes.close()
        await self.publisher.close()

    async def serve(self, client: Client) -> None:
        """Let a client in, and serve it until it leaves.  Raises PubsubError, which is fatal."""
        client.negotiate()
        user = await self._authenticated(client)
        client.authenticated()
        replication = client.parameters.get("replication", "false").lower()
        if replication not in _OFF and replication != "database":
            raise FeatureNotSupported("a node has no physical replication")
        if replication == "database" and not user.may_replicate:
            raise InsufficientPrivilege(
                "permission denied to start WAL sender",
                detail="Only users with the privilege replication may start a WAL sender process.",
            )
        await Session(self, client, user, replication=replication == "database").run()

    async def cancel(self, request: bytes) -> bool:
        """End what the session with this key does; return whether there is one."""
        return self.keys.cancel(request)

    async def _authenticated(self, client: Client) -> users.User:
        if client.is_local:
            return authentication.by_trust(client)
        path = self.settings.walsender.auth_file
        if path is None:
            raise authentication.refused(client)
        user, _ = await authentication.by_password(client, self.settings.home / path)
        return user

    async def environment(self, caller: Caller, versions: Mapping[str, int]) -> Environment:
        """Return what a query works with, as of now; tables in `versions` are read at these."""
        state = await self.node.state()
        return Environment(state, lambda: self._contents(state), self._catalogs, caller, self._processes, versions)

    def _contents(self, state: State) -> Contents:
        names: list[str] = []
        if self.settings.walsender.auth_file is not None:
            try:
                names = list(users.read(self.settings.home / self.settings.walsender.auth_file))
            except PubsubError:
                names = []  # whoever logs in is told
        # PostgreSQL's parameters, as a session begins with them, and the node's settings.
        known = SessionParameters({}, contents.OWNER, SERVER_VERSION, superuser=True).listed()
        described = sorted([*((*one, "") for one in known), *self.settings.describe_all()])
        found = contents.contents(state, described, names)
        return replace(found, rows={**found.rows, **self.publisher.rows(found)})
