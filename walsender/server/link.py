"""A client's connection to the upstream server, in the protocol's own bytes: what it sends goes there, and comes back.

The client authenticates at the upstream server; its messages are passed on as they are.  SCRAM with channel binding is not
offered, since the two sides see different certificates.  TLS to the upstream server follows sslmode of its connection
string: none with disable, allow and prefer, TLS with require, verify-ca and verify-full.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from pathlib import Path

from psycopg import pq

from pubsub.backend import messages as m
from pubsub.backend.listener import close
from pubsub.errors import ConnectionFailure
from pubsub.publisher.connection import Connection
from pubsub.publisher.conninfo import Host, format_conninfo, parse_conninfo, resolve_hosts


class Upstream:
    """Where the upstream server is, by libpq's connection string."""

    def __init__(self, conninfo: str) -> None:
        self.conninfo = conninfo
        self._parameters = parse_conninfo(conninfo)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection, with TLS if it is wanted.  Raises ConnectionFailure, PublisherError."""
        failure: OSError | None = None
        for host in await self._hosts():
            place = host.address or host.name
            try:
                if place.startswith(("/", "@")):
                    reader, writer = await asyncio.open_unix_connection(f"{place}/.s.PGSQL.{host.port}")
                else:
                    reader, writer = await asyncio.open_connection(place, int(host.port))
                    await self._secure(reader, writer, host.name)
            except OSError as error:
                failure = error
                continue
            return reader, writer
        raise ConnectionFailure(f"could not connect to the upstream server: {failure}")

    async def _hosts(self) -> list[Host]:
        """Return the places to try, in order; the one that fits where not every server would (target_session_attrs)."""
        hosts = await resolve_hosts(self._parameters)
        if len(hosts) > 1 and self._parameters.get("target_session_attrs", "any") != "any":
            # Only a session can tell.
            async with await Connection.connect(self.conninfo, application_name="walsender") as chosen:
                address = chosen.pgconn.hostaddr.decode()
                return [one for one in hosts if (one.name, one.port) == (chosen.host, chosen.port)] or [
                    Host(chosen.host, address, chosen.port)
                ]
        return hosts or self._local()

    def _local(self) -> list[Host]:
        """Return the place that libpq takes when no name has to be resolved."""
        defaults = {one.keyword.decode(): (one.val or b"").decode() for one in pq.Conninfo.get_defaults()}
        given = {**defaults, **self._parameters}
        port = given.get("port") or "5432"
        return [Host(given.get("host") or "localhost", given.get("hostaddr") or "", port)]

    async def _secure(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str) -> None:
        mode = self._parameters.get("sslmode", "prefer")
        if mode not in {"require", "verify-ca", "verify-full"}:
            return
        context = ssl.create_default_context()
        context.check_hostname = mode == "verify-full"
        if mode == "require":
            context.verify_mode = ssl.CERT_NONE
        else:
            root = self._parameters.get("sslrootcert", str(Path.home() / ".postgresql" / "root.crt"))
            if root != "system":
                context = ssl.create_default_context(cafile=root)
                context.check_hostname = mode == "verify-full"
        writer.write((8).to_bytes(4, "big") + m.SSL_REQUEST.to_bytes(4, "big"))
        if await reader.read(1) != b"S":
            raise ConnectionFailure("the upstream server does not support SSL, but SSL was required")
        await writer.start_tls(context, server_hostname=name)

    def with_database(self, database: str, options: str = "") -> str:
        """Return the connection string of this program's own sessions in another database, with settings in `options`."""
        parameters: Mapping[str, str] = {**self._parameters, "dbname": database}
        if options:
            parameters = {**parameters, "options": f"{self._parameters.get('options', '')} {options}".strip()}
        return format_conninfo(parameters)

    async def cancel(self, request: bytes) -> None:
        """Pass a cancel request on, and wait until the upstream server has taken it.  Raises ConnectionFailure."""
        reader, writer = await self.connect()
        try:
            writer.write((len(request) + 8).to_bytes(4, "big") + m.CANCEL_REQUEST.to_bytes(4, "big") + request)
            await writer.drain()
            await reader.read()
        except OSError as error:
            raise ConnectionFailure(f"could not send the cancel request: {error}") from error
        finally:
            await close(writer)


def without_channel_binding(body: bytes) -> bytes:
    """Return AuthenticationSASL without the mechanisms that bind to the TLS channel."""
    names = [name for name in body[4:].split(b"\0") if name and not name.endswith(b"-PLUS")]
    return body[:4] + b"".join(name + b"\0" for name in names) + b"\0"
