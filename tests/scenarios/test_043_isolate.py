"""on_table_error = isolate: the failing table stops alone, durably, and only RESYNC TABLE brings it back."""

from __future__ import annotations

from typing import Any

import pytest

from pubsub.delta.places import place, remove_tree
from tests.support.replica import Faults, Replica, wait_until

TABLES = """
CREATE TABLE a (id int PRIMARY KEY, at timestamptz);
CREATE TABLE b (id int PRIMARY KEY, t text);
INSERT INTO a VALUES (1, '2024-01-01'), (2, '2024-01-02');
CREATE PUBLICATION p FOR TABLE a, b;
"""


def table(replica: Replica, name: str) -> dict[str, Any]:
    """Return the table's row in pg_subscription_rel."""
    found = replica.node.fetch(
        f"SELECT r.* FROM pg_subscription_rel r JOIN pg_subscription s ON r.srsubid = s.oid "
        f"WHERE s.subname = '{replica.name}' AND relation = 'public.{name}'"
    )
    return found[0]


def stopped(replica: Replica, name: str) -> dict[str, Any]:
    """Wait until the table has stopped; return its row in pg_subscription_rel."""

    def find() -> dict[str, Any] | None:
        row = table(replica, name)
        return row if row["stopped"] else None

    return wait_until(find, f"table {name} to stop")


def test_a_value_that_does_not_fit_stops_its_table_alone(replica: Replica) -> None:
    replica.execute(TABLES)
    replica.subscribe(on_table_error="isolate", disable_on_error="true")
    replica.assert_equal("a", "b")
    replica.execute(
        "INSERT INTO a VALUES (3, '2024-01-03'); INSERT INTO b VALUES (1, 'before')",
        "INSERT INTO b VALUES (2, 'same'); INSERT INTO a VALUES (4, '2024-01-04'), (5, 'infinity')",
        "INSERT INTO a VALUES (6, '2024-01-06'); INSERT INTO b VALUES (3, 'after')",
    )
    row = stopped(replica, "a")
    assert row["error"].startswith('column "at" of table "public.a":')
    assert 'RESYNC TABLE "public"."a"'.replace('"', "") in row["error_hint"].replace('"', "")
    # The other table and the origin do not wait for it, and the subscription is not disabled.
    replica.execute("INSERT INTO b VALUES (4, 'later'); DELETE FROM a WHERE id = 1")
    replica.assert_equal("b")
    # It holds what the publisher held before the transaction that its error names.
    assert [r["id"] for r in replica.rows("a", "id FROM delta_t ORDER BY id")] == [1, 2, 3]
    assert table(replica, "a")["error_lsn"] == row["error_lsn"] != None  # noqa: E711
    assert replica.node.statistics(replica.name)["apply_error_count"] == 1
    (enabled,) = replica.node.fetch(f"SELECT subenabled FROM pg_subscription WHERE subname = '{replica.name}'")
    assert enabled["subenabled"]
    # Neither a restart of the worker nor the other setting brings it back; a copy does, once Delta can hold the row.
    replica.alter("SET (on_table_error = stop)")
    replica.execute("INSERT INTO b VALUES (5, 'later still')")
    replica.assert_equal("b")
    assert table(replica, "a")["stopped"]
    replica.execute("UPDATE a SET at = '2024-01-05' WHERE id = 5")
    replica.alter("RESYNC TABLE a")
    replica.execute("INSERT INTO a VALUES (7, NULL)")
    replica.assert_equal("a", "b")
    row = table(replica, "a")
    assert (row["stopped"], row["error"], row["error_lsn"], row["srsubstate"]) == (False, None, None, "r")


