"""The process that decodes a slot's changes for one call of a function; it is forked (pubsub/forks), and has a socket.

from the server   a line of JSON (Task); then lines with the LSN up to which there is WAL in the spool
to the server     chunks: kind (1 byte), length (4 bytes), content
                  R   LSN (8), transaction (4), what the plugin has written
                  P   LSN up to which was decoded (8), restart point (8), statistics (9 of 8 each): the end
                  W   a warning, E   the error that ends it: JSON with the error's fields
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import socket
import tempfile
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from struct import Struct
from typing import Final

from pubsub.errors import NotInPrerequisiteState, PubsubError
from pubsub.reorderbuffer.directories import SpillDirectory
from walsender.decoding import DecodeRequest, Session
from walsender.feed.spool import Spool
from walsender.historic.upstream import Upstream
from walsender.plugin_request import PluginRequest
from walsender.streaming.ahead import Ahead
from walsender.streaming.spool_source import SpoolSource

_CHUNK: Final = Struct(">cI")
_ROW: Final = Struct(">QI")
_POSITION: Final = Struct(">11Q")
_SPILL: Final = "walsender-spill-"


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be decoded: up to the record that reaches `end`, or to the transaction with the change number `limit`.

    `start`, `two_phase_at`: LSNs as PluginRequest has them; `redo`: as in DecodeRequest; `spool`: the directory; `tip`: where
    the WAL there ends; `answer_timeout`: seconds that the upstream server may take for an answer; 0: for ever.
    """

    conninfo: str
    plugin: str
    options: dict[str, str]
    spool: str
    tip: int
    start: int
    redo: int
    two_phase_at: int | None
    work_mem: int
    client_encoding: str
    system_identifier: int
    end: int
    limit: int
    answer_timeout: float

    def line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


class _Chunks:
    """Writes chunks.  Blocks while the server does not read, and so bounds what lies between."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, kind: bytes, content: bytes) -> None:
        view = memoryview(_CHUNK.pack(kind, len(content)) + content)
        while view:
            try:
                view = view[os.write(self._descriptor, view) :]
            except BlockingIOError:
                select.select([], [self._descriptor], [])

    def tell(self, kind: bytes, error: PubsubError) -> None:
        self.write(kind, json.dumps(error.fields()).encode())


class _EnoughError(Exception):
    """The limit was reached by a transaction before."""


class _Rows:
    """Writes the rows.  The limit is looked at between records only, as in pg_logical_slot_get_changes_guts."""

    def __init__(self, limit: int, chunks: _Chunks) -> None:
        self._limit = limit
        self._chunks = chunks
        self._count = 0
        self._held: list[bytes] = []
        self.session: Session
        self.position = 0
        """The end of the record with which the last row came."""
        self.restart = 0
        """Where decoding may begin from there on."""

    def write(self, lsn: int, xid: int, data: bytes) -> None:
        position = self.session.reader.position
        if position != self.position and 0 < self._limit <= self._count:
            raise _EnoughError
        if position != self.position:
            self.position, self.restart = position, self.session.decoder.restarts.known
        self._count += 1
        self._held.append(data)
        if lsn:
            # A Relation message has no LSN in a stream; here it has that of the change which it comes before.
            for one in self._held:
                self._chunks.write(b"R", _ROW.pack(lsn, xid) + one)
            self._held.clear()


async def _run(task: Task, lines: asyncio.StreamReader, chunks: _Chunks, spill: Path) -> None:
    """Decode; end if the lines do, since the server is gone then.  Raises PubsubError."""
    sources: list[SpoolSource] = []
    tip = task.tip

    def make(server: Upstream) -> SpoolSource:
        if server.system_identifier != task.system_identifier:
            raise NotInPrerequisiteState("the upstream server is another one than before")
        source = SpoolSource(Spool(Path(task.spool), server.segment_size), tip)
        sources.append(source)
        return source

    async def follow() -> None:
        nonlocal tip
        while line := await lines.readline():
            tip = max(tip, int(line))
            for source in sources:
                source.reaches(tip)

    following = asyncio.create_task(follow())
    decoding = asyncio.create_task(_decode(task, make, chunks, spill, lambda: tip))
    await asyncio.wait({following, decoding}, return_when=asyncio.FIRST_COMPLETED)
    following.cancel()
    if not decoding.done():
        decoding.cancel()
    await asyncio.gather(following, return_exceptions=True)
    await decoding


async def _decode(
    task: Task, make: Callable[[Upstream], SpoolSource], chunks: _Chunks, spill: Path, tip: Callable[[], int]
) -> None:
    rows = _Rows(task.limit, chunks)
    request = DecodeRequest(
        task.conninfo,
        PluginRequest(task.plugin, task.options, task.start, task.two_phase_at, task.client_encoding),
        spill,
        end=task.end,
        work_mem=task.work_mem,
        redo=task.redo,
        receiver_timeout=task.answer_timeout,
        make_source=make,
    )

    def warn(warning: PubsubError) -> bool:
        # What is read before the start is not sent.
        if session.reader.position < task.start:
            return False
        chunks.tell(b"W", warning)
        return True

    session = await Session.open(request, rows.write, lambda _: None, warn)
    # The limit is looked at between records: each transaction is sent with the record of its end.
    session.output.may_go_on = lambda: True
    rows.session = session
    spool = Spool(Path(task.spool), session.server.segment_size)
    ahead = session.decoder.ahead = Ahead(spool, session.reader.geometry, tip)
    position = restart = 0
    try:
        await session.run()
        position, restart = task.end, session.decoder.restarts.known
    except _EnoughError:
        # It was decoded on to the next row.
        position, restart = rows.position, rows.restart
    finally:
        ahead.close()
        await session.close()
    chunks.write(b"P", _POSITION.pack(position, restart, *astuple(session.output.statistics)))


async def _serve(sock: socket.socket) -> None:
    lines, _writer = await asyncio.open_unix_connection(sock=sock)
    chunks = _Chunks(sock.fileno())
    line = await lines.readline()
    if not line:
        return  # the session has ended meanwhile
    task = Task(**json.loads(line))
    try:
        with SpillDirectory.within(Path(tempfile.gettempdir()), _SPILL) as spill:
            await _run(task, lines, chunks, spill.path)
    except PubsubError as error:
        chunks.tell(b"E", error)


def main(descriptor: int) -> int:
    """Decode for the server at the other end of a socket; return the exit code."""
    try:
        asyncio.run(_serve(socket.socket(fileno=descriptor)))
    except (asyncio.CancelledError, BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        return 1
    return 0
