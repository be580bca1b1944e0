"""The replication stream on a fake libpq: order, bounds, and frames before an end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from typing import Any

import psycopg
import pytest
from psycopg.pq import ConnStatus, DiagnosticField, ExecStatus

from pubsub.errors import ConnectionFailure, PublisherError
from pubsub.protocol.copyboth import StatusUpdate, read_client_message
from pubsub.publisher import replication
from pubsub.publisher.connection import Connection
from pubsub.publisher.replication import ReplicationStream, StreamEnded

CUT = psycopg.OperationalError("cut")


class Result:
    def __init__(self, status: ExecStatus, fields: dict[DiagnosticField, bytes] | None = None) -> None:
        self.status = status
        self.fields = fields or {}

    def error_field(self, code: DiagnosticField) -> bytes | None:
        return self.fields.get(code)


class Libpq:
    """A fake libpq.  Each item of `reads` is the result of one read of the socket: frames, or an error.

    The socket is readable as long as there are reads left.
    """

    server_version = 180000
    backend_pid = 1
    db = user = b"x"
    port = b"1"
    hostaddr = b""
    ssl_in_use = used_gssapi = False
    status = ConnStatus.OK
    error_message = b"server closed the connection unexpectedly\n"

    def __init__(self, reads: list[list[bytes] | Exception], *, host: bytes = b"/run") -> None:
        self.reads = reads
        self.host = host
        self.buffered: list[bytes] = []
        self.sent: list[bytes] = []
        self.blocked_flushes = 0
        self.over = False
        self.results: list[Result | None] = [Result(ExecStatus.COPY_IN), Result(ExecStatus.COMMAND_OK), None]
        self.socket, self._other = os.pipe()
        os.write(self._other, b"x")
        self.consumed = 0

    def get_copy_data(self, _async: int) -> tuple[int, bytes]:
        if self.buffered:
            frame = self.buffered.pop(0)
            if frame == b"":
                self.over = True
                return -1, b""
            return len(frame), memoryview(frame)  # type: ignore[return-value]
        if self.over:
            raise psycopg.OperationalError("no COPY in progress")
        return 0, b""

    def consume_input(self) -> None:
        self.consumed += 1
        if not self.reads:
            return
        read = self.reads.pop(0)
        if isinstance(read, Exception):
            raise read
        self.buffered += read

    def put_copy_data(self, data: bytes) -> None:
        self.sent.append(data)

    def put_copy_end(self) -> None:
        self.sent.append(b"end")

    def flush(self) -> int:
        if self.blocked_flushes:
            self.blocked_flushes -= 1
            return 1
        return 0

    def is_busy(self) -> int:
        return 0

    def get_result(self) -> Result | None:
        return self.results.pop(0) if self.results else None

    def finish(self) -> None:
        os.close(self.socket)
        os.close(self._other)


@pytest.fixture
async def streaming() -> AsyncIterator[Callable[..., tuple[ReplicationStream, Libpq]]]:
    connections: list[Connection] = []

    def stream(*reads: list[bytes] | Exception, host: bytes = b"/run") -> tuple[ReplicationStream, Libpq]:
        libpq = Libpq(list(reads), host=host)
        connection = Connection(libpq, replication=True)  # type: ignore[arg-type]
        connections.append(connection)
        return ReplicationStream(connection), libpq

    yield stream
    for connection in connections:
        await connection.close()


async def test_receive_returns_all_buffered_frames_in_order(streaming: Any) -> None:
    stream, _ = streaming([b"w1", b"w2", b"k3"], [b"w4"])
    frames = await stream.receive()
    assert frames == [b"w1", b"w2", b"k3"]
    assert all(type(frame) is bytes for frame in frames)
    assert await stream.receive() == [b"w4"]


async def test_waits_over_reads_without_a_frame(streaming: Any) -> None:
    stream, libpq = streaming([], [], [b"w1"])
    assert await stream.receive() == [b"w1"]
    assert libpq.consumed == 3


async def test_max_bytes_leaves_the_rest(streaming: Any) -> None:
    stream, libpq = streaming([b"w" * 10] * 5)
    assert len(await stream.receive(25)) == 3
    consumed = libpq.consumed
    assert len(await stream.receive(25)) == 2
    assert libpq.consumed == consumed, "what libpq holds needs no read"


async def test_frames_come_before_the_end(streaming: Any) -> None:
    stream, _ = streaming([b"w1", b""])
    assert await stream.receive() == [b"w1"]
    with pytest.raises(StreamEnded, match="data stream from publisher has ended"):
        await stream.receive()


async def test_frames_come_before_a_cut(streaming: Any) -> None:
    stream, libpq = streaming([b"w1", b"w2"], CUT)
    libpq.get_copy_data = lambda _async: (
        (_ for _ in ()).throw(CUT) if libpq.consumed > 1 else Libpq.get_copy_data(libpq, 1)
    )
    assert await stream.receive() == [b"w1", b"w2"]
    with pytest.raises(ConnectionFailure) as caught:
        await stream.receive()
    assert caught.value.message == "could not receive data from WAL stream: server closed the connection unexpectedly"
    with pytest.raises(ConnectionFailure):
        await stream.receive()


async def test_many_frames_come_before_a_cut_that_comes_with_them(streaming: Any) -> None:
    """libpq has closed the socket by then, so its buffer size cannot be read."""
    frames = [b"w" * 1000] * 100
    stream, libpq = streaming(host=b"127.0.0.1")

    def cut() -> None:
        libpq.buffered += frames
        libpq.get_copy_data = lambda _async: (
            Libpq.get_copy_data(libpq, 1) if libpq.buffered else (_ for _ in ()).throw(CUT)
        )
        os.close(libpq.socket)
        libpq.socket = -1
        raise CUT

    libpq.consume_input = cut
    libpq.finish = lambda: os.close(libpq._other)
    assert await stream.receive() == frames
    with pytest.raises(ConnectionFailure, match="server closed the connection unexpectedly"):
        await stream.receive()


async def test_the_servers_error(streaming: Any) -> None:
    stream, libpq = streaming([b"w1", b""])
    fields = {
        DiagnosticField.SQLSTATE: b"57P01",
        DiagnosticField.SEVERITY_NONLOCALIZED: b"FATAL",
        DiagnosticField.MESSAGE_PRIMARY: b"terminating connection due to administrator command",
    }
    libpq.results = [Result(ExecStatus.FATAL_ERROR, fields), None]
    await stream.receive()
    with pytest.raises(PublisherError) as caught:
        await stream.receive()
    assert caught.value.sqlstate == "57P01"
    assert caught.value.message == (
        "could not receive data from WAL stream: FATAL:  terminating connection due to administrator command"
    )


async def test_cancelling_loses_no_frame(streaming: Any) -> None:
    stream, libpq = streaming()
    receiving = asyncio.create_task(stream.receive())
    await asyncio.sleep(0)
    receiving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receiving
    libpq.reads.append([b"w1"])
    assert await stream.receive() == [b"w1"]


async def test_closing_wakes_the_receiver(streaming: Any) -> None:
    stream, libpq = streaming()
    os.read(libpq.socket, 1)  # nothing to read now
    receiving = asyncio.create_task(stream.receive())
    await asyncio.sleep(0)
    await stream._connection.close()
    with pytest.raises(ConnectionFailure, match="closed"):
        await receiving
    with pytest.raises(ConnectionFailure, match="closed"):
        await stream.send_status(1, 1, 1)


async def test_a_backlog_is_held_back_but_not_on_a_unix_socket(streaming: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replication, "_receive_buffer", lambda _fd: 1 << 20)
    big = [b"w" * 4000] * 10
    remote, _ = streaming(big, [b"w1", b"w2"], [b"k"], host=b"h")
    holds = []
    for _ in range(3):
        await remote.receive()
        holds.append(remote._hold)
    assert holds == [replication._LONG_HOLD, replication._LIVE_HOLD, 0.0]
    local, _ = streaming(big)
    await local.receive()
    assert local._hold == 0.0


async def test_large_frames_are_not_held_back(streaming: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read returns one of them: with 10 ms between reads at most 13 MB of WAL arrived in a second."""
    monkeypatch.setattr(replication, "_receive_buffer", lambda _fd: 1 << 20)
    stream, _ = streaming([b"w" * (128 << 10)], [b"w" * 4000] * 10, [b"w" * (128 << 10), b"w" * 4000], host=b"h")
    holds = []
    for _ in range(3):
        await stream.receive()
        holds.append(stream._hold)
    assert holds == [0.0, replication._LONG_HOLD, 0.0]


