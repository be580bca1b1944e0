"""pg_stat_replication_slots shows what was decoded for our slots, as PostgreSQL's does for its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pubsub.testing.fixtures import Database
from pubsub.testing.servers import EmbeddedPostgres
from tests.support.follower import Follower
from tests.support.publish import Publish
from tests.support.replica import wait_until

_NAMES = [f"{what}_{which}" for what in ("spill", "stream") for which in ("txns", "count", "bytes")]
_NAMES += ["total_txns", "total_bytes"]
_COUNTED = f"SELECT {', '.join(_NAMES)} FROM pg_stat_replication_slots WHERE slot_name = 's'"
_GET = "SELECT count(*) FROM pg_logical_slot_get_changes('s', NULL, NULL, 'include-xids', '0'"


_WORKERS = "SELECT count(*) FROM pg_stat_activity WHERE backend_type LIKE 'autovacuum%'"


@pytest.fixture
def quiet(database: Database) -> Iterator[None]:
    """No autovacuum: an ANALYZE, of this database's catalogs as of its tables, is a transaction that is counted."""
    server = database.server
    server.execute("ALTER SYSTEM SET autovacuum = off")
    server.query("SELECT pg_reload_conf()")
    wait_until(lambda: server.query(_WORKERS) == [(0,)], "autovacuum has ended")
    yield
    server.execute("ALTER SYSTEM RESET autovacuum")
    server.query("SELECT pg_reload_conf()")


@pytest.fixture
def publish(database: Database, quiet: None, tmp_path: Path) -> Iterator[Publish]:
    database.execute("CREATE TABLE t (id int, v text)")
    publish = Publish(tmp_path / "node", database.conninfo, "--work-mem", "64kB")
    publish.execute("SELECT pg_create_logical_replication_slot('s', 'test_decoding')")
    yield publish
    publish.terminate()


def _counted(rows: list[tuple[Any, ...]]) -> dict[str, int]:
    ((*numbers,),) = rows
    return dict(zip(_NAMES, numbers, strict=True))


def test_what_functions_decode(database: Database, publish: Publish) -> None:
    """The server's own slot of the same name is asked for the same changes."""
    database.execute("SELECT pg_create_logical_replication_slot('s', 'test_decoding')")
    try:
        for number in range(3):
            database.execute(f"INSERT INTO t VALUES ({number}, 'a')")
        database.execute("CREATE TABLE u (id int)")
        database.execute("ANALYZE t")
        assert publish.query(f"{_GET})") == database.query(f"{_GET})")
        database.query("SELECT pg_stat_force_next_flush()")
        ours, theirs = _counted(publish.query(_COUNTED)), _counted(database.query(_COUNTED))
        assert ours["total_txns"] == theirs["total_txns"] > 0
        assert 0 < ours.pop("total_bytes") < 10 * theirs.pop("total_bytes")
        assert ours == theirs
    finally:
        database.query("SELECT pg_drop_replication_slot('s')")


@pytest.mark.full
def test_spilled_and_streamed_transactions(database: Database, publish: Publish) -> None:
    database.execute("INSERT INTO t SELECT id, repeat('x', 100) FROM generate_series(1, 5000) id")
    publish.query(f"{_GET})")
    spilled = _counted(publish.query(_COUNTED))
    assert (spilled["spill_txns"], spilled["stream_txns"], spilled["total_txns"]) == (1, 0, 1)
    assert spilled["spill_bytes"] == spilled["total_bytes"] > 500_000
    database.execute("INSERT INTO t SELECT id, repeat('x', 100) FROM generate_series(1, 5000) id")
    publish.query(f"{_GET}, 'stream-changes', '1')")
    streamed = _counted(publish.query(_COUNTED))
    assert (streamed["stream_txns"], streamed["total_txns"]) == (1, 2)
    assert streamed["stream_count"] > 5
    assert streamed["stream_bytes"] == streamed["total_bytes"] - spilled["total_bytes"] > 500_000


