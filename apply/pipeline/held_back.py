"""Hold received frames back for a moment before they are fed, so that a batch can be told where to end just in time.

A replication slot that is being created names its LSN only when it is done, a moment after the publisher has written that
record.  Meanwhile the stream comes `delay` seconds late, so that no transaction past that LSN is in a batch yet
(apply.snapshot_point).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Final

# No more is read while this many bytes are held back.
_MOST_BYTES: Final = 32 << 20


class HeldBack:
    """Frames in order of arrival; times are monotonic, in seconds."""

    def __init__(self, delay: float) -> None:
        self._delay = delay
        self._released = asyncio.Event()
        self._frames: deque[tuple[float, Sequence[bytes]]] = deque()
        self._nbytes = 0

    @property
    def full(self) -> bool:
        """Whether no more is to be read before something is due."""
        return self._nbytes >= _MOST_BYTES

    @property
    def over(self) -> bool:
        """Whether frames need no longer pass through here."""
        return self._released.is_set() and not self._frames

    def release(self) -> None:
        """Let everything be due at once, from now on."""
        self._released.set()

    def put(self, frames: Sequence[bytes], now: float) -> None:
        """Add frames that have just arrived."""
        if frames:
            self._frames.append((now + self._delay, frames))
            self._nbytes += sum(map(len, frames))

    def take(self, now: float) -> Sequence[bytes]:
        """Take the oldest frames that are due, of one arrival; () if none are."""
        if not self._frames or (self._frames[0][0] > now and not self._released.is_set()):
            return ()
        _, frames = self._frames.popleft()
        self._nbytes -= sum(map(len, frames))
        return frames

    def wait(self, now: float) -> float:
        """Return in how many seconds something is due; 1 at most."""
        return min(max(self._frames[0][0] - now, 0.0), 1.0) if self._frames else 1.0

    async def until_due(self, now: float) -> None:
        """Wait until something is due, or `release`."""
        try:
            async with asyncio.timeout(self.wait(now)):
                await self._released.wait()
        except TimeoutError:
            pass
