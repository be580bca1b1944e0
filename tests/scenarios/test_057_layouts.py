"""partition_by, cluster_by and table_properties: how the Delta tables of a subscription lie."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltalake import DeltaTable

from pubsub.delta.spark.spark_session import Spark
from tests.support.replica import Replica


def detail(replica: Replica, spark: Spark, table: str) -> dict[str, object]:
    (row,) = spark.session.sql(f"DESCRIBE DETAIL delta.`{replica.path(table)}`").collect()
    return dict(row.asDict())


def test_a_partitioned_table_follows(replica: Replica) -> None:
    """Rows are copied into their partitions, move between them, and are read alike; other tables lie as always."""
    replica.execute(
        "CREATE TABLE t (id int PRIMARY KEY, region text, kind smallint); CREATE TABLE u (id int PRIMARY KEY);"
        "INSERT INTO t SELECT g, CASE WHEN g % 7 > 0 THEN 'r' || g % 3 END, g % 2 FROM generate_series(1, 500) g;"
        "INSERT INTO u VALUES (1); CREATE PUBLICATION p FOR ALL TABLES"
    )
    replica.subscribe(partition_by="'public.t (region, kind)'", table_properties="'* (team = shop)'")
    replica.assert_equal("t", "u")
    replica.execute(
        "UPDATE t SET region = 'north/south = ü', kind = 9 WHERE id < 20; DELETE FROM t WHERE id > 450;"
        "INSERT INTO t VALUES (1000, NULL, NULL), (1001, ' ', 3)"
    )
    replica.assert_equal("t")
    replica.assert_read_alike("t")
    metadata = DeltaTable(replica.path("t")).metadata()
    assert metadata.partition_columns == ["region", "kind"]
    assert metadata.configuration["team"] == "shop"
    assert DeltaTable(replica.path("u")).metadata().configuration["team"] == "shop"
    assert DeltaTable(replica.path("u")).metadata().partition_columns == []


@pytest.mark.full
def test_the_publishers_alterations_of_partition_and_cluster_columns(replica: Replica, spark: Spark) -> None:
    """Renamed, dropped and retyped: the rows stay equal, or the table says what Delta cannot do."""
    replica.execute(
        "CREATE TABLE t (id int PRIMARY KEY, region text, n int); CREATE TABLE c (id int PRIMARY KEY, a text, b date);"
        "INSERT INTO t SELECT g, 'r' || g % 3, g FROM generate_series(1, 100) g;"
        "INSERT INTO c SELECT g, 'a' || g, date '2026-01-01' + g FROM generate_series(1, 100) g;"
        "CREATE PUBLICATION p FOR ALL TABLES"
    )
    replica.subscribe(partition_by="'public.t (region)'", cluster_by="'public.c (b, a)'")
    replica.assert_equal("t", "c")
    assert detail(replica, spark, "c")["clusteringColumns"] == ["b", "a"]
    replica.execute("ALTER TABLE t ADD COLUMN more int DEFAULT 5; INSERT INTO t VALUES (200, 'new', 1, 2)")
    replica.execute("ALTER TABLE c ADD COLUMN more int; UPDATE c SET more = id, a = 'x' WHERE id < 50")
    replica.assert_equal("t", "c")
    replica.execute("ALTER TABLE t RENAME region TO area; INSERT INTO t VALUES (201, 'renamed', 1, 2)")
    replica.execute("ALTER TABLE c RENAME a TO aa; INSERT INTO c VALUES (201, 'renamed', NULL, 2)")
    replica.assert_equal("t", "c")
    assert DeltaTable(replica.path("t")).metadata().partition_columns == ["area"]
    replica.execute("ALTER TABLE t DROP COLUMN area; INSERT INTO t VALUES (202, 1, 2)")
    replica.execute("ALTER TABLE c DROP COLUMN aa; INSERT INTO c VALUES (202, NULL, 2)")
    replica.assert_equal("t", columns=["id", "n", "more"])
    replica.assert_equal("c", columns=["id", "b", "more"])
    replica.alter("RESYNC TABLE public.t, public.c")
    replica.until_copied("t", 1)
    replica.until_ready()
    replica.execute("INSERT INTO t VALUES (203, 1, 2)", "DELETE FROM c WHERE id < 10")
    replica.assert_equal("t", columns=["id", "n", "more"])
    replica.assert_equal("c", columns=["id", "b", "more"])
    # The copy gives every column another physical name, by which Delta knows the cluster columns.
    assert detail(replica, spark, "c")["clusteringColumns"] == ["b"]


@pytest.mark.full
def test_a_change_data_feed_is_read_by_structured_streaming(replica: Replica, spark: Spark, tmp_path: Path) -> None:
    """A streaming reader gets every change once; an UPDATE is a deletion and an insertion."""
    replica.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t VALUES (1, 'a'), (2, 'b'); CREATE PUBLICATION p FOR TABLE t"
    )
    replica.subscribe(table_properties="'public.t (delta.enableChangeDataFeed = true)'")
    replica.assert_equal("t")
    for statement in (
        "INSERT INTO t VALUES (3, 'c')",
        "UPDATE t SET v = 'B' WHERE id = 2",
        "DELETE FROM t WHERE id = 1",
    ):
        replica.execute(statement)
        replica.assert_equal("t")
    feed = spark.session.readStream.format("delta").option("readChangeFeed", "true").option("startingVersion", 0)
    out, checkpoint = str(tmp_path / "out"), str(tmp_path / "checkpoint")
    query = (
        feed.load(replica.path("t"))
        .writeStream.format("delta")
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start(out)
    )
    query.awaitTermination()
    found = sorted(
        (r["_commit_version"], r["_change_type"], r["id"], r["v"])
        for r in spark.session.read.format("delta").load(out).collect()
    )
    assert [(kind, id_, v) for _, kind, id_, v in found] == [
        ("insert", 1, "a"),
        ("insert", 2, "b"),
        ("insert", 3, "c"),
        ("delete", 2, "b"),
        ("insert", 2, "B"),
        ("delete", 1, "a"),
    ]


def test_what_cannot_be_is_refused_before_anything_is_made(replica: Replica) -> None:
    replica.execute("CREATE TABLE t (id int PRIMARY KEY, x float8, b bytea, ok text); CREATE PUBLICATION p FOR TABLE t")
    for options, sqlstate, message in (
        ("partition_by = 'public.u (id)'", "42P01", 'partition_by names tables that are not published: "public.u"'),
        ("partition_by = 'public.t (nope)'", "42703", 'column "nope" of table "public.t"'),
        ("partition_by = '* (x)'", "0A000", 'column "x" cannot partition'),
        ("partition_by = '* (id, ok, b, x)'", "0A000", 'column "b" cannot partition'),
        ("cluster_by = 'public.t (b)'", "0A000", 'column "b" cannot cluster'),
        ("cluster_by = '* (id)', partition_by = 'public.t (ok)'", "0A000", "cannot be partitioned and clustered"),
        (
            "table_properties = '* (delta.appendOnly = true)'",
            "42704",
            'table property "delta.appendOnly" cannot be given',
        ),
        ("cluster_by = 'public.t'", "22023", 'invalid value for parameter "cluster_by"'),
    ):
        replica.assert_refused(options, sqlstate, message)
    assert replica.slots() == []
