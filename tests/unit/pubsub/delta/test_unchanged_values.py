"""Rows whose large values an UPDATE leaves unchanged: completed from the table in pieces of bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder

from pubsub.delta import table as delta
from pubsub.delta.files import bounded_rows, data_files, file_rows
from pubsub.delta.files.bounded_rows import ScatteredRows
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.table import Commit, TargetTable
from pubsub.delta.writers import arrow_writer
from pubsub.delta.writers.arrow_writer import DirectStaged
from pubsub.delta.writers.changeset import BASE_PREFIX, UNCHANGED_PREFIX
from pubsub.protocol.lsn import Lsn
from pubsub.protocol.type_contract import VARIANT
from tests.support.json_transactions import JsonTransactions

SCHEMA = pa.schema([pa.field("id", pa.int64(), False), pa.field("n", pa.int64()), pa.field("t", pa.string())])
PIECE = 1 << 20
ROWS = 4000
WIDTH = 16_000


class Peak:
    """The most bytes that Arrow held at once."""

    nbytes = 0


@contextmanager
def peak_of_arrow() -> Iterator[Peak]:
    """Measure Arrow's memory inside; `nbytes` is set at the end."""
    usual, found = pa.default_memory_pool(), Peak()
    pool = pa.proxy_memory_pool(usual)
    pa.set_memory_pool(pool)
    try:
        yield found
    finally:
        pa.set_memory_pool(usual)
        found.nbytes = pool.max_memory()


