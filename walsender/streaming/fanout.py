"""One output's messages, for all subscribers that want the same ones.

Each message is made once; its copy-data frame, too.
"""

from __future__ import annotations

import time
from dataclasses import astuple
from struct import Struct
from typing import Final

from pubsub.errors import PubsubError
from pubsub.protocol.copyboth import PG_EPOCH_UNIX_SECONDS, XLOG_HEADER
from pubsub.reorderbuffer.buffer import Statistics
from walsender.streaming.subscriber import STOPPED, Subscriber

_FRAME: Final = Struct(">cIcQQq")
_ENOUGH: Final = 64 << 10


class Fanout:
    """The subscribers of an output.  `late`: those that begin at a later transaction."""

    def __init__(self, subscribers: list[Subscriber]) -> None:
        self.subscribers = subscribers
        self.late: list[Subscriber] = []
        self._buffer = bytearray()

    def all(self) -> list[Subscriber]:
        return [*self.subscribers, *self.late]

    def remove(self, subscriber: Subscriber) -> None:
        for one in (self.subscribers, self.late):
            if subscriber in one:
                one.remove(subscriber)

    def write(self, lsn: int, _xid: int, data: bytes) -> None:
        """Send a message of the plugin."""
        buffer = self._buffer
        now = int((time.time() - PG_EPOCH_UNIX_SECONDS) * 1_000_000)
        head = _FRAME.pack(b"d", 4 + XLOG_HEADER + len(data), b"w", lsn, lsn, now)
        if len(data) >= _ENOUGH:
            self.flush()
            self._put(head + data)
            return
        buffer += head
        buffer += data
        if len(buffer) >= _ENOUGH:
            self.flush()

    def flush(self) -> None:
        """Give the subscribers what was written."""
        if self._buffer:
            chunk = bytes(self._buffer)
            self._buffer.clear()
            self._put(chunk)

    def _put(self, chunk: bytes) -> None:
        for subscriber in list(self.subscribers):
            subscriber.put(chunk)

    def fail(self, error: PubsubError) -> None:
        """End the streams: their output has failed."""
        self.flush()
        for subscriber in self.all():
            subscriber.end(STOPPED, error)

    def count(self, statistics: Statistics) -> None:
        """Give the subscribers what their output has counted, and set it back."""
        counted = astuple(statistics)
        if any(counted):
            for subscriber in self.subscribers:
                subscriber.statistics.add(counted)
            statistics.add([-one for one in counted])

    @property
    def has_room(self) -> bool:
        """Whether there is a subscriber that takes what it is sent; one that begins later has room."""
        return any(subscriber.has_room for subscriber in self.subscribers) or bool(self.late)
