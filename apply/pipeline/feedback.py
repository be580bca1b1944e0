"""Decide which LSN is reported to the publisher as flushed, store it as the origin, and send status messages.

    received   Dispatcher.position: everything up to here has arrived
    flushed    everything up to here is durable in Delta: the end of the last committed batch or, with nothing pending, the
               position received
    stored     the origin in the catalog, where the stream starts after a restart: the only LSN reported as flushed

    received >= flushed >= stored

A publisher may remove WAL up to the LSN that it is told; if that were past the stored origin, a restarted worker would ask
for WAL that is gone.  Feedback waits for nothing but the socket: an origin that takes long to store is stored in a task of
its own, and replies go on with the one stored before.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from apply.batch import Transaction
from apply.pipeline.dispatch import Dispatcher
from apply.pipeline.in_flight import InFlight
from apply.pipeline.interfaces import Stream, SubscriptionTables, Tables, Timers
from apply.twophase import TwoPhase
from apply.worker_statistics import Figures
from catalog.records import LastCommit
from pubsub.protocol.lsn import Lsn

# How long storing the origin may delay a reply to the publisher, and further reading, in seconds.
_PATIENCE: Final = 1.0


class Feedback:
    """Keep what is durable of one stream, and report it.  `flushed` only grows; keepalives raise it to `stop_at` at most.

    `timers`: their status_interval is wal_receiver_status_interval (0: no status unless requested).  `on_caught_up` is called whenever
    `advance` finds everything received durable.
    `away_since`: since when, in monotonic seconds, the worker has not been reading the socket; None while it waits on it.
    """

    def __init__(
        self,
        stream: Stream,
        dispatcher: Dispatcher,
        in_flight: InFlight,
        tables: Tables,
        figures: Figures,
        start: Lsn,
        *,
        whole: SubscriptionTables | None,
        timers: Timers,
        stop_at: Lsn | None = None,
        two_phase: TwoPhase | None = None,
        on_caught_up: Callable[[], None],
    ) -> None:
        self.flushed = start
        self.away_since: float | None = None
        self._stream = stream
        self._dispatcher = dispatcher
        self._in_flight = in_flight
        self._tables = tables
        self._whole = whole
        self._figures = figures
        self._timers = timers
        self._stop_at = stop_at
        self._two_phase = two_phase
        self._on_caught_up = on_caught_up
        self._stored = start
        self._storing: asyncio.Task[None] | None = None
        self._storing_since = 0.0
        # Set when the stored origin has moved.
        self._moved = asyncio.Event()
        self._last: LastCommit | None = None

    # What is durable

    @property
    def caught_up(self) -> bool:
        """Whether everything received is durable, apart from streamed transactions in progress."""
        return self._dispatcher.idle and not self._in_flight

    def committed(self, last: Transaction) -> None:
        """Note that the oldest batch taken, whose last transaction is `last`, is in Delta."""
        self._in_flight.committed += 1
        self.flushed = max(self.flushed, last.end_lsn)
        self._last = LastCommit(last.commit_lsn, last.commit_time)

    @property
    def is_awaited(self) -> bool:
        """Whether a table becomes ready once the position is stored; keepalives that come all the time leave no silence for that."""
        return self.caught_up and self._whole is not None and self._whole.waits_for(self._dispatcher.position)

    def note_progress(self, now: float) -> None:
        """Show in the figures whether the worker has caught up.  `now`: monotonic seconds."""
        pending = bool(self._in_flight or self._dispatcher.batch.transactions)
        self._figures.received(now, caught_up=self.caught_up, pending=pending)

    async def advance(self) -> None:
        """If nothing is pending, raise `flushed` to the position received, and begin to store it.

        Otherwise tables that do not change would retain the publisher's WAL.
        """
        self.note_progress(time.monotonic())
        if self.caught_up:
            self._on_caught_up()
            position = self._dispatcher.position
            self.flushed = max(self.flushed, position if self._stop_at is None else min(position, self._stop_at))
            skipped = self._dispatcher.skipped
            if skipped is not None and (self._last is None or skipped.lsn > self._last.lsn):
                # Otherwise a slot that stands before the origin could send it again, when nothing skips it any more.
                self._last = skipped
        await self._store_for(0.0)

    # The origin

    async def until_stored(self) -> None:
        """Wait until the stored origin has reached what `flushed` is now.  Raises the errors of storing it."""
        wanted = self.flushed
        while self._stored < wanted:
            await self._store_for(None)
        await self._after_storing()

    async def until_stored_to(self, lsn: Lsn) -> None:
        """Wait until the stored origin is at or past `lsn`."""
        while self._stored < lsn:
            self._moved.clear()
            await self._moved.wait()

    async def close(self) -> None:
        """Cancel storing the origin; a later call stores it anew."""
        task, self._storing = self._storing, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _store_for(self, seconds: float | None) -> None:
        """Store the origin; return at most `seconds` after that began (None: when it has ended).  Raises its errors.

        Storing runs as its own task: while the catalog does not answer, replies go on with the origin stored before.
        """
        task = self._storing
        if task is None:
            if self.flushed <= self._stored:
                return
            self._storing_since = time.monotonic()
            task = self._storing = asyncio.create_task(self._store(), name="store origin")
        left = None if seconds is None else max(0.0, self._storing_since + seconds - time.monotonic())
        await asyncio.wait({task}, timeout=left)
        if task.done():
            if self._storing is task:
                self._storing = None
            task.result()

    async def _store(self) -> None:
        # `flushed` may move meanwhile; only what was stored may be reported.
        flushed, last = self.flushed, self._last
        await self._tables.before_commit()
        if self._whole is not None:
            await self._whole.durable(flushed, last)
        self._stored = max(self._stored, flushed)
        self._moved.set()
        if self._two_phase is not None:
            await self._two_phase.origin_stored(flushed)
        await self._after_storing()

    async def _after_storing(self) -> None:
        self._figures.flush_lsn = self._stored
        passed = self._dispatcher.passed_skip
        if passed is not None and self._stored >= passed.end:
            self._dispatcher.passed_skip = None
            if self._whole is not None:
                await self._whole.skip_passed(passed)

    # Status messages

    async def answer(self) -> None:
        """Answer the publisher's request for a reply, with what can be stored within _PATIENCE."""
        await self.advance()
        await self._store_for(_PATIENCE)
        await self.send_status()

    async def report(self) -> None:
        """Send an unrequested status, except with wal_receiver_status_interval = 0 (worker.c: send_feedback)."""
        if self._timers.status_interval:
            await self.send_status()

    async def send_status(self, *, reply: bool = False) -> None:
        """Send the positions; `reply` requests the publisher's."""
        received = max(self._dispatcher.position, self._stored)
        await self._stream.send_status(received, self._stored, self._stored, reply=reply)

    async def send_status_regularly(self) -> None:
        """Send status at every interval, and every second while nothing is read, until cancelled.

        The publisher's request for a reply may then lie unread in the socket, and it must not take the worker for dead.
        Without a status interval, status is sent only in that case.
        """
        sent = time.monotonic()
        while True:
            await asyncio.sleep(min(self._timers.status_interval, 1.0) or 1.0)
            now = time.monotonic()
            away = self.away_since is not None and now - self.away_since >= 1.0
            if away or (self._timers.status_interval and now - sent >= self._timers.status_interval):
                sent = now
                await self.advance()
                await self.send_status()
