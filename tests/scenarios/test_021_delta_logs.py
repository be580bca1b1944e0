"""Logs that Spark has written, or must read: checkpoints of every form, and commits of two daemons."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from apply.pipeline.commit import commit_table
from apply.pipeline.dispatch import Dispatcher
from apply.staging.destination import Destination
from apply.staging.stage_batch import stage_batch
from apply.staging.staged_table import StagedTable
from pubsub.delta import table as delta
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.spark.jvm_transactions import DeltaTransactions
from pubsub.delta.spark.spark_session import Spark
from pubsub.delta.table import TargetTable
from pubsub.delta.writers.arrow_writer import DirectStaged
from pubsub.delta.writers.choose_writer import TableWriters
from pubsub.errors import Overtaken
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.protocol.pgoutput import Message
from tests.support.frames import INT8, delete, insert, relation, transaction, update
from tests.support.readers import assert_read_alike

OID = 16384
DAMAGED = Path(__file__).parent.parent / "data" / "damaged_by_alter"


class Engine:
    """engine.Engine, with the work done in this thread."""

    def __init__(self, spark: Spark) -> None:
        self.session = spark.session

    async def run(self, work: Callable[..., Any], *args: Any) -> Any:
        return work(self.session, *args)

    async def run_without_spark(self, work: Callable[..., Any], *args: Any) -> Any:
        return work(*args)


class Daemon:
    """One process's knowledge of the table."""

    def __init__(self, spark: Spark, table: TargetTable, directory: Path, *, direct: bool) -> None:
        self.table = table
        self.stage = TableWriters(directory, DeltaTransactions(spark.session), direct=direct)
        self.engine: Any = Engine(spark)
        self.start()

    def start(self) -> None:
        self.version = delta.committed_lsn(self.table.path, "app") or INVALID_LSN

    def staged(self, *transactions: tuple[int, Message]) -> StagedTable:
        dispatcher = Dispatcher(INVALID_LSN)
        sent = relation(OID, "t", [("id", INT8), ("n", INT8)], key=self.table.key, identity="d")
        for lsn, message in transactions:
            dispatcher.feed(transaction(lsn, sent, message), 0.0)
        destination = Destination(OID, self.table, "app", self.version)
        (table,) = stage_batch(dispatcher.take(), [{("public", "t"): destination}], self.stage, "pg_1")
        return table

    def commit(self, table: StagedTable) -> None:
        asyncio.run(commit_table(self.engine, table, self.version))
        self.version = table.commit.last


def rows(table: TargetTable) -> list[tuple[int, ...]]:
    from deltalake import QueryBuilder

    found = (
        QueryBuilder().register("t", DeltaTable(table.path)).execute("SELECT id, n FROM t ORDER BY id, n").read_all()
    )
    return [tuple(row.values()) for row in pa.table(found).to_pylist()]


def of_spark(spark: Spark, path: Path, policy: str = "classic") -> TargetTable:
    spark.session.sql(
        f"CREATE TABLE delta.`{path}` (id BIGINT NOT NULL, n BIGINT) USING delta "
        f"TBLPROPERTIES ('delta.enableDeletionVectors' = 'true', 'delta.checkpointPolicy' = '{policy}')"
    )
    schema = pa.schema([pa.field("id", pa.int64(), False), pa.field("n", pa.int64())])
    return TargetTable(str(path), schema, ("id",), "public.t")


