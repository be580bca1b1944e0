"""Transactions that are streamed while in progress (src/test/subscription/t/015 to 019), on PostgreSQL 15 to 18.

The publisher streams from 64 kB on, and the node has 64 kB for changes, so every transaction here arrives in many
blocks and is moved to disk.  After each one, all rows are compared with the publisher's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

import apply.staging.stage_batch
from pubsub.delta.spark.spark_session import Spark
from pubsub.testing.fixtures import Database, Servers
from tablesync import choose_copier
from tests.support.disk import room_for
from tests.support.replica import Replica, RunningNode, Stock, wait_until

DDL = """
CREATE TABLE a (id int PRIMARY KEY, n int, t text);
CREATE TABLE b (id bigint, k text, v numeric(8,2), PRIMARY KEY (k, id));
CREATE TABLE big (id int PRIMARY KEY, n int, t text);
ALTER TABLE big ALTER t SET STORAGE EXTERNAL;
CREATE TABLE keyless (n int, t text);
CREATE TABLE full_keyless (n int, t text);
ALTER TABLE full_keyless REPLICA IDENTITY FULL;
"""
ROWS = """
INSERT INTO a SELECT g, 0, md5(g::text) FROM generate_series(1, 2000) g;
INSERT INTO big SELECT g, 0, repeat(md5(g::text), 100) FROM generate_series(1, 200) g;
"""
TABLES = ("a", "b", "big", "keyless", "full_keyless")

SIMPLE = """
BEGIN;
INSERT INTO a SELECT g, 1, md5(g::text) FROM generate_series(3000, 6000) g;
INSERT INTO b SELECT g, g % 7, g / 4.0 FROM generate_series(1, 3000) g;
UPDATE a SET n = n + 1, t = t || 'x' WHERE id % 3 = 0;
UPDATE a SET id = id + 10000 WHERE id % 10 = 1;
UPDATE big SET n = n + 1 WHERE id % 2 = 0;
UPDATE big SET id = -id WHERE id % 5 = 0;
UPDATE b SET k = 'moved ' || k WHERE id % 4 = 0;
DELETE FROM a WHERE id % 4 = 0;
DELETE FROM b WHERE id % 9 = 0;
INSERT INTO keyless SELECT g % 10, 'x' FROM generate_series(1, 3000) g;
INSERT INTO full_keyless SELECT g % 10, g % 3 FROM generate_series(1, 2000) g;
UPDATE full_keyless SET t = 'u' WHERE ctid IN (SELECT ctid FROM full_keyless WHERE n = 3 LIMIT 20);
DELETE FROM full_keyless WHERE ctid IN (SELECT ctid FROM full_keyless WHERE n = 4 LIMIT 20);
COMMIT
"""
SUBTRANSACTIONS = """
BEGIN;
INSERT INTO a SELECT g, 1, 'top' FROM generate_series(20000, 21000) g;
SAVEPOINT s1;
INSERT INTO a SELECT g, 1, 's1' FROM generate_series(21001, 22000) g;
UPDATE a SET n = 100 WHERE id < 500;
SAVEPOINT s2;
INSERT INTO a SELECT g, 1, 's2, rolled back' FROM generate_series(22001, 24000) g;
DELETE FROM a WHERE id < 300;
SAVEPOINT s3;
UPDATE a SET t = 's3, rolled back with s2' WHERE id > 1000;
RELEASE SAVEPOINT s3;
ROLLBACK TO SAVEPOINT s2;
INSERT INTO a SELECT g, 1, 's2 again' FROM generate_series(22001, 23000) g;
SAVEPOINT s4;
DELETE FROM b;
INSERT INTO b SELECT g, 's4', 0 FROM generate_series(1, 2000) g;
ROLLBACK TO SAVEPOINT s1;
INSERT INTO a SELECT g, 1, 'after s1' FROM generate_series(21001, 22500) g;
SAVEPOINT s5;
UPDATE a SET n = n - 1 WHERE id > 21000;
RELEASE SAVEPOINT s5;
COMMIT
"""
#: Each row is in a subtransaction of its own; half of them are rolled back.
MANY_SUBTRANSACTIONS = """
DO $$ BEGIN
    FOR i IN 1..2000 LOOP
        BEGIN
            INSERT INTO a VALUES (30000 + i, i, repeat('s', 50));
            UPDATE a SET n = n + 1 WHERE id = i;
            IF i % 2 = 0 THEN RAISE EXCEPTION 'no'; END IF;
        EXCEPTION WHEN raise_exception THEN
            NULL;
        END;
    END LOOP;
