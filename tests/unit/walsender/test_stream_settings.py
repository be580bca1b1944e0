"""A stream follows the upstream server's configuration, and answers its client, whatever becomes of a question."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pubsub.errors import PubsubError
from walsender.server import stream as streams

ANSWERS = {"load_time": ["10:01"], "wal_sender_timeout": ["1500"], "snapshot": ["100", "90"], "insert_lsn": ["0/10"]}


async def test_a_question_that_is_cancelled_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings were not followed any more, and a subscriber with retain_dead_tuples waited for its answer for ever."""
    asked: set[str] = set()
    told: asyncio.Queue[Any] = asyncio.Queue()

    async def query(sql: str) -> list[list[str]]:
        if sql not in asked:
            asked.add(sql)
            raise PubsubError("canceling statement due to user request", sqlstate="57014")
        return next([row] for word, row in ANSWERS.items() if word in sql)

    async def texts(*_: object, **__: object) -> str:
        return "new"

    monkeypatch.setattr(streams, "_LOOK", 0)
    monkeypatch.setattr(streams.upstream, "session_texts", texts)
    feed = SimpleNamespace(end_of_record=lambda lsn: lsn)
    session: Any = SimpleNamespace(query=query, service=SimpleNamespace(zones={}, feed=feed))
    slot: Any = SimpleNamespace(name="s")
    decoder: Any = SimpleNamespace(
        change_settings=lambda _number, *settings: told.put_nowait(settings),
        primary_status=lambda *_: told.put_nowait("status"),
    )
    before: Any = ("old", 60.0)
    stream = streams.Stream(session, slot, 0, {})
    stream.status_requested()
    tasks = [
        asyncio.create_task(stream._follow_settings(decoder, 1, before, [["10:00"]])),
        asyncio.create_task(stream._answer_status(decoder, 1)),
    ]
    async with asyncio.timeout(300):
        assert {await told.get() for _ in range(2)} == {("new", 1.5), "status"}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