async def test_a_hold_shrinks_where_the_socket_fills(streaming: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    room = 64 << 10
    monkeypatch.setattr(replication, "_receive_buffer", lambda _fd: room)
    big = [b"w" * 4000] * 10
    stream, libpq = streaming(big, big, host=b"h")
    await stream.receive()
    await stream.receive()
    assert stream._hold == replication._LONG_HOLD / 4
    room = 1 << 20
    libpq.reads.append(big)
    await stream.receive()
    assert stream._hold == replication._LONG_HOLD / 2


async def test_over_tls_records_are_read_until_no_more_come(streaming: Any) -> None:
    stream, libpq = streaming()
    stream._layered = True
    libpq.reads += [[b"w1"], [b"w2"], [], [b"w3"], [], []]
    assert await stream.receive() == [b"w1", b"w2", b"w3"]


async def test_status(streaming: Any) -> None:
    stream, libpq = streaming()
    await stream.send_status(3, 2, 1, reply=True)
    (sent,) = libpq.sent
    status = read_client_message(sent)
    assert isinstance(status, StatusUpdate)
    assert (status.written, status.flushed, status.applied, status.reply_requested) == (3, 2, 1, True)


async def test_no_status_hides_why_the_stream_ended(streaming: Any) -> None:
    stream, libpq = streaming([b"w1", b""])
    await stream.receive()
    await stream.send_status(1, 1, 1)
    assert libpq.sent == []
    with pytest.raises(StreamEnded):
        await stream.receive()


async def test_close_drops_what_still_comes_and_leaves_the_connection(streaming: Any) -> None:
    stream, libpq = streaming([b"w1"], [], [b"w2", b""])
    await stream.close()
    assert libpq.sent == [b"end"]
    assert libpq.results == []
    assert not stream._connection.closed


async def test_close_is_bounded(streaming: Any) -> None:
    stream, libpq = streaming()
    os.read(libpq.socket, 1)
    await stream.close(timeout=0.01)
    assert stream._connection.closed
    await stream.close()