END $$
"""
#: Definitions that hold from there on, and one that is rolled back.  (The table must not change after the latter:
#: PostgreSQL's walsender, when it streams, then fails with "could not map filenumber".)
DEFINITIONS = """
BEGIN;
INSERT INTO a SELECT g, 1, 'before' FROM generate_series(40000, 42000) g;
ALTER TABLE a REPLICA IDENTITY FULL;
UPDATE a SET n = 7 WHERE id > 40500;
ALTER TABLE a REPLICA IDENTITY DEFAULT;
UPDATE a SET n = 8 WHERE id > 41500;
SAVEPOINT s;
ALTER TABLE a ADD extra text DEFAULT 'rolled back';
INSERT INTO a SELECT g, 1, 'lost', 'lost' FROM generate_series(42001, 44000) g;
UPDATE a SET extra = 'lost' WHERE id > 40000;
ROLLBACK TO SAVEPOINT s;
INSERT INTO b SELECT g, 'after', 0 FROM generate_series(1, 500) g;
COMMIT
"""
TRUNCATES = """
BEGIN;
INSERT INTO keyless SELECT g, 'void' FROM generate_series(1, 3000) g;
INSERT INTO b SELECT g, 'void', 0 FROM generate_series(1, 3000) g;
TRUNCATE keyless, b;
INSERT INTO keyless SELECT g, 'kept' FROM generate_series(1, 2000) g;
SAVEPOINT s;
TRUNCATE a;
INSERT INTO a SELECT g, 1, 'lost' FROM generate_series(1, 2000) g;
ROLLBACK TO SAVEPOINT s;
INSERT INTO b SELECT g, 'kept', 0 FROM generate_series(1, 2000) g;
COMMIT
"""
ROLLED_BACK = """
BEGIN;
INSERT INTO a SELECT g, 1, 'lost' FROM generate_series(50000, 53000) g;
DELETE FROM b;
ROLLBACK
"""
ALL = (SIMPLE, SUBTRANSACTIONS, MANY_SUBTRANSACTIONS, DEFINITIONS, TRUNCATES, ROLLED_BACK)


def prepare(database: Database) -> None:
    """Make the tables, and let the walsenders of this database alone stream early."""
    database.execute(f"ALTER DATABASE {database.name} SET logical_decoding_work_mem = '64kB'")
    database.execute(DDL)
    database.execute("CREATE PUBLICATION p FOR TABLE a, b, big, full_keyless")
    database.execute("CREATE PUBLICATION q FOR TABLE keyless WITH (publish = 'insert, truncate')")
    database.execute(ROWS)


def streamed(replica: Replica) -> int:
    """Return how many blocks the slot has streamed."""
    replica.caught_up()
    query = f"SELECT stream_count FROM pg_stat_replication_slots WHERE slot_name = '{replica.name}'"
    return int(wait_until(lambda: replica.query(query)[0][0], "blocks to be streamed"))


def counters(replica: Replica) -> dict[str, int] | None:
    """Return the subscriber's counters once it has counted all streams; None before."""
    (row,) = replica.node.fetch("SELECT * FROM pg_stat_subscription_stats")
    return row if row["stream_txns"] >= len(ALL) - 1 else None


