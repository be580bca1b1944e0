"""Accept connections and take them up to the startup message; a backend serves the client from there on.

    accept ─► quotas ─► SSL request, TLS ─► startup message ─► the backend of its database ─► authenticated: no deadline any more
                                        └─► cancel request ─► the backends, until one knows its key

Until a client has authenticated, it may send MAX_STARTUP bytes and what its backend bounds, has `authentication_timeout`
seconds, and shares a quota with others of its address.

Follows backend_startup.c (ProcessSSLStartup, ProcessStartupPacket, ProcessCancelRequestPacket).
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import structlog

from pubsub.backend import messages as m
from pubsub.backend.socket_paths import SOCKET_NAME, short_path
from pubsub.backend.tls import Tls, start_tls_behind
from pubsub.errors import FeatureNotSupported, ProtocolViolation, PubsubError

PROTOCOL: Final = 3
NEWEST_MINOR: Final = 2
_BUFFER: Final = 1 << 16
"""Bytes that are read ahead of what is used; twice that stops the reading."""
_PER_ADDRESS: Final = 32
"""Most connections of one address that have not authenticated yet."""
_CLOSING_SECONDS: Final = 2.0
_HANDSHAKE: Final = 0x16
"""The first byte of a TLS handshake; as the length of a startup message it would be too long."""

logger = structlog.get_logger()


@dataclass(eq=False, slots=True)
class Client:
    """One connection, from its startup message on."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    address: str
    """Empty on a Unix socket."""
    port: int
    task: asyncio.Task[None]
    end_point: bytes | None = None
    """What SCRAM can bind to; None without TLS."""
    version: int = 0
    """The protocol's version that was asked for, major and minor."""
    parameters: dict[str, str] = field(default_factory=dict)
    authenticated: Callable[[], None] = lambda: None
    """Ends the deadline and the quota of those that have not authenticated; raises PubsubError past max_connections."""

    @property
    def is_local(self) -> bool:
        """Whether it came by the Unix socket, which this program's own user alone can open."""
        return not self.address

    @property
    def is_of_this_host(self) -> bool:
        """Whether it came by the Unix socket, or from a loopback address."""
        if self.is_local:
            return True
        try:
            address = ipaddress.ip_address(self.address)
        except ValueError:
            return False
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return (mapped or address).is_loopback

    @property
    def is_encrypted(self) -> bool:
        """Whether it speaks over TLS."""
        return self.writer.get_extra_info("ssl_object") is not None

    @property
    def database(self) -> str:
        return self.parameters.get("database") or self.user

    @property
    def user(self) -> str:
        return self.parameters.get("user", "")

    def end(self) -> None:
        """End the session from outside, as its process's SIGTERM does."""
        self.task.cancel()

    def negotiate(self) -> None:
        """Tell a client that asks for more than NEWEST_MINOR what there is (SendNegotiateProtocolVersion)."""
        unknown = [name for name in self.parameters if name.startswith("_pq_.")]
        minor = min(self.version & 0xFFFF, NEWEST_MINOR)
        if unknown or minor != self.version & 0xFFFF:
            self.writer.write(m.negotiate(PROTOCOL << 16 | minor, unknown))
        self.version = PROTOCOL << 16 | minor


class Backend(Protocol):
    """Serves clients after their startup message."""

    async def serve(self, client: Client) -> None:
        """Authenticate and serve a client until it leaves.  A PubsubError is sent to it as FATAL."""

    async def cancel(self, request: bytes) -> bool:
        """Carry out a cancel request (process id and key); return whether the key is one of this backend's."""


