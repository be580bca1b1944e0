"""A client's session before a fake upstream server: who is let in, and which messages are read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pubsub.backend import messages as m
from pubsub.backend.cancel_keys import CancelKeys
from pubsub.backend.listener import Client, Listener
from walsender.server.service import ServerOptions, Service
from walsender.server.session import Session

OK = m.message(b"R", bytes(4))
READY = m.ready(b"I")
PASSWORD = m.message(b"R", (3).to_bytes(4, "big"))
OPTIONS = ServerOptions("", Path())


class Upstream:
    """An upstream server that says `first` to each client, and `then` after each message of its own that it gets."""

    def __init__(self, first: bytes, then: Sequence[bytes] = ()) -> None:
        self.first = first
        self.then = list(then)
        self.startup = b""
        self.got: asyncio.Queue[tuple[bytes, bytes]] = asyncio.Queue()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            _, self.startup = await m.read_startup(reader)
            writer.write(self.first)
            while True:
                self.got.put_nowait(await m.read_message(reader))
                if self.then:
                    writer.write(self.then.pop(0))
        except m.Closed:
            writer.close()

    port = 0
    certificate = False

    def shows_certificate(self, connected: asyncio.StreamWriter) -> bool:
        assert isinstance(connected, asyncio.StreamWriter)
        return self.certificate


class Sessions:
    """Serves clients as the publisher's server does, as if they came from `address`."""

    def __init__(self, service: Service, address: str) -> None:
        self.service = service
        self.address = address

    async def serve(self, client: Client) -> None:
        client.address = self.address
        await Session(self.service, client).run()

    async def cancel(self, request: bytes) -> bool:
        return False


