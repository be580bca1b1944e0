"""The option comments: what COMMENT ON says at the publisher is in the Delta tables, too."""

from __future__ import annotations

from typing import Any

import pytest
from deltalake import DeltaTable

from pubsub.delta.spark.spark_session import Spark
from pubsub.errors import PubsubError
from pubsub.settings import Settings
from tests.support.replica import Replica, wait_until

SETUP = (
    "CREATE TABLE t (id int PRIMARY KEY, gone int, v text, n int); ALTER TABLE t DROP gone;"
    "INSERT INTO t SELECT g, 'v', g FROM generate_series(1, 20) g; CREATE PUBLICATION p FOR TABLE t;"
    "COMMENT ON TABLE t IS 'Orders; it''s all of them'; COMMENT ON COLUMN t.id IS 'Größe'; COMMENT ON COLUMN t.v IS 'Value'"
)


def comments(replica: Replica) -> tuple[str | None, dict[str, str]]:
    """Return the comment of the Delta table, and those of its columns that have one."""
    table = DeltaTable(replica.path("t"))
    fields = table.schema().fields
    found = {field.name: field.metadata["comment"] for field in fields if field.metadata.get("comment") is not None}
    return table.metadata().description, found


def until(replica: Replica, table: str | None, **columns: str) -> None:
    wait_until(lambda: comments(replica) == (table, columns), f"the comments {table!r}, {columns}")


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have publishers asked as often as the catalog is looked at."""
    monkeypatch.setattr("launcher.table_comments._INTERVAL", 0.0)
    monkeypatch.setattr("launcher.table_comments.NAP", 0.1)


@pytest.mark.usefixtures("often")
def test_comments_follow_the_publisher_s(replica: Replica, spark: Spark) -> None:
    replica.execute(SETUP)
    replica.subscribe(rename="'public.t (n amount)'")
    replica.until_ready()
    assert comments(replica) == (None, {})
    replica.alter("SET (comments = true)")
    until(replica, "Orders; it's all of them", id="Größe", v="Value")
    shown: list[Any] = spark.session.sql(f"DESCRIBE TABLE EXTENDED delta.`{replica.path('t')}`").collect()
    assert {(row["col_name"], row["comment"]) for row in shown} >= {("id", "Größe"), ("v", "Value")}
    replica.execute(
        "COMMENT ON COLUMN t.n IS 'How many'; COMMENT ON COLUMN t.v IS NULL; COMMENT ON TABLE t IS 'Other'",
        "UPDATE t SET n = n + 1",
    )
    until(replica, "Other", id="Größe", amount="How many")
    replica.execute(
        "ALTER TABLE t RENAME v TO w; ALTER TABLE t ADD c int DEFAULT 5; COMMENT ON COLUMN t.w IS 'Again'",
        "UPDATE t SET c = 6 WHERE id = 1",
    )
    replica.caught_up()
    until(replica, "Other", id="Größe", w="Again", amount="How many")
    replica.alter("SET (comments = false)")
    replica.alter("SET (rename = '')")
    generation = replica.relation("t").copy_generation
    replica.alter("RESYNC TABLE t")
    replica.until_copied("t", generation)
    replica.alter("SET (comments = true)")
    replica.execute("COMMENT ON TABLE t IS NULL")
    until(replica, None, id="Größe", w="Again", n="How many")
    replica.assert_equal("t")
    (row,) = replica.node.fetch(f"SELECT comments FROM pg_subscription WHERE subname = '{replica.name}'")
    assert row["comments"] is True
    statistics = replica.node.statistics(replica.name)
    assert (statistics["apply_error_count"], statistics["sync_error_count"]) == (0, 0)


@pytest.mark.full
@pytest.mark.usefixtures("often")
def test_batches_are_committed_while_comments_change(replica: Replica) -> None:
    """A commit of metadata is in the way of others that Delta works out at that moment."""
    replica.execute(SETUP)
    replica.subscribe(comments="true", mode="'public.t (mirror)'")
    for number in range(40):
        replica.execute(
            f"COMMENT ON TABLE t IS 'number {number}'; UPDATE t SET n = n + 1; INSERT INTO t VALUES (100 + {number})"
        )
        if number % 10 == 0:
            replica.caught_up()
    until(replica, "number 39", id="Größe", v="Value")
    replica.assert_equal("t")
    assert replica.relation("t").foreign is None
    statistics = replica.node.statistics(replica.name)
    assert (statistics["apply_error_count"], statistics["sync_error_count"]) == (0, 0)


@pytest.mark.full
@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("options", [{"mode": "history"}, {"mode": "scd2"}, {"partition_by": "'public.t (n)'"}])
def test_kinds_of_tables(replica: Replica, options: dict[str, str]) -> None:
    replica.execute(SETUP)
    replica.subscribe(comments="true", **options)
    replica.until_ready()
    until(replica, "Orders; it's all of them", id="Größe", v="Value")
    replica.execute("UPDATE t SET v = 'w' WHERE id < 5; COMMENT ON COLUMN t.v IS 'Changed'")
    replica.caught_up()
    until(replica, "Orders; it's all of them", id="Größe", v="Changed")


def test_refused_where_only_spark_reaches(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    replica.execute(SETUP)
    monkeypatch.setattr(Settings, "warehouse_uri", property(lambda _: "alluxio://master/warehouse"))
    with pytest.raises(PubsubError, match="where only Spark reaches the Delta tables") as refused:
        replica.subscribe(comments="true")
    assert refused.value.sqlstate == "0A000"