@pytest.mark.full
def test_a_changed_definition_a_lost_key_and_a_rename(replica: Replica) -> None:
    replica.execute(
        "CREATE TABLE wider (id int PRIMARY KEY); CREATE TABLE keyless (id int PRIMARY KEY, n int);"
        "CREATE TABLE renamed (id int PRIMARY KEY); CREATE TABLE well (id int PRIMARY KEY);"
        "INSERT INTO keyless VALUES (1, 1); CREATE PUBLICATION p FOR TABLE wider, keyless, renamed, well"
    )
    # All that follows is one batch, unless the machine is very slow.
    replica.subscribe(on_table_error="isolate", schema_changes="refuse", batch_age="'1s'")
    names = ("wider", "keyless", "renamed", "well")
    replica.assert_equal(*names)
    replica.execute(
        *(f"INSERT INTO {name} VALUES (2)" for name in names),
        "ALTER TABLE wider ADD more int",
        "INSERT INTO wider VALUES (3, 3); INSERT INTO well VALUES (3)",
        "ALTER TABLE keyless DROP CONSTRAINT keyless_pkey; ALTER TABLE keyless REPLICA IDENTITY NOTHING",
        "INSERT INTO keyless VALUES (3); INSERT INTO well VALUES (4)",
    )
    row = stopped(replica, "wider")
    assert 'is missing replicated column: "more"' in row["error"]
    assert row["error_lsn"] is not None
    replica.execute("ALTER TABLE renamed RENAME TO other", "INSERT INTO other VALUES (3); INSERT INTO well VALUES (5)")
    assert "does not exist" in stopped(replica, "renamed")["error"]
    replica.assert_equal("well")
    assert [r["id"] for r in replica.rows("wider", "id FROM delta_t")] == [2]


def test_a_copy_that_fails_stops_alone_and_leaves_no_slot(replica: Replica) -> None:
    replica.execute(TABLES, "INSERT INTO a VALUES (3, 'infinity')", "INSERT INTO b VALUES (1, 'x')")
    replica.subscribe(on_table_error="isolate")
    row = stopped(replica, "a")
    assert row["srsubstate"] == "d"
    assert row["error_lsn"] is not None
    assert "RESYNC TABLE" in row["error_hint"]
    replica.execute("INSERT INTO b VALUES (2, 'y'); INSERT INTO a VALUES (4, NULL)")
    replica.assert_equal("b")
    wait_until(lambda: replica.slots() == [replica.name], "the sync slot to be dropped")
    assert replica.node.statistics(replica.name)["sync_error_count"] == 1
    replica.execute("DELETE FROM a WHERE id = 3")
    replica.alter("RESYNC TABLE a")
    replica.assert_equal("a", "b")


def test_a_catch_up_that_fails_stops_alone(replica: Replica, fault: Faults) -> None:
    """A change between the copy and the hand-over fails in the sync worker."""
    replica.execute(TABLES)
    fault.arm("copy finished public.a")
    replica.subscribe(on_table_error="isolate")
    fault.wait("copy finished public.a")
    replica.execute("INSERT INTO a VALUES (3, 'infinity'); INSERT INTO b VALUES (1, 'x')")
    wait_until(lambda: replica.rows("b"), "apply to pass the transaction")
    fault.release("copy finished public.a")
    stopped(replica, "a")
    replica.execute("INSERT INTO a VALUES (4, NULL); INSERT INTO b VALUES (2, 'x')")
    replica.assert_equal("b")
    wait_until(lambda: replica.slots() == [replica.name], "the sync slot to be dropped")
    assert [r["id"] for r in replica.rows("a", "id FROM delta_t ORDER BY id")] == [1, 2]


@pytest.mark.parametrize("policy", ["isolate", "stop"])
def test_a_delta_table_that_was_deleted(replica: Replica, policy: str) -> None:
    replica.execute(TABLES)
    replica.subscribe(on_table_error=policy)
    replica.assert_equal("a", "b")
    replica.execute("INSERT INTO b VALUES (1, 'x'); INSERT INTO a VALUES (3, NULL)")
    replica.assert_equal("a", "b")
    remove_tree(place(replica.path("a")))
    replica.execute("INSERT INTO b VALUES (2, 'x'); INSERT INTO a VALUES (4, NULL)")
    if policy == "isolate":
        row = stopped(replica, "a")
        assert "does not exist" in row["error"]
        assert "RESYNC TABLE" in row["error_hint"]
        replica.assert_equal("b")
    else:
        assert "does not exist" in replica.error()
        wait_until(lambda: table(replica, "a")["error"], "the table's error")
        assert "RESYNC TABLE" in replica.node.statistics(replica.name)["error_hint"]
    replica.alter("RESYNC TABLE a")
    replica.assert_equal("a", "b")
    wait_until(lambda: not table(replica, "a")["error"], "the error to be cleared")
