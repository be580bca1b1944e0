"""A slot's snapshot and the WAL that it needs, while nothing keeps that yet."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pubsub.protocol.lsn import Lsn
from walsender.server import commands, slot_statements
from walsender.server.slot_changes import Moves
from walsender.slots.slot import Slot, SlotStore


class Commits:
    """Commits of a feed that lets WAL go: where a slot could begin, each time that it is asked."""

    def __init__(self, *restarts: int | None) -> None:
        self.recent: list[tuple[int, int]] = []
        self._restarts = list(restarts)

    @contextmanager
    def all_kept(self) -> Iterator[Commits]:
        yield self

    def restart_for(self, _lsn: int, _oldest: int) -> int | None:
        return self._restarts.pop(0)


class Feed:
    position = 9000
    oldest = 0
    waited = 0

    def __init__(self, commits: Commits) -> None:
        self.commits = commits

    async def wait_for(self, _lsn: int) -> None: ...

    async def wait_for_more(self) -> None:
        self.waited += 1


async def test_wal_that_goes_while_the_snapshot_is_exported() -> None:
    """A slot from before the oldest WAL would send nothing; the snapshot is taken again."""
    feed = Feed(Commits(100, None, 200, 200))
    asked: list[str] = []

    async def query(sql: str) -> list[list[str]]:
        asked.append(sql.split(maxsplit=1)[0] if "export" not in sql else "export")
        if "pg_current_snapshot" in sql:
            return [["100:100:", "0/10"]]
        return [[f"snapshot {asked.count('export')}"]]

    exchange = SimpleNamespace(transaction=[], status=b"T")
    session: Any = SimpleNamespace(service=SimpleNamespace(feed=feed), query=query, exchange=exchange, exported=False)
    session.check_client = lambda: None
    found = await commands._snapshot(session, "pgoutput", export=True)
    assert found == (9000, 200, "snapshot 2")
    assert asked == ["BEGIN", "SELECT", "export", "ROLLBACK", "BEGIN", "SELECT", "export"]
    assert (session.exported, exchange.status, feed.waited) == (True, b"I", 1)


async def test_where_no_lsn_fits_it_is_asked_again_at_leisure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit may wait for its synchronous standby for ever: the server was asked again at once, as often as it answered."""
    feed = Feed(Commits(100, 100))
    feed.commits.recent = [(10, 97), (20, 98)]
    paused: list[float] = []

    async def sleep(seconds: float) -> None:
        paused.append(seconds)
        if len(paused) == 20:
            feed.commits.recent = []

    asked = itertools.count()

    async def query(sql: str) -> list[list[str]]:
        assert next(asked) < 100
        return [["97:101:97", "0/10"]] if "pg_current_snapshot" in sql else [["name"]]

    monkeypatch.setattr(asyncio, "sleep", sleep)
    exchange = SimpleNamespace(transaction=[], status=b"T")
    service = SimpleNamespace(feed=feed)
    session: Any = SimpleNamespace(
        service=service, query=query, exchange=exchange, exported=False, check_client=lambda: None
    )
    assert await commands._snapshot(session, "pgoutput", export=True) == (9000, 100, "name")
    assert len(paused) == 20
    assert 0 < paused[0] < paused[-1] == paused[-2]


@pytest.mark.parametrize(("oid", "shown"), [(7, (None, None)), (0, ("caf?", "m??"))])
async def test_names_that_a_database_s_encoding_lacks_break_no_view(oid: int, shown: tuple[str | None, ...]) -> None:
    """One client's name would keep everybody from looking; by its oid the server has the name itself."""
    feed = SimpleNamespace(received=0, oldest=0)
    service: Any = SimpleNamespace(feed=feed, options=SimpleNamespace(keep_size=None), sessions=[])
    row = slot_statements.slot_row(service, Slot("s", "pgoutput", "caf\udce9", 1, 1, oid))
    stream = SimpleNamespace(row=lambda: {"usename": "m\u0434\udcff"})
    service.sessions = [SimpleNamespace(stream=stream, user_oid=oid or None, port=1)]

    async def query(_sql: str) -> list[list[str | None]]:
        return [["t", None]]

    session: Any = SimpleNamespace(service=service, query=query)
    (found,) = await slot_statements._stream_rows(session)
    assert (row["database"], found["usename"]) == shown


async def test_a_slot_does_not_restart_beyond_what_was_confirmed(tmp_path: Path) -> None:
    slots = SlotStore(tmp_path, 1)
    slot = Slot("s", "test_decoding", "d", 5, 10, temporary=True)
    slots._slots = {"s": slot}
    session: Any = SimpleNamespace(service=SimpleNamespace(slots=slots), pid=1, end=None)
    slot.owner = session
    for confirmed, restart, moved in ((20, 30, 5), (40, 30, 30)):
        moves = Moves(session)
        moves.add(moves.acquire("s"), confirmed, restart)
        shown = moves.shown(slot, {})
        await moves.carry_out()
        assert (slot.confirmed_flush_lsn, slot.restart_lsn) == (confirmed, moved)
        assert shown["restart_lsn"] == str(Lsn(moved))
