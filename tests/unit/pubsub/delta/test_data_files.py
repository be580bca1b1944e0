"""Which data files, and which row groups in them, rows go to."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pubsub.delta.files import data_files
from pubsub.delta.files.file_rows import live_rows
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.log.transactions import Operation
from pubsub.delta.table import TargetTable, create_empty
from tests.support.json_transactions import JsonTransactions

LARGE = 25 << 20
#: Past the years 1677 to 2262, which timestamps in nanoseconds have.
FAR = [datetime(1200, 5, 1, 1, 2, 3, 4, UTC), datetime(9999, 12, 31, 23, 59, 59, 999999, UTC), None]


def parts(*sizes: int) -> Iterator[pa.Table]:
    """Yield a table of one row for each size of its value, with rising ids."""
    for number, size in enumerate(sizes):
        yield pa.table({"id": pa.array([number], pa.int64()), "v": ["x" * size]})


@pytest.mark.parametrize("merging", [False, True])
def test_a_large_value_has_a_row_group_and_ends_its_file(tmp_path: Path, merging: bool) -> None:
    """While a file is open it keeps what it wrote a large value with; merging must end with one file, or would begin again."""
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), ("v", pa.string())])
    table = TargetTable(str(tmp_path), schema, ("id",), "t")
    added = data_files.write(table, parts(1, 1, LARGE, 1, LARGE, 1), merging=merging)
    found = [pq.ParquetFile(str(path)) for path in data_files.paths(table.path, added)]
    groups = [[file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)] for file in found]
    assert groups == ([[2, 1, 1, 1, 1]] if merging else [[2, 1], [1, 1], [1]])
    assert [number for file in found for number in file.read(["id"])["id"].to_pylist()] == [0, 1, 2, 3, 4, 5]


def test_rows_with_large_values_among_small_ones_are_divided(tmp_path: Path) -> None:
    """One row group of them all would take several times the sum of the values."""
    table = TargetTable(str(tmp_path), pa.schema([("id", pa.int64()), ("v", pa.string())]), ("id",), "t")
    rows = pa.concat_tables(parts(1, 1, LARGE, 1, LARGE, LARGE, 1))
    added = data_files.write(table, [rows])
    sizes = [pq.ParquetFile(str(path)).metadata.num_rows for path in data_files.paths(table.path, added)]
    assert sum(sizes) == 7
    assert len(sizes) >= 3


def test_timestamps_that_another_spark_has_written(tmp_path: Path) -> None:
    """Its default is INT96, whose values have no time zone in the file and are nanoseconds to Arrow, also inside others."""
    instant = pa.timestamp("us", "UTC")
    composite = pa.struct([("at", instant), ("n", pa.int32())])
    schema = pa.schema([("id", pa.int64()), ("at", instant), ("l", pa.list_(instant)), ("s", pa.list_(composite))])
    table = TargetTable(str(tmp_path / "t"), schema, (), "t")
    assert create_empty(JsonTransactions(), table, {})
    rows = pa.table(
        {
            "id": [1, 2, 3],
            "at": FAR,
            "l": [FAR, [], None],
            "s": [[{"at": at, "n": 1} for at in FAR], [None], None],
        },
        schema,
    )
    log = TableLog(table.path, JsonTransactions())
    log.refresh()
    (added,) = data_files.write(table, [rows])
    (path,) = data_files.paths(table.path, [added])
    pq.write_table(rows, str(path), use_deprecated_int96_timestamps=True, store_schema=False)
    log.commit([added], Operation.WRITE)
    (found,) = live_rows(log, list(log.files.values()), table)
    assert found.column("l").type.value_type == instant
    assert found.to_pylist() == rows.to_pylist()
