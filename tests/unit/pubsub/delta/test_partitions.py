"""The text of partition values, the directories of their files, and which files a batch's keys can be in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pytest

from pubsub.delta import table as delta
from pubsub.delta.files import data_files, file_rows, partitions
from pubsub.delta.housekeeping.rewrite import rewrite
from pubsub.delta.log import durable_files
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.table import Commit, TargetTable
from pubsub.delta.writers import arrow_writer
from pubsub.delta.writers.arrow_writer import DirectStaged
from pubsub.errors import InvalidValue, NotInPrerequisiteState
from pubsub.protocol.lsn import Lsn
from tests.support.json_transactions import JsonTransactions

VALUES: list[tuple[pa.DataType, Any, str]] = [
    (pa.string(), "a/b=c%20 ü\n", "a/b=c%20 ü\n"),
    (pa.string(), " ", " "),
    (pa.string(), "null", "null"),
    (pa.int64(), -(2**63), "-9223372036854775808"),
    (pa.int16(), 7, "7"),
    (pa.bool_(), True, "true"),
    (pa.date32(), date(1, 1, 1), "0001-01-01"),
    (pa.date32(), date(9999, 12, 31), "9999-12-31"),
    (pa.decimal128(38, 18), Decimal("1E-18"), "0.000000000000000001"),
    (pa.decimal128(10, 2), Decimal("-1.50"), "-1.50"),
    (pa.timestamp("us", "UTC"), datetime(1582, 10, 10, 12, 0, 0, 1, UTC), "1582-10-10T12:00:00.000001Z"),
    (pa.timestamp("us"), datetime(1, 1, 1), "0001-01-01 00:00:00.000000"),
]


def partitioned(path: Path, fields: Sequence[pa.Field], by: Sequence[str], key: str = "id") -> TargetTable:
    table = TargetTable(str(path), pa.schema([pa.field("id", pa.int64(), False), *fields]), (key,), "public.t")
    assert delta.create_empty(JsonTransactions(), table, {})
    commit = path / "_delta_log" / f"{0:020}.json"
    actions = [json.loads(line) for line in commit.read_text().splitlines()]
    for action in actions:
        if "metaData" in action:
            action["metaData"]["partitionColumns"] = list(by)
    commit.write_text("".join(json.dumps(action) + "\n" for action in actions))
    return table


def opened(table: TargetTable) -> TableLog:
    log = TableLog(table.path, JsonTransactions())
    log.refresh()
    return log


@pytest.mark.parametrize(("kind", "value", "text"), VALUES, ids=lambda one: str(one)[:30])
def test_each_type_is_read_back_from_its_text(tmp_path: Path, kind: pa.DataType, value: Any, text: str) -> None:
    table = partitioned(tmp_path / "t", [pa.field("p", kind)], ["p"])
    log = opened(table)
    assert log.unsupported() is None
    laid = file_rows.laid_out(log, table)
    rows = pa.table({"id": [1, 2, 3], "p": [value, None, value]}, schema=table.schema)
    added = data_files.write(laid, [rows])
    assert [action["add"]["partitionValues"] for action in added] == [{"p": text}, {"p": None}]
    for action, path in zip(added, data_files.paths(table.path, added), strict=True):
        assert path.is_file()
        assert path.parent.parent == Path(table.path), "one directory for each partition column"
        assert action["add"]["path"].isascii()
        assert unquote(action["add"]["path"]) == str(path.relative_to(table.path))
    arrow_writer.commit_copy(log, laid, added, Commit("app", Lsn(1), Lsn(1)))
    read = pa.concat_tables(file_rows.live_rows(log, list(log.files.values()), table))
    assert sorted(read.to_pylist(), key=lambda row: int(row["id"])) == rows.to_pylist()


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ("o'brien & (co) + a@b,c;d!$~", "p=o'brien%20&%20(co)%20+%20a@b,c;d!$~"),
        ("100%/x:y=z", "p=100%2525%252Fx%253Ay%253Dz"),
        ("ü*?", "p=%25C3%25BC%252A%253F"),
    ],
)
def test_paths_in_the_log_have_the_escapes_of_java(tmp_path: Path, value: str, path: str) -> None:
    """Delta's VACUUM once took files whose paths were escaped further for ones that no version names, and deleted them."""
    table = partitioned(tmp_path / "t", [pa.field("p", pa.string())], ["p"])
    laid = file_rows.laid_out(opened(table), table)
    (added,) = data_files.write(laid, [pa.table({"id": [1], "p": [value]}, schema=table.schema)])
    assert added["add"]["path"].rpartition("/")[0] == path
    assert Path(table.path, unquote(added["add"]["path"])).is_file()