@pytest.mark.full
@pytest.mark.parametrize("form", ["v2", "parts"])
def test_a_checkpoint_of_sparks_and_a_log_that_was_cleaned(spark: Spark, tmp_path: Path, form: str) -> None:
    path = tmp_path / "t"
    table = of_spark(spark, path, "v2" if form == "v2" else "classic")
    session = spark.session.newSession()
    if form == "parts":
        session.conf.set("spark.databricks.delta.checkpoint.partSize", "2")
    for start in (0, 10, 20):
        session.sql(f"INSERT INTO delta.`{path}` SELECT id, id FROM range({start}, {start + 10})")
    session.sql(f"DELETE FROM delta.`{path}` WHERE id = 3")
    # Delta's own API writes the checkpoint, with the session's settings.
    of_jvm = session._jvm.org.apache.spark.sql.delta.DeltaLog.forTable(session._jsparkSession, str(path))
    session._jvm.org.apache.spark.sql.SparkSession.setActiveSession(session._jsparkSession)
    of_jvm.checkpoint()
    spark.session._jvm.org.apache.spark.sql.SparkSession.setActiveSession(spark.session._jsparkSession)
    names = [
        one.name for one in (path / "_delta_log").iterdir() if "checkpoint" in one.name and not one.name.startswith(".")
    ]
    assert len(names) >= 2, names
    assert f"{4:020}.checkpoint.parquet" not in names
    for version in range(4):
        (path / "_delta_log" / f"{version:020}.json").unlink()
    read = TableLog(str(path))
    read.refresh()
    assert set(read.files) == set(DeltaTable(str(path)).get_add_actions()["path"].to_pylist())
    assert read.version == 4
    assert sum((file.rows or 0) - file.deleted for file in read.files.values()) == 29
    daemon = Daemon(spark, table, tmp_path / "stage", direct=True)
    staged = daemon.staged((100, update(OID, 5, 55)), (110, delete(OID, 4, None)), (120, insert(OID, 40, 40)))
    assert isinstance(staged.staged, DirectStaged)
    daemon.commit(staged)
    expected = [(number, 55 if number == 5 else number) for number in (*range(30), 40) if number not in (3, 4)]
    assert rows(table) == expected
    assert_read_alike(str(path), spark)


@pytest.mark.parametrize("direct", [True, False], ids=["directly", "by Spark"])
def test_two_daemons(spark: Spark, tmp_path: Path, direct: bool) -> None:
    """Transactions 20, 25 and 30, one row each: A stages them together, B commits the first alone, then A commits."""
    path = tmp_path / "t"
    table = TargetTable(str(path), of_spark(spark, path).schema, (), "public.t")
    a, b = (Daemon(spark, table, tmp_path / name, direct=direct) for name in "ab")
    late = a.staged((20, insert(OID, 1, 1)), (25, insert(OID, 2, 2)), (30, insert(OID, 3, 3)))
    b.commit(b.staged((20, insert(OID, 1, 1))))
    with pytest.raises(Overtaken):
        a.commit(late)
    assert rows(table) == [(1, 1)]
    a.start()
    a.commit(a.staged((20, insert(OID, 1, 1)), (25, insert(OID, 2, 2)), (30, insert(OID, 3, 3))))
    assert rows(table) == [(1, 1), (2, 2), (3, 3)]
    # A batch that the table holds already is done, whichever daemon committed it.  If the table is further on, it is Overtaken.
    a.version = Lsn(20)
    a.commit(a.staged((20, insert(OID, 1, 1)), (25, insert(OID, 2, 2)), (30, insert(OID, 3, 3))))
    with pytest.raises(Overtaken):
        b.commit(b.staged((25, insert(OID, 2, 2))))
    assert rows(table) == [(1, 1), (2, 2), (3, 3)]


def test_a_damaged_table_is_mended_for_every_reader(spark: Spark, tmp_path: Path) -> None:
    path = str(tmp_path / "t")
    shutil.copytree(DAMAGED, path)
    with pytest.raises(Exception, match="FAILED_READ_FILE"):
        spark.session.read.format("delta").load(path).count()
    assert delta.committed_lsn(path, "app") == Lsn(3)
    assert_read_alike(path, spark)
    assert spark.session.sql(f"DESCRIBE HISTORY delta.`{path}`").count() == 5
    assert spark.session.read.format("delta").option("versionAsOf", 4).load(path).count() == 3
