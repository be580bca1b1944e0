"""One stream of WAL out of what there is: a directory, a server, or both."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

from pubsub.errors import NotInPrerequisiteState
from pubsub.publisher.connection import Connection
from walsender.historic.upstream import Upstream
from walsender.source.stream import WalStream
from walsender.xlog.formats import XLOG_BLCKSZ

Piece = tuple[int, bytes]


class WalSource:
    """WAL from a position on: `seek`, then `pieces`; and again.

    `flushed`: what a physical slot may let go.
    """

    def __init__(
        self, conninfo: str, server: Upstream, timeline: int, directory: Path | None = None, slot: str | None = None
    ) -> None:
        self._conninfo = conninfo
        self._server = server
        self._timeline = timeline
        self._slot = slot
        self._stream: WalStream | None = None
        self._next = 0
        self.flushed = 0

    async def seek(self, lsn: int) -> None:
        """The next piece begins at the page that holds `lsn`."""
        await self.close()
        self._next = lsn - lsn % XLOG_BLCKSZ

    async def pieces(self) -> AsyncGenerator[Piece | None, None]:
        """(LSN, bytes) in order; None whenever all that is there has been given.  Raises ConnectionFailure, WalMissing."""
        connection = await Connection.connect(self._conninfo, replication=True, application_name="walsender")
        stream = self._stream = WalStream(connection, self._slot)
        await stream.start(self._next, self._timeline)
        async for piece in stream.pieces():
            if piece is not None:
                self._next = piece[0] + len(piece[1])
            stream.flushed = self.flushed
            yield piece
        raise NotInPrerequisiteState("the server's timeline has ended")

    async def close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.close()
