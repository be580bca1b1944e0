"""Partitions, published as their root, whose replica identities differ from the root's.

The publisher sends the root's columns with the old values that the partition's replica identity has.
"""

from __future__ import annotations

import pytest

from pubsub.publisher.check import check
from pubsub.testing.fixtures import Database
from tests.support.replica import Replica, RunningNode, wait_until

FULL_AT_THE_ROOT = """
CREATE TABLE m (id int NOT NULL, n int) PARTITION BY RANGE (id);
CREATE TABLE "m One" PARTITION OF m FOR VALUES FROM (0) TO (100);
CREATE TABLE m2 PARTITION OF m FOR VALUES FROM (100) TO (200);
ALTER TABLE "m One" ADD PRIMARY KEY (id);
ALTER TABLE m REPLICA IDENTITY FULL;
ALTER TABLE m2 REPLICA IDENTITY FULL;
"""
ANOTHER_INDEX = """
CREATE TABLE m (id int PRIMARY KEY, n int NOT NULL) PARTITION BY RANGE (id);
CREATE TABLE "m One" PARTITION OF m FOR VALUES FROM (0) TO (100);
CREATE TABLE m2 PARTITION OF m FOR VALUES FROM (100) TO (200);
CREATE UNIQUE INDEX m1_n ON "m One" (n);
ALTER TABLE "m One" REPLICA IDENTITY USING INDEX m1_n;
"""
ROWS = "INSERT INTO m SELECT g, g FROM generate_series(0, 199) g"
PUBLICATION = "CREATE PUBLICATION p FOR TABLE m WITH (publish_via_partition_root = true)"

CASES = [
    pytest.param(FULL_AT_THE_ROOT, 'ALTER TABLE public."m One" REPLICA IDENTITY FULL;', id="full at the root"),
    pytest.param(ANOTHER_INDEX, 'ALTER TABLE public."m One" REPLICA IDENTITY DEFAULT;', id="another index"),
]


@pytest.mark.parametrize(("ddl", "change"), CASES)
def test_the_partition_is_named(replica: Replica, ddl: str, change: str) -> None:
    replica.execute(ddl, ROWS, PUBLICATION)
    replica.subscribe()
    replica.assert_equal("m")
    replica.execute("UPDATE m SET n = -1 WHERE id = 7")
    assert "did not send replica identity column" in replica.error()
    told = replica.node.statistics(replica.name)
    assert 'partition "public.m One"' in told["error_detail"]
    assert change in told["error_hint"]
    # What the hint says helps.
    replica.execute(change)
    replica.alter("RESYNC TABLE m")
    replica.execute("DELETE FROM m WHERE id = 8; UPDATE m SET n = -n WHERE id % 5 = 0")
    replica.assert_equal("m")


def test_a_partition_of_a_table_that_stops_alone(replica: Replica) -> None:
    replica.execute(ANOTHER_INDEX, ROWS, PUBLICATION)
    replica.subscribe(on_table_error="isolate")
    replica.assert_equal("m")
    replica.execute("UPDATE m SET n = -1 WHERE id = 7")
    wait_until(lambda: replica.relation("m").stopped, "the table to stop")
    hint = replica.relation("m").error_hint or ""
    assert 'ALTER TABLE public."m One" REPLICA IDENTITY DEFAULT;' in hint
    assert "RESYNC TABLE public.m" in hint


@pytest.mark.parametrize(("ddl", "change"), CASES)
async def test_check_names_the_partition(any_database: Database, ddl: str, change: str) -> None:
    any_database.execute(ddl)
    any_database.execute(PUBLICATION)
    found = [finding for finding in await check(any_database.conninfo, ["p"]) if finding.change == (change,)]
    assert [finding.severity for finding in found] == ["error"]
    assert 'partition "public.m One"' in found[0].message
    any_database.execute(change)
    assert [f for f in await check(any_database.conninfo, ["p"]) if f.change] == []


GENERATED = """
CREATE TABLE g (a int NOT NULL, b int GENERATED ALWAYS AS (a * 2) STORED PRIMARY KEY, n int);
CREATE PUBLICATION p FOR TABLE g
"""


async def test_check_of_a_generated_key(any_database: Database) -> None:
    """Up to 17 the publisher sends updates without the key; from 18 on it refuses them."""
    any_database.execute(GENERATED)
    (found,) = [f for f in await check(any_database.conninfo, ["p"]) if f.change]
    old = any_database.server.version < "18"
    assert found.severity == ("error" if old else "warning")
    assert found.message.startswith("updates and deletes of" if old else 'cannot update table "g"')
    assert found.change == ("ALTER TABLE public.g REPLICA IDENTITY FULL;",)


@pytest.mark.parametrize("any_database", ["17"], indirect=True)
def test_a_generated_key_is_named(node: RunningNode, any_database: Database) -> None:
    replica = Replica(node, any_database)
    replica.execute(GENERATED, "INSERT INTO g (a) SELECT generate_series(1, 20)")
    replica.subscribe()
    replica.assert_equal("g", columns=["a", "n"])
    replica.execute("UPDATE g SET n = a")
    assert "neither REPLICA IDENTITY index nor PRIMARY KEY" in replica.error()
    told = node.statistics(replica.name)
    assert 'generated column "b"' in told["error_detail"]
    change = "ALTER TABLE public.g REPLICA IDENTITY FULL;"
    assert change in told["error_hint"]
    replica.execute(change)
    replica.alter("RESYNC TABLE g")
    replica.execute("UPDATE g SET n = a + 1; DELETE FROM g WHERE a = 3")
    replica.assert_equal("g", columns=["a", "n"])
    replica.drop()
