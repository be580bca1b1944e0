"""The replication commands, and the stream of changes that START_REPLICATION opens.

All take a Connection made with replication=True.  The stream returns raw copy-both frames, many at a time, with one
call of libpq and one copy of the bytes per frame; the receiver parses them.

Follows libpqwalreceiver.c (libpqrcv_identify_system, libpqrcv_create_slot, libpqrcv_startstreaming, libpqrcv_receive,
libpqrcv_endstreaming) and tablesync.c (ReplicationSlotDropAtPubNode).
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import psycopg
from psycopg.pq import ExecStatus

from pubsub.errors import ConnectionFailure, FeatureNotSupported, ObjectInUse, ProtocolViolation, PublisherError
from pubsub.processor_time import spent_on
from pubsub.protocol import commands
from pubsub.protocol.copyboth import StatusUpdate, pg_now, write_client_message
from pubsub.protocol.lsn import Lsn
from pubsub.protocol.timeline import TimelineHistory, parse_history
from pubsub.publisher.connection import Connection, Row
from pubsub.publisher.fields import number

UNDEFINED_OBJECT: Final = "42704"
STREAM_FAILED: Final = "could not receive data from WAL stream"
_UNDECODABLE_HINT: Final = (
    "If this comes again and again, the publisher cannot decode its WAL there: ALTER SUBSCRIPTION ... RESYNC TABLE with every table "
    "of the subscription goes on past it."
)

RECEIVE_BYTES: Final = 1 << 20

_RETRY: Final = 0.05  # seconds
_CANCEL_USER: Final = """
SELECT pg_cancel_backend(active_pid) FROM pg_replication_slots WHERE slot_name = $1::text AND active_pid IS NOT NULL
"""
# Behind a proxy the process is another one, and may be anybody's.
_CREATOR: Final = """
SELECT 1 FROM pg_stat_activity
 WHERE pid = $1::int AND usename = current_user AND application_name = current_setting('application_name')
"""

_BUFFER_BYTES: Final = 256 << 10
_CLOSE_TIMEOUT: Final = 5.0  # seconds

# How long a read is delayed, in seconds, so that it finds more: see ReplicationStream.
_SHORT_HOLD: Final = 0.001
_LIVE_HOLD: Final = 0.005
_LONG_HOLD: Final = 0.010
_BACKLOG_BYTES: Final = 16 << 10
_LARGE_FRAME: Final = 16 << 10


@dataclass(frozen=True, slots=True)
class SystemIdentity:
    """IDENTIFY_SYSTEM's answer.  `xlogpos` is the end of the flushed WAL, exclusive."""

    system_identifier: str
    timeline: int
    xlogpos: Lsn
    dbname: str | None


@dataclass(frozen=True, slots=True)
class CreatedSlot:
    """A slot just created.  Transactions that commit at or after `consistent_point` are streamed; those before it are
    in the snapshot, which lasts until the next command on the connection."""

    name: str
    consistent_point: Lsn
    snapshot_name: str | None


class StreamEnded(ConnectionFailure):
    """The publisher ended the stream cleanly, as it does when it shuts down."""


async def identify_system(connection: Connection) -> SystemIdentity:
    """Run IDENTIFY_SYSTEM.  Raises PublisherError, ProtocolViolation for an answer of another shape."""
    row = _one_row(await connection.query(commands.identify_system()), "identify the system", 4)
    system_identifier, timeline, xlogpos, dbname = row[:4]
    return SystemIdentity(str(system_identifier), number(timeline or "0"), Lsn.parse(str(xlogpos)), dbname)


async def timeline_history(connection: Connection, timeline: int) -> TimelineHistory:
    """Return the history of the publisher's timeline.  Raises PublisherError, DataCorrupted."""
    if timeline == 1:
        return TimelineHistory.only(1)
    row = _one_row(await connection.query(commands.timeline_history(timeline)), "read a timeline's history", 2)
    text = str(row[1])
    # Some servers declare the column as bytea.
    return parse_history(timeline, bytes.fromhex(text[2:]).decode() if text.startswith("\\x") else text)


