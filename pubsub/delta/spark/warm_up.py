"""Make a JVM that has just started ready for commits and copies, whose first ones take many times as long as later ones.

A checkpoint is no part of it, though the first one is slow, too: it takes more processor time than Spark's own start,
beside a new node's first copies.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from pubsub.delta.files import data_files
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.log.transactions import Operation, Transactions
from pubsub.delta.table import TargetTable, create_empty

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_COMMITS: Final = 3


def warm_up(transactions: Transactions, directory: Path) -> None:
    """Create a small table in `directory`, commit to it, and remove it.  Blocks.

    Raises the errors of TableLog.commit.
    """
    schema = pa.schema([pa.field("id", pa.int64(), False)])
    table = TargetTable(str(directory / "warm-up"), schema, ("id",), "warm-up")
    shutil.rmtree(table.path, ignore_errors=True)
    try:
        create_empty(transactions, table, {})
        log = TableLog(table.path, transactions)
        for number in range(_COMMITS):
            log.refresh()
            added = data_files.write_table(table, pa.table({"id": pa.array([number], pa.int64())}))
            log.commit(added, Operation.WRITE, user_metadata="{}")
    finally:
        shutil.rmtree(table.path, ignore_errors=True)
        transactions.forget(table.path)


def warm_up_copies(session: SparkSession) -> None:
    """Run an empty job: Spark starts the process of which it forks its Python workers (python_workers.py).  Blocks."""
    session.sparkContext.parallelize([0], 1).foreach(_nothing)


def _nothing(_: int) -> None:
    pass
