"""Housekeeping beside replication: files are merged, old ones deleted and the log cleaned, and no row suffers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from launcher import housekeeper
from pubsub.delta.housekeeping import choose_files, delta_optimize, upkeep
from pubsub.delta.housekeeping.inventory import list_files, list_log, needed
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.log.transactions import Listed
from pubsub.delta.places import place
from pubsub.delta.spark.jvm_transactions import DeltaTransactions
from pubsub.delta.spark.spark_session import Spark
from tests.support import stores
from tests.support.replica import Faults, Replica, RunningNode, wait_until

FILES, LOG = "delta.deletedFileRetentionDuration", "delta.logRetentionDuration"


@pytest.fixture(scope="module")
def node(spark: Spark, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    """A node whose housekeeper is in a hurry, and takes a few rows for many."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in (
            (housekeeper, "NAP", 0.1),
            (housekeeper, "_LOOK", 0.2),
            (housekeeper, "_MEASURE", 0.5),
            (housekeeper, "_PAUSE", 0.0),
            (upkeep, "_SOONEST", 0.2),
            (choose_files, "_WORN_ROWS", 8),
        ):
            patch.setattr(module, name, value)
        with RunningNode(tmp_path_factory.mktemp("node"), spark) as node:
            yield node


def alter(replica: Replica, table: str, **properties: str) -> None:
    listed = ", ".join(f"'{name}' = '{value}'" for name, value in properties.items())
    replica.node.spark.session.sql(f"ALTER TABLE delta.`{replica.path(table)}` SET TBLPROPERTIES ({listed})")


def files(replica: Replica, table: str) -> set[str]:
    return {one.path for one in list_files(place(replica.path(table)))}


def only_what_is_needed(replica: Replica, table: str) -> bool:
    log = TableLog(replica.path(table))
    log.refresh()
    return files(replica, table) == needed(log.files.values())


def status(replica: Replica, table: str) -> dict[str, Any]:
    found = replica.node.status_json(replica.name)["tables"]
    return next(one for one in found if one["name"] == f"public.{table}")


def merged(replica: Replica, table: str) -> bool:
    return any(one.get("operation") == "OPTIMIZE" for one in DeltaTable(replica.path(table)).history())


def test_small_files_are_merged_while_batches_are_committed(replica: Replica, fault: Faults) -> None:
    replica.execute(
        "CREATE TABLE t (id int PRIMARY KEY, n int)",
        "INSERT INTO t SELECT g, 0 FROM generate_series(1, 50) g",
        "CREATE PUBLICATION p FOR TABLE t",
    )
    replica.subscribe()
    replica.assert_equal("t")
    fault.arm("files rewritten")
    for number in range(10):
        replica.execute(f"INSERT INTO t VALUES ({100 + number}, 0); UPDATE t SET n = n + 1 WHERE id % 10 = {number}")
        replica.caught_up()
    fault.wait("files rewritten")
    # The merged file is written, and its commit is not made: batches go on, and change rows that are in it.
    replica.execute("DELETE FROM t WHERE id % 7 = 0", "UPDATE t SET n = -n WHERE id % 3 = 0")
    replica.assert_equal("t")
    assert not merged(replica, "t")
    fault.release("files rewritten")
    wait_until(lambda: merged(replica, "t"), "merged files")
    replica.assert_equal("t")
    replica.execute("UPDATE t SET id = id + 1000 WHERE id % 2 = 0", "DELETE FROM t WHERE n = 0")
    replica.assert_equal("t")
    replica.assert_read_alike("t")


@pytest.mark.full
def test_old_files_go_when_the_retention_has_passed(replica: Replica) -> None:
    replica.execute(
        "CREATE TABLE t (id int PRIMARY KEY, n int)",
        "INSERT INTO t SELECT g, 0 FROM generate_series(1, 50) g",
        "CREATE PUBLICATION p FOR TABLE t",
    )
    replica.subscribe()
    replica.assert_equal("t")
    properties = TableLog(replica.path("t"))
    properties.refresh()
    assert properties.properties[FILES] == properties.properties[LOG] == "interval 3600 seconds"
    for number in range(4):
        replica.execute(f"UPDATE t SET n = {number} WHERE id < 30", f"DELETE FROM t WHERE id = {number}")
        replica.caught_up()
    wait_until(lambda: (status(replica, "t")["retained_bytes"] or 0) > 0, "what the retention costs")
    assert status(replica, "t")["last_vacuum"] is None
    before = files(replica, "t")
    alter(replica, "t", **{FILES: "interval 1 seconds", LOG: "interval 1 seconds"})
    replica.execute("UPDATE t SET n = 100 WHERE id = 40")
    replica.caught_up()
    wait_until(lambda: only_what_is_needed(replica, "t"), "VACUUM")
    assert files(replica, "t") - before
    found = wait_until(lambda: (one := status(replica, "t"))["last_vacuum"] and one, "the status after VACUUM")
    assert found["live_bytes"] > 0
    assert found["log_bytes"] > 0
    replica.assert_equal("t")
    replica.assert_read_alike("t")
    assert list_log(place(replica.path("t"))).vacuumed is not None
    # The table's own properties count, whatever the settings say.
    log = TableLog(replica.path("t"))
    log.refresh()
    assert log.properties[FILES] == "interval 1 seconds"


