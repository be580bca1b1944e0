"""A TRUNCATE that marks rows as deleted: which files are written again, which are left alone, and what is left behind."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pubsub.delta import soft_deletes
from pubsub.delta import table as delta
from pubsub.delta.files import data_files, file_rows
from pubsub.delta.soft_deletes import DELETED_AT
from pubsub.delta.table import Commit, TargetTable
from pubsub.delta.writers import arrow_writer
from pubsub.delta.writers.arrow_writer import DirectStaged
from pubsub.delta.writers.changeset import Folded
from pubsub.delta.writers.choose_writer import TableWriters, discard
from pubsub.protocol.lsn import Lsn
from tests.support.json_transactions import JsonTransactions

AT = [datetime(2026, 11, 1, tzinfo=UTC) + timedelta(hours=hour) for hour in range(9)]
Rows = dict[int, tuple[str, datetime | None]]


class Table:
    """A Delta table whose deleted rows stay, and batches for it."""

    def __init__(self, directory: Path) -> None:
        schema = pa.schema([pa.field("k", pa.int64(), False), pa.field("v", pa.string()), soft_deletes.FIELD])
        self.target = TargetTable(str(directory / "t"), schema, ("k",), "public.t", soft_deletes=True, truncate="soft")
        assert delta.create_empty(JsonTransactions(), self.target, {"pubsub.node": "1"})
        self.stage = TableWriters(directory / "stage", JsonTransactions())
        self.lsn = 0

    @property
    def files(self) -> dict[str, Any]:
        log = self.stage.log_of(self.target.path)
        log.refresh()
        return dict(log.files)

    @property
    def rows(self) -> Rows:
        read = delta.query(self.target.path, "SELECT * FROM t").read_all().to_pylist()
        found = {row["k"]: (row["v"], row[DELETED_AT]) for row in read}
        assert len(found) == len(read), "a key twice"
        return found

    def write(self, rows: Rows, leaving: Sequence[int] = (), truncated: datetime | None = None) -> None:
        columns = [[*rows], [v for v, _ in rows.values()], [at for _, at in rows.values()]]
        images = pa.table(
            [pa.array(one, field.type) for one, field in zip(columns, self.target.schema, strict=True)],
            schema=self.target.schema,
        )
        none = self.target.schema.empty_table()
        keys = pa.table({"k": pa.array(leaving, pa.int64())})
        marks = None if truncated is None else {DELETED_AT: pa.scalar(truncated, soft_deletes.FIELD.type)}
        folded = Folded(images, none, keys, none, False, False, len(rows), 0, 0, marks=marks)
        staged = self.stage.write(self.target, folded, replace_all=False)
        assert isinstance(staged, DirectStaged)
        record = Commit("app", Lsn(self.lsn + 1), Lsn(self.lsn + 1), previous=Lsn(self.lsn) if self.lsn else None)
        try:
            arrow_writer.commit(staged, record)
        finally:
            discard(staged)
        self.lsn += 1


@pytest.fixture(name="table")
def _table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Table:
    monkeypatch.setattr(data_files, "_ROW_GROUP_ROWS", 16)
    monkeypatch.setattr(data_files, "_FILE_ROWS", 48)
    monkeypatch.setattr(file_rows, "_MOST_ROWS", 5)
    return Table(tmp_path)


def test_live_rows_are_marked_and_the_others_stay(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    live: Rows = {k: (f"v{k}", None) for k in range(100)}
    marked: Rows = {k: (f"v{k}", AT[0]) for k in range(100, 140)}
    mixed: Rows = {k: (f"v{k}", AT[1] if k % 3 else None) for k in range(200, 220)}
    table.write(live)
    table.write(marked)
    table.write(mixed)
    table.write({k: (f"w{k}", AT[2] if k < 15 else None) for k in range(10, 18)}, leaving=range(10, 20))
    (path_of_marked,) = [path for path, file in table.files.items() if file.bounds["k"] == (100, 139)]
    before, read = table.files, list[str]()
    read_columns = file_rows.read_columns

    def reading(log: Any, file: Any, of: Any, names: Sequence[str], *rest: Any, **named: Any) -> Any:
        if list(names) == of.schema.names:
            read.append(file.path)
        return read_columns(log, file, of, names, *rest, **named)

    monkeypatch.setattr(file_rows, "read_columns", reading)
    expected = {k: (v, at or AT[3]) for k, (v, at) in table.rows.items()}
    # The batch names a live row, one that is marked, and one of a file with both: they are what the batch says.
    named: Rows = {5: ("new", None), 101: ("new", None), 201: ("gone", AT[3]), 300: ("new", None)}
    table.write(named, leaving=[5, 101, 201, 204], truncated=AT[3])
    expected = {k: row for k, row in expected.items() if k != 204} | named
    assert table.rows == expected
    after = table.files
    assert path_of_marked in after
    assert path_of_marked not in read
    assert len(read) == len(set(read)) == len(before) - 1
    # What was written for the TRUNCATE is not read by the next one.
    read.clear()
    table.write({}, truncated=AT[4])
    assert table.rows == {k: (v, at or AT[4]) for k, (v, at) in expected.items()}
    assert len(read) == 1
    read.clear()
    files = table.files
    table.write({}, truncated=AT[5])
    assert table.rows == {k: (v, at or AT[4]) for k, (v, at) in expected.items()}
    assert (read, table.files.keys()) == ([], files.keys())


def test_a_failure_leaves_nothing_behind(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the rows were written again, and while they are."""
    table.write({k: (f"v{k}", AT[0] if k % 2 else None) for k in range(100)})
    files = sorted(Path(table.target.path).rglob("*.parquet"))
    rows = table.rows

    def fails(*_: object) -> None:
        raise OSError("disk full")

    for module, name in ((arrow_writer.deletion_vectors, "write"), (data_files._DataFile, "finish")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, fails)
            with pytest.raises(OSError, match="disk full"):
                table.write({}, truncated=AT[1])
        assert sorted(Path(table.target.path).rglob("*.parquet")) == files
        assert table.rows == rows
    table.write({}, truncated=AT[1])
    assert {at for _, at in table.rows.values()} == {AT[0], AT[1]}