def cannot_decode(message: str | None, sqlstate: str | None) -> bool:
    """Return whether an error is an internal one of the publisher's, in the middle of a stream: it meets that again and again."""
    return (message or "").startswith(f"{STREAM_FAILED}: ERROR:") and (sqlstate or "").startswith("XX")


async def create_slot(
    connection: Connection,
    name: str,
    *,
    snapshot: commands.Snapshot,
    temporary: bool = False,
    two_phase: bool = False,
    failover: bool = False,
    plugin: str = "pgoutput",
) -> CreatedSlot:
    """Create a logical slot, waiting for the transactions that are running on the publisher.

    When cancelled it asks the server to stop, which removes an unfinished slot; if the slot was finished at that
    moment, the caller must drop it.  Raises PublisherError.
    """
    command = commands.create_replication_slot(
        name,
        plugin,
        snapshot=snapshot,
        temporary=temporary,
        two_phase=two_phase,
        failover=failover,
        server_version=connection.server_version,
    )
    try:
        row = _one_row(await connection.query(command), "create a replication slot", 3)
    except PublisherError as error:
        raise _explained(error, f'could not create replication slot "{name}"') from error
    return CreatedSlot(str(row[0]), Lsn.parse(str(row[1])), row[2])


async def drop_slot(connection: Connection, name: str, *, missing_ok: bool = False, wait: bool = False) -> bool:
    """Drop a slot and return whether it existed.

    With `wait`, wait until no one uses it; without, a slot in use raises 55006.  Raises PublisherError, but not for a
    missing slot if `missing_ok`.
    """
    try:
        await connection.execute(commands.drop_replication_slot(name, wait=wait))
    except PublisherError as error:
        if missing_ok and error.sqlstate == UNDEFINED_OBJECT:
            return False
        raise _explained(error, f'could not drop replication slot "{name}" on publisher') from error
    return True


async def abandon_slot(connection: Connection, name: str, creator: int) -> None:
    """Drop a slot whose creation was given up, and let its walsender, the process `creator`, end.  Raises PublisherError.

    The walsender may be waiting for transactions, and a request to cancel be lost: it may not even have read the command yet,
    which it does before it notices that its client is gone.
    """
    while True:
        await connection.query(_CANCEL_USER, [name])
        try:
            if await drop_slot(connection, name, missing_ok=True) or not await connection.query(_CREATOR, [creator]):
                return
        except PublisherError as error:
            if error.sqlstate != ObjectInUse.default_sqlstate:
                raise
        await asyncio.sleep(_RETRY)


async def alter_slot(
    connection: Connection, name: str, *, failover: bool | None = None, two_phase: bool | None = None
) -> None:
    """Set the options that are not None.  Raises PublisherError; FeatureNotSupported if the server is too old."""
    for option, value, version in (("failover", failover, 17), ("two_phase", two_phase, 18)):
        if value is not None and connection.server_version < version * 10000:
            raise FeatureNotSupported(
                f'the publisher cannot alter option "{option}" of replication slots before version {version}',
                hint="Drop the subscription, and create it with the option." if option == "two_phase" else None,
            )
    try:
        await connection.execute(commands.alter_replication_slot(name, failover=failover, two_phase=two_phase))
    except PublisherError as error:
        raise _explained(error, f'could not alter replication slot "{name}"') from error


async def start(connection: Connection, slot: str, start_lsn: int, options: Mapping[str, str]) -> ReplicationStream:
    """Start streaming from `slot` what commits at or after `start_lsn` (0: the slot's confirmed_flush_lsn).

    `options` are the plugin's (commands.pgoutput_options).  Raises PublisherError.
    """
    # libpq reads as much at once as fits its buffer, 16 kB at first.  A longer message enlarges the buffer for good.
    await connection.query(f"SELECT pg_catalog.repeat('x', {_BUFFER_BYTES})")
    try:
        await connection.start_copy_both(commands.start_replication(slot, start_lsn, options))
    except PublisherError as error:
        raise _explained(error, "could not start WAL streaming") from error
    return ReplicationStream(connection)


