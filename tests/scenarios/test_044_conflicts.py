"""PostgreSQL 18's conflicts: Delta tables whose rows differ from the publisher's, or that others write."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest

from pubsub.delta.places import place
from pubsub.delta.spark.spark_session import Spark
from tests.support import stores
from tests.support.replica import Replica, Stock, wait_until

TABLES = """
CREATE TABLE a (id int PRIMARY KEY, t text);
CREATE TABLE b (id int PRIMARY KEY, t text);
INSERT INTO a SELECT g, 'row ' || g FROM generate_series(1, 20) g;
CREATE PUBLICATION p FOR TABLE a, b;
"""


def table(replica: Replica, name: str) -> dict[str, Any]:
    """Return the table's row in pg_subscription_rel."""
    found = replica.node.fetch(
        f"SELECT r.* FROM pg_subscription_rel r JOIN pg_subscription s ON r.srsubid = s.oid "
        f"WHERE s.subname = '{replica.name}' AND relation = 'public.{name}'"
    )
    return found[0]


def foreign(replica: Replica, spark: Spark, statement: str) -> None:
    """Run a statement of another engine on a's Delta table."""
    spark.session.sql(statement.format(f"delta.`{replica.path('a')}`")).collect()


@pytest.mark.full
def test_a_commit_of_others_is_noticed_at_the_next_batch(replica: Replica, spark: Spark) -> None:
    replica.execute(TABLES)
    replica.subscribe()
    replica.assert_equal("a", "b")
    foreign(replica, spark, "OPTIMIZE {}")
    replica.execute("UPDATE a SET t = 'after OPTIMIZE' WHERE id = 1")
    replica.assert_equal("a", "b")
    assert table(replica, "a")["foreign_commit"] is None
    foreign(replica, spark, "UPDATE {} SET t = 'theirs' WHERE id = 2")
    at = replica.version("a")
    replica.execute("UPDATE a SET t = 'ours' WHERE id = 2; INSERT INTO a VALUES (21, 'ours')")
    replica.assert_equal("a", "b")
    noticed = table(replica, "a")["foreign_commit"]
    assert noticed.startswith(f"version {at}, UPDATE by Apache-Spark/")
    assert conflicts(replica) == {"update_origin_differs": 1}
    status = replica.node.status_json(replica.name)
    assert [t["foreign_commit"] for t in status["tables"] if t["name"] == "public.a"] == [noticed]
    # A copy makes the table this node's alone again.
    replica.alter("RESYNC TABLE a")
    replica.assert_equal("a", "b")
    assert table(replica, "a")["foreign_commit"] is None


@pytest.mark.full
def test_a_table_that_went_back_or_lost_a_file(replica: Replica, spark: Spark) -> None:
    replica.execute(TABLES)
    replica.subscribe(on_table_error="isolate")
    replica.assert_equal("a", "b")
    before = replica.version("a")
    replica.execute("DELETE FROM a WHERE id = 3")
    replica.assert_equal("a", "b")
    foreign(replica, spark, f"RESTORE TABLE {{}} TO VERSION AS OF {before}")
    replica.execute("INSERT INTO a VALUES (30, 'x'); INSERT INTO b VALUES (1, 'x')")
    row = wait_until(lambda: table(replica, "a")["stopped"] and table(replica, "a"), "table a to stop")
    assert "was restored to an earlier version" in row["error"]
    assert "RESYNC TABLE" in row["error_hint"]
    replica.assert_equal("b")
    replica.alter("RESYNC TABLE a")
    replica.assert_equal("a", "b")
    for path in place(replica.path("a")).glob("*.parquet"):
        path.unlink()
    replica.execute("UPDATE a SET t = 'changed' WHERE id = 5; INSERT INTO b VALUES (2, 'x')")
    row = wait_until(lambda: table(replica, "a")["stopped"] and table(replica, "a"), "table a to stop")
    assert "data file" in row["error"]
    replica.assert_equal("b")
    shutil.rmtree(replica.path("a"))
    replica.alter("RESYNC TABLE a")
    replica.assert_equal("a", "b")


