"""ALTER SUBSCRIPTION … RESYNC TABLE: tables are copied anew, whatever their Delta tables have become."""

from __future__ import annotations

import threading

import pytest

from pubsub.errors import UndefinedTable
from tests.support.overlapping import Overlapping
from tests.support.replica import Replica, wait_until

TABLES = """
CREATE TABLE a (id int PRIMARY KEY, t text);
CREATE TABLE b (id int PRIMARY KEY, t text);
INSERT INTO a SELECT g, 'row ' || g FROM generate_series(1, 1000) g;
INSERT INTO b SELECT * FROM a;
CREATE PUBLICATION p FOR TABLE a, b;
"""


@pytest.mark.full
def test_a_table_that_another_writer_has_spoiled(replica: Replica, spark: object) -> None:
    replica.execute(TABLES)
    replica.subscribe()
    replica.assert_equal("a", "b")
    session = spark.session  # type: ignore[attr-defined]
    session.sql(f"DELETE FROM delta.`{replica.path('a')}` WHERE id % 7 = 0")
    session.sql(f"UPDATE delta.`{replica.path('a')}` SET t = 'spoiled' WHERE id % 5 = 0")
    before, other = replica.relation("a").copy_generation, replica.relation("b")
    replica.alter("RESYNC TABLE a")
    replica.execute(
        "UPDATE a SET t = 'after' WHERE id % 3 = 0; INSERT INTO b VALUES (2000, 'b'); DELETE FROM a WHERE id = 8"
    )
    replica.assert_equal("a", "b")
    assert replica.relation("a").copy_generation == before + 1
    assert replica.relation("b").copy_generation == other.copy_generation
    assert replica.states() == {"public.a": "r", "public.b": "r"}
    assert replica.slots() == [replica.name]
    # Later changes are applied as before.
    replica.execute("UPDATE a SET id = -id WHERE id < 10; TRUNCATE b")
    replica.assert_equal("a", "b")


def test_a_table_that_was_dropped_and_made_again(replica: Replica) -> None:
    replica.execute(TABLES)
    replica.subscribe()
    replica.assert_equal("a", "b")
    replica.execute("DROP TABLE a; CREATE TABLE a (id int PRIMARY KEY, t text); INSERT INTO a VALUES (1, 'new')")
    with pytest.raises(UndefinedTable, match=r'table "public\.a" not found on publisher'):
        replica.alter("RESYNC TABLE b, a")
    replica.execute("ALTER PUBLICATION p ADD TABLE a")
    replica.alter("RESYNC TABLE public.a, b")
    replica.execute("INSERT INTO a VALUES (2, 'newer')")
    replica.assert_equal("a", "b")
    assert replica.slots() == [replica.name]


def test_a_table_that_was_renamed(replica: Replica) -> None:
    """It was not found under its old name, and the subscription did not know the new one: no row had told it."""
    replica.execute(TABLES)
    replica.subscribe()
    replica.assert_equal("a", "b")
    replica.execute("ALTER TABLE a RENAME TO c")
    replica.alter("RESYNC TABLE a")
    replica.execute("INSERT INTO c VALUES (2000, 'c')")
    replica.caught_up()
    assert replica.states() == {"public.c": "r", "public.b": "r"}
    replica.assert_equal("c", "b")


@pytest.mark.parametrize("two_phase", ["false", "true"])
def test_a_slot_that_the_publisher_cannot_decode(replica: Replica, two_phase: str) -> None:
    """RESYNC TABLE of every table goes on past it, which the error's hint says."""
    replica.execute(TABLES)
    made = threading.Thread(
        target=replica.query, args=(f"SELECT pg_create_logical_replication_slot('{replica.name}', 'pgoutput')",)
    )
    with Overlapping(replica) as transactions:
        transactions.begin(made.start, meanwhile="TRUNCATE a")
        transactions.last.execute("INSERT INTO a VALUES (-3, 'third')")
        transactions.go_on()
        made.join()
        transactions.last.commit()
    options = {"create_slot": "false", "slot_name": replica.name, "copy_data": "false", "two_phase": two_phase}
    replica.subscribe(**options)
    assert "could not map filenumber" in replica.error()
    statistics = replica.node.statistics(replica.name)
    assert statistics["error_sqlstate"] == "XX000"
    assert "RESYNC TABLE with every table" in statistics["error_hint"]
    enabled = f"SELECT two_phase FROM pg_replication_slots WHERE slot_name = '{replica.name}'"
    wait_until(lambda: replica.query(enabled) == [(two_phase == "true",)], "two-phase commit to be enabled")
    wait_until(lambda: replica.node.statistics(replica.name)["error"], "it to fail with two-phase commit, too")
    replica.alter("RESYNC TABLE a, b")
    replica.execute("INSERT INTO a VALUES (-4, 'later'); DELETE FROM b WHERE id < 10")
    replica.assert_equal("a", "b")
    replica.until_ready()
    assert replica.query(enabled) == [(two_phase == "true",)]
