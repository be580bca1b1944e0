"""A stream of a slot, as its session sees it (walsender.c: StartLogicalReplication).

    session ──► the client's socket, what it asks for ──► decoding process ──► client
    decoding process ──► positions ──► the slot

While it lasts the client's socket is the decoding process's: nothing is read or written here.  With TLS the process has one
end of a pair of sockets instead, and what goes over the pair is passed on here.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import astuple
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import structlog

from pubsub.backend import messages as m
from pubsub.errors import ConnectionFailure, PubsubError
from pubsub.protocol.lsn import Lsn
from pubsub.publisher.connection import Parameter, with_literals
from pubsub.reorderbuffer.buffer import Statistics
from walsender.historic import upstream
from walsender.slots.slot import Slot
from walsender.streaming.requests import StreamEnd
from walsender.streaming.subscriber import BROKEN, CLOSED, COPY_DONE, CUT

if TYPE_CHECKING:
    from walsender.server.decoders import Decoder
    from walsender.server.session import Session

_LOADED: Final = "SELECT pg_catalog.pg_conf_load_time()"
_TIMEOUT: Final = "SELECT setting FROM pg_catalog.pg_settings WHERE name = 'wal_sender_timeout'"
_IDLE: Final = "SELECT pg_catalog.current_setting('idle_session_timeout')"
_SET_IDLE: Final = "SELECT pg_catalog.set_config('idle_session_timeout', $1, false)"
# What holds a transaction's lock is running, or is just ending; an xid without one is not that far.
_RUNNING: Final = (
    "SELECT pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot()), array_to_string(ARRAY("
    "SELECT transactionid::text FROM pg_catalog.pg_locks WHERE locktype = 'transactionid'), ' ')"
)
_INSERT_LSN: Final = "SELECT pg_catalog.pg_current_wal_insert_lsn()"
_LOOK: Final = 2.0
"""Seconds between two looks at whether the upstream server has read its configuration again."""
_COPY_BOTH: Final = m.message(b"W", b"\0\0\0")
_RELAYED: Final = 64 << 10
_ENDS: Final = 60.0
"""How long the decoding process, which may be waiting for an archive, may take to end a stream, in seconds."""
_TAKES: Final = 5.0
"""Seconds that a client has to take what was sent before the stream ended."""

logger = structlog.get_logger()


class Stream:
    """One stream, made for `run`.  `start`: LSN; `options`: the plugin's."""

    def __init__(self, session: Session, slot: Slot, start: int, options: dict[str, str]) -> None:
        self._session = session
        self._slot = slot
        self._start = start
        self._options = options
        self._began = datetime.now(UTC)
        self._sent = start
        """Everything before it was sent."""
        self._written = self._flushed = self._applied = 0
        self._replied_at: datetime | None = None
        self.replied = asyncio.Event()
        """Set with each report of the client's positions."""
        self._status_wanted = asyncio.Event()
        self.stand_in_pid: int | None = None
        """The walsender at the upstream server that stands for the client (synchronous.py)."""
        self.sync_priority, self.sync_state = 0, "async"
        self._counted: Sequence[int] = astuple(Statistics())
        self._end: asyncio.Future[StreamEnd] = asyncio.get_running_loop().create_future()

    @property
    def application_name(self) -> str:
        return self._session.application_name

    @property
    def failover(self) -> bool:
        """Whether the slot waits for standbys (standby_slots.py)."""
        return self._slot.failover

    @property
    def positions(self) -> tuple[int, int, int]:
        """What the client has written, flushed and applied, as it says."""
        return self._written, self._flushed, self._applied

    def row(self) -> dict[str, Any]:
        """Return the stream's row of pg_stat_replication."""
        session = self._session

        def text(lsn: int) -> str | None:
            return str(Lsn(lsn)) if lsn else None

        return {
            "pid": session.pid,
            "usename": session.user,
            "application_name": session.application_name,
            "client_addr": session.client or None,
            "backend_start": self._began.isoformat(),
            "state": "streaming" if self._sent >= session.service.feed.position else "catchup",
            "sent_lsn": text(self._sent),
            "write_lsn": text(self._written),
            "flush_lsn": text(self._flushed),
            "replay_lsn": text(self._applied),
            "sync_priority": self.sync_priority,
            "sync_state": self.sync_state,
            "reply_time": self._replied_at and self._replied_at.isoformat(),
        }

    async def run(self) -> None:
        """Stream until the client ends it.  Raises the error that ended it, Closed if the client is gone."""
        session, slot = self._session, self._slot
        feed = session.service.feed
        asking = _Asking(session)
        # The session's backend has nothing to do while a walsender's would be busy, also until the decoding begins.
        async with self._answers():
            ((idle,),) = await asking.query(_IDLE)
            await asking.query(_SET_IDLE, ["0"])
        await feed.wait_for(min(self._start, feed.received))
        decoder = await session.service.decoders.of(slot)
        if slot.failover:
            await session.service.standby_slots.looked()
        # Before the settings: what is reloaded between them is seen afterwards.
        async with self._answers():
            loaded = await asking.query(_LOADED)
            texts, timeout = settings = await self._settings()
        session.send(_COPY_BOTH)
        client = await _Client.of(session)
        request = {
            "plugin": slot.plugin,
            "options": self._options,
            "start": self._start,
            "restart": slot.restart_lsn,
            "redo": feed.redo_for(slot.restart_lsn),
            "two_phase_at": slot.two_phase_at or None,
            "client_encoding": session.client_encoding,
            "texts": texts,
            "timeout": timeout,
            "failover": slot.failover,
            "received": client.received,
        }
        session.exchange.lent = True
        number = decoder.begin(self, request, client.descriptor)
        beside = [
            asyncio.create_task(self._follow_settings(decoder, number, settings, loaded)),
            asyncio.create_task(self._answer_status(decoder, number)),
        ]
        try:
            end = await asyncio.shield(self._end)
        except asyncio.CancelledError:
            end = await self._stopped(decoder, number)
            await self._take_back(client, end)
            raise
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
        await self._take_back(client, end)
        if end.how in {CLOSED, CUT}:
            if end.error is not None:
                logger.error("a stream has ended", slot=slot.name, reason=end.error["message"])
            raise m.Closed
        if end.how == BROKEN:
            assert end.error is not None
            session.send(session.error(PubsubError(**end.error), "FATAL"))
            raise m.Closed
        error = None if end.error is None else PubsubError(**end.error)
        async with self._answers(error):
            await asking.query(_SET_IDLE, [str(idle)])
        if error is not None:
            raise error
        if end.how == COPY_DONE:
            session.send(m.message(b"c"))

    @asynccontextmanager
    async def _answers(self, error: PubsubError | None = None) -> AsyncIterator[None]:
        """End the session if the upstream server leaves the body's questions unanswered for wal_receiver_timeout.

        The client is told `error`, or that.  Its slot would otherwise stay active, whether the client is still there or not, until
        TCP finds that the link to the server is lost.
        """
        try:
            async with asyncio.timeout(self._session.service.feed.receiver_timeout or None):
                yield
        except TimeoutError:
            lost = ConnectionFailure("the upstream server does not answer")
            logger.warning("a session is ended", slot=self._slot.name, reason=lost.message)
            self._session.send(self._session.error(error or lost, "FATAL"))
            raise m.Closed from None

    async def _settings(self) -> tuple[upstream.SessionTexts, float]:
        """Return what texts depend on now, and wal_sender_timeout in seconds."""
        asking = _Asking(self._session)
        ((timeout,),) = await asking.query(_TIMEOUT)
        texts = await upstream.session_texts(asking, self._session.service.zones, current=True)
        return texts, int(str(timeout)) / 1000

    async def _follow_settings(
        self, decoder: Decoder, number: int, settings: tuple[upstream.SessionTexts, float], loaded: object
    ) -> None:
        """Tell the decoding process when a reload of the upstream server's configuration has changed `settings`.

        `loaded`: when it was loaded before they were asked for.  A question may fail, since somebody can cancel it and the role
        can have a statement_timeout: it is asked again.
        """
        asking = _Asking(self._session)
        failed = False
        while True:
            await asyncio.sleep(_LOOK)
            try:
                now = await asking.query(_LOADED)
                if now != loaded:
                    before, settings = settings, await self._settings()
                    if settings != before:
                        decoder.change_settings(number, *settings)
                loaded, failed = now, False
            except PubsubError as error:
                if not failed:
                    logger.warning(
                        "settings that were reloaded are not followed", slot=self._slot.name, reason=error.message
                    )
                failed = True

    async def _answer_status(self, decoder: Decoder, number: int) -> None:
        """Tell the client, whenever it asks, which transactions have ended by now (ProcessStandbyPSRequestMessage).

        A subscription with retain_dead_tuples keeps dead rows until no change with an earlier commit time can come any more.
        A server names the oldest transaction that is committing.  From outside it cannot be told which of the running ones
        are: the oldest of these is named, which a client waits for longer.
        """
        session = self._session
        failed = False
        while True:
            await self._status_wanted.wait()
            try:
                ((highest, locked),) = await session.query(_RUNNING)
                ((lsn,),) = await session.query(_INSERT_LSN)
            except PubsubError as error:
                # The client asks once, and waits.
                if not failed:
                    logger.warning("the primary's status is not told", slot=self._slot.name, reason=error.message)
                failed = True
                await asyncio.sleep(_LOOK)
                continue
            failed = False
            self._status_wanted.clear()
            oldest, following = running_xids(int(highest or 0), [int(one) for one in (locked or "").split()])
            decoder.primary_status(number, session.service.feed.end_of_record(Lsn.parse(lsn or "")), oldest, following)

    async def _take_back(self, client: _Client, end: StreamEnd) -> None:
        await client.take_back(end.rest, cut=end.how in {CLOSED, CUT})
        self._session.exchange.lent = False

    async def _stopped(self, decoder: Decoder, number: int) -> StreamEnd:
        """End the stream: the session is to end.  Its end is waited for, since the socket is not ours before.

        A process that does not end it in time is killed: the session, and the server's end, would otherwise wait for ever.
        """
        decoder.end(number)
        late = asyncio.get_running_loop().call_later(_ENDS, decoder.kill)
        try:
            while True:
                with suppress(asyncio.CancelledError):
                    return await asyncio.shield(self._end)
        finally:
            late.cancel()

    # What the decoding process tells

    def moved(self, sent: int, written: int, flushed: int, applied: int, replied_at: float) -> None:
        self._sent, self._written, self._flushed, self._applied = sent, written, flushed, applied
        self._replied_at = datetime.fromtimestamp(replied_at, UTC) if replied_at else None
        self.replied.set()

    def confirmed(self, lsn: int, restart: int) -> None:
        """Move the slot (logical.c: LogicalConfirmReceivedLocation).  `restart` serves for everything from `lsn` on."""
        slot = self._slot
        # Never beyond the WAL, whatever the client says.
        lsn = min(lsn, self._session.service.feed.received)
        if lsn > slot.confirmed_flush_lsn:
            slot.confirmed_flush_lsn = lsn
            slot.changed = True
        if slot.restart_lsn < restart <= slot.confirmed_flush_lsn:
            slot.restart_lsn = restart
            slot.changed = True

    def counted(self, counted: Sequence[int]) -> None:
        """Take what the stream has counted since it began."""
        more = [now - before for now, before in zip(counted, self._counted, strict=True)]
        if any(more):
            self._counted = counted
            self._slot.statistics.add(more)
            self._slot.changed = True

    def status_requested(self) -> None:
        self._status_wanted.set()

    def warned(self, warning: PubsubError) -> None:
        logger.warning("stream warns", reason=warning.message, hint=warning.hint, slot=self._slot.name)

    def ended(self, end: StreamEnd) -> None:
        if not self._end.done():
            self._end.set_result(end)


