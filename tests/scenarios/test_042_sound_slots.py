"""Tables altered while a slot is made: PostgreSQL decodes from it as if they had not been, so it is made again."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from pubsub.sql.identifiers import quote_literal
from tests.support.captured_logs import captured_logs
from tests.support.overlapping import Overlapping
from tests.support.replica import Faults, Replica

TABLES = """
CREATE TABLE a (id int PRIMARY KEY, t text);
CREATE TABLE b (id int PRIMARY KEY, t text);
INSERT INTO a SELECT g, 'row ' || g FROM generate_series(1, 100) g;
CREATE PUBLICATION p FOR TABLE a, b;
"""


@pytest.mark.parametrize("altered", ["ALTER TABLE a ADD COLUMN c int", "TRUNCATE a", "ALTER TABLE a RENAME t TO c"])
def test_the_subscriptions_slot(replica: Replica, altered: str) -> None:
    """Once the subscription stopped: its publisher could not decode, or told of a table that it no longer had."""
    replica.execute(TABLES)
    results: list[Any] = []

    def create() -> None:
        conninfo = quote_literal(replica.conninfo)
        results.extend(
            replica.node.execute(
                f"CREATE SUBSCRIPTION {replica.name} CONNECTION {conninfo} PUBLICATION p WITH (copy_data = false)"
            )
        )
        replica.created = True

    creating = threading.Thread(target=create)
    with Overlapping(replica) as transactions:
        transactions.begin(creating.start, meanwhile=altered)
        transactions.last.execute("INSERT INTO a VALUES (1001, 'while')")
        transactions.go_on()
        # The slot was there, and is made again.
        transactions.waited_for(transactions.last)
        transactions.last.commit()
        creating.join()
    ((again,),) = [[one for one in result.notices if "is made again" in one.message] for result in results]
    assert "public.a" in again.detail
    replica.execute("INSERT INTO a VALUES (1002, 'later'), (1003, 'later'); UPDATE a SET id = -id WHERE id = 1003")
    replica.assert_equal("a", where="id > 1001 OR id < 0")


def test_a_tables_slot(replica: Replica, fault: Faults) -> None:
    """Once such a table was copied again."""
    replica.execute(TABLES)
    fault.arm("init public.a")
    replica.subscribe()
    fault.wait("init public.a")
    with Overlapping(replica) as transactions, captured_logs() as logs:
        transactions.begin(lambda: fault.release("init public.a"), meanwhile="ALTER TABLE a ADD COLUMN c int DEFAULT 1")
        transactions.last.execute("INSERT INTO a VALUES (1001, 'while', 2)")
        transactions.go_on()
        transactions.waited_for(transactions.last)
        transactions.last.commit()
        replica.execute("INSERT INTO a VALUES (1002, 'later', 3); UPDATE a SET id = -id WHERE id % 10 = 0")
        replica.assert_equal("a", "b")
    (again,) = [one for one in logs if one["event"] == "replication slot is made again"]
    assert again["altered"] == "public.a"
    assert not [one for one in logs if one["event"] == "copy starts over"]


def test_tables_that_are_altered_all_the_time(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last slot stays, and the user is told."""
    replica.execute(TABLES)
    queries = {
        "_NEXT_XID": "SELECT clock_timestamp()::text",
        "_ALTERED": "SELECT 'public.a' WHERE $1::text <> ''",
        "_ALTERED_TABLE": "SELECT NULL::text WHERE $1::text <> $2::text",
    }
    for name, query in queries.items():
        monkeypatch.setattr(f"pubsub.publisher.sound_slots.{name}", query)
    conninfo = quote_literal(replica.conninfo)
    (result,) = replica.node.execute(f"CREATE SUBSCRIPTION {replica.name} CONNECTION {conninfo} PUBLICATION p")
    replica.created = True
    told = [(one.severity, one.message) for one in result.notices if "replication slot" in one.message]
    assert told == [
        ("NOTICE", f'replication slot "{replica.name}" is made again'),
        ("NOTICE", f'replication slot "{replica.name}" is made again'),
        ("WARNING", f'replication slot "{replica.name}" may decode its first changes wrongly'),
        ("NOTICE", f'created replication slot "{replica.name}" on publisher'),
    ]
    replica.assert_equal("a", "b")


def test_a_look_at_the_catalogs_that_fails(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    """No slot is left."""
    replica.execute(TABLES)
    monkeypatch.setattr("pubsub.publisher.sound_slots._NEXT_XID", "SELECT clock_timestamp()::text")
    error = replica.refused("copy_data = true")
    assert error.sqlstate == "22P02", error
    assert replica.slots() == []
