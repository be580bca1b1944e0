"""A database in which nothing is written does not hold back the WAL that its neighbours on the server write.

No heartbeat is needed for it: a walsender that has read to the end of the WAL says so in a keepalive, and with nothing pending
that position is stored and reported as flushed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pubsub.delta.spark.spark_session import Spark
from pubsub.testing.fixtures import Database
from pubsub.testing.servers import EmbeddedPostgres
from tests.support.publish import Publish, ServedReplica
from tests.support.replica import Replica, RunningNode, wait_until

ROUNDS = 2


@pytest.fixture(scope="module")
def node(spark: Spark, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    with RunningNode(tmp_path_factory.mktemp("node"), spark, wal_receiver_status_interval="1s") as node:
        yield node


@pytest.fixture(scope="module", params=["18", pytest.param("15", marks=pytest.mark.full)])
def server(request: pytest.FixtureRequest) -> Iterator[EmbeddedPostgres]:
    """A server with WAL segments of 1 MB, which are removed or used again at the next checkpoint."""
    settings = {"min_wal_size": "2MB", "max_wal_size": "8MB", "checkpoint_timeout": "1h"}
    with EmbeddedPostgres(request.param, settings=settings, initdb=("--wal-segsize=1",)) as server:
        server.create_database("neighbour")
        server.execute("CREATE TABLE busy (n bigint, t text)", "neighbour")
        yield server


def quiet(server: EmbeddedPostgres, name: str) -> Database:
    server.create_database(name)
    database = Database(server, name)
    database.execute("CREATE TABLE a (id int PRIMARY KEY); INSERT INTO a VALUES (1); CREATE PUBLICATION p FOR TABLE a")
    return database


def write(server: EmbeddedPostgres) -> str:
    """Let the neighbour write 8 MB of WAL; return the LSN before it."""
    ((lsn,),) = server.query("SELECT pg_current_wal_lsn()")
    server.execute("INSERT INTO busy SELECT g, repeat('x', 1000) FROM generate_series(1, 8000) g", "neighbour")
    return str(lsn)


def checkpoint(server: EmbeddedPostgres) -> None:
    """Let the server write where a slot can begin, which it does every 15 s otherwise, and remove WAL that nobody needs."""
    if server.version >= "16":
        server.execute("SELECT pg_log_standby_snapshot()")
    server.execute("CHECKPOINT")


def is_gone(server: EmbeddedPostgres, lsn: str) -> bool:
    """Return whether the server no longer needs the WAL at this LSN, and has removed it."""
    checkpoint(server)
    ((gone,),) = server.query(f"SELECT pg_walfile_name('{lsn}') NOT IN (SELECT name FROM pg_ls_waldir())")
    return bool(gone)


@pytest.mark.full
def test_a_neighbours_wal_is_not_retained(node: RunningNode, server: EmbeddedPostgres) -> None:
    replica = Replica(node, quiet(server, f"idle_{server.version}"))
    replica.subscribe()
    replica.assert_equal("a")
    batches = replica.batches("a")
    for _ in range(ROUNDS):
        before = write(server)
        wait_until(lambda before=before: is_confirmed(replica, before), "the slot is confirmed")
        wait_until(lambda before=before: is_gone(server, before), "the WAL to be removed")
    assert replica.batches("a") == batches

    # A subscription that does not follow does retain it.
    replica.alter("DISABLE")
    before = write(server)
    for _ in range(ROUNDS):
        write(server)
        assert not is_gone(server, before)
    replica.alter("ENABLE")
    wait_until(lambda: is_gone(server, before), "the WAL to be removed")
    replica.drop()


def is_confirmed(replica: Replica, lsn: str) -> bool:
    ((done,),) = replica.database.query(
        f"SELECT confirmed_flush_lsn >= '{lsn}' FROM pg_replication_slots WHERE slot_name = '{replica.name}'"
    )
    return bool(done)


@pytest.mark.full
def test_nor_by_our_own_server(node: RunningNode, server: EmbeddedPostgres, tmp_path: Path) -> None:
    """It keeps the WAL itself, and lets it go as its slot moves; on the server its physical slot moves, too."""
    server.query("SELECT pg_create_physical_replication_slot('feed', true)")
    publish = Publish(tmp_path / "publish", server.conninfo(), "--primary-slot-name", "feed")
    try:
        replica = ServedReplica(node, quiet(server, f"served_{server.version}"), publish)
        replica.subscribe()
        replica.assert_equal("a")

        def has_moved(lsn: str) -> bool:
            checkpoint(server)
            columns = f"restart_lsn >= '{lsn}' AND confirmed_flush_lsn >= '{lsn}'"
            found = f"SELECT {columns} FROM pg_replication_slots WHERE slot_name = '{replica.name}'"
            return publish.query(found, dbname=replica.database.name) == [(True,)]

        for _ in range(ROUNDS):
            before = write(server)
            wait_until(lambda before=before: has_moved(before), "the slot to move")
            wait_until(lambda before=before: is_gone(server, before), "the WAL to be removed")
        replica.drop()
    finally:
        assert publish.terminate() == 0, publish.tail()
    server.drop_slot("feed")
