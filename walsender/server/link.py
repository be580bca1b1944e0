"""A client's connection to the upstream server, in the protocol's own bytes: what it sends goes there, and comes back.

The client authenticates at the upstream server; its messages are passed on as they are.  SCRAM with channel binding is not
offered, since the two sides see different certificates.  TLS to the upstream server follows sslmode: none with disable,
allow and prefer, TLS with require, verify-ca and verify-full, with this program's own certificate (sslcert).
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from psycopg import pq

from pubsub.backend import messages as m
from pubsub.backend.listener import close
from pubsub.errors import ConnectionFailure, PubsubError
from pubsub.publisher.connection import Connection, connect_timeout
from pubsub.publisher.conninfo import Host, format_conninfo, parse_conninfo, resolve_hosts

_PORT: Final = "5432"
_KEEPALIVES: Final = {
    "keepalives_idle": socket.TCP_KEEPIDLE,
    "keepalives_interval": socket.TCP_KEEPINTVL,
    "keepalives_count": socket.TCP_KEEPCNT,
    "tcp_user_timeout": socket.TCP_USER_TIMEOUT,
}


class Upstream:
    """Where the upstream server is, by libpq's connection string.

    What that does not say is said by libpq's defaults (the environment, a service file that PGSERVICE names), since this
    program's own sessions have them.
    """

    def __init__(self, conninfo: str) -> None:
        self.conninfo = conninfo
        self._parameters = parse_conninfo(conninfo)
        if "service" in self._parameters:
            # libpq alone reads the file, and tells its content only of the one that the environment names.
            raise PubsubError(
                "the upstream server's connection string cannot name a service",
                sqlstate="22023",
                hint="Name it in the environment (PGSERVICE), or write out host, port and sslmode.",
            )
        defaults = {
            one.keyword.decode(): one.val.decode("utf-8", "surrogateescape")
            for one in pq.Conninfo.get_defaults()
            if one.val
        }
        given = {name: value for name, value in self._parameters.items() if value}
        self._effective: Mapping[str, str] = {**defaults, **given}
        self._socket_directory: str | None = None

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection, with TLS if it is wanted.  Raises ConnectionFailure, PublisherError."""
        failure: OSError | None = None
        for host in await self._hosts():
            place = host.address or host.name or await self._default()
            port = host.port or _PORT
            writer: asyncio.StreamWriter | None = None
            try:
                if place.startswith(("/", "@")):
                    path = f"{place}/.s.PGSQL.{port}"
                    return await asyncio.open_unix_connection("\0" + path[1:] if place[0] == "@" else path)
                async with asyncio.timeout(connect_timeout(self._effective.get("connect_timeout"))):
                    reader, writer = await asyncio.open_connection(place, int(port))
                    self._keep_alive(writer.get_extra_info("socket"))
                    await self._secure(reader, writer, host.name)
            except OSError as error:
                failure = error if error.args else TimeoutError("timeout expired")
            except BaseException:
                if writer is not None:
                    writer.transport.abort()
                raise
            else:
                return reader, writer
            if writer is not None:
                writer.transport.abort()
        raise ConnectionFailure(f"could not connect to the upstream server: {failure}")

    def _keep_alive(self, sock: socket.socket) -> None:
        """Have the system find that the server is gone, as libpq has it (fe-connect.c: PQconnectPoll)."""
        if not int(self._effective.get("keepalives", "1")):
            return
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, option in _KEEPALIVES.items():
            if (given := int(self._effective.get(name, "0"))) > 0:
                sock.setsockopt(socket.IPPROTO_TCP, option, given)

    async def _hosts(self) -> list[Host]:
        """Return the places to try, in order; the one that fits where not every server would (target_session_attrs)."""
        hosts = await self._resolved()
        if len(hosts) > 1 and self._effective.get("target_session_attrs", "any") != "any":
            # Only a session can tell.
            async with await Connection.connect(self.conninfo, application_name="walsender") as chosen:
                address = chosen.pgconn.hostaddr.decode()
                return [one for one in hosts if (one.name, one.port) == (chosen.host, chosen.port)] or [
                    Host(chosen.host, address, chosen.port)
                ]
        return hosts

    async def _resolved(self) -> list[Host]:
        given = self._effective
        names, addresses = given.get("host", "").split(","), given.get("hostaddr", "").split(",")
        if not given.get("hostaddr"):
            hosts = await resolve_hosts(given)
            if hosts:
                return hosts
            addresses = [""] * len(names)
        if not given.get("host"):
            names = addresses
        ports = given.get("port", "").split(",")
        if len(ports) == 1:
            ports *= len(names)
        if not len(names) == len(addresses) == len(ports):
            raise ConnectionFailure(
                f"could not match {len(names)} host names to {len(addresses)} addresses and {len(ports)} port numbers"
            )
        return [Host(*one) for one in zip(names, addresses, ports, strict=True)]

    async def _default(self) -> str:
        """Return the directory of the Unix socket that libpq was built with: where it connects to without a host."""
        if self._socket_directory is None:
            async with await Connection.connect(self.conninfo, application_name="walsender") as connection:
                self._socket_directory = connection.host
        return self._socket_directory

    async def _secure(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str) -> None:
        mode = self._effective.get("sslmode", "prefer")
        given = self._effective.get("sslrootcert")
        root = given or str(Path.home() / ".postgresql" / "root.crt")
        if root == "system":
            mode = "verify-full"  # no weaker one goes with it
        if mode not in {"require", "verify-ca", "verify-full"}:
            return
        crl = self._effective.get("sslcrl"), self._effective.get("sslcrldir")
        context = _tls(mode, root, *(crl if any(crl) else (str(Path.home() / ".postgresql" / "root.crl"), None)))
        certificate = self._certificate()
        if certificate is not None:
            _show(context, *certificate, self._effective.get("sslpassword", ""))
        if self._effective.get("sslnegotiation") == "direct":
            await writer.start_tls(context, server_hostname=name)
            return
        writer.write((8).to_bytes(4, "big") + m.SSL_REQUEST.to_bytes(4, "big"))
        if await reader.read(1) != b"S":
            raise ConnectionFailure("the upstream server does not support SSL, but SSL was required")
        if reader._buffer:  # type: ignore[attr-defined]
            # fe-connect.c: bytes before the handshake could come from somebody in the middle.
            raise ConnectionFailure("received unencrypted data after SSL response")
        await writer.start_tls(context, server_hostname=name)

    def shows_certificate(self, connected: asyncio.StreamWriter) -> bool:
        """Return whether a connection shows the upstream server a certificate of this program's, as libpq's do."""
        return connected.get_extra_info("ssl_object") is not None and self._certificate() is not None

    def _certificate(self) -> tuple[Path, Path] | None:
        """Return a certificate's file and its key's; one that is not there is none (fe-secure-openssl.c: initialize_SSL)."""
        given, home = self._effective, Path.home() / ".postgresql"
        file = Path(given.get("sslcert") or home / "postgresql.crt")
        if given.get("sslcertmode") == "disable" or not file.exists():
            return None
        return file, Path(given.get("sslkey") or home / "postgresql.key")

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


