"""Commit to Delta tables in every way, with a mark after each commit that is reported as durable.

    python -m tests.support.durable_commits DIRECTORY

A mark is a directory that is made: DIRECTORY/marks/<table>-<version>-<rows>.  tests/scenarios/test_028_power_cut.py
traces it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa

from pubsub.delta import table as delta
from pubsub.delta.files import data_files
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.spark.jvm_transactions import DeltaTransactions
from pubsub.delta.spark.spark_session import Spark
from pubsub.delta.table import Commit, TargetTable
from pubsub.delta.writers import arrow_writer, spark_writer
from pubsub.delta.writers.spark_writer import Staged
from pubsub.protocol.lsn import Lsn

COLUMNS = pa.schema([pa.field("id", pa.int64()), pa.field("n", pa.int64())])


def main() -> None:
    home = Path(sys.argv[1])
    (home / "marks").mkdir()
    (home / "home").mkdir()
    spark = Spark(home / "home", conf={"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"})
    spark.running()

    def mark(table: TargetTable, version: int, rows: int) -> None:
        (home / "marks" / f"{Path(table.path).name}-{version}-{rows}").mkdir()

    ours = TargetTable(str(home / "warehouse" / "new" / "ours"), COLUMNS, ("id",), "public.ours")
    transactions = DeltaTransactions(spark.session)
    delta._CHECKPOINT_INTERVAL = 2  # type: ignore[misc]
    assert delta.create_empty(transactions, ours, {})
    mark(ours, 0, 0)
    log = TableLog(ours.path, transactions)
    log.refresh()
    for number in range(1, 6):
        ids = [10 * number, 10 * number + 1]
        added = data_files.write_table(ours, pa.table({"id": ids, "n": ids}, COLUMNS))
        keys = pa.table({"id": pa.array([*ids, 10 * number - 10], pa.int64())})
        staged = arrow_writer.DirectStaged(ours, log, added, keys, None, False, 3)
        arrow_writer.commit(staged, Commit("app", Lsn(number), Lsn(number), previous=Lsn(number - 1) or None))
        mark(ours, number, number + 1)

    theirs = TargetTable(str(home / "warehouse" / "also" / "statement"), COLUMNS, ("id",), "public.statement")
    spark.session.sql(
        f"CREATE TABLE delta.`{theirs.path}` (id BIGINT, n BIGINT) USING delta PARTITIONED BY (n) TBLPROPERTIES "
        "('delta.enableDeletionVectors' = 'true', 'delta.enableChangeDataFeed' = 'true', 'delta.checkpointInterval' = '2')"
    )
    mark(theirs, 0, 0)
    for number in range(1, 4):
        directory = home / f"staged-{number}"
        directory.mkdir()
        ids = [10 * number, 10 * number + 1]
        images = spark_writer._write(directory / "images", pa.table({"id": ids, "n": [number, number]}, COLUMNS))
        keys = pa.table({"id": pa.array([*ids, 10 * number - 10], pa.int64())})
        deleted = spark_writer._write(directory / "keys", keys)
        statement = Staged(theirs, directory, images, None, deleted, None, False, None, 3)
        spark_writer.commit(
            spark.session, statement, Commit("app", Lsn(number), Lsn(number), previous=Lsn(number - 1) or None)
        )
        mark(theirs, number, number + 1)
    spark.stop()


if __name__ == "__main__":
    main()