@pytest.fixture
def any_replica(request: pytest.FixtureRequest, servers: Servers, spark: Spark, tmp_path: Path) -> Iterator[Replica]:
    """A node of its own with 64 kB for changes, and an empty database on each version."""
    server = servers[request.param]
    database = Database(server, f"stream_{request.param}")
    server.create_database(database.name)
    prepare(database)
    with RunningNode(tmp_path, spark, logical_decoding_work_mem="64kB") as node:
        replica = Replica(node, database)
        yield replica
        if replica.created:
            replica.drop()
    server.drop_database(database.name)


def on(*versions: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("any_replica", versions, indirect=True)


@pytest.mark.parametrize(
    ("any_replica", "streaming", "binary"),
    [("15", "on", False), ("16", "parallel", True), ("17", "on", True), ("18", "parallel", False)],
    indirect=["any_replica"],
)
def test_streamed_transactions(any_replica: Replica, streaming: str, binary: bool) -> None:
    replica = any_replica
    replica.subscribe("p, q", streaming=streaming, binary=str(binary).lower())
    replica.assert_equal(*TABLES)
    for statements in ALL:
        replica.database.execute(statements)
        replica.assert_equal(*TABLES)
    assert streamed(replica) > 20
    counted = wait_until(lambda: counters(replica), "the counters to be written")
    assert counted["stream_count"] > 20
    assert counted["stream_bytes"] > counted["stream_txns"] * 65536
    assert counted["spill_count"] >= counted["spill_txns"] > 0
    assert counted["spill_bytes"] > 65536
    spill = replica.node.home / "spill"
    assert [path for path in spill.rglob("*") if path.suffix == ".arrows"] == []


@pytest.mark.full
@on("18")
def test_a_batch_that_is_prepared_in_parts(any_replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage as if the batch were too large to be decoded at once: of each changed table, part of the keys at a time."""
    monkeypatch.setattr(apply.staging.stage_batch, "_WHOLE", 60_000)
    replica = any_replica
    replica.subscribe("p, q")
    replica.assert_equal(*TABLES)
    for statements in ALL:
        replica.database.execute(statements)
        replica.assert_equal(*TABLES)


@pytest.mark.full
@on("18")
def test_off_streams_nothing_and_spills_all_the_same(any_replica: Replica) -> None:
    replica = any_replica
    replica.subscribe("p, q", streaming="off")
    for statements in ALL:
        replica.database.execute(statements)
    replica.assert_equal(*TABLES)
    query = f"SELECT stream_count FROM pg_stat_replication_slots WHERE slot_name = '{replica.name}'"
    assert replica.query(query) == [(0,)]


@on("18")
def test_interleaved_transactions(any_replica: Replica) -> None:
    """Three at a time over the same tables, one of them rolled back; they commit in another order than they begin."""
    replica = any_replica
    replica.subscribe("p, q")
    replica.assert_equal(*TABLES)
    connections = [psycopg.connect(replica.conninfo) for _ in range(3)]
    try:
        for step in range(5):
            for number, connection in enumerate(connections):
                first = 100000 * (number + 1) + 1000 * step
                connection.execute(
                    f"INSERT INTO a SELECT g, {number}, repeat('i', 40) FROM generate_series({first}, {first + 999}) g"
                )
                connection.execute(f"UPDATE a SET n = n + 10 WHERE id = {number + 1}")
            replica.execute(f"INSERT INTO keyless VALUES ({step}, 'beside')")
        connections[2].commit()
        connections[1].rollback()
        replica.execute("UPDATE a SET n = -n WHERE id BETWEEN 300000 AND 300500")
        connections[0].commit()
    finally:
        for connection in connections:
            connection.close()
    replica.assert_equal(*TABLES)
    assert streamed(replica) > 5


@on("18")
def test_the_disk_is_full(any_replica: Replica) -> None:
    """The error is reported and the worker tries again; once there is room, nothing is missing."""
    replica = any_replica
    replica.subscribe("p, q")
    replica.assert_equal(*TABLES)
    with room_for(100_000):
        replica.database.execute(SIMPLE)
        assert "No space left on device" in replica.error()
        (row,) = replica.node.fetch("SELECT error_sqlstate, error_hint FROM pg_stat_subscription_stats")
        assert row["error_sqlstate"] == "53100"
        assert "tried again" in row["error_hint"]
    replica.assert_equal(*TABLES)
    assert not list((replica.node.home / "spill").rglob("*.arrows"))


@on("17")
def test_the_connection_is_cut_between_blocks(any_replica: Replica) -> None:
    """Blocks that were streamed before the cut are streamed again."""
    replica = any_replica
    replica.subscribe("p, q")
    replica.assert_equal(*TABLES)
    with psycopg.connect(replica.conninfo) as connection:
        for step in range(4):
            connection.execute(
                f"INSERT INTO a SELECT g, 1, repeat('c', 40) FROM generate_series(60000 + {step} * 2000, 61999 + {step} * 2000) g"
            )
            connection.execute("UPDATE a SET n = n + 1 WHERE id < 500")
            replica.execute(f"INSERT INTO keyless VALUES ({step}, 'beside')")
            replica.caught_up()
            replica.query(
                f"SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = '{replica.name}'"
            )
        connection.commit()
    replica.assert_equal(*TABLES)


def test_beside_a_stock_subscriber(replica: Replica, stock: Callable[[str], Stock]) -> None:
    prepare(replica.database)
    beside = stock(DDL)
    replica.subscribe("p, q")
    beside.subscribe("p, q")
    replica.assert_equal(*TABLES)
    for statements in ALL:
        replica.database.execute(statements)
    beside.assert_equal(*TABLES)
    assert streamed(replica) > 20


@pytest.mark.full
@pytest.mark.parametrize("streaming", ["parallel"])
def test_a_value_past_max_message_size(database: Database, spark: Spark, tmp_path: Path, streaming: str) -> None:
    """It is refused with its size and the setting's name; with a larger setting it is applied."""
    prepare(database)
    with RunningNode(tmp_path, spark, max_message_size="1MB") as node:
        replica = Replica(node, database)
        replica.subscribe("p, q", streaming=streaming)
        replica.assert_equal(*TABLES)
        replica.execute("INSERT INTO big VALUES (1000, 1, repeat('x', 2000000))")
        assert "the publisher sent a message of 2000" in replica.error()
        (row,) = node.fetch("SELECT error_hint AS hint FROM pg_stat_subscription_stats")
        assert "max_message_size" in row["hint"]
    with RunningNode(tmp_path, spark) as node:
        replica.node = node
        replica.assert_equal(*TABLES)
        replica.drop()


@pytest.mark.full
@pytest.mark.parametrize("job", [False, True])
def test_a_row_past_max_message_size_is_not_copied(
    database: Database, spark: Spark, tmp_path: Path, job: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for the stream: its size and the setting's name, from this process and from a task of Spark's."""
    prepare(database)
    database.execute("INSERT INTO big VALUES (1000, 1, repeat('x', 2000000))")
    monkeypatch.setattr(choose_copier, "takes_job", lambda size: job)
    with RunningNode(tmp_path, spark, max_message_size="1MB") as node:
        replica = Replica(node, database)
        replica.subscribe("p, q")
        error = replica.error()
        assert re.fullmatch(
            r'a row of table "public.big" takes 20000\d\d bytes, more than max_message_size, 1048576', error
        )
        assert replica.states()["public.big"] == "d"
    with RunningNode(tmp_path, spark) as node:
        replica.node = node
        replica.assert_equal(*TABLES)
        replica.drop()


@pytest.mark.soak
def test_a_value_of_200_mb(replica: Replica) -> None:
    prepare(replica.database)
    replica.subscribe("p, q")
    replica.execute("INSERT INTO big VALUES (1000, 1, repeat('0123456789', 20000000))")
    replica.caught_up()
    assert replica.rows("big", "length(t) AS n FROM delta_t WHERE id = 1000") == [{"n": 200_000_000}]
