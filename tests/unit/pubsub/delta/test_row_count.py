"""How many rows a table holds, by its log."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from pubsub.delta import table as delta
from pubsub.delta.files import data_files
from pubsub.delta.log.row_count import count_rows, rows_in_log
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.table import Commit, TargetTable
from pubsub.delta.writers import arrow_writer
from pubsub.protocol.lsn import Lsn
from tests.support.json_transactions import JsonTransactions

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("n", pa.int64())])


def made(tmp_path: Path) -> TargetTable:
    table = TargetTable(str(tmp_path / "t"), SCHEMA, ("id",), "public.t")
    assert delta.create_empty(JsonTransactions(), table, {})
    return table


def test_rows_of_files_less_those_deleted_by_vectors(tmp_path: Path) -> None:
    table = made(tmp_path)
    assert count_rows(table.path) == 0
    log = TableLog(table.path, JsonTransactions())
    log.refresh()
    rows = pa.table({"id": range(100), "n": range(100)}, SCHEMA)
    arrow_writer.commit_copy(log, table, data_files.write(table, [rows]), Commit("app", Lsn(1), Lsn(1)))
    assert count_rows(table.path) == rows_in_log(log) == 100
    staged = arrow_writer.DirectStaged(
        table, log, [], pa.table({"id": [3, 5, 500]}, pa.schema([SCHEMA.field("id")])), None, False, 3
    )
    arrow_writer.commit(staged, Commit("app", Lsn(2), Lsn(2), previous=Lsn(1)))
    assert count_rows(table.path) == rows_in_log(log) == 98


def test_files_without_statistics_make_the_count_unknown(tmp_path: Path) -> None:
    table = made(tmp_path)
    log = TableLog(table.path, JsonTransactions())
    log.refresh()
    rows = pa.table({"id": range(100), "n": range(100)}, SCHEMA)
    added = data_files.write(table, [rows])
    arrow_writer.commit_copy(log, table, added, Commit("app", Lsn(1), Lsn(1)))
    written = Path(table.path) / "_delta_log" / f"{log.version:020}.json"
    written.write_text(written.read_text().replace('"stats"', '"not_stats"'))
    assert count_rows(table.path) is None
    assert count_rows("gs://host/t") is None
