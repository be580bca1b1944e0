"""What bounds slots and streams: as a PostgreSQL 18 that has the same limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pubsub.testing.servers import EmbeddedPostgres
from tests.support.follower import Follower
from tests.support.publish import Publish
from tests.support.replica import wait_until

_STATE = "SELECT slot_name, invalidation_reason, wal_status, restart_lsn IS NULL, conflicting FROM pg_replication_slots"


@pytest.fixture
def upstream() -> Iterator[EmbeddedPostgres]:
    # It keeps what a publisher has not received yet, however fast a test moves on.
    settings: dict[str, str | int] = {"max_replication_slots": 1, "max_wal_senders": 3, "wal_keep_size": "1GB"}
    with EmbeddedPostgres("18", settings=settings, initdb=["--wal-segsize=1"]) as server:
        server.execute("CREATE TABLE t (id int, v text)")
        yield server


def _error(conninfo: str, statement: str, **more: Any) -> tuple[str | None, ...]:
    with pytest.raises(psycopg.Error) as caught, psycopg.connect(conninfo, autocommit=True, **more) as connection:
        connection.execute(statement)
    diag = caught.value.diag
    return caught.value.sqlstate, diag.message_primary, diag.message_detail, diag.message_hint


def test_slots_are_bounded_in_number_and_in_idle_time(upstream: EmbeddedPostgres, tmp_path: Path) -> None:
    publish = Publish(
        tmp_path / "node",
        upstream.conninfo(),
        *("--max-replication-slots", "1", "--idle-replication-slot-timeout", "6s"),
    )
    try:
        create = "SELECT pg_create_logical_replication_slot('{}', 'test_decoding')"
        get = "SELECT * FROM pg_logical_slot_get_changes('s', NULL, NULL)"
        sides = publish.conninfo(), upstream.conninfo()
        for side in sides:
            psycopg.connect(side, autocommit=True).execute(create.format("s"))
        ours, theirs = (_error(side, create.format("two")) for side in sides)
        assert ours == theirs
        assert ours[0] == "53400"
        # A slot in use is not idle.
        with Follower(publish.conninfo, "s") as follower:
            upstream.execute("INSERT INTO t VALUES (1)")
            wait_until(lambda: follower.ids == [1], "it streams")
            upstream.execute("ALTER SYSTEM SET idle_replication_slot_timeout = '1s'")
            upstream.query("SELECT pg_reload_conf()")

            def is_idle() -> bool:
                upstream.execute("CHECKPOINT")
                return upstream.query(_STATE)[0][1] is not None

            wait_until(is_idle, "the server has given its slot up")
            assert publish.query(_STATE) == [("s", None, "reserved", False, False)]
        wait_until(lambda: publish.query(_STATE)[0][1] is not None, "so have we")
        assert publish.query(_STATE) == upstream.query(_STATE) == [("s", "idle_timeout", "lost", False, False)]
        assert _error(sides[0], get) == _error(sides[1], get)
        with Follower(publish.conninfo, "s") as follower:
            wait_until(lambda: follower.error, "the subscriber is told")
        assert follower.error is not None
        assert 'This replication slot has been invalidated due to "idle_timeout".' in str(follower.error.detail)
        log = publish.tail()
        assert 'invalidating obsolete replication slot "s"' in log.replace('\\"', '"')
        assert "exceeds the configured" in log
        for side in sides:
            psycopg.connect(side, autocommit=True).execute("SELECT pg_drop_replication_slot('s')")
    finally:
        publish.kill()


def test_streams_and_what_slots_hold_back_are_bounded(upstream: EmbeddedPostgres, tmp_path: Path) -> None:
    publish = Publish(
        tmp_path / "node", upstream.conninfo(), "--max-wal-senders", "1", "--max-slot-wal-keep-size", "3MB"
    )
    try:
        publish.execute("SELECT pg_create_logical_replication_slot('s', 'test_decoding')")
        with psycopg.connect(publish.conninfo(), replication="database", autocommit=True):
            with pytest.raises(psycopg.OperationalError, match="number of requested standby connections exceeds"):
                psycopg.connect(publish.conninfo(), replication="database")
        with Follower(publish.conninfo, "s", confirms=False) as follower:
            upstream.execute("INSERT INTO t VALUES (1)")
            wait_until(lambda: follower.ids == [1], "it streams")

            def is_lost() -> bool:
                _move_on(upstream)
                return publish.query(_STATE)[0][1] is not None

            wait_until(is_lost, "the slot is lost")
            wait_until(lambda: follower.error, "the subscriber is told")
        assert publish.query(_STATE) == [("s", "wal_removed", "lost", True, False)]
        assert follower.error is not None
        assert follower.error.sqlstate == "55000"
        assert 'due to "wal_removed"' in str(follower.error.detail)
        log = publish.tail()
        assert "exceeds the limit by" in log
        spool = publish.home / "walsender" / "wal"

        def is_removed() -> bool:
            _move_on(upstream)
            return len(list(spool.glob("0*"))) <= 6

        wait_until(is_removed, "its WAL is removed")
    finally:
        publish.kill()


def _move_on(upstream: EmbeddedPostgres) -> None:
    """Begin a new segment, and let a checkpoint need none before it: a server gives up no slot behind its last checkpoint."""
    upstream.execute("INSERT INTO t VALUES (2)")
    upstream.query("SELECT pg_switch_wal()")
    upstream.execute("CHECKPOINT")
