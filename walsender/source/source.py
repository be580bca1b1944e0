"""One WAL from a directory, a server, or both, fed to a reader.

    ARCHIVE ── nothing more there ──► STREAM ── the server no longer has it, or its timeline ended ──► ARCHIVE
                                        └── the connection broke ──► STREAM

Without a directory there is only STREAM, and WAL that the server no longer has is an error.

Unless the directory ended with a whole segment, the reader starts again at the page of the first record not yet read:
the bytes from there may have been the torn end of a file that was being written.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from pubsub.errors import ConnectionFailure, NotInPrerequisiteState, PublisherError
from pubsub.protocol.lsn import Lsn
from pubsub.protocol.timeline import TimelineHistory
from pubsub.publisher.connection import Connection
from pubsub.publisher.replication import SystemIdentity, identify_system, timeline_history
from walsender.historic.upstream import Upstream
from walsender.source.retry import RETRY_INTERVAL, RETRY_SECONDS, Retry
from walsender.source.segments import SegmentDirectory
from walsender.source.stream import RECEIVER_TIMEOUT, WalStream
from walsender.xlog.errors import WalMissing
from walsender.xlog.geometry import Geometry
from walsender.xlog.reader import WalReader


def check_descent(history: TimelineHistory, timeline: int, position: int) -> None:
    """Raise NotInPrerequisiteState unless WAL of `timeline` that was read up to `position` is part of this history."""
    if timeline == history.newest:
        return
    end = history.end_of(timeline)
    if end is None:
        raise NotInPrerequisiteState(
            f"the server's timeline {history.newest} does not come from timeline {timeline}",
            detail=f"WAL of timeline {timeline} was read up to {Lsn(position)}.",
            hint="Connect to the server that goes on from there, or start decoding anew.",
        )
    if end < position:
        raise NotInPrerequisiteState(
            f"the server's timeline {history.newest} left timeline {timeline} before {Lsn(position)}",
            detail=f"It left at {Lsn(end)}; what was decoded after that did not happen there.",
            hint="Decoding must be started anew.",
        )


class Source(Protocol):
    """Where a reader's WAL comes from.  `flushed`: the LSN before which nothing is needed again."""

    flushed: int

    async def open(self) -> None: ...
    def feed(self, reader: WalReader) -> AsyncGenerator[bool, None]:
        """Feed `reader`; yield False when there may be records to take, True when there is nothing more for now."""

    async def keep_alive(self) -> None:
        """Tell the server that it is still heard, while `feed` is not asked for more."""

    async def close(self) -> None: ...