def _tls(mode: str, root: str, crl: str | None, crl_directory: str | None) -> ssl.SSLContext:
    """Return how to connect (fe-secure-openssl.c: initialize_SSL).  Raises OSError, ConnectionFailure."""
    if mode == "require" and not Path(root).exists():
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    else:
        # With a root certificate, "require" is verify-ca.
        context = ssl.create_default_context(cafile=None if root == "system" else root)
        context.check_hostname = mode == "verify-full"
        file = crl if crl and Path(crl).exists() else None
        if file or crl_directory:
            try:
                context.load_verify_locations(cafile=file, capath=crl_directory or None)
            except (OSError, ssl.SSLError) as error:
                raise ConnectionFailure(f'could not load certificate revocation list "{file}": {error}') from error
            context.verify_flags |= ssl.VerifyFlags.VERIFY_CRL_CHECK_CHAIN
    context.set_alpn_protocols(["postgresql"])
    return context


def _show(context: ssl.SSLContext, certificate: Path, key: Path, password: str) -> None:
    """Have connections show a certificate where they are asked for one (initialize_SSL).  Raises ConnectionFailure."""
    try:
        mode = key.stat()
    except OSError as error:
        raise ConnectionFailure(f'certificate present, but not private key file "{key}"') from error
    if mode.st_mode & (0o027 if mode.st_uid == 0 else 0o077):
        raise ConnectionFailure(
            f'private key file "{key}" has group or world access; file must have permissions u=rw (0600) or less if owned '
            "by the current user, or permissions u=rw,g=r (0640) or less if owned by root"
        )
    try:
        # With a password, however empty: OpenSSL would ask for it on the terminal.
        context.load_cert_chain(certificate, key, password)
    except (OSError, ssl.SSLError) as error:
        raise ConnectionFailure(
            f'could not load certificate "{certificate}" with private key file "{key}": {error}'
        ) from error


def without_channel_binding(body: bytes) -> bytes:
    """Return AuthenticationSASL without the mechanisms that bind to the TLS channel."""
    names = [name for name in body[4:].split(b"\0") if name and not name.endswith(b"-PLUS")]
    return body[:4] + b"".join(name + b"\0" for name in names) + b"\0"
