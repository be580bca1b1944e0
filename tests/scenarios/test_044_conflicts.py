"""Rows that are not as the publisher thinks: PostgreSQL 18's conflicts, and Delta tables that others write."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from apply.delta.session import Spark
from tests.replica import Replica, wait_until

TABLES = """
CREATE TABLE a (id int PRIMARY KEY, t text);
CREATE TABLE b (id int PRIMARY KEY, t text);
INSERT INTO a SELECT g, 'row ' || g FROM generate_series(1, 20) g;
CREATE PUBLICATION p FOR TABLE a, b;
"""


def table(replica: Replica, name: str) -> dict[str, Any]:
    """The table's row in pg_subscription_rel."""
    found = replica.node.fetch(
        f"SELECT r.* FROM pg_subscription_rel r JOIN pg_subscription s ON r.srsubid = s.oid "
        f"WHERE s.subname = '{replica.name}' AND relation = 'public.{name}'"
    )
    return found[0]


def foreign(replica: Replica, spark: Spark, statement: str) -> None:
    """Another engine's statement on a's Delta table."""
    spark.session.sql(statement.format(f"delta.`{replica.path('a')}`")).collect()


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
    status = replica.node.status_json(replica.name)
    assert [t["foreign_commit"] for t in status["tables"] if t["name"] == "public.a"] == [noticed]
    # A copy makes it this node's alone again.
    replica.alter("RESYNC TABLE a")
    replica.assert_equal("a", "b")
    assert table(replica, "a")["foreign_commit"] is None


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
    for path in Path(replica.path("a")).glob("*.parquet"):
        path.unlink()
    replica.execute("UPDATE a SET t = 'changed' WHERE id = 5; INSERT INTO b VALUES (2, 'x')")
    row = wait_until(lambda: table(replica, "a")["stopped"] and table(replica, "a"), "table a to stop")
    assert "data file" in row["error"]
    replica.assert_equal("b")
    shutil.rmtree(replica.path("a"))
    replica.alter("RESYNC TABLE a")
    replica.assert_equal("a", "b")
