"""The publisher's rows change unsent, in tables that were copied and that nobody else writes: conflicts are PostgreSQL's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pubsub.testing.compare import compare_tables
from tests.support.captured_logs import captured_logs
from tests.support.replica import Replica, Stock, wait_until

PLAIN = (
    "CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t SELECT g, 'row ' || g FROM generate_series(1, 20) g;"
)
LEAVES = """
CREATE TABLE t (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);
CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (11);
CREATE TABLE t2 PARTITION OF t FOR VALUES FROM (11) TO (100);
INSERT INTO t SELECT g, 'row ' || g FROM generate_series(1, 20) g;
"""
BY_ROOT = "CREATE PUBLICATION p FOR TABLE t WITH (publish_via_partition_root = true)"
THERE = "CREATE TABLE t (id int PRIMARY KEY, v text)"


class Pair:
    """The same publication, followed by this node and by a stock subscriber, until a conflict stops them."""

    def __init__(self, replica: Replica, stock: Callable[[str], Stock], *ddl: str, **options: object) -> None:
        self.replica = replica
        self.stock = stock(THERE)
        replica.execute(*ddl)
        replica.subscribe(disable_on_error="true", **options)
        self.stock.subscribe(disable_on_error="true", **options)
        self.assert_equal()

    def assert_equal(self) -> None:
        self.stock.assert_equal("t")

    def conflicts(self) -> list[dict[str, int]]:
        """Return the conflicts that the node and the stock subscriber have counted."""
        row = self.stock.server.query(
            f"SELECT to_jsonb(s) FROM pg_stat_subscription_stats s WHERE subname = '{self.stock.name}'", self.stock.name
        )[0][0]
        return [counted(self.replica.node.statistics(self.replica.name)), counted(row)]

    def assert_conflicts(self, **expected: int) -> None:
        wait_until(lambda: self.conflicts() == [expected] * 2, f"both to count {expected}")

    def assert_stopped(self, conflict: str, *, rows: Sequence[int]) -> None:
        """Both have stopped for the same conflict, with the same rows, whose keys are these."""
        wait_until(lambda: not self.enabled(), "both to be disabled")
        assert f"conflict={conflict}" in self.replica.error()
        assert all(conflict in found for found in self.conflicts())
        stock = self.stock.server.conninfo(self.stock.name)
        difference = compare_tables(stock, "public.t", self.replica.path("t"))
        assert difference is None, str(difference)
        assert sorted(row["id"] for row in self.replica.rows("t")) == list(rows)

    def enabled(self) -> bool:
        """Return whether one of the subscriptions is."""
        ours = self.replica.node.fetch(f"SELECT subenabled FROM pg_subscription WHERE subname = '{self.replica.name}'")
        theirs = self.stock.server.query(
            f"SELECT subenabled FROM pg_subscription WHERE subname = '{self.stock.name}'", self.stock.name
        )
        return bool(ours[0]["subenabled"] or theirs[0][0])

    def alter(self, action: str) -> None:
        self.replica.alter(action)
        self.stock.server.execute(f"ALTER SUBSCRIPTION {self.stock.name} {action}", self.stock.name)


def counted(row: dict[str, Any]) -> dict[str, int]:
    return {name.removeprefix("confl_"): n for name, n in row.items() if name.startswith("confl_") and n}


def test_a_partition_is_truncated_and_loaded_again(replica: Replica, stock: Callable[[str], Stock]) -> None:
    """A TRUNCATE of one partition is not sent for a table that is published via its root."""
    pair = Pair(replica, stock, LEAVES, BY_ROOT)
    replica.execute("TRUNCATE t1", "INSERT INTO t SELECT g, 'again' FROM generate_series(1, 10) g")
    pair.assert_stopped("insert_exists", rows=range(1, 21))


@pytest.mark.full
def test_a_truncated_partition_is_told_of(replica: Replica) -> None:
    """In status and log, with what has its rows go; a TRUNCATE of the root, which is sent, is not told of."""
    replica.execute(LEAVES, BY_ROOT)
    replica.subscribe()
    replica.assert_equal("t")

    def told() -> dict[str, Any] | None:
        warnings = replica.node.status_json(replica.name)["warnings"]
        return next((one for one in warnings if "was truncated" in one["message"]), None)

    def truncated() -> dict[str, Any] | None:
        replica.execute("TRUNCATE t1")  # the first ones may come before the partitions' files are known
        return told()

    with captured_logs() as logs:
        found = wait_until(truncated, "the partition to be told of")
    assert found["message"] == "partition public.t1 of table public.t was truncated or written anew"
    assert "still holds the rows" in found["detail"]
    (logged,) = [one for one in logs if one["event"] == "partition was truncated or written anew"]
    assert logged["hint"] == found["hint"]
    assert len(replica.rows("t")) == 20
    replica.alter("RESYNC TABLE public.t")
    wait_until(lambda: told() is None, "the end of the warning")
    replica.assert_equal("t")


@pytest.mark.parametrize("unsent", ["before", "within"])
def test_a_publication_without_delete(replica: Replica, stock: Callable[[str], Stock], unsent: str) -> None:
    """Of a transaction that a conflict stops nothing is applied, whatever tables it writes."""
    other = "CREATE TABLE u (id int PRIMARY KEY)"
    publication = "CREATE PUBLICATION p FOR TABLE t, u WITH (publish = 'insert, update')"
    pair = Pair(replica, lambda ddl: stock(f"{ddl}; {other}"), PLAIN, other, publication)
    replica.execute("INSERT INTO t VALUES (21, 'x'); INSERT INTO u VALUES (1)")
    pair.assert_equal()
    if unsent == "before":
        replica.execute("DELETE FROM t WHERE id = 21", "INSERT INTO u VALUES (2); INSERT INTO t VALUES (21, 'again')")
    else:
        twice = "INSERT INTO t VALUES (22, 'x'); DELETE FROM t WHERE id = 22; INSERT INTO t VALUES (22, 'again')"
        replica.execute(f"INSERT INTO u VALUES (2); {twice}")
    pair.assert_stopped("insert_exists", rows=range(1, 22))
    assert [row["id"] for row in replica.rows("u")] == [1]


def test_a_skipped_transaction_had_deletes(replica: Replica, stock: Callable[[str], Stock]) -> None:
    pair = Pair(replica, stock, PLAIN, "CREATE PUBLICATION p FOR TABLE t")
    pair.alter("DISABLE")
    replica.query("SELECT pg_create_logical_replication_slot('looks', 'pgoutput')")
    replica.execute("DELETE FROM t WHERE id IN (1, 2)")
    ((lsn,),) = replica.query(
        "SELECT '0/0'::pg_lsn + ('x' || encode(substr(data, 2, 8), 'hex'))::bit(64)::bigint FROM "
        "pg_logical_slot_get_binary_changes('looks', NULL, NULL, 'proto_version', '1', 'publication_names', 'p') "
        "WHERE get_byte(data, 0) = ascii('B')"
    )
    replica.query("SELECT pg_drop_replication_slot('looks')")
    pair.alter(f"SKIP (lsn = '{lsn}')")
    pair.alter("ENABLE")
    replica.execute("INSERT INTO t VALUES (30, 'x')")
    pair.assert_equal()
    replica.execute("INSERT INTO t VALUES (1, 'again')")
    pair.assert_stopped("insert_exists", rows=[*range(1, 21), 30])


def test_a_table_is_dropped_and_created_again(replica: Replica, stock: Callable[[str], Stock]) -> None:
    """Neither is sent under FOR ALL TABLES; the new table's rows go to the table of its name."""
    pair = Pair(replica, stock, PLAIN, "CREATE PUBLICATION p FOR ALL TABLES")
    replica.execute("DROP TABLE t", THERE, "INSERT INTO t VALUES (21, 'new')")
    wait_until(lambda: len(replica.rows("t")) == 21, "the new table's row")
    replica.execute("INSERT INTO t VALUES (1, 'new')")
    pair.assert_stopped("insert_exists", rows=range(1, 22))


