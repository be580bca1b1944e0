"""Read a stream's frames as they come, or held back for a moment, and notice a publisher that has gone silent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from apply.pipeline.dispatch import Dispatcher
from apply.pipeline.feedback import Feedback
from apply.pipeline.held_back import HeldBack
from apply.pipeline.interfaces import Limits, Stream, Timers
from pubsub.errors import ConnectionFailure, ProgramLimitExceeded
from pubsub.protocol.lsn import Lsn


class Receiver:
    """Reads the frames of one stream.

    While the stream is to come to an LSN, `stop_at` or the dispatcher's boundary, a silent publisher is asked how far it is.
    """

    def __init__(
        self,
        stream: Stream,
        dispatcher: Dispatcher,
        feedback: Feedback,
        limits: Limits,
        timers: Timers,
        stop_at: Lsn | None,
    ) -> None:
        self._stream = stream
        self._dispatcher = dispatcher
        self._feedback = feedback
        self._limits = limits
        self._timers = timers
        self._stop_at = stop_at
        self._held_back: HeldBack | None = None
        # The wait for frames, while there is one.
        self._reading: asyncio.Timeout | None = None
        # When reading began, or resumed after a wait for something else: silence before that is not the publisher's.
        self._reading_since = time.monotonic()

    async def frames(self) -> Sequence[bytes]:
        """Return the next frames, or none after a second of silence; while frames are held back, those that are due.

        Raises ConnectionFailure if the publisher is silent for wal_receiver_timeout, ProgramLimitExceeded for a frame that is too
        long.
        """
        held = self._held_back
        if held is not None and held.over:
            held = self._held_back = None
        if held is not None:
            if due := held.take(time.monotonic()):
                return due
            if held.full:
                await held.until_due(time.monotonic())
                self.resume()
                return held.take(time.monotonic())
        frames = await self._next_frames(held.wait(time.monotonic()) if held is not None else 1.0)
        self._check_sizes(frames)
        if self._held_back is None:
            return frames
        # Perhaps since a moment ago: these frames may have come later.
        self._held_back.put(frames, time.monotonic())
        return self._held_back.take(time.monotonic())

    def resume(self) -> None:
        """Note that nothing was read until now, for another reason than the publisher's silence."""
        self._reading_since = time.monotonic()

    def interrupt(self) -> None:
        """End the wait for frames, if there is one."""
        if self._reading is not None and not self._reading.expired():
            self._reading.reschedule(asyncio.get_running_loop().time())

    def hold_back(self, delay: float) -> None:
        """From now on return what arrives `delay` seconds later, until `end_delay`."""
        if self._held_back is None or self._held_back.over:
            self._held_back = HeldBack(delay)

    def end_delay(self) -> None:
        """Return what is held back, and what arrives, at once."""
        if self._held_back is not None:
            self._held_back.release()
            self.interrupt()

    async def _next_frames(self, patience: float) -> Sequence[bytes]:
        """Return the next frames, or none after `patience` seconds of silence (worker.c: LogicalRepApplyLoop)."""
        self._feedback.away_since = None
        try:
            async with asyncio.timeout(patience) as self._reading:
                return await self._stream.receive()
        except TimeoutError:
            self._reading = None
            silence = time.monotonic() - max(self._stream.last_receive, self._reading_since)
            limit = self._timers.receiver_timeout
            if limit and silence > limit:
                raise ConnectionFailure(
                    "terminating logical replication worker due to timeout",
                    hint="The publisher sent nothing for wal_receiver_timeout.",
                ) from None
            if (limit and silence > limit / 2) or (self._timers.status_interval and self._awaits_position):
                await self._feedback.send_status(reply=True)
            return ()
        finally:
            self._reading = None
            self._feedback.away_since = time.monotonic()

    @property
    def _awaits_position(self) -> bool:
        """Whether something waits for the stream to come to an LSN."""
        boundary = self._dispatcher.boundary
        return self._stop_at is not None or (boundary is not None and self._dispatcher.position < boundary)

    def _check_sizes(self, frames: Sequence[bytes]) -> None:
        limit = self._limits.message
        if sum(map(len, frames)) > limit and (longest := max(map(len, frames))) > limit:
            raise ProgramLimitExceeded(
                f"the publisher sent a message of {longest} bytes",
                detail=f"The limit is {limit} bytes.",
                hint='Raise "max_message_size" in pubsub.toml, or take the column out of the publication.',
            )