class Listener:
    """Accepts connections at any number of places, until `stop`.

    `choose` returns a client's backend, or raises PubsubError; `backends` are asked, in order, for a cancel request's key.
    `require_tls`: whether clients over TCP are refused without TLS.
    """

    def __init__(
        self,
        choose: Callable[[Client], Backend],
        backends: Callable[[], list[Backend]],
        *,
        tls: Tls | None = None,
        require_tls: bool = False,
        timeout: float = 60.0,
        max_connections: int = 100,
    ) -> None:
        self._choose = choose
        self._backends = backends
        self._tls = tls
        self._require_tls = require_tls
        self._timeout = timeout
        self._limit = max_connections
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: Counter[str] = Counter()
        self._served = 0
        self._socket: Path | None = None

    async def listen(self, host: str, port: int) -> int:
        """Accept TCP connections; return the port.  Raises PubsubError (58030)."""
        try:
            server = await asyncio.start_server(self._accepted, host or None, port, limit=_BUFFER)
        except OSError as error:
            raise PubsubError(
                f'could not listen on "{host}:{port}": {error.strerror or error}', sqlstate="58030"
            ) from error
        self._servers.append(server)
        bound: int = server.sockets[0].getsockname()[1]
        return bound

    async def listen_locally(self, directory: Path) -> Path:
        """Accept connections on a Unix socket in `directory`, which only this user can open.  Raises PubsubError (58030)."""
        path = directory / SOCKET_NAME
        before = os.umask(0o077)
        try:
            with suppress(FileNotFoundError):
                path.unlink()
            with short_path(directory) as near:
                server = await asyncio.start_unix_server(self._accepted, near / SOCKET_NAME, limit=_BUFFER)
            path.chmod(0o700)
        except OSError as error:
            raise PubsubError(f'could not listen on "{path}": {error.strerror or error}', sqlstate="58030") from error
        finally:
            os.umask(before)
        self._servers.append(server)
        self._socket = path
        return path

    async def stop(self) -> None:
        """Accept no more, and end all connections."""
        for server in self._servers:
            server.close()
        if self._socket is not None:
            self._socket.unlink(missing_ok=True)
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks, timeout=_CLOSING_SECONDS)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")
        address, port = (str(peer[0]), int(peer[1])) if isinstance(peer, tuple) else ("", -1)
        if self._waiting[address] >= _PER_ADDRESS or len(self._tasks) >= 2 * self._limit + _PER_ADDRESS:
            logger.warning("connection refused: too many that have not authenticated", address=address)
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._waiting[address] += 1
        client = Client(reader, writer, address, port, task)
        waits, served = True, False

        def no_longer_waits() -> None:
            nonlocal waits
            if waits:
                waits = False
                self._waiting[address] -= 1
                if not self._waiting[address]:
                    del self._waiting[address]

        try:
            async with asyncio.timeout(self._timeout) as deadline:

                def authenticated() -> None:
                    nonlocal served
                    if self._served >= self._limit:
                        raise PubsubError("sorry, too many clients already", sqlstate="53300")
                    deadline.reschedule(None)
                    no_longer_waits()
                    self._served += 1
                    served = True

                client.authenticated = authenticated
                await self._serve(client)
        except TimeoutError:
            if client.parameters:
                _say(client, PubsubError("canceling authentication due to timeout", sqlstate="57014"))
        except PubsubError as error:
            _say(client, error)
        except asyncio.CancelledError:
            _say(client, PubsubError("terminating connection due to administrator command", sqlstate="57P01"))
        except (m.Closed, ConnectionError, ssl.SSLError):
            pass
        except Exception as error:
            logger.exception("a session has failed", reason=str(error))
            _say(client, PubsubError("the session has failed", sqlstate="XX000"))
        finally:
            no_longer_waits()
            self._served -= served
            self._tasks.discard(task)
            # Cancelled or not, nothing waits here for a client that does not read.
            closing = asyncio.create_task(close(writer))
            self._tasks.add(closing)
            closing.add_done_callback(self._tasks.discard)

    async def _serve(self, client: Client) -> None:
        code, body = await self._first(client)
        if code == m.CANCEL_REQUEST:
            for backend in self._backends():
                if await backend.cancel(body):
                    break
            return
        if code >> 16 != PROTOCOL:
            raise FeatureNotSupported(
                f"unsupported frontend protocol {code >> 16}.{code & 0xFFFF}: server supports 3.0 to 3.{NEWEST_MINOR}"
            )
        client.version = code
        client.parameters = m.parameters(body)
        if not client.user:
            raise PubsubError("no PostgreSQL user name specified in startup packet", sqlstate="28000")
        sock = client.writer.get_extra_info("socket")
        if sock is not None and not client.is_local:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if self._require_tls and not client.is_local and not client.is_encrypted:
            raise no_entry(client)
        await self._choose(client).serve(client)

    async def _first(self, client: Client) -> tuple[int, bytes]:
        """Read the startup message or the cancel request; TLS and GSS encryption may be asked for once before.

        A client may also begin with TLS itself (ProcessSSLStartup).
        """
        asked: set[int] = set()
        if await m.first_byte(client.reader) == _HANDSHAKE:
            await self._begin_with_tls(client)
            asked = {m.SSL_REQUEST, m.GSS_REQUEST}
        while True:
            code, body = await m.read_startup(client.reader)
            if code not in {m.SSL_REQUEST, m.GSS_REQUEST} or code in asked:
                return code, body
            asked.add(code)
            if code == m.SSL_REQUEST and self._tls is not None and not client.is_local:
                await self._start_tls(client, self._tls)
                asked.add(m.GSS_REQUEST)
            else:
                client.writer.write(b"N")
                await client.writer.drain()

    async def _start_tls(self, client: Client, tls: Tls) -> None:
        client.writer.write(b"S")
        await client.writer.drain()
        if client.reader._buffer:  # type: ignore[attr-defined]
            # backend_startup.c: bytes before the handshake could come from somebody in the middle.
            raise ProtocolViolation("received unencrypted data after SSL request")
        await client.writer.start_tls(tls.context, ssl_handshake_timeout=self._timeout)
        client.end_point = tls.end_point

    async def _begin_with_tls(self, client: Client) -> None:
        """Take TLS from a client that has not asked for it.  Raises Closed where it cannot be had, or not for this protocol."""
        if self._tls is None or client.is_local:
            raise m.Closed
        buffer: bytearray = client.reader._buffer  # type: ignore[attr-defined]
        begun = bytes(buffer)
        buffer.clear()
        await start_tls_behind(client.writer, self._tls.context, begun, self._timeout)
        if client.writer.get_extra_info("ssl_object").selected_alpn_protocol() is None:
            # Another protocol's client could be led here (ALPACA).
            logger.warning(
                "received direct SSL connection request without ALPN protocol negotiation extension",
                address=client.address,
            )
            raise m.Closed
        client.end_point = self._tls.end_point


def no_entry(client: Client, hint: str | None = None) -> PubsubError:
    """Return the error of a client that no rule lets in (auth.c: ClientAuthentication)."""
    encryption = "SSL encryption" if client.is_encrypted else "no encryption"
    return PubsubError(
        f'no pg_hba.conf entry for host "{client.address}", user "{client.user}", database "{client.database}", {encryption}',
        sqlstate="28000",
        hint=hint,
    )


def _say(client: Client, error: PubsubError) -> None:
    with suppress(ConnectionError, RuntimeError):
        client.writer.write(m.error(error, "FATAL"))


async def close(writer: asyncio.StreamWriter) -> None:
    """Close a connection, whatever has become of it; what the other side does not read is dropped after a moment."""
    writer.close()
    with suppress(OSError, ssl.SSLError, TimeoutError):
        async with asyncio.timeout(_CLOSING_SECONDS):
            await writer.wait_closed()
            return
    writer.transport.abort()