def value(row: int) -> str:
    return f"{row:08}" * (WIDTH // 8)


def held(path: Path, ids: range, monkeypatch: pytest.MonkeyPatch) -> tuple[TargetTable, TableLog]:
    """Make a table of rows with large values, in two files."""
    monkeypatch.setattr(bounded_rows, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(data_files, "_ROW_GROUP_BYTES", 2 * PIECE)
    table = TargetTable(str(path / "t"), SCHEMA, ("id",), "public.t")
    assert delta.create_empty(JsonTransactions(), table, {})
    log = TableLog(table.path, JsonTransactions())
    log.refresh()
    added: list[Any] = []
    half = len(ids) // 2
    for part in (ids[:half], ids[half:]):
        added += data_files.write(table, (rows(part[at : at + 50], 0) for at in range(0, len(part), 50)))
    arrow_writer.commit(DirectStaged(table, log, added, None, None, False, len(ids)), Commit("app", Lsn(1), Lsn(1)))
    return table, log


def rows(ids: range, n: int) -> pa.Table:
    columns = [pa.array(ids, pa.int64()), pa.array([n] * len(ids), pa.int64()), pa.array(map(value, ids), pa.string())]
    return pa.table(columns, schema=SCHEMA)


def unchanged(table: TargetTable, log: TableLog, ids: Any) -> DirectStaged:
    """Stage UPDATE t SET n = 1 WHERE id is one of `ids`, which leaves t unchanged."""
    keys = pa.array(ids, pa.int64())
    masked = pa.table(
        {
            "id": keys,
            "n": pa.array([1] * len(keys), pa.int64()),
            "t": pa.nulls(len(keys), pa.string()),
            f"{UNCHANGED_PREFIX}2": pa.array([True] * len(keys)),
            f"{BASE_PREFIX}0": keys,
        }
    )
    return DirectStaged(table, log, [], pa.table({"id": keys}), masked, False, len(keys))


def found(table: TargetTable, what: str) -> list[dict[str, Any]]:
    read = QueryBuilder().register("t", DeltaTable(table.path)).execute(f"SELECT {what} FROM t").read_all()
    return pa.table(read).to_pylist()


def test_an_update_of_every_row_holds_a_few_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 MB of values pass through a few MB of memory, whatever the order of the changes, into several files."""
    table, log = held(tmp_path, range(ROWS), monkeypatch)
    monkeypatch.setattr(data_files, "_FILE_BYTES", 16 << 20)
    staged = unchanged(table, log, np.random.default_rng(1).permutation(ROWS + 10))
    with peak_of_arrow() as peak:
        arrow_writer.commit(staged, Commit("app", Lsn(2), Lsn(2), previous=Lsn(1)))
    assert peak.nbytes < 16 * PIECE, f"{peak.nbytes / PIECE:.1f} MB"
    assert len(log.files) == 4
    (row,) = found(table, "count(*) AS c, count(DISTINCT id) AS d, min(n) AS n, sum(CAST(left(t, 8) AS INT) - id) AS x")
    assert row == {"c": ROWS, "d": ROWS, "n": 1, "x": 0}
    (row,) = found(table, "count(*) AS c, min(length(t)) AS low, max(length(t)) AS high")
    assert row == {"c": ROWS, "low": WIDTH, "high": WIDTH}


def test_an_update_of_a_few_rows_reads_their_row_groups_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, log = held(tmp_path, range(1000), monkeypatch)
    read: list[int] = []
    named = file_rows._named

    def counted(batch: pa.RecordBatch, *rest: Any) -> pa.RecordBatch:
        if "t" in batch.schema.names:
            read.append(batch.num_rows)
        return named(batch, *rest)

    monkeypatch.setattr(file_rows, "_named", counted)
    arrow_writer.commit(unchanged(table, log, [3, 998]), Commit("app", Lsn(2), Lsn(2), previous=Lsn(1)))
    assert 2 <= sum(read) <= 320
    assert sorted(row["id"] for row in found(table, "id, n") if row["n"]) == [3, 998]


def test_whole_rows_are_read_in_pieces_however_well_they_compress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a merge of files reads them, and the search for rows without a key."""
    table, log = held(tmp_path, range(1000), monkeypatch)
    sizes = [part.nbytes for part in file_rows.live_rows(log, list(log.files.values()), table)]
    assert max(sizes) < 1.5 * PIECE
    assert sum(sizes) > 1000 * WIDTH


NESTED = pa.table(
    {
        "s": pa.array(["a" * 1000, None, "", "ä" * 50], pa.string()),
        "b": pa.array([b"", b"1234", None, b"x" * 3000], pa.binary()),
        "l": pa.array([["x" * 70, None], None, [], ["y"] * 10], pa.list_(pa.string())),
        "r": pa.array(
            [None, {"p": 1, "q": "z" * 20}, {"p": None, "q": None}, None], pa.struct([("p", "int32"), ("q", "string")])
        ),
        "v": pa.array([{"metadata": b"m" * 9, "value": b"v"}] * 4, VARIANT),
        "m": pa.array([[("k", "v" * 40)], None, [], [("a", None), ("b", "c")]], pa.map_(pa.string(), pa.string())),
        "d": pa.array([1, None, 3, 4], pa.decimal128(38, 2)),
        "y": pa.array([True, None, False, True]),
    }
)


def test_scattered_rows_of_every_kind_of_type() -> None:
    chunked = pa.concat_tables([NESTED.slice(0, 1), NESTED.slice(1, 2), NESTED.slice(3), NESTED.slice(0, 3)])
    scattered = ScatteredRows(chunked)
    numbers = np.array([6, 0, 3, 3, 1, 5, 2, 4])
    assert scattered.take(numbers) == chunked.take(pa.array(numbers))
    assert scattered.take(numbers[:0]).num_rows == 0
    sizes = scattered._bytes.tolist()
    assert sizes[:4] == [
        1000 + 70 + 4 + 10 + 41 + 16 + 1,
        4 + 4 + 20 + 10 + 16 + 1,
        4 + 10 + 16 + 1,
        3100 + 10 + 4 + 10 + 3 + 16 + 1,
    ]
    assert sizes[4:] == sizes[:3]


def test_pieces_end_at_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that is larger than a piece is one of its own."""
    monkeypatch.setattr(bounded_rows, "PIECE_BYTES", 100)
    scattered = ScatteredRows(pa.table({"t": ["x" * size for size in (40, 60, 1, 1000, 30, 30, 30, 30)]}))
    numbers = np.arange(8)
    assert [numbers[part].tolist() for part in scattered.pieces(numbers)] == [[0, 1], [2], [3], [4, 5, 6], [7]]
    assert list(scattered.pieces(numbers[:0])) == []
