"""One WAL out of what there is: a directory, a server, or both; and a reader that is fed with it.

    ARCHIVE ── nothing more there ──► STREAM ── the server no longer has it ──► ARCHIVE
                                        └── the server's timeline ended, or the connection broke ──► STREAM

Each time the reader starts again at the page of the first record not yet read: what came from a directory may have been
the torn end of a file that was being written.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Final

from pubsub.errors import ConnectionFailure, NotInPrerequisiteState, PublisherError
from pubsub.protocol.lsn import Lsn
from pubsub.protocol.timeline import TimelineHistory
from pubsub.publisher.connection import Connection
from pubsub.publisher.replication import identify_system, timeline_history
from walsender.historic.upstream import Upstream
from walsender.source.segments import SegmentDirectory
from walsender.source.stream import WalStream
from walsender.xlog import formats as f
from walsender.xlog.errors import WalMissing
from walsender.xlog.formats import Rmgr
from walsender.xlog.geometry import Geometry
from walsender.xlog.reader import WalReader
from walsender.xlog.record import parse_record

RETRY_SECONDS: Final = 60.0
"""How long a server that does not answer is tried again."""
_RETRY_INTERVAL: Final = 0.5


class WalSource:
    """WAL of `server`, in the history of `timeline`; `directory` is asked first.  `slot`: a physical slot."""

    def __init__(
        self, conninfo: str, server: Upstream, timeline: int, directory: Path | None = None, slot: str | None = None
    ) -> None:
        self._conninfo = conninfo
        self._server = server
        self._slot = slot
        self._directory = None if directory is None else SegmentDirectory(directory, Geometry(server.segment_size))
        self._stream: WalStream | None = None
        self.history = TimelineHistory.only(timeline)
        self.flushed = 0
        """What a physical slot may let go."""

    async def follow_history(self) -> None:
        """Learn of the timelines before this one, from the directory or the server.  Raises ConnectionFailure."""
        timeline = self.history.newest
        if timeline == 1:
            return
        if self._directory is not None:
            found = self._directory.history(timeline)
            if len(found.entries) > 1:
                self.history = found
                return
        async with await self._connect() as connection:
            self.history = await timeline_history(connection, timeline)

    async def feed(self, reader: WalReader) -> AsyncGenerator[bool, None]:
        """Feed `reader`; yields False when there may be records to take, True when there is nothing more for now.

        Whoever asks must take the records each time.  Raises WalMissing, WalCorrupted, ConnectionFailure and what the
        server reports; NotInPrerequisiteState where the server is another, or went another way.
        """
        while True:
            if self._directory is not None:
                reader.final = False
                reader.restart_at(reader.position)
                for lsn, data in self._directory.read(reader.received, self.history):
                    reader.feed(lsn, data)
                    yield False
                    if reader.torn is not None:
                        break
                if reader.torn is not None:
                    size = reader.geometry.segment_size
                    behind = reader.torn.lsn - reader.torn.lsn % size + size
                    if self._directory.has_from(behind, self.history):
                        raise reader.torn
                yield True
            reader.final = True
            reader.restart_at(reader.position)
            try:
                async for idle in self._stream_to(reader):
                    yield idle
            except WalMissing as error:
                if self._directory is None or not self._directory.has_from(reader.position, self.history):
                    raise
                error.add_note("the directory has it")

    async def _stream_to(self, reader: WalReader) -> AsyncGenerator[bool, None]:
        """Until the timeline has ended or the connection broke and the server answers again."""
        deadline = time.monotonic() + RETRY_SECONDS
        while True:
            connected = False
            try:
                await self._start(reader)
                connected = True
                stream = self._stream
                assert stream is not None
                async for piece in stream.pieces():
                    stream.flushed = self.flushed
                    if piece is None:
                        yield True
                    else:
                        reader.feed(*piece)
                        yield False
                return  # the timeline has ended
            except (ConnectionFailure, PublisherError) as error:
                # What shuts down, or starts, will be there again; everything else is final.  A connection may have lasted long.
                if connected:
                    deadline = time.monotonic() + RETRY_SECONDS
                if not _passes(error) or time.monotonic() > deadline:
                    raise
            finally:
                await self.close()
            await asyncio.sleep(_RETRY_INTERVAL)
            reader.restart_at(reader.position)

    async def _start(self, reader: WalReader) -> None:
        connection = await self._connect()
        try:
            identity = await identify_system(connection)
            if int(identity.system_identifier) != self._server.system_identifier:
                raise NotInPrerequisiteState(
                    "the server is another one than before",
                    detail=f"Its system identifier is {identity.system_identifier}, not {self._server.system_identifier}.",
                    hint="Decoding must be started anew.",
                )
            if identity.timeline != self.history.newest:
                await self._switch(connection, identity.timeline, reader.position)
            timeline = self.history.timeline_of(reader.position)
            stream = self._stream = WalStream(connection, self._slot)
            await stream.start(reader.position, timeline)
        except BaseException:
            self._stream = None
            await connection.close()
            raise

    async def _switch(self, connection: Connection, timeline: int, position: int) -> None:
        """The server is on a new timeline.  Raises NotInPrerequisiteState where that left this one before `position`."""
        history = await timeline_history(connection, timeline)
        end = history.end_of(self.history.newest)
        if end is None or end < position:
            raise NotInPrerequisiteState(
                f"the server's timeline {timeline} left timeline {self.history.newest} before {Lsn(position)}",
                detail="What was decoded after that did not happen there.",
                hint="Decoding must be started anew.",
            )
        self.history = history

    def has(self, lsn: int) -> bool:
        """Whether the directory has the WAL at `lsn`."""
        return self._directory is not None and self._directory.has_from(lsn, self.history)

    def checkpoints(self, reader: WalReader, lsn: int, end: int) -> Iterator[int]:
        """The redo positions that the checkpoints' records in the directory tell, from the segment at `lsn` up to `end`."""
        if self._directory is None:
            return
        for position, data in self._directory.read(lsn, self.history):
            reader.feed(position, data)
            for buffer, offset, length, _, _, info, rmgr in reader.records():
                kinds = {f.XLOG_CHECKPOINT_ONLINE, f.XLOG_CHECKPOINT_SHUTDOWN}
                if rmgr == Rmgr.XLOG and info & f.XLR_RMGR_INFO_MASK in kinds:
                    main = parse_record(buffer, offset, length, position, position, 0, info, rmgr).main
                    yield int.from_bytes(main[:8], "little")
            if reader.torn is not None or reader.position >= end:
                return

    async def _connect(self) -> Connection:
        return await Connection.connect(self._conninfo, replication=True, application_name="walsender")

    async def close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.close()


_STARTING_OR_STOPPING: Final = frozenset({"57P01", "57P02", "57P03", "57P05"})


def _passes(error: ConnectionFailure | PublisherError) -> bool:
    if isinstance(error, ConnectionFailure):
        return True
    return error.sqlstate in _STARTING_OR_STOPPING
