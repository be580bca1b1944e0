"""A client's exchange with the upstream server."""

from __future__ import annotations

import asyncio

import pytest

from pubsub.backend import messages as m
from walsender.server.exchange import Exchange


async def test_what_is_asked_after_the_server_s_end_is_not_waited_for() -> None:
    """A session that was ended rolled back on its way out, and waited for the answer for ever."""

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1)
        writer.close()

    server = await asyncio.start_server(accepted, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        exchange = Exchange(reader, writer, writer)

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
        writer.close()