def running_xids(highest: int, locked: Sequence[int]) -> tuple[int, int]:
    """Return the oldest running transaction and the next one's id, both with 64 bits.

    `highest`: one more than the highest transaction that has ended, with 64 bits; `locked`: the running ones, with 32.
    """
    running = [highest + ((xid - highest + (1 << 31)) & 0xFFFFFFFF) - (1 << 31) for xid in locked]
    following = max([highest, *(xid + 1 for xid in running)])
    return min([following, *running]), following


class _Asking:
    """Asks the upstream server in the client's own session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def query(self, sql: str, params: Sequence[Parameter] = ()) -> Sequence[Sequence[object]]:
        return await self._session.query(with_literals(sql, params))

    async def execute(self, sql: str) -> object:
        return await self._session.query(sql)


class _Client:
    """The client's connection while it is lent.  `descriptor`: the socket; `received`: what has come already."""

    def __init__(self, session: Session, descriptor: int, received: bytes) -> None:
        self.descriptor = descriptor
        self.received = received
        self._session = session
        self._relay: list[asyncio.Task[None]] = []
        self._pair: tuple[socket.socket, socket.socket] | None = None

    @classmethod
    async def of(cls, session: Session) -> _Client:
        """Lend a session's connection, when everything that was to be sent is sent.  Raises Closed."""
        writer, reader = session.writer, session.reader
        transport: Any = writer.transport
        transport.set_write_buffer_limits(0)
        await writer.drain()
        transport.set_write_buffer_limits()
        if writer.is_closing():
            raise m.Closed
        if writer.get_extra_info("sslcontext") is not None:
            ours, theirs = socket.socketpair()
            for one in (ours, theirs):
                one.setblocking(False)
            client = cls(session, theirs.fileno(), b"")
            client._pair = ours, theirs
            client._relay = [asyncio.create_task(one) for one in (client._from_client(ours), client._to_client(ours))]
            return client
        buffer: bytearray = reader._buffer  # type: ignore[attr-defined]
        received = bytes(buffer)
        buffer.clear()
        reader._maybe_resume_transport()  # type: ignore[attr-defined]
        transport.pause_reading()
        return cls(session, writer.get_extra_info("socket").fileno(), received)

    async def take_back(self, rest: bytes, *, cut: bool) -> None:
        """Use the connection here again; `rest` was read from it, and comes first.  `cut`: it cannot be used any more."""
        transport: Any = self._session.writer.transport
        if cut:
            transport.abort()
        if self._pair is not None:
            rest += await self._end_relay(*self._pair)
        elif not transport.is_closing():
            transport.resume_reading()
        if cut:
            return
        buffer: bytearray = self._session.reader._buffer  # type: ignore[attr-defined]
        buffer[:0] = rest

    async def _end_relay(self, ours: socket.socket, theirs: socket.socket) -> bytes:
        """Return what the client has sent that the other end has not read."""
        from_client, to_client = self._relay
        from_client.cancel()
        await asyncio.gather(from_client, return_exceptions=True)
        rest = b""
        with suppress(OSError):
            while data := theirs.recv(_RELAYED):
                rest += data
        theirs.close()
        try:
            async with asyncio.timeout(_TAKES):
                await to_client
        except TimeoutError:
            self._session.writer.transport.abort()
        ours.close()
        return rest

    async def _from_client(self, pair: socket.socket) -> None:
        """Pass on what the client sends, until cancelled."""
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            while data := await self._session.reader.read(_RELAYED):
                await loop.sock_sendall(pair, data)
            pair.shutdown(socket.SHUT_WR)

    async def _to_client(self, pair: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        writer = self._session.writer
        with suppress(OSError):
            while data := await loop.sock_recv(pair, _RELAYED):
                writer.write(data)
                await writer.drain()
