"""A stream's client, as the decoding process sees it: messages go out, status updates come in (walsender.c: WalSndLoop).

    output ──► put ──► backlog ──► socket
    socket ──► status updates ──► positions, for the slot

It never blocks, and never keeps anybody waiting: what the client does not take is kept in the backlog.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from struct import Struct
from typing import Final

from pubsub.errors import ProtocolViolation, PubsubError
from pubsub.protocol.copyboth import (
    PG_EPOCH_UNIX_SECONDS,
    PrimaryStatusRequest,
    PrimaryStatusUpdate,
    StatusUpdate,
    pg_now,
    read_client_message,
    write_primary_status,
)
from pubsub.protocol.lsn import Lsn
from pubsub.reorderbuffer.buffer import Statistics
from walsender.streaming.backlog import Backlog

ROOM: Final = 1 << 20
"""Bytes that may wait for the client before it is slow."""
_RECEIVE: Final = 64 << 10
_LONGEST: Final = 1 << 20
"""Bytes of a client's message: status updates are short."""
_REPLIES: Final = 0.05
"""Seconds between two readings of replies, of which only the last one counts."""
_KEEPALIVES: Final = 0.1
"""Seconds between two keepalives that ask for nothing."""
_END: Final = 5.0
"""Seconds that a client has to take the rest of a message when the stream is ended from here."""
_FROM_STANDBYS: Final = {b"r", b"h", b"p"}
"""Status update, hot standby feedback, request for the primary's status."""
_HEAD: Final = Struct(">cI")
_KEEPALIVE: Final = Struct(">cIcQqB")

# How a stream ends.
COPY_DONE: Final = "copy done"
"""The client has sent CopyDone."""
CLOSED: Final = "closed"
"""The client is gone, or did not answer for too long."""
STOPPED: Final = "stopped"
"""It was ended from here, between two messages."""
BROKEN: Final = "broken"
"""The client has sent what must not come in a stream: it is told, and its session ends."""
CUT: Final = "cut"
"""It was ended from here in the midst of a message that the client did not take."""


