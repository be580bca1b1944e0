"""A client's exchange with the upstream server."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from pubsub.backend import messages as m
from pubsub.errors import ProgramLimitExceeded
from walsender.server import exchange as exchanges
from walsender.server.exchange import Exchange


@asynccontextmanager
async def exchange_with(
    accepted: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[tuple[Exchange, asyncio.StreamWriter]]:
    """Yield an exchange with a server that does this with its connection, and what writes to it."""
    server = await asyncio.start_server(accepted, "127.0.0.1", 0)
    async with server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.sockets[0].getsockname()[1])
        yield Exchange(reader, writer, writer), writer
        writer.close()


async def test_what_is_asked_after_the_server_s_end_is_not_waited_for() -> None:
    """A session that was ended rolled back on its way out, and waited for the answer for ever."""

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1)
        writer.close()

    async with exchange_with(accepted) as (exchange, _):

        async def session() -> None:
            try:
                await exchange.ask("SELECT 1")
            finally:
                await exchange.ask("ROLLBACK")

        asking = asyncio.create_task(session())
        idle = asyncio.create_task(exchange.idle())
        await exchange.run()
        asking.cancel()
        exchange.close()
        for waiting in (asking, idle):
            with pytest.raises(m.Closed):
                await waiting


async def test_an_answer_to_a_question_in_a_client_s_words_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The options of pg_logical_slot_get_changes for each row of a query: they were collected here, of any length."""
    monkeypatch.setattr(exchanges, "_MOST", 100)

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for count in (9, 1):
            await m.read_message(reader)
            writer.write(m.rows([("a", m.TEXT)], [["x" * 40]] * count, f"SELECT {count}") + m.ready(b"I"))
        await reader.read()
        writer.close()

    async with exchange_with(accepted) as (exchange, writer):
        running = asyncio.create_task(exchange.run())
        async with asyncio.timeout(300):
            with pytest.raises(ProgramLimitExceeded):
                await exchange.ask("SELECT a")
            assert (await exchange.ask("SELECT a"))[1] == [["x" * 40]]
            writer.close()
            await running


async def test_a_client_that_is_gone_is_told_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """asyncio logged each row of the answer."""

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await m.read_message(reader)
        writer.write(m.message(b"D", b"\0\0") * 30 + m.ready(b"I"))
        await writer.drain()
        writer.close()

    async with exchange_with(accepted) as (exchange, _):
        ours, theirs = socket.socketpair()
        with theirs:
            _, client = await asyncio.open_unix_connection(sock=ours)
            client.transport.abort()
            exchange._client = client
            await exchange.pass_on(b"Q", b"SELECT 1\0")
            await exchange.run()
    assert exchange.status == b"I"
    assert caplog.records == []