def conflicts(replica: Replica) -> dict[str, int]:
    """Return the conflicts that were counted."""
    row = replica.node.statistics(replica.name)
    return {name.removeprefix("confl_"): n for name, n in row.items() if name.startswith("confl_") and n}


MISSING = """
CREATE TABLE a (id int PRIMARY KEY, n int, t text);
ALTER TABLE a ALTER t SET STORAGE EXTERNAL;
CREATE TABLE bare (n int, t text);
ALTER TABLE bare REPLICA IDENTITY FULL;
"""


@pytest.mark.full
def test_rows_that_are_missing_are_passed_over_as_postgresql_does(
    replica: Replica, spark: Spark, stock: Callable[[str], Stock]
) -> None:
    beside = stock(MISSING)
    replica.execute(
        MISSING,
        "INSERT INTO a SELECT g, g, repeat('long', 1000) FROM generate_series(1, 20) g;"
        "INSERT INTO bare SELECT g % 5, 'x' FROM generate_series(1, 10) g; CREATE PUBLICATION p FOR TABLE a, bare",
    )
    replica.subscribe()
    beside.subscribe()
    replica.assert_equal("a", "bare")
    beside.assert_equal("a", "bare")
    for name, where in (("a", "id IN (2, 3, 4, 5, 6, 7, 8)"), ("bare", "n = 1")):
        spark.session.sql(f"DELETE FROM delta.`{replica.path(name)}` WHERE {where}").collect()
        beside.server.execute(f"DELETE FROM {name} WHERE {where}", beside.name)
    replica.execute(
        "UPDATE a SET n = 0 WHERE id <= 3",
        "DELETE FROM a WHERE id IN (1, 4); UPDATE a SET id = 105 WHERE id = 5; UPDATE a SET n = 1 WHERE id = 105",
        "DELETE FROM a WHERE id = 6; INSERT INTO a VALUES (6, 6, 'again'); UPDATE a SET n = 7 WHERE id = 6",
        "UPDATE a SET id = 110, n = 8 WHERE id = 10",
        "UPDATE bare SET t = 'y' WHERE n IN (1, 2)",
        "DELETE FROM bare WHERE n IN (1, 3)",
    )
    beside.assert_equal("a", "bare")
    expected = {"update_missing": 6, "delete_missing": 4}
    assert conflicts(replica) == expected
    wait_until(
        lambda: (
            beside.server.query(
                "SELECT confl_update_missing, confl_delete_missing FROM pg_stat_subscription_stats "
                f"WHERE subname = '{beside.name}'",
                beside.name,
            )
            == [tuple(expected.values())]
        ),
        "the stock subscriber to count the same",
    )


@pytest.mark.full
def test_rows_that_are_in_the_way_stop_the_subscription(replica: Replica, spark: Spark) -> None:
    replica.execute(TABLES)
    replica.subscribe()
    replica.assert_equal("a", "b")
    foreign(replica, spark, "INSERT INTO {} VALUES (100, 'theirs'), (101, 'theirs')")
    replica.execute("INSERT INTO b VALUES (1, 'x'); INSERT INTO a VALUES (100, 'ours')")
    assert replica.error() == 'conflict detected on relation "public.a": conflict=insert_exists'
    detail = replica.node.statistics(replica.name)["error_detail"]
    assert detail == "Key already exists in the Delta table.\nKey (id)=(100); remote row (100, ours)."
    assert conflicts(replica)["insert_exists"] >= 1
    # None of the transaction is applied until the row in the way is deleted; then all of it is.
    assert replica.rows("b") == []
    foreign(replica, spark, "DELETE FROM {} WHERE id = 100")
    wait_until(lambda: replica.rows("b"), "the transaction to be applied")
    replica.execute("UPDATE a SET id = 101 WHERE id = 1")
    wait_until(lambda: "update_exists" in (replica.node.statistics(replica.name)["error"] or ""), "the second conflict")
    foreign(replica, spark, "DELETE FROM {} WHERE id = 101")
    replica.assert_equal("a", "b")
    assert set(conflicts(replica)) == {"insert_exists", "update_exists"}