@asynccontextmanager
async def served(
    upstream: Upstream, options: ServerOptions = OPTIONS, address: str = "127.0.0.1"
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect a client to a session before `upstream`."""
    service: Any = SimpleNamespace(options=options, upstream=upstream, keys=CancelKeys(), slots=[], sessions=set())
    backend = Sessions(cast(Service, service), address)
    listener = Listener(lambda _: backend, lambda: [backend])
    port = await listener.listen("127.0.0.1", 0)
    async with await asyncio.start_server(upstream.serve, "127.0.0.1", 0) as server:
        upstream.port = server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            async with asyncio.timeout(60):
                yield reader, writer
        finally:
            writer.close()
            await listener.stop()


def hello(**more: str) -> bytes:
    return m.startup(3 << 16, {"user": "me", "database": "d", **more})


REMOTE = ("192.0.2.7", "2001:db8::7", "::ffff:192.0.2.7", "fe80::7%eth0")
NEAR = ("127.0.0.1", "127.1.2.3", "::1", "::ffff:127.0.0.1", "")


@pytest.mark.parametrize("parameters", [{}, {"replication": "database"}, {"replication": "true"}])
@pytest.mark.parametrize("address", REMOTE)
async def test_who_is_trusted_for_this_program_s_address_is_not_let_in(
    address: str, parameters: dict[str, str]
) -> None:
    """The upstream server's trust and peer mean this program's address, not the client's."""
    async with served(Upstream(OK + READY), address=address) as (reader, writer):
        writer.write(hello(**parameters))
        kind, body = await m.read_message(reader)
        assert kind == b"E"
        error = m.read_error(body)
        assert (m.read_fields(body)["S"], error.sqlstate) == ("FATAL", "28000")
        assert error.message == 'the upstream server lets the user "me" in without asking for anything'
        assert error.hint is not None
        assert "allow_trust" in error.hint
        assert await reader.read() == b""


@pytest.mark.parametrize(
    ("address", "options"), [*((one, OPTIONS) for one in NEAR), (REMOTE[0], replace(OPTIONS, allow_trust=True))]
)
async def test_clients_of_this_host_are_trusted_and_others_where_that_is_set(
    address: str, options: ServerOptions
) -> None:
    async with served(Upstream(OK + READY), options, address) as (reader, writer):
        writer.write(hello())
        assert await reader.readexactly(len(OK + READY)) == OK + READY


@pytest.mark.parametrize(("address", "is_let_in"), [("127.0.0.1", False), ("::1", False), ("", True)])
async def test_who_is_let_in_by_this_program_s_certificate(address: str, is_let_in: bool) -> None:
    """Its key is readable for its own user only, whom the Unix socket is for; loopback addresses are for everyone here."""
    upstream = Upstream(OK + READY)
    upstream.certificate = True
    async with served(upstream, address=address) as (reader, writer):
        writer.write(hello())
        if is_let_in:
            assert await reader.readexactly(len(OK + READY)) == OK + READY
            return
        kind, body = await m.read_message(reader)
        error = m.read_error(body)
        assert (kind, error.sqlstate) == (b"E", "28000")
        assert "address and certificate only" in (error.detail or "")


async def test_who_was_asked_for_a_password_is_let_in() -> None:
    upstream = Upstream(PASSWORD, [OK + READY])
    async with served(upstream, address=REMOTE[0]) as (reader, writer):
        writer.write(hello())
        assert await reader.readexactly(len(PASSWORD)) == PASSWORD
        answer = m.message(b"p", b"secret\0")
        writer.write(answer)
        assert await reader.readexactly(len(OK + READY)) == OK + READY
        assert await upstream.got.get() == (b"p", b"secret\0")


@asynccontextmanager
async def begun(
    upstream: Upstream, address: str = "127.0.0.1"
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A session that has begun."""
    upstream.first = OK + READY
    async with served(upstream, address=address) as (reader, writer):
        writer.write(hello())
        assert await reader.readexactly(len(OK + READY)) == OK + READY
        yield reader, writer


async def test_a_bearer_token_may_be_long_and_what_scram_says_may_not() -> None:
    def mechanisms(*names: bytes) -> bytes:
        return m.message(b"R", (10).to_bytes(4, "big") + b"".join(name + b"\0" for name in names) + b"\0")

    token = m.message(b"p", bytes(60_000))
    for names in ([b"OAUTHBEARER"], [b"SCRAM-SHA-256", b"OAUTHBEARER"]):
        async with served(Upstream(mechanisms(*names), [OK + READY])) as (reader, writer):
            writer.write(hello())
            asked = mechanisms(*names)
            assert await reader.readexactly(len(asked)) == asked
            writer.write(token)
            assert await reader.readexactly(len(OK + READY)) == OK + READY
    async with served(Upstream(mechanisms(b"SCRAM-SHA-256"), [OK + READY])) as (reader, writer):
        writer.write(hello())
        await m.read_message(reader)
        writer.write(token[:5])
        assert b"invalid message length" in await reader.read()


@pytest.mark.parametrize("name", [b"user", b"database", b"application_name", b"options"])
async def test_bytes_that_are_no_utf_8_go_to_the_upstream_server_as_they_came(name: bytes) -> None:
    upstream = Upstream(OK + READY)
    body = b"user\0me\0" + name + b"\0caf\xe9 \xff\0\0"
    async with served(upstream) as (reader, writer):
        writer.write((len(body) + 8).to_bytes(4, "big") + (3 << 16).to_bytes(4, "big") + body)
        assert await reader.readexactly(len(OK + READY)) == OK + READY
        assert name + b"\0caf\xe9 \xff\0" in upstream.startup


async def test_only_queries_parameters_and_copies_are_long() -> None:
    """Other kinds are bounded as in postgres.c, SocketBackend: the length counts itself."""
    for kind in (b"S", b"H", b"D", b"C", b"E", b"c", b"f", b"p", b"?"):
        async with begun(Upstream(b"")) as (reader, writer):
            writer.write(kind + (10_001).to_bytes(4, "big"))
            writer.write_eof()
            if kind in b"p?":
                head = await m.read_head(reader)
                error = m.read_error(await m.read_body(reader, head[1]))
                expected = f"invalid frontend message type {kind[0]}"
                assert (head[0], error.sqlstate, error.message) == (b"E", "08P01", expected)
            assert await reader.read() == b"", kind
    upstream = Upstream(b"")
    async with begun(upstream) as (_, writer):
        message = m.message(b"f", b"x" * 9_995 + b"\0")
        writer.write(message + m.message(b"S"))
        assert await upstream.got.get() == (b"f", message[5:])


@pytest.mark.parametrize("kind", [b"Q", b"P"])
async def test_a_long_text_about_slots_is_passed_on_unread(kind: bytes) -> None:
    """What takes the event loop long to read, any role could send."""
    upstream = Upstream(b"")
    text = b"SELECT 1 FROM pg_replication_slots WHERE slot_name IN (" + b"1," * (128 << 10) + b"1)\0"
    async with begun(upstream) as (_, writer):
        body = text if kind == b"Q" else b"\0" + text + b"\0\0"
        writer.write(m.message(kind, body))
        assert await upstream.got.get() == (kind, body)
        assert upstream.got.empty()


async def test_an_application_s_name_is_shown_in_ascii() -> None:
    """In pg_stat_replication it must be text in any encoding (string.c: pg_clean_ascii)."""
    service: Any = SimpleNamespace(options=OPTIONS)
    client: Any = SimpleNamespace(
        reader=None,
        writer=None,
        user="me",
        database="d",
        address="",
        port=-1,
        parameters={"application_name": "ü\udcff\tx"},
    )
    assert Session(service, client).application_name == "\\xc3\\xbc\\xff\\x09x"


async def test_a_query_of_many_statements_about_slots_is_refused() -> None:
    """Each would take the text of all slots."""
    upstream = Upstream(b"")
    async with begun(upstream) as (reader, writer):
        writer.write(m.message(b"Q", b"SELECT 1 FROM pg_replication_slots;" * 31 + b"\0"))
        kind, body = await m.read_message(reader)
        assert (kind, m.read_error(body).sqlstate) == (b"E", "54000")
        assert await m.read_message(reader) == (b"Z", b"I")
        assert upstream.got.empty()
