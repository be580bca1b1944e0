"""A decoding session: from a server's conninfo to an output plugin's messages.

    inspect the server ► checkpoint ► read the catalogs' files ► scan the WAL from the redo position to now
      ► the catalogs at the redo position ► decode from there, over the consistent point, for as long as is wanted

Serves the purpose of logical.c (CreateInitDecodingContext, DecodingContextFindStartpoint).
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pubsub.errors import ConnectionFailure, NotInPrerequisiteState, PublisherError
from pubsub.protocol.lsn import Lsn
from pubsub.publisher import publication
from pubsub.publisher.connection import Connection
from pubsub.reorderbuffer.buffer import ReorderBuffer
from walsender.beginning import read_catalogs
from walsender.confirmation import Restarts
from walsender.decode.decoder import Decoder
from walsender.decode.snapbuild import State
from walsender.historic import upstream
from walsender.historic.encodings import encoded, python_encoding
from walsender.historic.tracker import CatalogTracker
from walsender.historic.upstream import Upstream
from walsender.plugin_request import PluginMaker, PluginRequest
from walsender.plugins.pgoutput import PgoutputOptions
from walsender.plugins.plugin import Write
from walsender.plugins.publication import Warn, missing_publication
from walsender.source.restored import RestoredSegments
from walsender.source.retry import Retry
from walsender.source.segments import SegmentDirectory
from walsender.source.source import Source, WalSource
from walsender.source.stream import RECEIVER_TIMEOUT
from walsender.startpoint import redo_before
from walsender.xlog.formats import format_of_version
from walsender.xlog.geometry import Geometry
from walsender.xlog.reader import WalReader

WORK_MEM = 64 << 20
_TURN_SECONDS: Final = 0.05


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """What to decode.  `end`: LSN, 0 for none; `work_mem`: bytes."""

    conninfo: str
    asked: PluginRequest
    spill: Path
    end: int = 0
    wal: Path | None = None
    slot: str | None = None
    work_mem: int = WORK_MEM
    restore_command: str | None = None
    """The command that fetches segments, in place of the directory `wal`."""
    restore_timeout: float = 0.0
    """Seconds that it may take for each; 0: without end."""
    redo: int = 0
    """The redo position of the checkpoint to begin at, if it is known; 0: it is searched for."""
    receiver_timeout: float = RECEIVER_TIMEOUT
    """wal_receiver_timeout: seconds after which a silent server is taken for lost, and connected to anew; 0: never."""
    one_timeline: bool = False
    """Whether decoding ends (NotInPrerequisiteState) where the server is found on a later timeline than it was at the start."""
    make_source: Callable[[Upstream], Source] | None = None
    """Where the WAL comes from instead of the server and `wal`."""


def _archive(request: DecodeRequest, server: Upstream) -> Path | SegmentDirectory | None:
    if request.restore_command is None:
        return request.wal
    # Session.open may begin anew.
    path = Path(tempfile.mkdtemp(prefix="restored-", dir=request.spill)) / "segments"
    geometry = Geometry(server.segment_size)
    return RestoredSegments(request.restore_command, request.restore_timeout, path, geometry, server.system_identifier)


def _refuse_timeline() -> None:
    raise NotInPrerequisiteState(
        "the server is on a later timeline than before",
        detail="Everything up to now is of the timeline before.",
        hint="Begin again: what follows is of the new timeline.",
    )


class _Turn:
    """A short time for which work may go on before something else is looked at."""

    def __init__(self) -> None:
        self._end = 0.0

    def begin(self) -> None:
        self._end = time.monotonic() + _TURN_SECONDS

    def lasts(self) -> bool:
        return time.monotonic() < self._end


class Session:
    """One decoding, made by `open`; `run` decodes up to the requested end, or for ever."""

    def __init__(
        self,
        request: DecodeRequest,
        server: Upstream,
        source: Source,
        reader: WalReader,
        decoder: Decoder,
        turn: _Turn,
    ) -> None:
        self.server = server
        self.decoder = decoder
        self.reader = reader
        self.output = decoder.outputs[0]
        self._request = request
        self._source = source
        self._turn = turn
        self.written = reader.position
        """LSN up to which everything is decoded and written."""
        self.restarts = Restarts(decoder.restarts.point)
        source.flushed = decoder.restarts.point

    @classmethod
    async def open(
        cls,
        request: DecodeRequest,
        write: Write,
        on_consistent: Callable[[int], None],
        on_warning: Warn = lambda _: True,
    ) -> Session:
        """Prepare a session up to the redo position; begin anew if the server restarts meanwhile.

        Raises NotInPrerequisiteState, InsufficientPrivilege and so on, before anything is written.
        """
        retry = Retry()
        try:
            connection = await Connection.connect(request.conninfo, application_name="walsender")
        except PublisherError as error:
            retry.judge(error)
            connection = await retry.connect(request.conninfo)
        while True:
            connection.answer_timeout = request.receiver_timeout or None
            async with connection:
                try:
                    return await cls._open(connection, request, write, on_consistent, on_warning)
                except (ConnectionFailure, PublisherError) as error:
                    # If the session still works it is final, such as a replication connection that is refused.
                    await retry.judge_session(error, connection)
            connection = await retry.connect(request.conninfo)

    @classmethod
    async def _open(
        cls,
        connection: Connection,
        request: DecodeRequest,
        write: Write,
        on_consistent: Callable[[int], None],
        on_warning: Warn,
    ) -> Session:
        server = await upstream.inspect(connection)
        asked = request.asked
        options = asked.parse(server.version)
        if request.slot is not None:
            await upstream.check_slot(connection, request.slot)
        # If the requested start lies in the past, decoding needs an older checkpoint.
        now = await upstream.flushed(connection)
        past = 0 < asked.start <= now
        redo = Lsn(request.redo)
        if not redo:
            redo = await upstream.checkpoint(connection, may_checkpoint=server.may_checkpoint and not past)
        source: Source
        if request.make_source is not None:
            source = request.make_source(server)
        else:
            source = WalSource(
                request.conninfo,
                server,
                _archive(request, server),
                request.slot,
                timeout=request.receiver_timeout,
                switched=_refuse_timeline if request.one_timeline else lambda: None,
            )
        try:
            await source.open()
            if past and not request.redo:
                redo = await redo_before(source, server, asked.start, redo, now)
            state = await read_catalogs(connection, server, source, int(redo), asked.start if past else 0)
            texts = await upstream.session_texts(connection)
        except BaseException:
            await source.close()
            raise
        wal_format = format_of_version(server.version)
        assert wal_format is not None
        decoder = Decoder(
            database=server.database,
            wal_format=wal_format,
            make_tracker=state.tracker,
            encoding=python_encoding(server.encoding),
            make_buffer=lambda work_mem: ReorderBuffer(request.spill, work_mem),
            on_consistent=on_consistent,
            redo=int(redo),
            work_mem=request.work_mem,
        )
        if asked.missing_is_error and isinstance(options, PgoutputOptions):
            await _check_publications(connection, options.publication_names, decoder.tracker, server)
        turn = _Turn()
        output = PluginMaker(state.facts).make(asked, texts, write, on_warning, may_go_on=turn.lasts)
        decoder.builder.enter(State.BUILDING)
        decoder.add(output)
        reader = WalReader(Geometry(server.segment_size), int(redo))
        return cls(request, server, source, reader, decoder, turn)

    async def run(
        self,
        idle: Callable[[], None] = lambda: None,
        going: Callable[[], None] = lambda: None,
        kept: Callable[[int], int] = lambda position: position,
    ) -> None:
        """Decode up to the requested end, or until cancelled.

        `idle` is called whenever there is nothing more to read for now, `going` when there is.  `kept` is asked before the
        physical slot moves: it is given the position up to which all is written, and returns up to where it is kept.  Raises
        what ends a decoding.
        """
        end = self._request.end
        reader, decoder = self.reader, self.decoder
        restarts = self.restarts
        stop = reader.geometry.to_byte_position(end) if end else 0
        async for nothing_more in self._source.feed(reader):
            self._turn.begin()
            ended = decoder.run(reader, end)
            while not self.output.proceed():
                # Let signals be handled in the midst of a large transaction, and the server know that this goes on.
                await asyncio.sleep(0)
                await self._source.keep_alive()
                self._turn.begin()
            self.written = reader.position
            if ended:
                break
            if nothing_more:
                idle()
                restarts.note(reader.position, decoder.restarts.point)
                if restarts.moves and self._request.slot is not None:
                    self._source.flushed = restarts.kept(kept(reader.position))
            else:
                going()
            if end and reader.geometry.to_byte_position(reader.position) >= stop:
                break
        if not decoder.builder.consistent:
            raise NotInPrerequisiteState(
                f"there is no consistent point before {Lsn(end)}",
                detail="No list of running transactions that all have ended since was found in the WAL up to there.",
                hint="Begin further back (--wal with an older archive), or end later.",
            )

    async def close(self) -> None:
        await self._source.close()


async def _check_publications(
    connection: Connection, names: Sequence[str], tracker: CatalogTracker, server: Upstream
) -> None:
    """Refuse publications that exist neither where the WAL begins nor on the server now: others may be created or dropped later."""
    keys = {name: encoded(name, server.encoding) for name in names}
    for name, key in keys.items():
        if key is None:
            raise missing_publication(name)  # the server could not even be asked
    for name in await publication.missing_publications(connection, names):
        key = keys[name]
        if key is None or tracker.first("pg_publication", key, frozenset(), 1) is None:
            raise missing_publication(name)
