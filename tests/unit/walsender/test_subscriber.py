"""A stream's client, as the decoding process sees it."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path

import pytest

from pubsub.backend import messages as m
from pubsub.errors import PubsubError
from walsender.streaming.backlog import Backlog
from walsender.streaming.subscriber import CLOSED, COPY_DONE, Subscriber

_COPY_DONE = b"c\0\0\0\4"


class _Flooded(socket.socket):
    """A socket whose client sends faster than it is read."""

    asked = 0

    def recv(self, size: int, flags: int = 0) -> bytes:
        self.asked += 1
        if self.asked > 1000:
            raise BlockingIOError
        return b"x" * size


async def test_what_comes_after_the_end_of_a_stream_is_bounded(tmp_path: Path) -> None:
    """All of it was read into memory, for as long as it came; what is left is the session's to read."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def on_end(_: Subscriber, how: str, error: PubsubError | None) -> None:
            ended.set_result(how)

        flooded = _Flooded(fileno=ours.detach())
        subscriber = Subscriber(
            1,
            flooded,
            Backlog(tmp_path, 1 << 20),
            start=0,
            timeout=0,
            received=_COPY_DONE + b"first",
            on_room=lambda: None,
            on_end=on_end,
        )
        assert await asyncio.wait_for(ended, 60) == COPY_DONE
        assert subscriber.rest.startswith(b"firstx")
        assert len(subscriber.rest) < 2 << 20


@pytest.mark.parametrize("replies", [True, False])
async def test_what_has_come_counts_before_a_client_is_given_up(tmp_path: Path, replies: bool) -> None:
    """A process that was held up for longer than wal_sender_timeout cut off clients whose replies it had not read."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        subscriber = Subscriber(
            1,
            socket.socket(fileno=ours.detach()),
            Backlog(tmp_path, 1 << 20),
            start=0,
            timeout=60,
            on_room=lambda: None,
            on_end=lambda *_: None,
        )
        began = time.monotonic()
        # It was held up before it could ask: the client has its time from now on.
        subscriber.check(began + 1000)
        assert theirs.recv(100)[5:6] == b"k"
        subscriber.check(began + 1001)
        assert subscriber.ending is None
        if replies:
            theirs.send(m.message(b"d", b"r" + bytes(33)))
        subscriber.check(began + 1031)
        assert subscriber.ending == (None if replies else CLOSED)
        subscriber.end(COPY_DONE)
