"""Measure commits of small data files through Delta's own transaction, without a subscription."""

from __future__ import annotations

import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from bench.results import Limit
from pubsub.delta.files import data_files
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.log.transactions import Operation, transaction
from pubsub.delta.spark.jvm_transactions import SparkTransactions
from pubsub.delta.spark.spark_session import Spark
from pubsub.delta.spark.warm_up import warm_up
from pubsub.delta.table import TargetTable, create_empty

NAMES: Final = ("commits",)
_TABLES: Final = 4


def limits(count: int) -> list[Limit]:
    """Return the time of one of `count` commits to one table, and the rates to one table and to four at once.

    The time of a commit is from the refresh of the log until the commit is durable; its data file is written before.
    Checkpoints are in it.
    """
    with tempfile.TemporaryDirectory(prefix="pubsub-bench-commits-") as scratch:
        home = Path(scratch)
        spark = Spark(home)
        spark.running()
        try:
            transactions = SparkTransactions(spark)
            warm_up(transactions, home)
            tables = [_Table(home / f"table-{number}", transactions) for number in range(1 + _TABLES)]
            alone = np.array(tables[0].commit(count))
            began = time.monotonic()
            with ThreadPoolExecutor(_TABLES) as threads:
                together = [len(times) for times in threads.map(lambda table: table.commit(count), tables[1:])]
            rate = sum(together) / (time.monotonic() - began)
        finally:
            spark.stop()
    return [
        Limit("commit_p50", "a commit by Delta's transaction, p50", "seconds", float(np.percentile(alone, 50))),
        Limit("commit_p95", "a commit by Delta's transaction, p95", "seconds", float(np.percentile(alone, 95))),
        Limit("commits_one", "commits/s to one table", "rate", len(alone) / float(alone.sum())),
        Limit("commits_four", f"commits/s to {_TABLES} tables at once, with their files' writing", "rate", rate),
    ]


class _Table:
    def __init__(self, path: Path, transactions: SparkTransactions) -> None:
        schema = pa.schema([pa.field("id", pa.int64(), False), pa.field("name", pa.string())])
        self._table = TargetTable(str(path), schema, ("id",), "bench")
        create_empty(transactions, self._table, {})
        self._log = TableLog(str(path), transactions)
        self._number = 0

    def commit(self, count: int) -> list[float]:
        """Commit `count` files, and return the seconds that each took."""
        found = []
        for _ in range(count):
            self._number += 1
            row = pa.table({"id": pa.array([self._number], pa.int64()), "name": pa.array(["a name"])})
            added = data_files.write_table(self._table, row)
            began = time.monotonic()
            self._log.refresh()
            self._log.commit([transaction("bench", self._number), *added], Operation.WRITE, user_metadata="{}")
            found.append(time.monotonic() - began)
        return found
