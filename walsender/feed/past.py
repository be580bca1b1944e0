"""Where a slot can begin in the past: the WAL before the spool is searched backwards for a checkpoint (startpoint.py).

It is read from the archive.  What only the server still has is put into the spool, so that the slot has it later, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator

from pubsub.errors import InvalidValue
from pubsub.protocol.lsn import Lsn
from pubsub.protocol.timeline import TimelineHistory
from walsender.feed.feed import Feed
from walsender.feed.spool import Spool
from walsender.historic import upstream
from walsender.source.stream import WalStream
from walsender.startpoint import redo_before
from walsender.xlog.errors import WalMissing
from walsender.xlog.reader import WalReader


async def restart_for(feed: Feed, conninfo: str, lsn: int) -> int:
    """Return the redo position from which everything that ends from `lsn` on is whole; from there on there is WAL then.

    Keep `feed.held` until a slot needs it.  Raises WalMissing if neither the spool, nor the archive, nor the server has it,
    InvalidValue for the future.
    """
    async with await feed.connect(conninfo) as connection:
        flushed = await upstream.flushed(connection)
        last = await upstream.checkpoint(connection, may_checkpoint=False)
    if lsn > flushed:
        raise InvalidValue(f"cannot begin at {Lsn(lsn)}, the WAL ends at {flushed}")
    feed.held = min(lsn - lsn % feed.geometry.segment_size, feed.oldest)
    await feed.wait_for(lsn)
    found = feed.commits.restart_for(lsn, feed.oldest)
    if found is not None:
        return found
    source = _Past(feed)
    try:
        redo = await redo_before(source, feed.server, lsn, last, feed.received)
        await source.fill(redo)
    except WalMissing as error:
        raise WalMissing(
            f"cannot begin at {Lsn(lsn)}, WAL from before it is missing",
            error.lsn,
            detail=error.__cause__.message if isinstance(error.__cause__, WalMissing) else error.message,
            hint="Name an archive that goes back further (--archive-directory, --restore-command), or begin later.",
        ) from error
    finally:
        source.stop()
        await source.close()
    return redo


class _Past:
    """All WAL that is to be had, as a source (source.Source)."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._size = feed.geometry.segment_size
        self._spool = Spool(feed.spool.directory, self._size)
        self._tip = feed.received
        self.flushed = 0

    async def open(self) -> None:
        """Nothing is to be opened."""

    async def feed(self, reader: WalReader) -> AsyncGenerator[bool, None]:
        """See source.Source.  Raises WalMissing."""
        reader.final = True
        while True:
            if reader.received < reader.position:
                reader.restart_at(reader.position)
            pieces: Iterator[tuple[int, bytes]] = iter(self._spool.read(reader.received, self._tip))
            try:
                # An archive may be slow.
                while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                    reader.feed(*piece)
                    yield False
            except WalMissing as error:
                await self._from_server(error.lsn)
                continue
            yield True

    async def keep_alive(self) -> None:
        """No connection waits meanwhile."""

    async def fill(self, redo: int) -> None:
        """Take from the server what neither the spool nor the archive has from `redo` on.  Raises WalMissing.

        That is the newest WAL before the spool, if any: an archive gets a segment only when it is whole.
        """
        start = self._feed.oldest - self._size
        while start + self._size > redo:
            if start not in await asyncio.to_thread(self._spool.starts):
                archive = self._feed.archive
                if archive is not None and await asyncio.to_thread(archive.has, start, self._spool.stop):
                    break
                await self._from_server(start)
            start -= self._size
        self._feed.oldest = await asyncio.to_thread(self._feed.spool.run_start, self._feed.oldest)

    async def close(self) -> None:
        """See source.Source: it can be read again."""
        self._spool.close()

    def stop(self) -> None:
        """Have a restore_command that still runs be killed; nothing is read any more."""
        self._spool.stop.set()

    async def _from_server(self, lsn: int) -> None:
        """Put the segment that holds `lsn` into the spool.  Raises WalMissing, PublisherError, ConnectionFailure."""
        start = lsn - lsn % self._size
        history: TimelineHistory = self._feed.history
        timeline = history.timelines_of_segment(start, self._size)[0]
        name = self._feed.geometry.segment_name(timeline, start)
        pieces: list[bytes] = []
        got = start
        conninfo = self._feed.wal_conninfo
        connection = await self._feed.connect(conninfo, replication=True)
        stream = WalStream(connection, timeout=self._feed.receiver_timeout)
        try:
            await stream.start(start, timeline)
            async for piece in stream.pieces():
                if piece is not None:
                    got = piece[0] + len(piece[1])
                    pieces.append(piece[1][: max(start + self._size - piece[0], 0)])
                if got >= start + self._size:
                    break
        except WalMissing as error:
            archive = "nor the archive " if self._feed.archive is not None else ""
            raise WalMissing(
                f"requested WAL segment {name} has already been removed: "
                f"neither the spool {archive}nor the upstream server has it",
                start,
            ) from error
        finally:
            await stream.close()
        if got < start + self._size:
            raise WalMissing(f"the upstream server has only a part of WAL segment {name}", start)
        await asyncio.to_thread(self._feed.spool.put, start, pieces)