def test_what_delta_would_read_as_null_is_refused(tmp_path: Path) -> None:
    table = partitioned(tmp_path / "t", [pa.field("p", pa.string())], ["p"])
    laid = file_rows.laid_out(opened(table), table)
    rows = pa.table({"id": [1, 2], "p": ["a", ""]}, schema=table.schema)
    with pytest.raises(InvalidValue, match='value "" cannot be stored in column "p"'):
        data_files.write(laid, [rows])
    with pytest.raises(InvalidValue, match='column "p"'):
        partitions.require_storable(laid, rows)
    assert not list(Path(table.path).rglob("*.parquet"))


def test_the_name_of_the_directory_of_null_is_refused_where_spark_writes(tmp_path: Path) -> None:
    """Spark reads a partition's values from the names of directories, before Delta's log gets them."""
    table = partitioned(tmp_path / "t", [pa.field("p", pa.string())], ["p"])
    laid = file_rows.laid_out(opened(table), table)
    rows = pa.table({"id": [1, 2], "p": ["__HIVE_DEFAULT_PARTITION__", None]}, schema=table.schema)
    with pytest.raises(InvalidValue, match='value "__HIVE_DEFAULT_PARTITION__" cannot be stored in column "p"'):
        partitions.require_storable(laid, rows)


def test_a_text_that_has_the_directory_of_null(tmp_path: Path) -> None:
    """Its rows and those of NULL once came into one file, and all of them got the first one's value."""
    table = partitioned(tmp_path / "t", [pa.field("p", pa.string())], ["p"])
    laid = file_rows.laid_out(opened(table), table)
    rows = pa.table({"id": [1, 2], "p": ["__HIVE_DEFAULT_PARTITION__", None]}, schema=table.schema)
    named, null = data_files.write(laid, [rows])
    assert [one["add"]["partitionValues"]["p"] for one in (named, null)] == ["__HIVE_DEFAULT_PARTITION__", None]


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    """Spark's statement stored them as U+FFFD, and none as NULL."""
    schema = pa.schema([pa.field("p", pa.binary()), pa.field("q", pa.string())])
    table = TargetTable(str(tmp_path / "t"), schema, (), "s.t", partitioned_by=("p",))
    good = pa.table({"p": [b"a", "ü".encode(), None], "q": ["", "", ""]}, schema=schema)
    partitions.require_storable(table, good)
    for bad, shown in (
        (b"", r"\\x"),
        (b"a\xff", r"\\x61ff"),
        (b"a\0", r"\\x6100"),
        (b"__HIVE_DEFAULT_PARTITION__", r"\\x5f5f48"),
    ):
        rows = pa.record_batch({"p": [b"a", bad], "q": ["", ""]}, schema=schema)
        with pytest.raises(InvalidValue, match=f'value "{shown}.*" cannot be stored in column "p"'):
            partitions.require_storable(table, rows)


@pytest.mark.parametrize("kind", [pa.string(), pa.binary()])
def test_a_value_that_is_too_long_for_the_name_that_spark_gives(tmp_path: Path, kind: pa.DataType) -> None:
    """Spark's job failed with the file system's "File name too long", and the worker started again for ever."""
    schema = pa.schema([pa.field("p", kind), pa.field("q", pa.string())])
    table = TargetTable(str(tmp_path / "t"), schema, (), "s.t", partitioned_by=("p",))
    whole, escaped = "ü" * 126, "/" * 84
    for fits, too_long in ((whole + "a", whole + "ab"), (escaped + "a", escaped + "ab")):
        good = pa.table({"p": pa.array([fits, None], pa.string()).cast(kind), "q": [too_long, ""]}, schema=schema)
        partitions.require_storable(table, good)
        (tmp_path / f"p={fits}".replace("/", "%2F")).mkdir()
        bad = pa.table({"p": pa.array([fits, too_long], pa.string()).cast(kind), "q": ["", ""]}, schema=schema)
        with pytest.raises(InvalidValue, match='cannot be stored in column "p"') as raised:
            partitions.require_storable(table, bad)
        assert "would be longer than 255 bytes" in str(raised.value.detail)
        assert len(raised.value.message) < 200
        with pytest.raises(OSError, match="too long"):
            (tmp_path / f"p={too_long}".replace("/", "%2F")).mkdir()
        # A store has no directories.
        partitions.require_storable(replace(table, path="s3a://lake/t"), bad)


def test_a_value_that_is_too_long_for_a_name(tmp_path: Path) -> None:
    table = partitioned(tmp_path / "t", [pa.field("p", pa.string())], ["p"])
    laid = file_rows.laid_out(opened(table), table)
    long = "ü/" * 500
    (added,) = data_files.write(laid, [pa.table({"id": [1], "p": [long]}, schema=table.schema)])
    assert added["add"]["partitionValues"] == {"p": long}
    assert data_files.paths(table.path, [added])[0].is_file()


