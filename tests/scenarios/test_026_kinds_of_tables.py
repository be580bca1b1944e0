"""Every kind of Delta table that a user may have made for a subscription: who writes it, and that it gets the publisher's rows."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from pubsub.delta import alter, schema_json
from pubsub.delta import table as delta
from pubsub.delta.alter import Alteration
from pubsub.delta.files import data_files
from pubsub.delta.housekeeping.rewrite import rewrite
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.places import open_parquet, place
from pubsub.delta.spark.jvm_transactions import DeltaTransactions
from pubsub.delta.spark.spark_session import Spark
from pubsub.delta.table import Commit, TargetTable
from pubsub.delta.writers import arrow_writer
from pubsub.protocol.lsn import Lsn
from tests.support import stores
from tests.support.replica import Replica, wait_until

COLUMNS = "id INT NOT NULL, day DATE, n INT, s STRING"


@dataclass(frozen=True)
class Kind:
    """How a table is made.  `reason`: why a statement of Spark's writes it (None: our files do)."""

    reason: str | None = None
    columns: str = COLUMNS
    clauses: str = ""
    properties: str = ""
    later: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    """Columns that only the Delta table has."""


KINDS = {
    "partitioned": Kind(clauses="PARTITIONED BY (s, day)"),
    "partitioned by a number that is in the key": Kind(clauses="PARTITIONED BY (id)"),
    "partitioned by a double": Kind(
        "it is partitioned by d, a double", columns=f"{COLUMNS}, d DOUBLE", clauses="PARTITIONED BY (d)", extra=("d",)
    ),
    "clustered": Kind(clauses="CLUSTER BY (day, n)"),
    "CHECK constraint": Kind(
        "it has the constraint small", later=("ALTER TABLE {} ADD CONSTRAINT small CHECK (n IS NULL OR n < 1000)",)
    ),
    "NOT NULL": Kind(columns="id INT NOT NULL, day DATE NOT NULL, n INT NOT NULL, s STRING"),
    "VARCHAR": Kind("column s has constraints", columns="id INT NOT NULL, day DATE, n INT, s VARCHAR(40)"),
    "generated column": Kind(
        "column year has constraints",
        columns=f"{COLUMNS}, year INT GENERATED ALWAYS AS (YEAR(day))",
        extra=("year",),
    ),
    "identity column": Kind(
        "column number has constraints",
        columns=f"{COLUMNS}, number BIGINT GENERATED ALWAYS AS IDENTITY",
        extra=("number",),
    ),
    "change data feed": Kind("delta.enableChangeDataFeed is set", properties="'delta.enableChangeDataFeed' = 'true'"),
    "row tracking": Kind(properties="'delta.enableRowTracking' = 'true'"),
    "in-commit timestamps": Kind(properties="'delta.enableInCommitTimestamps' = 'true'"),
    "mapped by name": Kind(properties="'delta.columnMapping.mode' = 'name'"),
    "partitioned and mapped by name": Kind(
        properties="'delta.columnMapping.mode' = 'name'", clauses="PARTITIONED BY (day)"
    ),
    "mapped by id": Kind(properties="'delta.columnMapping.mode' = 'id'"),
    "v2 checkpoints": Kind(properties="'delta.checkpointPolicy' = 'v2', 'delta.checkpointInterval' = '4'"),
    "deltalake's": Kind(),
}
FIRST = ("partitioned", "NOT NULL")
# Spark writes these, for more than a minute each.
SLOW = ("partitioned by a double", "VARCHAR", "generated column", "identity column", "change data feed")


def make(spark: Spark, path: Path, kind: Kind, *, by_spark: bool) -> None:
    if not by_spark:
        fields = [("id", pa.int32()), ("day", pa.date32()), ("n", pa.int32()), ("s", pa.string())]
        write_deltalake(str(path), pa.schema(fields).empty_table())
        return
    properties = f"TBLPROPERTIES ({kind.properties})" if kind.properties else ""
    spark.session.sql(f"CREATE TABLE delta.`{path}` ({kind.columns}) USING delta {kind.clauses} {properties}")
    for statement in kind.later:
        spark.session.sql(statement.format(f"delta.`{path}`"))


def writers(path: str) -> set[str]:
    """Return who wrote the data files that the commits of the subscription have added."""
    log = TableLog(path)
    log.refresh()
    found = set()
    for version in range(log.version + 1):
        actions = log.actions(version) or []
        if any("txn" in action for action in actions):
            for file in data_files.paths(path, [action for action in actions if "add" in action]):
                with open_parquet(file) as opened:
                    by_arrow = "parquet-cpp-arrow" in opened.metadata.created_by
                found.add("our files" if by_arrow else "Spark")
    return found