def test_what_streams_send_and_a_restart_keeps(database: Database, publish: Publish) -> None:
    with Follower(publish.conninfo, "s") as follower:
        for number in range(20):
            database.execute(f"INSERT INTO t VALUES ({number}, 'a')")
        wait_until(lambda: len(follower.ids) == 20, "all have come")
        wait_until(lambda: _counted(publish.query(_COUNTED))["total_txns"] == 20, "they are counted")
        wait_until(lambda: follower.is_confirmed(publish.query), "they do not come again")
    before = publish.query(_COUNTED)
    publish.terminate()
    publish.start()
    assert publish.query(_COUNTED) == before
    with Follower(publish.conninfo, "s") as follower:
        database.execute("INSERT INTO t VALUES (20, 'a')")
        wait_until(lambda: _counted(publish.query(_COUNTED))["total_txns"] == 21, "the new one is counted")


@pytest.mark.full
def test_reset(database: Database, publish: Publish) -> None:
    database.execute("INSERT INTO t VALUES (1, 'a')")
    publish.query(f"{_GET})")
    reset = "SELECT total_txns, stats_reset IS NULL FROM pg_stat_replication_slots"
    assert publish.query(reset) == [(1, True)]
    assert publish.query("SELECT total_txns FROM pg_stat_get_replication_slot('s')") == [(1,)]
    with pytest.raises(psycopg.Error, match='replication slot "none" does not exist') as error:
        publish.query("SELECT pg_stat_reset_replication_slot('none')")
    assert error.value.sqlstate == "22023"
    publish.query("SELECT pg_stat_reset_replication_slot('s')")
    assert publish.query(reset) == [(0, False)]
    database.execute("CREATE ROLE counts_nothing LOGIN")
    try:
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="permission denied for function"):
            publish.query("SELECT pg_stat_reset_replication_slot(NULL)", user="counts_nothing")
        assert publish.query("SELECT total_txns FROM pg_stat_replication_slots", user="counts_nothing") == [(0,)]
    finally:
        database.execute("DROP ROLE counts_nothing")
    publish.query("SELECT pg_stat_reset_replication_slot(NULL)")


@pytest.mark.parametrize("version", ["19"])
def test_columns_of_19_have_their_values(version: str, tmp_path: Path) -> None:
    """mem_exceeded_count counts as the server does; nothing here is synchronized to a standby."""
    settings = {"logical_decoding_work_mem": "64kB", "autovacuum": "off"}
    with EmbeddedPostgres(version, settings=settings) as server:
        publish = Publish(tmp_path / "node", server.conninfo("postgres"), "--work-mem", "64kB")
        try:
            with psycopg.connect(server.conninfo("postgres"), autocommit=True) as theirs, publish.connect() as ours:
                server.execute("CREATE TABLE t (id int, v text)")
                for connection in (theirs, ours):
                    connection.execute("SELECT pg_create_logical_replication_slot('s', 'test_decoding')")
                for stream in ("1", "0"):
                    server.execute("INSERT INTO t SELECT id, repeat('x', 100) FROM generate_series(1, 5000) id")
                    counted = []
                    for connection in (theirs, ours):
                        connection.execute(f"{_GET}, 'stream-changes', '{stream}')".encode())
                        connection.execute("SELECT pg_stat_force_next_flush()")
                        found = connection.execute(
                            "SELECT mem_exceeded_count, slotsync_skip_count, slotsync_last_skip"
                            " FROM pg_stat_replication_slots WHERE slot_name = 's'"
                        ).fetchone()
                        assert found is not None
                        counted.append(found)
                        select = "SELECT mem_exceeded_count, slotsync_skip_count, slotsync_last_skip FROM"
                        assert connection.execute(f"{select} pg_stat_get_replication_slot('s')").fetchone() == found
                    if stream == "1":
                        assert counted[0][0] > 5
                        assert counted[1] == counted[0]
                        streamed = counted[1][0]
                # What is written to disk is written in larger pieces here.
                assert counted[1][0] > streamed
                for source in (
                    *("pg_stat_replication_slots", "pg_stat_get_replication_slot('s')"),
                    *("pg_replication_slots", "pg_get_replication_slots()", "pg_stat_get_replication_slot('none')"),
                ):
                    described = []
                    for connection in (theirs, ours):
                        cursor = connection.execute(f"SELECT * FROM {source}".encode())
                        assert cursor.description is not None
                        described.append([(one.name, one.type_code) for one in cursor.description])
                    assert described[1] == described[0], source
                for connection in (theirs, ours):
                    query = "SELECT slotsync_skip_reason FROM pg_replication_slots"
                    assert connection.execute(query).fetchall() == [(None,)]
        finally:
            publish.terminate()