def test_a_table_that_existed_before(replica: Replica, spark: Spark) -> None:
    """With copy_data = false only existing rows change; b is partitioned, c has mapped columns."""
    replica.execute(
        "CREATE TABLE a (id int PRIMARY KEY, t text); CREATE TABLE b (id int PRIMARY KEY, t text);"
        "INSERT INTO a SELECT g, 'row ' || g FROM generate_series(1, 20) g; INSERT INTO b SELECT * FROM a;"
        'CREATE TABLE c ("the id" int PRIMARY KEY, "a,b" text); INSERT INTO c SELECT * FROM a;'
        "CREATE PUBLICATION p FOR TABLE a, b, c"
    )
    warehouse = stores.warehouse(replica.node.home) / replica.database.name / "public"
    session = spark.session
    rows = session.sql("SELECT CAST(id AS INT) AS id, concat('row ', id) AS t FROM range(1, 6)")
    rows.write.format("delta").partitionBy("t").save(str(warehouse / "b"))
    replica.subscribe(copy_data="false")
    replica.execute(
        *(
            f"UPDATE {name} SET t = 'changed' WHERE id IN (2, 12); DELETE FROM {name} WHERE id IN (3, 13);"
            f"INSERT INTO {name} VALUES (30, 'new')"
            for name in ("a", "b")
        ),
        """INSERT INTO c VALUES (30, 'new'); UPDATE c SET "a,b" = 'changed' WHERE "the id" IN (2, 30)""",
        """UPDATE c SET "a,b" = 'again' WHERE "the id" IN (3, 30); DELETE FROM c WHERE "the id" = 4""",
    )
    replica.caught_up()
    assert sorted((r["id"], r["t"]) for r in replica.rows("a")) == [(30, "new")]
    there = [(1, "row 1"), (2, "changed"), (4, "row 4"), (5, "row 5"), (30, "new")]
    assert sorted((r["id"], r["t"]) for r in replica.rows("b")) == there
    (row,) = replica.rows("c")
    assert tuple(row.values()) == (30, "again")
    # The rows of b are another program's, and its log says so.
    ours = {"update_missing": 5, "delete_missing": 4}
    origins = {"update_origin_differs": 1, "delete_origin_differs": 1}
    assert conflicts(replica) == {**ours, **origins}
    replica.execute("INSERT INTO b VALUES (31, 'x')", "UPDATE b SET t = 'y' WHERE id IN (31, 14)")
    replica.caught_up()
    assert sorted((r["id"], r["t"]) for r in replica.rows("b")) == [*there, (31, "y")]
    assert conflicts(replica) == {**ours, "update_missing": 6, **origins}


@pytest.mark.full
def test_a_table_that_only_spark_reads_is_not_looked_at(replica: Replica, spark: Spark) -> None:
    """deltalake has no type widening, and the change data feed takes a statement of Spark's."""
    replica.execute("CREATE TABLE a (id int PRIMARY KEY, t text)", "CREATE PUBLICATION p FOR TABLE a")
    path = stores.warehouse(replica.node.home) / replica.database.name / "public" / "a"
    spark.session.sql(
        f"CREATE TABLE delta.`{path}` (id INT, t STRING) USING delta "
        "TBLPROPERTIES ('delta.enableTypeWidening' = 'true', 'delta.enableChangeDataFeed' = 'true')"
    )
    spark.session.sql(f"INSERT INTO delta.`{path}` VALUES (1, 'theirs'), (2, 'theirs')")
    replica.subscribe(create_tables="false", copy_data="false")
    replica.execute("INSERT INTO a VALUES (3, 'ours')", "UPDATE a SET t = 'changed'")
    replica.caught_up()
    foreign(replica, spark, "DELETE FROM {} WHERE id = 1")
    replica.execute("DELETE FROM a WHERE id = 3; INSERT INTO a VALUES (4, 'ours')")
    replica.caught_up()
    read = spark.session.read.format("delta").load(str(path)).orderBy("id").collect()
    assert [tuple(row) for row in read] == [(2, "theirs"), (4, "ours")]
    assert conflicts(replica) == {}