def assert_same(replica: Replica, kind: Kind, *more: str) -> None:
    replica.assert_equal("t", columns=["id", "day", "n", "s", *more])
    for row in replica.rows("t") if kind.extra else ():
        if "year" in row:
            assert row["year"] == (row["day"].year if row["day"] else None)
        if "number" in row:
            assert row["number"] is not None


@pytest.mark.parametrize(
    "name",
    [
        name if name in FIRST else pytest.param(name, marks=pytest.mark.soak if name in SLOW else pytest.mark.full)
        for name in KINDS
    ],
)
def test_every_kind_of_table_gets_the_publishers_rows(replica: Replica, spark: Spark, name: str) -> None:
    kind = KINDS[name]
    by_spark = name != "deltalake's"
    required = "NOT NULL" if name == "NOT NULL" else ""
    replica.execute(
        f"CREATE TABLE t (id int PRIMARY KEY, day date {required}, n int {required}, s text);"
        "INSERT INTO t VALUES (1, '2024-01-01', 1, 'a'), (2, NULL, NULL, NULL), (3, '2024-01-03', 3, 'c/d=e%20 ü'),"
        " (4, '2024-01-04', 4, 'a');".replace(
            "(2, NULL, NULL, NULL)", "(2, '2024-01-02', 2, NULL)" if required else "(2, NULL, NULL, NULL)"
        ),
        "CREATE PUBLICATION p FOR TABLE t",
    )
    path = stores.warehouse(replica.node.home) / replica.database.name / "public" / "t"
    make(spark, path, kind, by_spark=by_spark)
    replica.subscribe(create_tables="false")
    assert_same(replica, kind)
    identities = {row["id"]: row["number"] for row in replica.rows("t")} if name == "identity column" else {}
    # Inserts alone; then changes, rows that move between partitions, key changes and deletes in one transaction.
    replica.execute("INSERT INTO t SELECT g, date '2024-01-01' + g % 3, g, 'x' || g % 3 FROM generate_series(10, 30) g")
    assert_same(replica, kind)
    replica.execute(
        "UPDATE t SET n = n + 100 WHERE id < 4; UPDATE t SET s = 'moved', day = '1999-12-31' WHERE id IN (1, 10, 11);"
        "UPDATE t SET id = id + 100 WHERE id BETWEEN 12 AND 14; DELETE FROM t WHERE id IN (3, 15, 16);"
        "INSERT INTO t VALUES (3, '0001-01-01', 33, NULL), (99, '9999-12-31', 0, 'q''\"\\ \n');"
    )
    assert_same(replica, kind)
    found = {row["id"]: row.get("number") for row in replica.rows("t")}
    assert all(found[number] == identity for number, identity in identities.items()), "a row keeps its identity"
    if name == "identity column":
        replica.execute("ALTER TABLE t ALTER s SET STORAGE EXTERNAL")
        replica.execute("INSERT INTO t VALUES (50, '2024-01-05', 5, repeat('toasted', 1000))")
        assert_same(replica, kind)
        replica.execute("UPDATE t SET n = n + 1 WHERE id IN (4, 50); DELETE FROM t WHERE id = 2")
        assert_same(replica, kind)
    replica.execute("DELETE FROM t WHERE id IN (17, 18)")
    assert_same(replica, kind)
    log = TableLog(str(path))
    log.refresh()
    assert log.unsupported() == kind.reason
    expected = {"Spark"} if kind.reason else {"our files"}
    if not by_spark:
        expected = {"our files", "Spark"}  # rows change by Spark, since the table has no deletion vectors
        assert not log.vectors_enabled()
    assert writers(str(path)) == expected
    if kind.reason is None:
        replica.execute(
            "ALTER TABLE t ADD c text", "ALTER TABLE t ADD d int DEFAULT 7", "UPDATE t SET c = 'new' WHERE id < 20"
        )
        assert_same(replica, kind, "c", "d")
    replica.execute(
        "BEGIN; TRUNCATE t; INSERT INTO t VALUES (1, '2024-01-01', 5, 'after'), (2, '2024-01-01', 6, 'after'); COMMIT"
    )
    assert_same(replica, kind)
    replica.execute("TRUNCATE t")
    assert_same(replica, kind)
    replica.execute("INSERT INTO t VALUES (7, '2024-01-01', 5, 'last')")
    assert_same(replica, kind)
    if name == "partitioned and mapped by name":
        # DuckDB seeks a mapped partition column under its name of today, and reads NULL.
        read = spark.session.read.format("delta").load(str(path)).toArrow().to_pylist()
        assert read == replica.rows("t")
    else:
        replica.assert_read_alike("t")
    check_kind(spark, str(path), name)
    if name in FIRST:
        # What a copy brought into a table of the user's, another copy replaces.
        replica.alter("RESYNC TABLE t")
        assert_same(replica, kind)