def test_more_partitions_than_files_may_be_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_files, "_OPEN_FILES", 3)
    table = partitioned(tmp_path / "t", [pa.field("p", pa.int32())], ["p"])
    log = opened(table)
    laid = file_rows.laid_out(log, table)
    parts = [
        pa.table({"id": list(range(n, n + 20)), "p": [i % 10 for i in range(20)]}, schema=table.schema) for n in (0, 20)
    ]
    monkeypatch.setattr(data_files, "_ROW_GROUP_ROWS", 20)
    most = 0
    opens, finish = durable_files.create, data_files._DataFile.finish
    now = 0

    def count_open(path: Any) -> Any:
        nonlocal now, most
        now += 1
        most = max(most, now)
        return opens(path)

    def count_finish(file: Any) -> None:
        nonlocal now
        now -= 1
        finish(file)

    monkeypatch.setattr(durable_files, "create", count_open)
    monkeypatch.setattr(data_files._DataFile, "finish", count_finish)
    added = data_files.write(laid, parts)
    assert (most, now) == (3, 0)
    assert sum(arrow_writer.row_count(action) for action in added) == 40
    assert {action["add"]["partitionValues"]["p"] for action in added} == {str(i) for i in range(10)}
    data_files.remove_copy(table.path, added[0]["add"]["path"].split("part-00000-")[1].split("-c")[0])
    assert not list(Path(table.path).rglob("*.parquet"))


def test_keys_are_sought_only_in_their_partitions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = [pa.field("p", pa.string(), False), pa.field("v", pa.string())]
    table = partitioned(tmp_path / "t", fields, ["p"])
    table = TargetTable(table.path, table.schema, ("id", "p"), "public.t")
    log = opened(table)
    laid = file_rows.laid_out(log, table)
    rows = pa.table({"id": [1, 1, 2], "p": ["a", "b", "c"], "v": ["x", "y", "z"]}, schema=table.schema)
    arrow_writer.commit_copy(log, laid, data_files.write(laid, [rows]), Commit("app", Lsn(1), Lsn(1)))
    read: list[str] = []
    opens = file_rows._opened
    monkeypatch.setattr(file_rows, "_opened", lambda log, file: read.append(file.path) or opens(log, file))
    # The row moves from b to d: only b's file is looked into.
    added: Any = data_files.write(laid, [pa.table({"id": [1], "p": ["d"], "v": ["Y"]}, schema=table.schema)])
    keys = pa.table({"id": pa.array([1], pa.int64()), "p": ["b"]})
    arrow_writer.commit(
        DirectStaged(laid, log, added, keys, None, False, 1), Commit("app", Lsn(2), Lsn(2), previous=Lsn(1))
    )
    assert [path.split("/")[0] for path in read] == ["p=b"]
    found = pa.concat_tables(file_rows.live_rows(log, list(log.files.values()), table)).to_pylist()
    assert sorted(tuple(row.values()) for row in found) == [(1, "a", "x"), (1, "d", "Y"), (2, "c", "z")]


def test_a_batch_for_another_layout_is_not_committed(tmp_path: Path) -> None:
    """Its files would hold the partition column, and the log would say NULL."""
    table = partitioned(tmp_path / "t", [pa.field("p", pa.int32())], ["p"])
    log = opened(table)
    added = data_files.write(table, [pa.table({"id": [1], "p": [1]}, schema=table.schema)])
    with pytest.raises(NotInPrerequisiteState, match="was altered"):
        arrow_writer.commit_copy(log, table, added, Commit("app", Lsn(1), Lsn(1)))


def test_files_are_merged_within_their_partition(tmp_path: Path) -> None:
    table = partitioned(tmp_path / "t", [pa.field("p", pa.int32())], ["p"])
    log = opened(table)
    laid = file_rows.laid_out(log, table)
    for number in range(1, 6):
        added: Any = data_files.write(laid, [pa.table({"id": [number], "p": [number % 2]}, schema=table.schema)])
        staged = DirectStaged(laid, log, added, None, None, False, 1)
        before = Lsn(number - 1) if number > 1 else None
        arrow_writer.commit(staged, Commit("app", Lsn(number), Lsn(number), previous=before))
        rewrite(log, lambda: table, lambda files: files if len(files) >= 3 else [])
    merged = {file.partition["p"]: file.rows for file in log.files.values() if file.rows and file.rows > 1}
    assert merged == {"1": 3}
    assert len(log.files) == 3
    assert all(path.split("/")[0] == f"p={file.partition['p']}" for path, file in log.files.items())


@pytest.mark.parametrize("kind", [pa.float64(), pa.binary()], ids=str)
def test_types_without_one_text_are_sparks(tmp_path: Path, kind: pa.DataType) -> None:
    reason = opened(partitioned(tmp_path / "t", [pa.field("p", kind)], ["p"])).unsupported()
    assert reason is not None
    assert reason.startswith("it is partitioned by p, a ")
