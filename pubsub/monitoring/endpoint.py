"""The HTTP server of [http]: GET and HEAD of a few paths, one request a connection.

    /metrics   OpenMetrics                     500 if they cannot be made, 503 if the catalog does not answer
    /health    the process answers             200
    /ready     every subscription follows      200, or 503 with the reasons
    /          the page (page.py), unless [http] page = false

Nothing is changed by a request, and nobody is asked who he is: whoever reaches the port may read.  A browser may not read the page
for one of another site, whose name was turned to this address: the Host of its request gives it away (421).  A client gets _SECONDS
for its request and for taking the answer, and MAX_REQUEST bytes; past MAX_CLIENTS at a time it is turned away.  What fails here is
logged, and costs the daemon nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from http import HTTPStatus
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol, Self

import h11
import structlog

from pubsub.errors import PubsubError
from pubsub.monitoring.answers import TEXT, Answer, Asked, Handler, as_json

if TYPE_CHECKING:
    from prometheus_client import Metric

MAX_CLIENTS: Final = 32
MAX_REQUEST: Final = 16 << 10
"""Bytes of a request's line and headers."""
_SECONDS: Final = 15.0
_BODY: Final = 1 << 16
"""Bytes of a request's body that are read and thrown away."""

_HOST: Final = re.compile(r"(?:(?P<name>[^\[\]:@]+)|\[(?P<address>[^\[\]]+)\])(?::\d*)?")

logger = structlog.get_logger()


#: A page of ours may load and run our own files alone, and be shown inside of no other page.
_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("script", "style", "img", "connect")),
        *(f"{what} 'none'" for what in ("base-uri", "form-action", "frame-ancestors")),
    )
)
_HEADERS: Final = (
    ("Cache-Control", "no-store"),
    ("Content-Security-Policy", _POLICY),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Referrer-Policy", "no-referrer"),
    ("X-Content-Type-Options", "nosniff"),
)


class Source(Protocol):
    """What is served."""

    async def families(self) -> Callable[[], Iterator[Metric]]:
        """Return what makes the metrics, of this moment; it is called in a thread."""

    async def ready(self) -> Answer:
        """Return the answer to /ready."""


