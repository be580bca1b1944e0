"""The WAL comes from a standby of the upstream server, which is asked for SQL, catalogs and snapshots only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pubsub.testing.servers import EmbeddedPostgres
from tests.support.follower import Follower
from tests.support.publish import Publish
from tests.support.replica import wait_until


@pytest.fixture
def servers() -> Iterator[tuple[EmbeddedPostgres, EmbeddedPostgres]]:
    """A primary and its standby."""
    settings: dict[str, str | int] = {"autovacuum": "off", "wal_keep_size": "64MB"}
    with EmbeddedPostgres("18", settings=settings) as primary:
        primary.execute("CREATE TABLE t (id int, v text)")
        with primary.make_standby("sb") as standby:
            yield primary, standby


def _insert(server: EmbeddedPostgres, first: int, last: int) -> None:
    for number in range(first, last + 1):
        server.execute(f"INSERT INTO t VALUES ({number}, repeat('x', 300))")


def test_slots_and_streams(servers: tuple[EmbeddedPostgres, EmbeddedPostgres], tmp_path: Path) -> None:
    primary, standby = servers
    standby.query("SELECT pg_create_physical_replication_slot('ours')")
    options = ("--wal-source", standby.conninfo(), "--primary-slot-name", "ours")
    publish = Publish(tmp_path / "node", primary.conninfo(), *options)
    try:
        _insert(primary, 1, 5)
        publish.execute("SELECT pg_create_logical_replication_slot('s', 'test_decoding')")
        with Follower(publish.conninfo, "s") as follower:
            _insert(primary, 6, 15)
            wait_until(lambda: len(follower.ids) == 10, "what the primary writes has come")
            assert primary.query("SELECT application_name FROM pg_stat_replication") == [("sb",)]
            assert standby.query("SELECT slot_name FROM pg_replication_slots WHERE active") == [("ours",)]
            # While the standby is away, changes wait, and so does a new slot.
            standby.stop()
            _insert(primary, 16, 20)
            standby.start()
            publish.execute("SELECT pg_create_logical_replication_slot('later', 'test_decoding')")
            _insert(primary, 21, 25)
            wait_until(lambda: len(follower.ids) == 20, "the rest has come")
            later = publish.query("SELECT count(*) FROM pg_logical_slot_get_changes('later', NULL, NULL)")
            assert later == [(15,)]
        assert follower.ids == list(range(6, 26))
        assert primary.query("SELECT slot_name FROM pg_replication_slots") == [("sb",)]
    finally:
        publish.terminate()


@pytest.mark.full
def test_a_standby_that_was_promoted_by_itself_is_refused(
    servers: tuple[EmbeddedPostgres, EmbeddedPostgres], tmp_path: Path
) -> None:
    primary, standby = servers
    publish = Publish(tmp_path / "node", primary.conninfo(), "--wal-source", standby.conninfo())
    try:
        publish.execute("SELECT pg_create_logical_replication_slot('s', 'test_decoding')")
        with Follower(publish.conninfo, "s") as follower:
            _insert(primary, 1, 5)
            wait_until(lambda: len(follower.ids) == 5, "what the primary writes has come")
            standby.promote()
            _insert(standby, 100, 105)
            assert publish.wait() == 1
        assert follower.ids == [1, 2, 3, 4, 5]
        assert "on timeline 2, which the upstream server's does not come from" in publish.tail()
    finally:
        publish.kill()
    # Another standby, and it goes on.
    with primary.make_standby("sc") as other:
        again = Publish(tmp_path / "node", primary.conninfo(), "--wal-source", other.conninfo())
        try:
            with Follower(again.conninfo, "s") as follower:
                follower.applied, follower.ids = 0, []
                _insert(primary, 6, 10)
                wait_until(lambda: set(range(6, 11)) <= set(follower.ids), "the new ones have come")
                assert max(follower.ids) == 10
        finally:
            again.terminate()