def check_kind(spark: Spark, path: str, name: str) -> None:
    """What is particular to a kind still holds, by what Spark says of the table."""
    table = f"delta.`{path}`"
    (detail,) = spark.session.sql(f"DESCRIBE DETAIL {table}").collect()
    actions: list[dict[str, Any]] = []
    log = TableLog(path)
    log.refresh()
    for version in range(log.version + 1):
        actions += log.actions(version) or []
    match name:
        case "partitioned":
            assert detail["partitionColumns"] == ["s", "day"]
            assert spark.session.sql(f"SELECT count(*) FROM {table} WHERE s = 'last'").collect()[0][0] == 1
        case "clustered":
            assert detail["clusteringColumns"] == ["day", "n"]
            spark.session.sql(f"OPTIMIZE {table}")
        case "row tracking":
            adds = [action["add"] for action in actions if "add" in action]
            assert all("baseRowId" in add for add in adds)
            assert spark.session.sql(f"SELECT _metadata.row_id FROM {table}").collect()[0][0] is not None
        case "in-commit timestamps":
            assert all("inCommitTimestamp" in action["commitInfo"] for action in actions if "commitInfo" in action)
        case "v2 checkpoints":
            assert [
                one
                for one in (place(path) / "_delta_log").iterdir()
                if re.search(r"checkpoint\.[0-9a-f-]{36}\.", one.name)
            ]
        case "change data feed":
            feed = spark.session.sql(
                f"SELECT _change_type, count(*) FROM table_changes_by_path('{path}', 1) GROUP BY 1"
            )
            assert {row[0] for row in feed.collect()} >= {"insert", "delete"}
        case _:
            pass


@pytest.mark.full
def test_a_row_that_breaks_a_constraint_stops_the_table_and_loses_nothing(replica: Replica, spark: Spark) -> None:
    replica.execute("CREATE TABLE t (id int PRIMARY KEY, day date, n int, s text)", "CREATE PUBLICATION p FOR TABLE t")
    path = stores.warehouse(replica.node.home) / replica.database.name / "public" / "t"
    make(spark, path, KINDS["CHECK constraint"], by_spark=True)
    replica.subscribe(create_tables="false")
    replica.execute("INSERT INTO t VALUES (1, NULL, 1, 'a')")
    replica.assert_equal("t")
    replica.execute("INSERT INTO t VALUES (2, NULL, 2, 'b'); INSERT INTO t VALUES (3, NULL, 1000, 'c')")
    error = replica.error()
    assert 'new row for relation "public.t" violates check constraint "small"' in error, error
    assert [row["id"] for row in replica.rows("t")] == [1]
    spark.session.sql(f"ALTER TABLE delta.`{path}` DROP CONSTRAINT small")
    replica.execute("INSERT INTO t VALUES (4, NULL, 4, 'd')")
    replica.assert_equal("t")


@pytest.mark.full
def test_an_empty_text_in_a_partition_column_of_a_table_that_spark_copies(replica: Replica, spark: Spark) -> None:
    """A copy by Spark's statement once made it NULL, as Spark does."""
    replica.execute(
        "CREATE TABLE t (id int PRIMARY KEY, day date, n int, s text); INSERT INTO t VALUES (1, NULL, 1, '')",
        "CREATE PUBLICATION p FOR TABLE t",
    )
    path = stores.warehouse(replica.node.home) / replica.database.name / "public" / "t"
    make(spark, path, replace(KINDS["change data feed"], clauses="PARTITIONED BY (s)"), by_spark=True)
    replica.subscribe(create_tables="false")
    error = replica.error()
    assert 'value "" cannot be stored in column "s" of the Delta table of "public.t"' in error, error
    replica.execute("UPDATE t SET s = NULL")
    replica.until_ready()
    assert_same(replica, KINDS["change data feed"])
    # A copy that brings other columns once left the table without partitions.
    replica.execute("ALTER TABLE t ADD c int DEFAULT 5; INSERT INTO t VALUES (2, NULL, 2, 'x', 6)")
    wait_until(lambda: "cannot be altered" in replica.error(), "the refusal to alter it")
    replica.alter("RESYNC TABLE t")
    replica.until_copied("t", 1)
    replica.until_ready()
    assert_same(replica, KINDS["change data feed"], "c")
    assert DeltaTable(str(path)).metadata().partition_columns == ["s"]