class Endpoint:
    """Serves what `source` tells, until `close`; made by `open`."""

    def __init__(
        self,
        source: Source,
        more: Mapping[str, Handler] = MappingProxyType({}),
        hosts: Iterable[str] = (),
    ) -> None:
        self._source = source
        self._hosts = frozenset(host.lower() for host in ("localhost", socket.gethostname(), *hosts))
        self._page = frozenset(more)
        self._paths: Mapping[str, Handler] = MappingProxyType(
            {"/metrics": self._metrics, "/health": self._health, "/ready": self._ready, **more}
        )
        self._server: asyncio.Server | None = None
        self._clients: set[asyncio.Task[None]] = set()
        self._failing: str | None = None
        # Only one answer is made at a time: making one takes processor time from the workers.
        self._making = asyncio.Lock()
        self.place: str | None = None
        """HOST:PORT."""

    @classmethod
    async def open(
        cls,
        place: tuple[str, int],
        source: Source,
        more: Mapping[str, Handler] = MappingProxyType({}),
        *,
        hosts: Iterable[str] = (),
    ) -> Self:
        """Listen at host and port (0: a free one).  Raises PubsubError (58030).

        `more`: further paths, which show what not everybody may see.  `hosts`: further names under which clients may ask for
        these, besides addresses, localhost, the machine's name and the host of `place`.
        """
        host, port = place
        endpoint = cls(source, more, (host, *hosts))
        try:
            endpoint._server = await asyncio.start_server(endpoint._accepted, host, port, limit=MAX_REQUEST)
        except OSError as error:
            raise PubsubError(
                f'could not listen on "{host}:{port}": {error.strerror or error}',
                sqlstate="58030",
                hint='Is another program there?  "http.listen" in pubsub.toml names the place.',
            ) from error
        bound = endpoint._server.sockets[0].getsockname()[1]
        endpoint.place = f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"
        return endpoint

    async def close(self) -> None:
        """Listen no more, and cut the clients off."""
        if self._server is not None:
            self._server.close()
        for task in self._clients:
            task.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._clients) >= MAX_CLIENTS:
            writer.transport.abort()
            return
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._clients.add(task)
        task.add_done_callback(self._clients.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        protocol = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_REQUEST)
        try:
            try:
                async with asyncio.timeout(_SECONDS):
                    request = await _request(protocol, reader)
            except h11.RemoteProtocolError as error:
                if protocol.our_state is h11.ERROR:
                    return
                answer = Answer(HTTPStatus(error.error_status_hint), TEXT, b"bad request\n")
                request = None
            else:
                if request is None:
                    return
                answer = await self._answer(request)
            async with asyncio.timeout(_SECONDS):
                await _send(protocol, writer, answer, head=request is not None and request.method == b"HEAD")
        except (OSError, TimeoutError):
            pass  # the client's affair
        except Exception as error:
            logger.warning("HTTP request failed", reason=f"{type(error).__name__}: {error}")
        finally:
            writer.close()
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(_SECONDS):
                    await writer.wait_closed()

    async def _answer(self, request: h11.Request) -> Answer:
        path, _, query = request.target.decode("latin-1").partition("?")
        make = self._paths.get(path)
        hosts = [value.decode("latin-1") for name, value in request.headers if name == b"host"]
        if path in self._page and not all(map(self._is_ours, hosts)):
            return Answer(HTTPStatus.MISDIRECTED_REQUEST, TEXT, b"not a name of this node: http.hosts in pubsub.toml\n")
        if make is None:
            return Answer(HTTPStatus.NOT_FOUND, TEXT, b"try /, /metrics, /health or /ready\n")
        if request.method not in (b"GET", b"HEAD"):
            return Answer(HTTPStatus.METHOD_NOT_ALLOWED, TEXT, b"only GET and HEAD\n")
        accept = ",".join(value.decode("latin-1") for name, value in request.headers if name == b"accept")
        try:
            answer = await make(Asked(query, accept))
        except (PubsubError, TimeoutError) as error:
            self._failed(path, f"the catalog could not be read: {error}")
            return Answer(HTTPStatus.SERVICE_UNAVAILABLE, TEXT, b"the catalog could not be read\n")
        except Exception as error:
            self._failed(path, f"{type(error).__name__}: {error}")
            return Answer(HTTPStatus.INTERNAL_SERVER_ERROR, TEXT, b"it could not be made; the log says why\n")
        self._failing = None
        return answer

    def _is_ours(self, host: str) -> bool:
        """Return whether a Host header names this server: by an address, which no other site can have, or a known name."""
        match = _HOST.fullmatch(host.strip().lower())
        if match is None:
            return False
        name = match["name"] or match["address"]
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return match["name"] is not None and name.removesuffix(".") in self._hosts
        return True

    def _failed(self, path: str, reason: str) -> None:
        """Log a failure, but not again for every scrape."""
        if reason != self._failing:
            logger.warning("HTTP request failed", path=path, reason=reason)
        self._failing = reason

    async def _metrics(self, asked: Asked) -> Answer:
        from pubsub.monitoring.metrics import exposition

        async with self._making:
            kind, body = await asyncio.to_thread(exposition, await self._source.families(), asked.accept)
        return Answer(HTTPStatus.OK, kind, body)

    async def _health(self, asked: Asked) -> Answer:
        return as_json(HTTPStatus.OK, {"status": "alive"})

    async def _ready(self, asked: Asked) -> Answer:
        return await self._source.ready()


async def _request(protocol: h11.Connection, reader: asyncio.StreamReader) -> h11.Request | None:
    """Read a request, and throw its body away; None if the client left.  Raises h11.RemoteProtocolError."""
    request: h11.Request | None = None
    left = _BODY
    while True:
        event = protocol.next_event()
        if event is h11.NEED_DATA:
            data = await reader.read(MAX_REQUEST)
            left -= len(data) if request is not None else 0
            if left < 0:
                raise h11.RemoteProtocolError("body too large", error_status_hint=413)
            protocol.receive_data(data)
        elif isinstance(event, h11.Request):
            request = event
        elif isinstance(event, h11.EndOfMessage):
            return request
        elif isinstance(event, h11.ConnectionClosed) or event is h11.PAUSED:
            return None


async def _send(protocol: h11.Connection, writer: asyncio.StreamWriter, answer: Answer, *, head: bool) -> None:
    headers = [
        ("Content-Type", answer.kind),
        ("Content-Length", str(len(answer.body))),
        ("Connection", "close"),
        *_HEADERS,
    ]
    if answer.status is HTTPStatus.METHOD_NOT_ALLOWED:
        headers.append(("Allow", "GET, HEAD"))
    response = h11.Response(status_code=answer.status, headers=headers, reason=answer.status.phrase.encode())
    writer.write(protocol.send(response) or b"")
    if not head:
        writer.write(protocol.send(h11.Data(data=answer.body)) or b"")
    writer.write(protocol.send(h11.EndOfMessage()) or b"")
    await writer.drain()