class ReplicationStream:
    """Copy-both frames from a walsender, and status updates to it.  One task receives; any may send.

    Why reads are delayed.  A walsender sends each change by itself.  Reading at once yields two or three changes per
    system call, which costs both sides more than the changes do.  So after a read of more than one frame the next
    read comes at least 5 ms later, in a backlog 10 ms, and the sender fills whole segments.  The socket's buffer must
    hold what arrives meanwhile; if it is half full after a delay, delays get shorter.  A Unix-domain socket's buffer
    holds only a few hundred changes, so there nothing is delayed.  Nor are large frames, of rows with large values or
    of the WAL itself (128 kB): each fills segments alone, and a read returns few of them.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._pgconn = connection.pgconn
        self._ended = False
        self._failure: psycopg.Error | None = None
        self._sending = asyncio.Lock()
        # Over TLS or GSSAPI one read returns one record, and its unread rest does not make the socket readable.
        self._layered = self._pgconn.ssl_in_use or self._pgconn.used_gssapi
        self._unix = self._pgconn.host.startswith((b"/", b"@")) and not self._pgconn.hostaddr
        self._hold = 0.0
        self._longest_hold = _LONG_HOLD
        self._last_read = 0.0
        self.last_receive: float = time.monotonic()
        """When the last frame arrived, or the stream began: time.monotonic(), seconds."""

    async def receive(self, max_bytes: int = RECEIVE_BYTES) -> list[bytes]:
        """Wait for a frame, then return all that are available, in order, up to `max_bytes` or one frame more.

        Each is a copy-data payload ('w…' or 'k…') that owns its bytes.  Cancelling loses none.  Raises StreamEnded at
        the publisher's CopyDone, PublisherError for its error, ConnectionFailure when the connection broke; each only
        after all earlier frames have been returned.
        """
        frames: list[bytes] = []
        if not self._ended:
            frames, _ = self._take(max_bytes)
        if not frames and not self._ended:
            await self._hold_back()
            frames, size = self._read(max_bytes)
            while not frames and not self._ended:
                await self._connection.readable()
                frames, size = self._read(max_bytes)
            if not self._ended:  # after the end there may be no socket, and there is no read to delay
                self._set_hold(len(frames), size)
        if not frames:
            await self._raise_end()
        self.last_receive = self._last_read
        return frames

    async def send_status(self, written: int, flushed: int, applied: int, *, reply: bool = False) -> None:
        """Send a status update (LSNs, exclusive); with `reply` the publisher answers with a keepalive.

        Raises ConnectionFailure.  Once the stream has ended nothing is sent; `receive` raises the reason for the end.
        """
        self._connection.check_open()
        if self._ended:
            return
        status = StatusUpdate(Lsn(written), Lsn(flushed), Lsn(applied), pg_now(), reply)
        try:
            self._pgconn.put_copy_data(write_client_message(status))
            await self._flush()
        except psycopg.Error as error:
            raise self._connection.lost("could not send data to WAL stream") from error

    async def close(self, timeout: float = _CLOSE_TIMEOUT) -> None:
        """End the stream and drop the frames that still arrive.  Harmless when the stream is over.

        Afterwards the connection takes commands again; if ending fails or takes over `timeout` seconds, it is closed.
        """
        if self._connection.closed:
            return
        try:
            async with asyncio.timeout(timeout):
                await self._finish()
        except (TimeoutError, psycopg.Error, ConnectionFailure, PublisherError):
            await self._connection.close()
        except BaseException:
            await self._connection.close()
            raise

    @spent_on("receiving")
    def _take(self, max_bytes: int) -> tuple[list[bytes], int]:
        """Take the frames that libpq has buffered.  The hottest loop of all."""
        self._connection.check_open()
        frames: list[bytes] = []
        append = frames.append
        get = self._pgconn.get_copy_data
        size = 0
        try:
            while size < max_bytes:
                length, data = get(1)
                if length <= 0:
                    self._ended = length < 0
                    break
                append(bytes(data))
                size += length
        except psycopg.Error as error:
            self._failure = error
            self._ended = True
        return frames, size

    @spent_on("receiving")
    def _read(self, max_bytes: int) -> tuple[list[bytes], int]:
        """Read from the socket, without waiting, and take the frames."""
        self._connection.check_open()
        frames, size = self._consume(max_bytes)
        if self._layered:
            # A read without a frame may have brought part of one, so only two in a row end the loop.
            misses = 0 if frames else 1
            while misses < 2 and size < max_bytes and not self._ended:
                more, more_size = self._consume(max_bytes - size)
                frames += more
                size += more_size
                misses = 0 if more else misses + 1
        self._last_read = time.monotonic()
        return frames, size

    def _consume(self, max_bytes: int) -> tuple[list[bytes], int]:
        try:
            self._pgconn.consume_input()
        except psycopg.Error as error:
            frames, size = self._take(max_bytes)
            if not self._ended:
                self._failure = error
                self._ended = True
            return frames, size
        return self._take(max_bytes)

    async def _hold_back(self) -> None:
        left = self._last_read + self._hold - time.monotonic()
        if left > 0:
            await asyncio.sleep(left)

    def _set_hold(self, frames: int, size: int) -> None:
        if self._unix:
            return
        if size >= frames * _LARGE_FRAME:
            self._hold = 0.0
        elif size >= _BACKLOG_BYTES:
            self._fit_longest_hold(size)
            self._hold = self._longest_hold
        else:
            self._hold = _LIVE_HOLD if frames > 1 else 0.0

    def _fit_longest_hold(self, size: int) -> None:
        room = _receive_buffer(self._pgconn.socket)
        if size * 2 >= room:
            self._longest_hold = max(self._longest_hold / 2, _SHORT_HOLD)
        elif size * 4 < room:
            self._longest_hold = min(self._longest_hold * 2, _LONG_HOLD)

    async def _flush(self) -> None:
        """Send what libpq has buffered.  Unlike Connection.flush, do not read: a walsender reads while it sends."""
        if self._pgconn.flush() == 1:
            async with self._sending:
                while self._pgconn.flush() == 1:
                    await self._connection.writable()

    async def _raise_end(self) -> None:
        if self._failure is not None:
            raise self._connection.lost(STREAM_FAILED) from self._failure
        result = await self._connection.next_result()
        if result is not None and result.status == ExecStatus.FATAL_ERROR:
            error = self._connection.error_of(result, STREAM_FAILED)
            if cannot_decode(error.message, error.sqlstate) and error.hint is None:
                error.hint = _UNDECODABLE_HINT
            raise error
        raise StreamEnded("data stream from publisher has ended")

    async def _finish(self) -> None:
        self._pgconn.put_copy_end()
        await self._flush()
        while not self._ended:
            frames, _ = self._read(RECEIVE_BYTES)
            if not frames and not self._ended:
                await self._connection.readable()
        if self._failure is not None:
            raise self._failure
        while (result := await self._connection.next_result()) is not None:
            if result.status == ExecStatus.FATAL_ERROR:
                raise self._connection.error_of(result)


def _receive_buffer(fd: int) -> int:
    """Return the size of the socket's receive buffer in bytes, which the kernel adapts to the reads."""
    borrowed = socket.socket(fileno=fd)
    try:
        return borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
    finally:
        borrowed.detach()


def _explained(error: PublisherError, what: str) -> PublisherError:
    """Word `error` as a subscriber prints it: what failed, then the server's message."""
    return PublisherError(
        f"{what}: ERROR:  {error.message}",
        sqlstate=error.sqlstate,
        detail=error.detail,
        hint=error.hint,
        context=error.context,
    )


def _one_row(rows: Sequence[Row], what: str, columns: int) -> Row:
    if len(rows) != 1 or len(rows[0]) < columns:
        shape = f"got {len(rows)} rows and {len(rows[0]) if rows else 0} fields"
        raise ProtocolViolation(
            "invalid response from publisher",
            detail=f"Could not {what}: {shape}, expected 1 rows and {columns} or more fields.",
        )
    return rows[0]
