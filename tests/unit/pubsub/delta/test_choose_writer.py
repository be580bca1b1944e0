"""Whether our files or a statement of Spark's takes a batch, by its number of changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from apply.pipeline.dispatch import Dispatcher
from apply.staging.destination import Destination
from apply.staging.stage_batch import stage_batch
from pubsub.delta import table as delta
from pubsub.delta.table import TargetTable
from pubsub.delta.writers.arrow_writer import DirectStaged
from pubsub.delta.writers.choose_writer import TableWriters
from pubsub.delta.writers.spark_writer import Staged
from pubsub.protocol.lsn import INVALID_LSN
from tests.support.frames import INT8, insert, relation, transaction, update
from tests.support.json_transactions import JsonTransactions

SENT = relation(1, "t", [("id", INT8), ("n", INT8)], key=("id",), identity="d")


class InWindow:
    """A window, which completes only our files."""


@pytest.mark.parametrize("whole", [None, 8], ids=["at once", "in parts"])
@pytest.mark.parametrize(
    ("statement_rows", "window", "taken_by"),
    [
        (0, False, DirectStaged),
        (5, False, DirectStaged),
        (4, False, Staged),
        (1, False, Staged),
        (1, True, DirectStaged),
    ],
)
def test_a_batch_of_so_many_changes_is_a_statement_s(
    tmp_path: Path, statement_rows: int, window: bool, taken_by: type, whole: int | None
) -> None:
    table = TargetTable(
        str(tmp_path / "t"),
        pa.schema([pa.field("id", pa.int64(), False), pa.field("n", pa.int64())]),
        ("id",),
        "public.t",
    )
    assert delta.create_empty(JsonTransactions(), table, {})
    stage = TableWriters(tmp_path / "stage", JsonTransactions(), statement_rows=statement_rows)
    dispatcher = Dispatcher(INVALID_LSN)
    dispatcher.feed(transaction(100, SENT, *(insert(1, n, n) for n in range(3)), update(1, 1, 7)), 0.0)
    given: Any = InWindow() if window else None
    destination = Destination(1, table, "app", INVALID_LSN, window=given)
    (staged,) = stage_batch(dispatcher.take(), [{("public", "t"): destination}], stage, "pg_1", whole=whole)
    assert type(staged.staged) is taken_by