def test_a_partition_is_loaded_while_it_is_detached(replica: Replica, stock: Callable[[str], Stock]) -> None:
    pair = Pair(replica, stock, LEAVES, BY_ROOT)
    replica.execute(
        "ALTER TABLE t DETACH PARTITION t1",
        "DELETE FROM t1 WHERE id <= 3; INSERT INTO t1 VALUES (0, 'unsent')",
        "ALTER TABLE t ATTACH PARTITION t1 FOR VALUES FROM (0) TO (11)",
        "UPDATE t SET v = 'changed' WHERE id IN (0, 4)",
        "DELETE FROM t WHERE id IN (0, 5)",
    )
    pair.assert_equal()
    pair.assert_conflicts(update_missing=1, delete_missing=1)
    replica.execute("INSERT INTO t VALUES (3, 'again')")
    pair.assert_stopped("insert_exists", rows=[n for n in range(1, 21) if n != 5])


def test_rows_of_another_origin_are_not_sent(replica: Replica, stock: Callable[[str], Stock]) -> None:
    """An UPDATE of a row that was never sent inserts none; one that moves a row takes the key of none that is there."""
    pair = Pair(replica, stock, PLAIN, "CREATE PUBLICATION p FOR TABLE t", origin="none")
    name = replica.database.name
    replica.query(f"SELECT pg_replication_origin_create('{name}')")
    replica.execute(
        f"SELECT pg_replication_origin_session_setup('{name}');"
        "INSERT INTO t SELECT g, 'theirs' FROM generate_series(101, 105) g; DELETE FROM t WHERE id = 7;"
        "SELECT pg_replication_origin_session_reset()",
    )
    replica.query(f"SELECT pg_replication_origin_drop('{name}')")
    replica.execute(
        "UPDATE t SET v = 'changed' WHERE id IN (1, 101)",
        "UPDATE t SET id = 202 WHERE id = 102; UPDATE t SET v = 'again' WHERE id = 202",
        "DELETE FROM t WHERE id IN (2, 103)",
    )
    pair.assert_equal()
    pair.assert_conflicts(update_missing=3, delete_missing=1)
    replica.execute("UPDATE t SET id = 7 WHERE id = 8")
    pair.assert_stopped("update_exists", rows=[1, *range(3, 21)])