class WalSource:
    """The WAL of `server`; `directory` is read first.  `slot`: a physical slot.  Call `open` before use.

    `keep` gets the WAL that the server sends, before the reader: LSN and bytes.  `switched` is called when `history` has
    become another one, before the first bytes of the new timeline.  `check` may refuse the timeline on which the server is.
    """

    def __init__(
        self,
        conninfo: str,
        server: Upstream,
        directory: Path | SegmentDirectory | None = None,
        slot: str | None = None,
        keep: Callable[[int, bytes], None] = lambda *_: None,
        timeout: float = RECEIVER_TIMEOUT,
        switched: Callable[[], None] = lambda: None,
        check: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        self._check = check
        self._keep = keep
        self._switched = switched
        self._timeout = timeout
        self._conninfo = conninfo
        self._server = server
        self._slot = slot
        self._directory = (
            SegmentDirectory(directory, Geometry(server.segment_size), server.system_identifier)
            if isinstance(directory, Path)
            else directory
        )
        self._stream: WalStream | None = None
        self._streamed = False
        self.history = TimelineHistory.only(1)
        self.flushed = 0
        """The LSN before which a physical slot may let WAL go."""

    async def open(self) -> None:
        """Learn the server's timelines, from the directory or the server; it must accept a replication connection.

        Raises ConnectionFailure, PublisherError, NotInPrerequisiteState for another server.
        """
        async with await self._connect() as connection:
            timeline = (await self._identify(connection)).timeline
            if self._directory is not None:
                async for _ in self._directory.provide_history(timeline):
                    pass
                self.history = self._directory.history(timeline)
            if len(self.history.entries) == 1:
                self.history = await timeline_history(connection, timeline)

    async def feed(self, reader: WalReader) -> AsyncGenerator[bool, None]:
        """Feed `reader`; yield False when there may be records to take, True when there is nothing more for now.

        The caller must take the records each time.  Raises WalMissing, WalCorrupted, ConnectionFailure and what the
        server reports; NotInPrerequisiteState if the server is another one, or on a timeline that left this one before
        the reader's position.
        """
        missed = -1
        deadline = 0.0
        while True:
            if self._directory is not None:
                async for idle in self._read_directory(self._directory, reader):
                    yield idle
                yield True
            reader.final = True
            if reader.torn is not None or reader.received % reader.geometry.segment_size:
                reader.restart_at(reader.position)
            # Otherwise go on from there: the server need not have the segment in which the next record begins.
            try:
                async for idle in self._stream_to(reader):
                    yield idle
            except WalMissing:
                if self._directory is None:
                    raise
                # The directory may have it by now, or soon, unless it has a gap there.
                now = time.monotonic()
                if reader.position > missed:
                    missed, deadline = reader.position, now + RETRY_SECONDS
                elif now > deadline or self._directory.has_after(missed):
                    raise
                else:
                    await asyncio.sleep(RETRY_INTERVAL)

    async def _read_directory(self, directory: SegmentDirectory, reader: WalReader) -> AsyncGenerator[bool, None]:
        """Feed all that the directory has.  Raises WalCorrupted if bytes that are no record have WAL after them."""
        size = reader.geometry.segment_size
        suspect = -1
        while True:
            reader.final = False
            reader.restart_at(reader.position)
            before = -1
            while reader.received != before:
                before = reader.received
                async for _ in directory.provide(before, self.history):
                    yield False
                for lsn, data in directory.read(before, self.history):
                    reader.feed(lsn, data)
                    yield False
                    # Nothing else waits in this loop: let signals be handled.
                    await asyncio.sleep(0)
                    if reader.torn is not None:
                        break
                if reader.torn is not None or reader.received % size:
                    break
            torn = reader.torn
            if torn is None:
                return
            following = torn.lsn - torn.lsn % size + size
            async for _ in directory.provide(following, self.history):
                yield False
            if not directory.has_written(following, self.history):
                return
            # The next segment is written to, so this one is complete now; when it was read it may not have been.
            if torn.lsn == suspect:
                raise torn
            suspect = torn.lsn

    async def _stream_to(self, reader: WalReader) -> AsyncIterator[bool]:
        """Feed from the server until its timeline ends; reconnect when the connection breaks."""
        retry = Retry()
        while True:
            connected = False
            try:
                await self._start(reader)
                connected = self._streamed = True
                stream = self._stream
                assert stream is not None
                async for piece in stream.pieces():
                    if piece is None:
                        yield True
                        stream.flushed = self.flushed
                    else:
                        self._keep(*piece)
                        reader.feed(*piece)
                        yield False
                return  # the timeline has ended
            except (ConnectionFailure, PublisherError) as error:
                # A server that shuts down or starts will be back; other errors are final.  The connection may have
                # lasted long, so the time starts anew.
                if connected:
                    retry.connected()
                retry.judge(error, slot=self._streamed)
            finally:
                await self.close()
            await asyncio.sleep(RETRY_INTERVAL)
            reader.restart_at(reader.position)

    async def _start(self, reader: WalReader) -> None:
        connection = await self._connect()
        try:
            identity = await self._identify(connection)
            if identity.timeline != self.history.newest:
                await self._switch(connection, identity.timeline, reader.position)
                reader.restart_at(reader.position)
            start = max(reader.position, reader.received)
            stream = self._stream = WalStream(connection, self._slot, self._timeout)
            await stream.start(start, self.history.timeline_of(start))
        except BaseException:
            self._stream = None
            await connection.close()
            raise

    async def _identify(self, connection: Connection) -> SystemIdentity:
        identity = await identify_system(connection)
        if int(identity.system_identifier) != self._server.system_identifier:
            raise NotInPrerequisiteState(
                "the server is another one than before",
                detail=f"Its system identifier is {identity.system_identifier}, not {self._server.system_identifier}.",
                hint="Decoding must be started anew.",
            )
        if self._check is not None:
            await self._check(identity.timeline)
        return identity

    async def _switch(self, connection: Connection, timeline: int, position: int) -> None:
        """Follow the server to a new timeline.

        Raises NotInPrerequisiteState if that left this one before `position`.
        """
        history = await timeline_history(connection, timeline)
        check_descent(history, self.history.newest, position)
        before, self.history = self.history, history
        try:
            self._switched()
        except BaseException:
            self.history = before
            raise

    async def _connect(self) -> Connection:
        return await Connection.connect(
            self._conninfo, replication=True, application_name="walsender", answer_timeout=self._timeout
        )

    async def keep_alive(self) -> None:
        """See Source.  A connection that is broken is left to `feed`."""
        if self._stream is not None:
            with suppress(ConnectionFailure):
                await self._stream.keep_alive()

    async def close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.close()