def test_a_stray_file_goes_though_no_commit_has_expired(spark: Spark, tmp_path: Path) -> None:
    """One of a killed process, in a table that rests: VACUUM is given a list, of which Delta leaves what a version needs."""
    path = tmp_path / "t"
    spark.session.range(0, 4, 1, 1).write.format("delta").save(str(path))
    stray = path / "part-00000-stray.parquet"
    stray.touch()
    (needed,) = set(path.glob("*.parquet")) - {stray}
    for file in (stray, needed):
        os.utime(file, (1, 1))
    vacuum = DeltaTransactions(spark.session).vacuum
    vacuum(str(path), [Listed(stray.name, 0, 1000), Listed(needed.name, needed.stat().st_size, 1000)])
    assert not stray.exists()
    assert needed.exists()


@pytest.mark.full
def test_vacuum_of_a_table_elsewhere_goes_on_though_the_log_lacks_commits(spark: Spark, tmp_path: Path) -> None:
    """Delta's own clean-up of the log removes commits up to midnight, whether VACUUM has read them or not."""
    path = tmp_path / "t"
    sql = spark.session.sql
    retention = "'delta.deletedFileRetentionDuration' = 'interval 0 seconds'"
    sql(f"CREATE TABLE delta.`{path}` (id int, p int) USING delta PARTITIONED BY (p) TBLPROPERTIES ({retention})")
    for number in range(2):
        sql(f"INSERT OVERWRITE delta.`{path}` VALUES ({number}, 1), ({number}, 2)")
    transactions = DeltaTransactions(spark.session)
    transactions.checkpoint(str(path))
    for version in range(2):
        (path / "_delta_log" / f"{version:020}.json").unlink()
    with pytest.raises(Exception, match="DELTA_CANNOT_VACUUM_LITE"):
        transactions.vacuum(str(path), None)
    young = path / "p=1" / "part-00000-young.parquet"
    young.touch()
    os.utime(young, (2_000_000_000, 2_000_000_000))
    transactions.vacuum_elsewhere(str(path), 1_990_000_000_000)
    named = set(DeltaTable(str(path)).file_uris())
    assert {str(file) for file in path.rglob("*.parquet") if "_delta_log" not in str(file)} == {*named, str(young)}
    transactions.vacuum(str(path), None)
    assert sql(f"SELECT id, p FROM delta.`{path}` ORDER BY p").collect() == [(1, 1), (1, 2)]


@pytest.mark.full
def test_checkpoints_are_written_beside_the_commits(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "CHECKPOINT", 3)
    replica.execute(
        "CREATE TABLE t (id int PRIMARY KEY, n int)",
        "INSERT INTO t SELECT g, 0 FROM generate_series(1, 50) g",
        "CREATE PUBLICATION p FOR TABLE t",
    )
    replica.subscribe()
    for number in range(4):
        replica.execute(f"UPDATE t SET n = {number} WHERE id > 40", f"INSERT INTO t VALUES ({100 + number}, 0)")
        replica.caught_up()
    wait_until(lambda: list_log(place(replica.path("t"))).checkpoints, "a checkpoint")
    replica.execute("UPDATE t SET n = -1 WHERE id < 5")
    replica.assert_equal("t")
    replica.assert_read_alike("t")


@pytest.mark.full
def test_optimize_says_whether_it_has_merged_files(spark: Spark, tmp_path: Path) -> None:
    """Small files of different partitions stay, so OPTIMIZE must not be run again for them."""
    path = str(tmp_path / "t")
    rows = spark.session.range(0, 4, 1, 1).selectExpr("id", "id % 2 AS p")
    rows.write.format("delta").partitionBy("p").save(path)
    assert delta_optimize.optimize(spark.session, path) is False
    rows.write.format("delta").mode("append").save(path)
    assert delta_optimize.optimize(spark.session, path) is True
    assert delta_optimize.optimize(spark.session, path) is False


@pytest.mark.full
@pytest.mark.parametrize(
    ("made", "by_spark"),
    [("CLUSTER BY (n)", False), ("TBLPROPERTIES ('delta.enableChangeDataFeed' = 'true')", True)],
)
def test_delta_optimizes_what_is_not_rewritten_here(
    replica: Replica, monkeypatch: pytest.MonkeyPatch, made: str, by_spark: bool
) -> None:
    """A clustered table, which takes our files, and one that only Spark's statement writes."""
    monkeypatch.setattr(housekeeper, "_REST", 20.0)
    monkeypatch.setattr(delta_optimize, "_MERGE", 4)
    replica.execute(
        "CREATE TABLE t (id int PRIMARY KEY, n int)",
        "INSERT INTO t SELECT g, g % 7 FROM generate_series(1, 500) g",
        "CREATE PUBLICATION p FOR TABLE t",
    )
    path = stores.warehouse(replica.node.home) / replica.database.name / "public" / "t"
    replica.node.spark.session.sql(f"CREATE TABLE delta.`{path}` (id int, n int) USING delta {made}")
    replica.subscribe(create_tables="false")

    def tight() -> bool:
        log = TableLog(str(path))
        log.refresh()
        assert (log.unsupported() is not None) is by_spark
        clustered = all(one.clustered for one in log.files.values())
        return len(log.files) == 1 and (by_spark or clustered)

    for number in range(4):
        replica.execute(f"INSERT INTO t VALUES ({1000 + number}, 3); UPDATE t SET n = n + 1 WHERE id % 10 = {number}")
        replica.caught_up()
    wait_until(tight, "one file, made by OPTIMIZE")
    replica.execute("UPDATE t SET n = -n WHERE id % 3 = 0", "DELETE FROM t WHERE id % 5 = 0")
    replica.assert_equal("t")
    wait_until(tight, "one file again")
    replica.assert_equal("t")
    replica.assert_read_alike("t")
