"""Our own subscriber behind our own server: both halves, from PostgreSQL's WAL to Delta tables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pubsub.testing.fixtures import Database
from pubsub.testing.servers import EmbeddedPostgres
from tests.support.publish import Publish, ServedReplica
from tests.support.replica import RunningNode, wait_until

_SETTINGS: dict[str, str | int] = {"max_prepared_transactions": 10}


@pytest.fixture
def own(node: RunningNode, tmp_path: Path) -> Iterator[ServedReplica]:
    """A replica behind a server of its own, which the test may kill."""
    with EmbeddedPostgres("18", settings=_SETTINGS) as server:
        server.create_database("own")
        publish = Publish(tmp_path / "node", server.conninfo("own"), "--work-mem", "64kB")
        replica = ServedReplica(node, Database(server, "own"), publish)
        yield replica
        replica.drop()
        assert replica.slots() == []
        assert server.query("SELECT slot_name FROM pg_replication_slots") == []
        assert publish.terminate() == 0, publish.tail()


@pytest.mark.full
def test_copy_stream_and_prepared_transactions_through_a_kill(own: ServedReplica) -> None:
    own.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text, n numeric, at timestamptz DEFAULT now())",
        "CREATE TABLE wide (id int PRIMARY KEY, v text)",
        "INSERT INTO t SELECT g, repeat('x', g % 50), g / 7.0 FROM generate_series(1, 2000) g",
        "INSERT INTO wide SELECT g, repeat(md5(g::text), 200) FROM generate_series(1, 50) g",
        "CREATE PUBLICATION p FOR TABLE t, wide",
    )
    own.subscribe(streaming="parallel", two_phase="true")
    own.assert_equal("t", "wide")
    own.execute(
        "UPDATE t SET n = n + 1 WHERE id % 3 = 0",
        "UPDATE wide SET id = id + 100 WHERE id < 10",
        "BEGIN; INSERT INTO t SELECT g, 'large' FROM generate_series(10000, 20000) g; DELETE FROM wide WHERE id > 100; COMMIT",
        "BEGIN; DELETE FROM t; ROLLBACK",
        "BEGIN; UPDATE t SET v = 'prepared' WHERE id < 500; PREPARE TRANSACTION 'one'",
        "BEGIN; INSERT INTO t VALUES (-1, 'never'); PREPARE TRANSACTION 'two'",
    )
    own.caught_up()
    own.publish.kill()
    own.execute("COMMIT PREPARED 'one'", "ROLLBACK PREPARED 'two'", "ALTER TABLE t ADD COLUMN added int DEFAULT 7")
    own.publish.start()
    own.execute("INSERT INTO t VALUES (-2, 'after')", "TRUNCATE wide")
    own.assert_equal("t", "wide")
    status = "SELECT confirmed_flush_lsn >= (SELECT restart_lsn FROM pg_replication_slots) FROM pg_replication_slots"
    wait_until(lambda: own.query(status) == [(True,)], "the slot is there")