class Subscriber:
    """One stream.  `number` names it to the server.

    `timeout`: wal_sender_timeout in seconds; 0: none.  `start`: LSN before which everything was sent.  `on_room` is called when
    there is room again after there was none; `on_end(subscriber, how, error)` once, when the socket is no longer used here;
    `on_status_request(subscriber)` when the client asks for the primary's status, for `primary_status` to answer.
    """

    def __init__(
        self,
        number: int,
        sock: socket.socket,
        backlog: Backlog,
        *,
        start: int,
        timeout: float,
        received: bytes = b"",
        on_room: Callable[[], None],
        on_end: Callable[[Subscriber, str, PubsubError | None], None],
        on_status_request: Callable[[Subscriber], None] = lambda _: None,
    ) -> None:
        sock.setblocking(False)
        self.number = number
        self.timeout = timeout
        self.start = start
        self.sent = start
        """LSN before which everything was sent, or is in the backlog."""
        self.written = self.flushed = self.applied = 0
        self.replied_at = 0.0
        """When the last status update came, in seconds since 1970."""
        self.statistics = Statistics()
        """What it was sent."""
        self.rest = b""
        """What the client has sent after the end of the stream."""
        self.ending: str | None = None
        """How the stream ends, once that is known."""
        self._error: PubsubError | None = None
        self._socket = sock
        self._backlog = backlog
        self._on_room = on_room
        self._on_end = on_end
        self._on_status_request = on_status_request
        self._status_requested = False
        self._loop = asyncio.get_running_loop()
        self._current = memoryview(b"")
        self._full = False
        self._waits_to_write = False
        self._received = bytearray(received)
        self._heard = time.monotonic()
        self._asked_at: float | None = None
        """When the client was asked for a reply, which has not come."""
        self._kept_alive = 0.0
        self._kept_alive_at = 0
        self._ended = False
        self._loop.add_reader(sock, self._readable)
        if received:
            self._loop.call_soon(self._take)

    # To the client

    @property
    def has_room(self) -> bool:
        """Whether the client takes what it is sent about as fast as it comes."""
        return self._backlog.size < ROOM

    @property
    def behind(self) -> int:
        """Bytes that the client has not taken."""
        return self._backlog.size + len(self._current)

    def put(self, chunk: bytes) -> None:
        """Send whole messages."""
        if self.ending is not None:
            return
        if not self._current and not self._backlog.size:
            # Nothing is before it: even a large one needs no file.
            self._current = memoryview(chunk)
        else:
            try:
                self._backlog.put(chunk)
            except PubsubError as error:
                self.end(STOPPED, error)
                return
        self._full = self._full or not self.has_room
        if not self._waits_to_write:
            self._write()

    def reached(self, lsn: int) -> None:
        """Note that everything before `lsn` was sent."""
        self.sent = max(self.sent, lsn)

    def keep_alive(self, now: float) -> None:
        """Tell the client how far it was sent everything, if it does not know (walsender.c: WalSndWaitForWal)."""
        if (
            self.written < self.sent
            and self.flushed < self.sent
            and self._kept_alive_at < self.sent
            and now - self._kept_alive >= _KEEPALIVES
        ):
            self._send_keepalive(now)

    def check(self, now: float) -> None:
        """Ask a silent client for a reply, and end the stream if it stays silent (WalSndCheckTimeOut)."""
        if not self.timeout or self.ending is not None:
            return
        silent = now - self._heard
        if silent < self.timeout / 2:
            return
        if self._asked_at is None:
            self._asked_at = now
            self._send_keepalive(now, reply=True)
        elif silent >= self.timeout and now - self._asked_at >= self.timeout / 2:
            # The process may have been held up, by another stream's plugin or the machine: what came meanwhile counts.
            self._readable()
            if self._asked_at is not None:
                self._give_up()

    def primary_status(self, lsn: int, oldest: int, following: int) -> None:
        """Answer a request for the primary's status (walsender.c: ProcessStandbyPSRequestMessage)."""
        self._status_requested = False
        body = write_primary_status(PrimaryStatusUpdate(Lsn(lsn), oldest, following, pg_now()))
        self.put(_HEAD.pack(b"d", 4 + len(body)) + body)

    def _send_keepalive(self, now: float, *, reply: bool = False) -> None:
        self._kept_alive, self._kept_alive_at = now, self.sent
        sent_at = int((time.time() - PG_EPOCH_UNIX_SECONDS) * 1_000_000)
        self.put(_KEEPALIVE.pack(b"d", 22, b"k", self.sent, sent_at, reply))

    def _write(self) -> None:
        try:
            while True:
                if not self._current:
                    chunk = None if self.ending is not None else self._backlog.take()
                    if chunk is None:
                        break
                    self._current = memoryview(chunk)
                # An empty view would keep the whole chunk.
                self._current = self._current[self._socket.send(self._current) :] or memoryview(b"")
        except BlockingIOError:
            if not self._waits_to_write:
                self._waits_to_write = True
                self._loop.add_writer(self._socket, self._write)
            self._tell_room()
            return
        except OSError:
            self._give_up()
            return
        except PubsubError as error:
            self.end(STOPPED, error)
            return
        if self._waits_to_write:
            self._waits_to_write = False
            self._loop.remove_writer(self._socket)
        self._tell_room()
        if self.ending is not None:
            self._finish()

    def _tell_room(self) -> None:
        if self._full and self._backlog.size < ROOM // 2:
            self._full = False
            self._on_room()

    # From the client

    def _readable(self) -> None:
        try:
            data = self._socket.recv(_RECEIVE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._give_up()
            return
        self._received += data
        self._loop.remove_reader(self._socket)
        self._take()
        if self.ending is None:
            self._loop.call_later(_REPLIES, self._listen)

    def _listen(self) -> None:
        if self.ending is None:
            self._loop.add_reader(self._socket, self._readable)

    def _take(self) -> None:
        """Take the client's messages (walsender.c: ProcessRepliesIfAny)."""
        received = self._received
        try:
            while len(received) >= _HEAD.size and self.ending is None:
                kind, length = _HEAD.unpack_from(received)
                if not 4 <= length <= _LONGEST:
                    # Where the next message begins is not known, nor whether the client would read an answer.
                    self._give_up(ProtocolViolation("invalid message length"))
                    return
                if len(received) < length + 1:
                    break
                body = bytes(received[_HEAD.size : length + 1])
                del received[: length + 1]
                self._message(kind, body)
        except PubsubError as error:
            self.end(STOPPED, error)

    def _message(self, kind: bytes, body: bytes) -> None:
        self._heard = time.monotonic()
        self._asked_at = None
        if kind == b"d" and body and body[:1] not in _FROM_STANDBYS:
            self._give_up(ProtocolViolation(f'unexpected message type "{body[:1].decode("ascii", "replace")}"'))
        elif kind == b"d":
            reply = read_client_message(body)
            if isinstance(reply, StatusUpdate):
                self.written, self.flushed, self.applied = reply.written, reply.flushed, reply.applied
                self.replied_at = time.time()
                if reply.reply_requested and self.behind < ROOM:
                    # A client that asks for replies and reads none is not answered without end.
                    self._send_keepalive(self._heard)
            elif isinstance(reply, PrimaryStatusRequest):
                self.replied_at = time.time()
                if not self._status_requested:
                    self._status_requested = True
                    self._on_status_request(self)
        elif kind == b"c":
            self.end(COPY_DONE)
        elif kind == b"X":
            self._give_up()
        else:
            error = ProtocolViolation(f'invalid standby message type "{kind.decode("ascii", "replace")}"')
            self.end(BROKEN, error)

    # The end

    def end(self, how: str, error: PubsubError | None = None) -> None:
        """End the stream, after the message that is being written."""
        if self.ending is not None:
            return
        self.ending, self._error = how, error
        self._backlog.clear()
        self._loop.remove_reader(self._socket)
        if not self._current:
            self._finish()
        else:
            self._loop.call_later(_END, self._cut)

    def _cut(self) -> None:
        if not self._ended:
            self.ending = CUT
            self._finish()

    def _give_up(self, error: PubsubError | None = None) -> None:
        self.ending, self._error = CLOSED, error
        self._backlog.clear()
        self._finish()

    def _finish(self) -> None:
        if self._ended:
            return
        self._ended = True
        assert self.ending is not None
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        if self.ending != CLOSED:
            # The session reads what is still to come, which a client may send without end.
            with suppress(OSError):
                while len(self._received) < _LONGEST and (data := self._socket.recv(_RECEIVE)):
                    self._received += data
        self.rest = bytes(self._received)
        self._socket.close()
        self._on_end(self, self.ending, self._error)
