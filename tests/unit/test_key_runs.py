"""The sorted keys of data files: what is found in them is what reading the files finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pubsub.delta import arrow_writer, data_files, key_runs
from pubsub.delta import table as delta
from pubsub.delta.arrow_writer import DirectStaged
from pubsub.delta.key_runs import KeyRuns
from pubsub.delta.key_set import KeySet
from pubsub.delta.log import TableLog
from pubsub.delta.table import Commit, TargetTable
from pubsub.errors import DataCorrupted
from pubsub.protocol.lsn import Lsn
from tests.support.json_transactions import JsonTransactions

COLUMNS = pa.schema([pa.field("id", pa.int32(), False), pa.field("t", pa.string())])


class Table:
    def __init__(self, path: Path) -> None:
        self.transactions = JsonTransactions()
        self.target = TargetTable(str(path), COLUMNS, ("id",), "public.t")
        assert delta.create_empty(self.transactions, self.target, {})
        self.log = TableLog(self.target.path, self.transactions)
        self.log.refresh()
        self.lsn = 0

    def commit(self, *, insert: Any = (), delete: Any = ()) -> None:
        rows = pa.table({"id": pa.array(insert, pa.int32()), "t": ["x"] * len(insert)}, COLUMNS)
        keys = pa.table({"id": pa.array(delete, pa.int32())}) if len(delete) else None
        staged = DirectStaged(
            self.target, self.log, data_files.write_table(self.target, rows), keys, None, False, len(rows)
        )
        self.lsn += 1
        before = Lsn(self.lsn - 1) or None
        arrow_writer.commit(staged, Commit("app", Lsn(self.lsn), Lsn(self.lsn), before=before))

    def find(self, keys: Any) -> dict[str, list[tuple[int, int]]]:
        """Return what is found of the keys in each file."""
        wanted = KeySet(pa.table({"id": pa.array(keys, pa.int32())}))
        found = {}
        for one in arrow_writer._find(self.log, wanted, self.target):
            assert list(one.positions) == sorted(one.positions)
            found[one.file.path] = [(int(a), int(b)) for a, b in zip(one.positions, one.key_rows, strict=True)]
        return found


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table(tmp_path / "t")


def test_a_run_finds_what_reading_finds(table: Table) -> None:
    random = np.random.default_rng(7)
    shuffled = random.permutation(40_000) - 20_000
    for part in (shuffled[:30_000], shuffled[30_000:30_500], shuffled[30_500:]):
        table.commit(insert=part)
    table.commit(delete=random.choice(shuffled, 3_000, replace=False))
    runs = KeyRuns()
    for keys in ([], [7], random.choice(50_000, 900, replace=False) - 25_000, [-(1 << 31), (1 << 31) - 1]):
        table.log.runs = None
        expected = table.find(keys)
        table.log.runs = runs
        assert table.find(keys) == expected
        assert table.find(keys) == expected, "from memory"
    assert 8 * 40_000 <= runs.nbytes <= 12 * 40_000


def test_a_file_with_a_key_twice_is_read(table: Table) -> None:
    """Another engine may write such a file."""
    table.commit(insert=[1, 2, 2, 3])
    table.log.runs = KeyRuns()
    for _ in range(2):
        (found,) = table.find([2]).values()
        assert found == [(1, 0), (2, 0)]


def test_a_file_that_is_gone_is_missed(table: Table) -> None:
    table.commit(insert=range(100))
    table.log.runs = KeyRuns()
    assert table.find([5])
    for path in Path(table.target.path).glob("*.parquet"):
        path.unlink()
    with pytest.raises(DataCorrupted, match="does not exist"):
        table.find([5])


def test_memory_is_bounded_and_a_run_in_use_stays(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    for start in (0, 1000, 2000):
        table.commit(insert=range(start, start + 1000))
    runs = table.log.runs = KeyRuns(most_bytes=25_000)
    for _ in range(2):
        assert len(table.find([5, 1005, 2005])) == 3, "what has no run is read"
    assert runs.nbytes == 2 * 8_000
    first = set(runs._runs)
    monkeypatch.setattr(key_runs, "_IN_USE", -1.0)
    assert len(table.find([5, 1005, 2005])) == 3
    assert runs.nbytes <= 25_000
    assert set(runs._runs) != first


def test_many_keys_are_sought_by_reading(table: Table) -> None:
    table.commit(insert=range(1000))
    runs = table.log.runs = KeyRuns()
    assert sum(map(len, table.find(range(6_000)).values())) == 1000
    assert runs.nbytes == 0


def test_the_number_of_runs_is_bounded(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of a few rows is mostly overhead, which its bytes do not show."""
    for start in range(5):
        table.commit(insert=[start])
    runs = table.log.runs = KeyRuns()
    monkeypatch.setattr(key_runs, "_MOST_RUNS", 3)
    for _ in range(2):
        assert len(table.find(range(5))) == 5
        assert len(runs._runs) == 3
    monkeypatch.setattr(key_runs, "_IN_USE", -1.0)
    assert len(table.find(range(5))) == 5
    assert len(runs._runs) == 3


def test_another_file_of_the_same_name_has_another_run(table: Table) -> None:
    """No writer of Delta does that; somebody who restores files by hand may."""
    table.commit(insert=[1, 2, 3])
    table.log.runs = KeyRuns()
    (path,) = Path(table.target.path).glob("*.parquet")
    assert list(table.find([1, 3]).values()) == [[(0, 0), (2, 1)]]
    aside = path.with_suffix(".aside")
    pq.write_table(pa.table({"id": pa.array([3, 2, 1], pa.int32()), "t": ["x"] * 3}, COLUMNS), aside)
    aside.replace(path)
    assert list(table.find([1, 3]).values()) == [[(0, 1), (2, 0)]]
