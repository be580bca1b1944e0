"""Everything that depends on the protocol, on PostgreSQL 15, 16 and 17; all else is tested on 18 alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pubsub.delta.spark.spark_session import Spark
from pubsub.testing.fixtures import Database, Servers
from tests.support.replica import Replica, RunningNode

TABLES = ("a", "composite", "full_keyless", "keyless", "part", "types")
DDL = """
CREATE TABLE a (id int PRIMARY KEY, n int, big text);
ALTER TABLE a ALTER big SET STORAGE EXTERNAL;
INSERT INTO a SELECT g, g, repeat(md5(g::text), 200) FROM generate_series(1, 50) g;
CREATE TABLE composite (t text, d date, n numeric(8,2), PRIMARY KEY (d, t));
INSERT INTO composite SELECT g % 5, date '2024-01-01' + g, g / 3.0 FROM generate_series(1, 50) g;
CREATE TABLE full_keyless (a int, t text);
ALTER TABLE full_keyless REPLICA IDENTITY FULL;
INSERT INTO full_keyless SELECT g % 3, NULLIF(g % 4, 0) FROM generate_series(1, 24) g;
CREATE TABLE keyless (a int);
INSERT INTO keyless VALUES (1), (1);
CREATE TABLE part (id int PRIMARY KEY, t text) PARTITION BY HASH (id);
CREATE TABLE part_0 PARTITION OF part FOR VALUES WITH (MODULUS 2, REMAINDER 0);
CREATE TABLE part_1 PARTITION OF part FOR VALUES WITH (MODULUS 2, REMAINDER 1);
INSERT INTO part SELECT g, g FROM generate_series(1, 50) g;
CREATE TABLE types (id int PRIMARY KEY, b bool, f8 float8, at timestamptz, ts timestamp, y bytea, u uuid, j jsonb,
    i interval, an int[]);
INSERT INTO types VALUES (1, true, 0.1, '2024-01-01 00:00:00.123456+00', '1582-10-10', '\\x00ff', md5('')::uuid,
    '{"a": 1}', '1 mon -1 day', '{1,NULL}');
CREATE TABLE listed (secret text, id int PRIMARY KEY, t text);
INSERT INTO listed SELECT 's', g, g FROM generate_series(1, 50) g;
CREATE PUBLICATION p FOR TABLE a, composite, full_keyless, types, part, listed (id, t) WHERE (id > 10)
    WITH (publish_via_partition_root);
CREATE PUBLICATION q FOR TABLE keyless WITH (publish = 'insert, truncate');
"""
CHANGES = """
INSERT INTO a VALUES (100, 1, 'x');
UPDATE a SET n = -n WHERE id < 10;
UPDATE a SET id = id + 1000 WHERE id BETWEEN 10 AND 20;
UPDATE a SET n = 0 WHERE id = 1011;
DELETE FROM a WHERE id BETWEEN 30 AND 35;
UPDATE composite SET t = 'moved' WHERE n < 3;
DELETE FROM composite WHERE n > 15;
DELETE FROM full_keyless WHERE ctid IN (SELECT ctid FROM full_keyless WHERE a = 1 LIMIT 2);
UPDATE full_keyless SET t = 'u' WHERE ctid IN (SELECT ctid FROM full_keyless WHERE a = 2 LIMIT 2);
INSERT INTO keyless VALUES (1), (2);
UPDATE part SET t = 'p' WHERE id < 10; UPDATE part SET id = id + 101 WHERE id > 40;
UPDATE types SET at = at + interval '1 us', y = y || '\\x01', j = NULL;
INSERT INTO types (id) VALUES (2);
UPDATE listed SET t = 'u', secret = 'x'; UPDATE listed SET id = -5 WHERE id = 11; DELETE FROM listed WHERE id = 12;
"""


@pytest.fixture(params=["15", "16", "17"])
def old(request: pytest.FixtureRequest, servers: Servers) -> Iterator[Database]:
    """An empty database on each older version in turn."""
    server = servers[request.param]
    name = f"old_{request.param}"
    server.create_database(name)
    yield Database(server, name)
    server.drop_database(name)


def test_copy_apply_restart(old: Database, spark: Spark, tmp_path: Path) -> None:
    with RunningNode(tmp_path, spark) as node:
        replica = Replica(node, old)
        replica.execute(DDL)
        replica.subscribe("p, q")
        compare(replica)
        replica.execute(CHANGES)
        compare(replica)
        replica.execute("TRUNCATE a, keyless; INSERT INTO a VALUES (1, 1, repeat('x', 9000))", "TRUNCATE part CASCADE")
        compare(replica)
    # Changes while no node runs; the first leaves a value out of the stream.
    replica.execute(
        "UPDATE a SET n = 2", "INSERT INTO part VALUES (1, 'a'), (2, 'b')", "INSERT INTO keyless VALUES (9)"
    )
    with RunningNode(tmp_path, spark) as node:
        replica.node = node
        compare(replica)
        replica.execute("ALTER TABLE part ADD CONSTRAINT c CHECK (id > 0); DELETE FROM part WHERE id = 1")
        compare(replica)
        # The walsender is terminated: the worker connects again.
        replica.query(
            f"SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = '{replica.name}'"
        )
        replica.execute("UPDATE a SET n = 3")
        compare(replica)
        assert replica.slots() == [replica.name]
        replica.drop()
    assert replica.slots() == []


def compare(replica: Replica) -> None:
    replica.assert_equal(*TABLES)
    replica.assert_equal("listed", columns=["id", "t"], where="id > 10")
