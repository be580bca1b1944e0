"""End a batch at a given LSN, and hold the tables there, while the stream goes on being received.

    hold back      frames are fed a moment late, so that no transaction past an LSN that is not known yet joins a batch
    end batch at   no batch has transactions from both sides of the LSN; with `halts` nothing past it is applied, either
    standing at    the tables hold everything up to the LSN, and nothing else, as long as the body runs

Which transactions wait at the boundary is the dispatcher's decision (`Dispatcher.boundary`, `halts`, `halted`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from apply.pipeline.dispatch import Dispatcher
from apply.pipeline.feedback import Feedback
from apply.pipeline.in_flight import InFlight
from apply.pipeline.receiver import Receiver
from pubsub.errors import NotInPrerequisiteState
from pubsub.protocol.lsn import Lsn


class Boundary:
    """The boundary between two batches of one stream.  Its owner, the pipeline, calls `moved`, `until_passed`, `drain`, `close`."""

    def __init__(self, dispatcher: Dispatcher, feedback: Feedback, in_flight: InFlight, receiver: Receiver) -> None:
        self._dispatcher = dispatcher
        self._feedback = feedback
        self._in_flight = in_flight
        self._receiver = receiver
        # Set when a halt ends; when the stream has come further, or was committed further; when the pipeline has ended.
        self._may_pass = asyncio.Event()
        self._moved = asyncio.Event()
        self._over = False

    def hold_back(self, delay: float) -> None:
        """From now on feed what arrives `delay` seconds later, until `end_batch_at` or `release`."""
        self._receiver.hold_back(delay)

    def release(self) -> None:
        """End the delay, and a halt."""
        self._receiver.end_delay()
        self._dispatcher.halts = self._dispatcher.halted = False
        self._may_pass.set()

    async def end_batch_at(self, lsn: Lsn, *, halts: bool = False) -> bool:
        """Let no batch have transactions from both sides of `lsn`; return False if one past it was received already.

        With `halts` nothing past it is applied until `release`.  Ends the delay of `hold_back`.
        """
        dispatcher = self._dispatcher
        if dispatcher.decided > lsn:
            return False
        dispatcher.boundary, dispatcher.halts = lsn, halts
        self._may_pass.clear()
        self._receiver.end_delay()
        # An idle publisher then says soon how far it is.
        await self._feedback.send_status(reply=True)
        return True

    @asynccontextmanager
    async def standing_at(self, lsn: Lsn) -> AsyncIterator[None]:
        """Hold the tables at `lsn`, for which `end_batch_at` has returned True, as long as the body runs.

        It begins when everything up to `lsn` is durable; nothing past it is applied before it ends.  Raises
        NotInPrerequisiteState if the pipeline ends before that.
        """
        dispatcher = self._dispatcher
        try:
            while True:
                if self._over:
                    raise NotInPrerequisiteState("the apply worker has ended")
                reached = dispatcher.halted or dispatcher.position >= lsn
                if reached and not dispatcher.batch.transactions and not self._in_flight:
                    break
                self._moved.clear()
                await self._moved.wait()
            yield
        finally:
            self.release()

    # For the pipeline

    def moved(self) -> None:
        """Note that the stream has come further, or was committed further."""
        self._moved.set()

    async def until_passed(self) -> None:
        """Wait for the end of a halt, or for `drain`."""
        await self._may_pass.wait()

    def drain(self) -> None:
        """End the wait at a halt: the pipeline receives nothing more."""
        self._may_pass.set()

    def close(self) -> None:
        """Note that the pipeline has ended: the tables stand nowhere any more."""
        self._over = True
        self._moved.set()