@pytest.mark.full
def test_files_from_before_a_column_was_widened(replica: Replica, spark: Spark) -> None:
    """Keys are found in them, values taken from them, and they are merged with others; our files do it all."""
    replica.execute(
        "CREATE TABLE t (id int PRIMARY KEY, day date, n int, s text); ALTER TABLE t ALTER s SET STORAGE EXTERNAL;"
        "INSERT INTO t SELECT g, '2024-01-01', g, repeat('s' || g, 1000) FROM generate_series(1, 40) g",
        "CREATE PUBLICATION p FOR TABLE t",
    )
    path = stores.warehouse(replica.node.home) / replica.database.name / "public" / "t"
    table = f"delta.`{path}`"
    spark.session.sql(
        f"CREATE TABLE {table} (id SMALLINT, day DATE, n SMALLINT, s STRING) USING delta "
        "TBLPROPERTIES ('delta.enableTypeWidening' = 'true', 'delta.enableDeletionVectors' = 'true')"
    )
    spark.session.sql(
        f"INSERT INTO {table} SELECT CAST(id AS SMALLINT), DATE'2024-01-01', CAST(id AS SMALLINT), repeat('s' || id, 1000) "
        "FROM range(1, 41)"
    )
    spark.session.sql(f"ALTER TABLE {table} ALTER COLUMN id TYPE INT")
    spark.session.sql(f"ALTER TABLE {table} ALTER COLUMN n TYPE INT")
    replica.subscribe(create_tables="false", copy_data="false")

    def assert_same() -> None:
        replica.caught_up()
        read = spark.session.read.format("delta").load(str(path)).orderBy("id").collect()
        assert [tuple(row) for row in read] == replica.query("SELECT * FROM t ORDER BY id")

    replica.execute("INSERT INTO t VALUES (100000, NULL, 200000, 'wide')", "DELETE FROM t WHERE id IN (3, 100000)")
    assert_same()
    replica.execute("UPDATE t SET n = 70000 WHERE id < 10", "INSERT INTO t VALUES (70000, NULL, 70000, 'x')")
    assert_same()
    replica.execute("UPDATE t SET id = id + 70000 WHERE id > 35", "UPDATE t SET n = n + 1", "ALTER TABLE t ADD c int")
    replica.execute("UPDATE t SET c = n WHERE id % 2 = 0")
    assert_same()
    log = TableLog(str(path))
    log.refresh()
    assert log.unsupported() is None
    widened = [one["name"] for one in schema_json.fields(log.metadata) if schema_json.TYPE_CHANGES in one["metadata"]]
    assert widened == ["id", "n"], "ADD COLUMN kept what the columns had been"
    definition = replica.relation("t").definition
    load = partial(delta.load, str(path), "public.t", definition)
    assert rewrite(TableLog(str(path), DeltaTransactions(spark.session)), load, list)
    assert_same()
    log.refresh()
    assert len(log.files) == 1


@pytest.mark.full
@pytest.mark.parametrize("mode", ["none", "name"])
def test_cluster_columns_that_go(spark: Spark, tmp_path: Path, mode: str) -> None:
    """A table that is clustered by a column which it lacks could not be described, optimized or written by our files."""
    transactions = DeltaTransactions(spark.session)

    def made(name: str) -> TableLog:
        path = str(tmp_path / name)
        spark.session.sql(
            f"CREATE TABLE delta.`{path}` (id BIGINT NOT NULL, a STRING, b INT) USING delta CLUSTER BY (a, b) "
            f"TBLPROPERTIES ('delta.columnMapping.mode' = '{mode}')"
        )
        spark.session.sql(f"INSERT INTO delta.`{path}` VALUES (1, 'x', 2)")
        log = TableLog(path, transactions)
        log.refresh()
        return log

    def check(log: TableLog, columns: list[str]) -> None:
        log.refresh()
        assert log.unsupported() is None
        (detail,) = spark.session.sql(f"DESCRIBE DETAIL delta.`{log.table}`").collect()
        assert detail["clusteringColumns"] == columns
        spark.session.sql(f"INSERT INTO delta.`{log.table}` SELECT * FROM delta.`{log.table}`")
        spark.session.sql(f"OPTIMIZE delta.`{log.table}`")

    log = made("altered")
    table = delta.load(str(log.table), "public.t", json.dumps({"key": ["id"]}))
    record = Commit("app", Lsn(1), Lsn(1))
    for column, left in (("a", ["b"]), ("b", [])):
        table = alter.alter(transactions, table, Alteration(("id",), "public.t", drop=(column,)), {}, record)
        check(log, left)
    log = made("copied")
    fields = [pa.field("id", pa.int64(), False), pa.field("b", pa.string()), pa.field("c", pa.int32())]
    table, definition = alter.for_copy(log, TargetTable(str(log.table), pa.schema(fields), ("id",), "public.t"))
    assert table.clustered_by == ("b",)
    arrow_writer.commit_copy(log, table, [], record, definition)
    check(log, ["b"])
