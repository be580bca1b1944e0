"""WAL from a running server: physical streaming replication over libpq.

Follows walreceiver.c and walsender.c (StartReplication).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Final

from pubsub.errors import ConnectionFailure, PublisherError
from pubsub.protocol.commands import start_physical_replication
from pubsub.protocol.copyboth import XLOG_HEADER, Keepalive, read_server_message
from pubsub.publisher.connection import Connection
from pubsub.publisher.replication import ReplicationStream, StreamEnded
from walsender.historic.upstream import MANAGED
from walsender.xlog.errors import WalMissing
from walsender.xlog.formats import XLOG_BLCKSZ

STATUS_INTERVAL: Final = 5.0
"""Seconds between status updates."""
_BUSY_INTERVAL: Final = 0.5
"""The same, while the server's requests for a reply are not read."""
RECEIVER_TIMEOUT: Final = 60.0
"""wal_receiver_timeout's default."""
_UNDEFINED_FILE: Final = "58P01"
_REFUSED: Final = frozenset({"0A000", "28000", "42501"})


class WalStream:
    """WAL of one timeline from a server.

    `slot`: a physical slot that keeps the WAL.  `flushed` is reported to it: an LSN up to which nothing is needed
    again.  `timeout`: seconds of silence after which the connection is taken for lost (wal_receiver_timeout); 0: none.
    `positions` returns what is reported (written, flushed, applied) of another that this one stands for.
    """

    def __init__(
        self,
        connection: Connection,
        slot: str | None = None,
        timeout: float = RECEIVER_TIMEOUT,
        positions: Callable[[], tuple[int, int, int]] | None = None,
    ) -> None:
        self._connection = connection
        self._timeout = timeout
        self._slot = slot
        self._positions = positions
        self._stream: ReplicationStream | None = None
        self._sent = 0.0
        self._next = 0  # LSN of the byte to come
        self.flushed = 0
        self._reported = 0

    async def start(self, lsn: int, timeline: int) -> None:
        """Begin at the page that holds `lsn`.  Raises WalMissing if the server no longer has it, PublisherError."""
        self._next = page = lsn - lsn % XLOG_BLCKSZ
        try:
            await self._connection.start_copy_both(start_physical_replication(self._slot, page, timeline))
        except PublisherError as error:
            raise self._explained(error) from error
        self._stream = ReplicationStream(self._connection)

    def _explained(self, error: PublisherError) -> PublisherError | WalMissing:
        if error.sqlstate in _REFUSED:
            error.hint = error.hint or MANAGED
        if error.sqlstate != _UNDEFINED_FILE:
            return error
        return WalMissing(
            error.message, self._next, hint="Use a physical slot (--slot), wal_keep_size, or an archive (--wal)."
        )

    async def pieces(self) -> AsyncIterator[tuple[int, bytes] | None]:
        """Yield (LSN, bytes) in order, and None whenever all received bytes have been yielded.

        Ends where the timeline ends.  Raises WalMissing if the server no longer has the next bytes (it notices only
        when it has to send them), ConnectionFailure, PublisherError, ProtocolViolation.
        """
        stream = self._stream
        assert stream is not None
        while True:
            try:
                frames = await self._receive(stream)
            except StreamEnded:
                return
            except PublisherError as error:
                raise self._explained(error) from error
            reply = False
            for frame in frames:
                if frame[:1] == b"w":
                    start = int.from_bytes(frame[1:9], "big")
                    self._next = start + len(frame) - XLOG_HEADER
                    yield start, frame[XLOG_HEADER:]
                else:
                    message = read_server_message(frame)
                    if isinstance(message, Keepalive):
                        reply |= message.reply_requested
            yield None
            # Report a new `flushed` at once: an idle server may send nothing for long, and this loop only runs
            # when it sends.
            if reply or self.flushed != self._reported or time.monotonic() - self._sent > STATUS_INTERVAL:
                await self.send_status()

    async def _receive(self, stream: ReplicationStream) -> list[bytes]:
        """Receive; ask a server that is silent for half the timeout to reply (walreceiver.c: WalReceiverMain)."""
        half = self._timeout / 2 or None
        try:
            async with asyncio.timeout(half):
                return await stream.receive()
        except TimeoutError:
            await self.send_status(ask=True)
        try:
            async with asyncio.timeout(half):
                return await stream.receive()
        except TimeoutError:
            raise ConnectionFailure(
                "terminating walreceiver due to timeout", hint="The server sent nothing for wal_receiver_timeout."
            ) from None

    async def keep_alive(self) -> None:
        """Report what was reported before, if that was a while ago: a server ends a walsender that gets no answer.

        For a receiver that is busy with what has come (wal_sender_timeout).  Raises ConnectionFailure.
        """
        if self._stream is not None and time.monotonic() - self._sent > _BUSY_INTERVAL:
            await self.send_status()

    async def send_status(self, *, ask: bool = False) -> None:
        """Report to the server which WAL has come and which is no longer needed; `ask` it to reply.

        Raises ConnectionFailure.

        A server that is shut down waits until all that it sent is reported flushed, or written if no flush position is
        reported (walsender.c: WalSndDone).  Without a slot none ever is, so that no commit waits for this walsender, or is
        taken for safe because of it (synchronous_standby_names = '*').  A slot moves to the reported flush position; it is
        reported once, with nothing beyond it as written (synchronous_commit = remote_write), and then taken back.
        """
        self._sent = time.monotonic()
        self._reported = self.flushed
        if self._stream is None:
            return
        if self._positions is not None:
            await self._stream.send_status(*self._positions(), reply=ask)
            return
        if self._slot is not None and self.flushed:
            await self._stream.send_status(self.flushed, self.flushed, self.flushed)
        await self._stream.send_status(self._next, 0, 0, reply=ask)

    async def close(self) -> None:
        if self._stream is not None:
            await self._stream.close()
        await self._connection.close()
