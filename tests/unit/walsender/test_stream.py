"""Status updates to a server about received WAL."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pubsub.errors import PublisherError
from walsender.source.stream import WalStream


class Told:
    """A stream that keeps the status updates."""

    def __init__(self) -> None:
        self.said: list[tuple[int, int, int]] = []

    async def send_status(self, written: int, flushed: int, applied: int, *, reply: bool = False) -> None:
        assert not reply
        self.said.append((written, flushed, applied))


@pytest.mark.parametrize(
    ("slot", "flushed", "said"),
    [
        (None, 0, [(500, 0, 0)]),
        (None, 300, [(500, 0, 0)]),
        ("hold", 0, [(500, 0, 0)]),
        ("hold", 300, [(300, 300, 300), (500, 0, 0)]),
    ],
)
def test_a_server_can_shut_down_and_a_slot_keeps_what_is_needed(
    slot: str | None, flushed: int, said: list[tuple[int, int, int]]
) -> None:
    """All is reported as written; to a slot, what is no longer needed as flushed, and nothing else beside it."""
    connection: Any = None
    stream = WalStream(connection, slot)
    told: Any = Told()
    stream._stream = told
    stream._next = 500
    stream.flushed = flushed
    asyncio.run(stream.send_status())
    assert told.said == said


def test_a_busy_receiver_tells_that_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server ends a walsender whose requests for a reply are not read (wal_sender_timeout)."""
    connection: Any = None
    stream = WalStream(connection)
    now = 100.0
    monkeypatch.setattr("walsender.source.stream.time.monotonic", lambda: now)

    async def tell() -> None:
        nonlocal now
        await stream.keep_alive()  # before it has begun
        told: Any = Told()
        stream._stream = told
        stream._next = 500
        await stream.keep_alive()
        await stream.keep_alive()
        assert told.said == [(500, 0, 0)]
        now += 1.0
        await stream.keep_alive()
        assert told.said == [(500, 0, 0)] * 2

    asyncio.run(tell())


@pytest.mark.parametrize(("sqlstate", "is_explained"), [("42501", True), ("0A000", True), ("55006", False)])
def test_a_service_that_refuses_physical_replication_is_told_what_that_means(sqlstate: str, is_explained: bool) -> None:
    class Refuses:
        async def start_copy_both(self, _command: str) -> None:
            raise PublisherError("must not be done here", sqlstate=sqlstate)

    connection: Any = Refuses()
    with pytest.raises(PublisherError) as caught:
        asyncio.run(WalStream(connection).start(8192, 1))
    assert (caught.value.hint is not None and "managed service" in caught.value.hint) is is_explained
